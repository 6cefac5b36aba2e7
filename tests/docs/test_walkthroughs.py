"""Every walkthrough runs from top to bottom, with warnings as errors, and writes the pictures that its page shows."""

import contextlib
import io
import logging
import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest
import torch
from PIL import Image

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
#: Scripts in cells: prose in comments, and code that asserts the statements of the prose.
WALKTHROUGHS = sorted(path for path in EXAMPLES.glob("*.py") if path.read_text().startswith("# %%"))
PAGE = (EXAMPLES / "README.md").read_text()


def run(path, folder):
    """Return the output of a walkthrough, with every warning as an error, and restore the state of the process."""
    dtype = torch.get_default_dtype()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.chdir(folder),
        torch.enable_grad(),
        warnings.catch_warnings(action="error"),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        patch.setenv("KERAS_HOME", str(folder))  # the folder of Keras's settings
        patch.setenv("KERAS_BACKEND", "torch")
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it logs the CUDA version
        try:
            runpy.run_path(str(path), run_name="__main__")
        finally:
            torch.set_default_dtype(dtype)
    assert err.getvalue() == ""
    return out.getvalue()


def drawn_by(path):
    return set(re.findall(r'save_figure\(.*"(\S+\.png)"\)', path.read_text()))


#: Walkthroughs that take ten seconds or more. Other tests cover their calls on smaller inputs.
LONG = {"insert_and_finetune", "einx_vs_bmm", "quickstart"}


MARKS = {path: pytest.mark.thorough if path.stem in LONG else pytest.mark.slow for path in WALKTHROUGHS}


@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem, marks=mark) for path, mark in MARKS.items()])
def test_it_runs_and_writes_the_files_that_it_reports(path, tmp_path, image_folder):
    (tmp_path / "flowers").symlink_to(image_folder)  # the images of the quickstart
    printed, folder = run(path, tmp_path), tmp_path / "examples-output"
    assert str(EXAMPLES.parent) not in printed
    reported = set(re.findall(r"examples-output/([\w/.-]+\.\w+)", printed))
    # A saved network counts as the file of its weights.
    files = [file for file in folder.rglob("*") if file.is_file() and file.name not in ("config.json", "README.md")]
    assert reported == {file.relative_to(folder).as_posix() for file in files} != set()
    assert {picture.name for picture in folder.glob("*.png")} == drawn_by(path)
    for page in folder.glob("*.md"):  # the cheat sheet
        assert page.read_text() == (EXAMPLES / page.name).read_text()
    for picture in folder.glob("*.png"):
        with Image.open(picture) as image:
            assert min(image.size) >= 300
            assert len(image.convert("L").getcolors()) > 16


def test_the_page_has_every_walkthrough_and_picture():
    assert sorted(set(re.findall(r"\]\((\w+\.py)\)", PAGE))) == sorted(path.name for path in EXAMPLES.glob("*.py"))
    made = {"two_views.png"}.union(*map(drawn_by, WALKTHROUGHS))  # the first by readme_picture.py
    assert {path.name for path in (EXAMPLES / "pictures").iterdir()} == made
    assert set(re.findall(r"\]\(pictures/(\S+\.png)\)", PAGE)) == made


def test_without_keras_the_equations_are_still_shown(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "keras", None)
    assert "pip install keras" in run(EXAMPLES / "keras_equations.py", tmp_path)
