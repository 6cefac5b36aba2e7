"""Makes the notebooks of the walkthroughs: run from top to bottom, with what they print and draw.

python docs/notebooks.py               all that are not in step with their walkthrough
python docs/notebooks.py einx_vs_bmm   this one
"""

import os
import sys
import tempfile
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
#: Scripts in cells, each a text, in the order of the page that lists them.
WALKTHROUGHS = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py")) if path.read_text()[:4] == "# %%"}
NOTEBOOKS = ROOT / "examples" / "notebooks"


def convert(path):
    """The notebook of a walkthrough, not yet run; links lead from its folder."""
    notebook = jupytext.read(path, fmt="py:percent")
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    for number, cell in enumerate(notebook.cells):
        cell.id = f"{path.stem.replace('_', '-')}-{number}"
        cell.metadata = {}
        if cell.cell_type == "markdown":
            for name in WALKTHROUGHS:
                cell.source = cell.source.replace(f"]({name}.py)", f"]({name}.ipynb)")
    return notebook


def execute(notebook, folder):
    """Run it in a process of its own that sees this library; what it writes goes to the folder."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "KERAS_HOME": str(folder)}
    client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}}, record_timing=False)
    client.execute(env=environment)
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":  # the remarks of other libraries on this environment are not the notebook's
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def sources(notebook):
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def in_step(path):
    """Whether the notebook of a walkthrough is there and has its text and code."""
    made = NOTEBOOKS / f"{path.stem}.ipynb"
    return made.exists() and sources(nbformat.read(made, as_version=4)) == sources(convert(path))


def main(names):
    NOTEBOOKS.mkdir(exist_ok=True)
    for path in [WALKTHROUGHS[name] for name in names] or [path for path in WALKTHROUGHS.values() if not in_step(path)]:
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(execute(convert(path), folder), NOTEBOOKS / f"{path.stem}.ipynb")
        print(f"made {path.stem}.ipynb")


if __name__ == "__main__":
    main(sys.argv[1:])
