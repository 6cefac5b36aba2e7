"""Every walkthrough runs from top to bottom, with warnings as errors, and leaves the pictures that its page shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
#: Scripts in cells, each a text: prose in comments, and code that asserts what the prose says.
WALKTHROUGHS = sorted(path for path in EXAMPLES.glob("*.py") if path.read_text().startswith("# %%"))
PAGE = (EXAMPLES / "README.md").read_text()


def run(folder, *arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KERAS_HOME": str(folder)}  # where Keras writes its settings
    command = [sys.executable, "-W", "error", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What a walkthrough prints, and the folder that it was run in; it is run once."""
    ran = {}

    def of(path):
        if path not in ran:
            folder = tmp_path_factory.mktemp(path.stem)
            ran[path] = run(folder, path), folder / "examples-output"
        return ran[path]

    return of


@pytest.mark.parametrize("path", WALKTHROUGHS, ids=lambda path: path.stem)
def test_it_runs_and_leaves_what_it_says(path, written):
    printed, folder = written(path)
    assert str(EXAMPLES.parent) not in printed
    said = re.findall(r"examples-output/(\S+\.\w+)", printed)
    assert said
    assert sorted(set(said)) == sorted(file.name for file in folder.iterdir())
    for picture in folder.glob("*.png"):
        with Image.open(picture) as image:
            assert min(image.size) >= 300
            assert len(image.convert("L").getcolors()) > 16


@pytest.mark.parametrize("path", WALKTHROUGHS, ids=lambda path: path.stem)
def test_it_reads_as_a_text(path):
    first, *cells = re.split(r"^# %%.*\n", path.read_text(), flags=re.MULTILINE)[1:]
    assert first.startswith("# # ")
    assert f"python examples/{path.name}" in first
    assert len(cells) > 8
    code = [cell for cell in cells if not cell.startswith("# ")]
    assert any("assert" in cell for cell in code)


def test_the_page_has_every_walkthrough_and_picture(written):
    assert sorted(set(re.findall(r"\]\((\w+\.py)\)", PAGE))) == sorted(path.name for path in EXAMPLES.glob("*.py"))
    made = {picture.name for path in WALKTHROUGHS for picture in written(path)[1].glob("*.png")}
    assert {path.name for path in (EXAMPLES / "pictures").iterdir()} == made
    assert set(re.findall(r"\]\(pictures/(\S+\.png)\)", PAGE)) == made


def test_the_printed_cheat_sheet_is_the_one_beside_it(written):
    _, folder = written(EXAMPLES / "einsum_cheatsheet.py")
    assert (folder / "einsum_cheatsheet.md").read_text() == (EXAMPLES / "einsum_cheatsheet.md").read_text()


def test_without_keras_the_equations_are_still_shown(tmp_path):
    without = "import runpy, sys; sys.modules['keras'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
    printed = run(tmp_path, "-c", without, EXAMPLES / "keras_equations.py")
    assert "pip install keras" in printed
