"""Run the walkthroughs of examples/ and write their notebooks, with all outputs.

python docs/notebooks.py               the notebooks whose walkthrough has changed
python docs/notebooks.py einx_vs_bmm   one notebook

The images of the quickstart are read from the folder flowers, or downloaded.
"""

import os
import sys
import tempfile
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
#: Scripts in cells, by name.
WALKTHROUGHS = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py")) if path.read_text()[:4] == "# %%"}
NOTEBOOKS = ROOT / "examples" / "notebooks"


def convert(path):
    """Return the notebook of a walkthrough without outputs, with links that start from its folder."""
    notebook = jupytext.read(path, fmt="py:percent")
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    for number, cell in enumerate(notebook.cells):
        cell.id = f"{path.stem.replace('_', '-')}-{number}"
        cell.metadata = {}
        if cell.cell_type == "markdown":
            cell.source = cell.source.replace("](../", "](../../")
            for name in WALKTHROUGHS:
                cell.source = cell.source.replace(f"]({name}.py)", f"]({name}.ipynb)")
    return notebook


def execute(notebook, folder):
    """Run a notebook in a new process, which imports this library and writes files to the folder."""
    paths = [str(ROOT), str(ROOT / "examples" / "experiments"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "KERAS_HOME": str(folder)}
    client = NotebookClient(notebook, timeout=1800, resources={"metadata": {"path": str(folder)}}, record_timing=False)
    client.execute(env=environment)
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":  # without the warnings of other libraries about this environment
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def sources(notebook):
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def is_current(path):
    """Return True if the notebook of a walkthrough has its text and code."""
    written = NOTEBOOKS / f"{path.stem}.ipynb"
    return written.exists() and sources(nbformat.read(written, as_version=4)) == sources(convert(path))


def main(names):
    NOTEBOOKS.mkdir(exist_ok=True)
    images = Path("flowers").resolve()
    outdated = [name for name, path in WALKTHROUGHS.items() if not is_current(path)]
    for name in names or outdated:
        with tempfile.TemporaryDirectory() as folder:
            if images.exists():
                Path(folder, images.name).symlink_to(images)
            nbformat.write(execute(convert(WALKTHROUGHS[name]), folder), NOTEBOOKS / f"{name}.ipynb")
        print(f"wrote {name}.ipynb")


if __name__ == "__main__":
    main(sys.argv[1:])
