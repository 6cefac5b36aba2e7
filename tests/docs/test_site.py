"""The documentation as a site: it builds without warnings, and every page fits on a phone."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PHONE = 390  # width in pixels

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason='mkdocs is not installed: pip install ".[docs]"')
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", "docs/mkdocs.yml", "-d", str(folder)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return folder


def test_notebooks_are_rendered_with_their_output(site):
    for path in (ROOT / "examples/notebooks").glob("*.ipynb"):
        page = (site / "examples/notebooks" / f"{path.stem}.html").read_text()
        assert page.count("<img ") >= path.read_text().count("image/png")
        assert "execution_count" not in page


def test_no_page_is_wider_than_a_phone(site, browser):
    pages = [path for path in sorted(site.rglob("*.html")) if path.name != "404.html" and "explorer" not in path.parts]
    assert len(pages) > 20
    tab, widths = browser.new_page(viewport={"width": PHONE, "height": 800}), {}
    for path in pages:
        tab.goto(path.as_uri())
        widths[path.relative_to(site).as_posix()] = tab.evaluate("document.documentElement.scrollWidth")
    assert {page: width for page, width in widths.items() if width > PHONE} == {}


def test_einx_and_bmm_are_columns_on_a_screen_and_tabs_on_a_phone(site, browser):
    rows = (ROOT / "docs/implementations.md").read_text().count("</td><td>")
    for width, columns in ((1366, 2), (PHONE, 1)):
        tab = browser.new_page(viewport={"width": width, "height": 768})
        tab.goto((site / "docs/implementations.html").as_uri())
        tab.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        sets = tab.locator(".tabbed-set").all()
        assert len(sets) == rows > 0
        for one in sets:
            boxes = [box for block in one.locator(".tabbed-block").all() if (box := block.bounding_box())]
            assert len(boxes) == len({box["x"] for box in boxes}) == columns
            assert len({box["y"] for box in boxes}) == 1
            assert max(box["height"] for box in boxes) < 768
