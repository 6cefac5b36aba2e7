"""Every walkthrough runs from top to bottom, with warnings as errors, and leaves the pictures that its page shows."""

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

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
#: Scripts in cells, each a text: prose in comments, and code that asserts what the prose says.
WALKTHROUGHS = sorted(path for path in EXAMPLES.glob("*.py") if path.read_text().startswith("# %%"))
PAGE = (EXAMPLES / "README.md").read_text()


def run(path, folder):
    """What a walkthrough prints, with every warning as an error; what it sets for its process is set back."""
    dtype = torch.get_default_dtype()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.chdir(folder),
        torch.enable_grad(),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        patch.setenv("KERAS_HOME", str(folder))  # where Keras writes its settings
        patch.setenv("KERAS_BACKEND", "torch")
        warnings.simplefilter("error")
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it says which CUDA a machine has
        try:
            runpy.run_path(str(path), run_name="__main__")
        finally:
            torch.set_default_dtype(dtype)
    assert err.getvalue() == ""
    return out.getvalue()


def drawn_by(path):
    return set(re.findall(r'save_figure\(.*"(\S+\.png)"\)', path.read_text()))


#: They take ten seconds each, for what other tests do on less.
LONG = {"insert_and_finetune", "einx_vs_bmm"}


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.thorough] * (path.stem in LONG)) for path in WALKTHROUGHS],
)
def test_it_runs_and_leaves_what_it_says(path, tmp_path):
    printed, folder = run(path, tmp_path), tmp_path / "examples-output"
    assert str(EXAMPLES.parent) not in printed
    said = set(re.findall(r"examples-output/(\S+\.\w+)", printed))
    assert said == {file.name for file in folder.iterdir()} != set()
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
