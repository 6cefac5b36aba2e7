"""The explorer's page: what it holds, and what it does in a browser."""

import base64
import json
import re
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from timm.models.maxxvit import Attention2d as TimmAttention2d
from torch import nn

import vision_attn as va
from vision_attn.networks.contributions import disabled

CLASSES = ("cat", "dog </script><script>alert(1)</script>", "bird")


class Answer(nn.Module):
    """Scores of three classes, which are large enough to tell them apart."""

    def forward(self, x):
        return 5 * x.mean((2, 3))[:, :3]


def network():
    """Blocks on maps of 8×12 and 4×6; what they add is as large as the map."""
    torch.manual_seed(0)
    blocks = [va.AttentionBlock2d(8, 4, gate_init=1.0), va.AttentionBlock2d(8, 2, gate_init=1.0, pattern=va.Window(3))]
    model = nn.Sequential(nn.Conv2d(3, 8, 2, 2), blocks[0], nn.Conv2d(8, 8, 2, 2), blocks[1], Answer()).eval()
    with torch.no_grad():
        for block in blocks:
            block.attn.qkv.weight.mul_(5)
    return model


def content(page):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    return json.loads(found[1])


def unpacked(part):
    """Maps as the page reads them, ``(heads, queries, cells)``."""
    queries, keys = np.prod(part["map"]), np.prod(part["keys"])
    maps = np.frombuffer(zlib.decompress(base64.b64decode(part["maps"])), np.uint8).reshape(-1, queries, keys)
    peaks = np.frombuffer(base64.b64decode(part["peaks"]), "<f4").reshape(-1, queries, 1)
    return maps * (peaks / part["levels"]), peaks / (2 * part["levels"])  # and how far they may be off


def captured(model, x):
    with torch.no_grad(), va.capture(model) as maps:
        model(x)
    return maps


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Two images of 16×24, their maps, and the page of them."""
    model, images = network(), torch.rand(2, 3, 16, 24, generator=torch.Generator().manual_seed(1))
    path = tmp_path_factory.mktemp("explorer") / "report.html"
    assert va.explore(model, images, path, normalize=lambda x: x - 0.5, classes=CLASSES, titles=["a", "<b>"]) == path
    return model, images, path


def test_the_page_has_the_maps_within_their_rounding(page):
    model, images, path = page
    held = content(path)
    for image, one in zip(images, held["images"], strict=True):
        maps = captured(model, image[None] - 0.5)
        assert [block["path"] for block in one["blocks"]] == list(maps) == ["1.attn", "3.attn"]
        for kind, expected in (("heads", maps), ("rollout", maps.rollout())):
            for block, seen in zip(one["blocks"], expected.values(), strict=True):
                found, error = unpacked(block[kind])
                assert block[kind]["levels"] == 255
                assert (np.abs(found - seen.weights[0].flatten(2).numpy()) <= error + 1e-7).all()
    assert [one["title"] for one in held["images"]] == ["a", "<b>"]
    assert "</script><script>alert" not in path.read_text()
    assert not re.search(r"https?://", path.read_text())


def test_the_page_says_what_becomes_of_the_prediction_without_each_block(page):
    model, images, path = page
    one, x = content(path)["images"][1], images[1:] - 0.5
    with torch.no_grad():
        scores = model(x).softmax(1)[0]
        order = scores.argsort(descending=True)
        assert [name for name, _ in one["prediction"]] == [CLASSES[label] for label in order]
        np.testing.assert_allclose([share for _, share in one["prediction"]], scores[order], atol=1e-6)
        report = va.contribution(model, x)
        for line, sites in zip(one["closings"], (["1"], ["3"], ["1", "3"]), strict=True):
            with disabled(model, sites):
                others = model(x).softmax(1)[0]
            assert abs(others[order[0]] - scores[order[0]]) > 1e-3
            assert line["probability"] == pytest.approx(others[order[0]].item(), abs=1e-6)
            assert line["name"] == CLASSES[others.argmax()]
    assert [line["what"] for line in one["closings"]] == ["1", "3", "all of them"]
    assert [line["share"] for line in one["closings"]][:2] == pytest.approx([b.share for b in report.blocks], abs=1e-5)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = TimmAttention2d(8, dim_head=4)

    def forward(self, x):
        return x + self.attn(x)


def test_swapped_attention_is_disabled_by_zeros(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 4, 4), Residual(), Answer()).eval()
    assert len(va.swap_(model)) == 1
    image = torch.rand(1, 3, 16, 16)
    (one,) = content(va.explore(model, image, tmp_path / "page.html"))["images"]
    (line,) = one["closings"]
    with torch.no_grad():
        expected = model[2](model[0](image)).softmax(1)[0, int(one["prediction"][0][0].removeprefix("class "))]
    assert (line["what"], line["share"], line["probability"]) == (
        "1.attn",
        None,
        pytest.approx(expected.item(), abs=1e-6),
    )


def test_large_maps_are_taken_together(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), va.AttentionBlock2d(4, 1, pattern="rows"))
    (one,) = content(va.explore(model, torch.rand(1, 3, 30, 33), tmp_path / "page.html"))["images"]
    assert (one["prediction"], one["closings"]) == ([], [])  # a map is no answer
    heads = one["blocks"][0]["heads"]
    assert (heads["map"], heads["keys"], heads["step"]) == ([15, 17], [15, 17], 2)
    (found,), _ = unpacked(heads)
    np.testing.assert_allclose(found.sum(1), 1, atol=0.02)
    own = found.reshape(15, 17, 15, 17).sum(3)[7, 3]  # by row of cells: a query looks along its own
    assert own.argmax() == 7
    assert own[7] == pytest.approx(1, abs=0.02)


def test_what_cannot_be_explored_is_refused(tmp_path):
    model, image, flat = network(), torch.rand(1, 3, 16, 24), nn.Sequential(nn.Conv2d(3, 8, 1), nn.Flatten(2))
    for one, arguments, message in (
        (
            model,
            {"images": image[0]},
            r"images must be \(b, 1 or 3, height, width\), of one at least; got \(3, 16, 24\)",
        ),
        (model, {"images": image, "titles": ["a", "b"]}, "titles must be as many as the images, 1; got 2"),
        (flat.append(va.Attention1d(8, 2)), {"images": image}, "has maps of 1 axes"),
    ):
        with pytest.raises(ValueError, match=message):
            va.explore(one, output=tmp_path / "page.html", **arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("side", "most", "levels"), [(14, 5e6, 255), pytest.param(28, 15e6, 15, marks=pytest.mark.slow)]
)
def test_four_blocks_of_eight_heads_stay_below_some_megabytes(tmp_path, side, most, levels):
    torch.manual_seed(0)
    blocks = [va.AttentionBlock2d(32, 8) for _ in range(4)]
    for block in blocks:
        nn.init.normal_(block.attn.qkv.weight, std=0.5)  # as hard to write down as any
    model = nn.Sequential(nn.Conv2d(3, 32, 2, 2), *blocks)
    page = va.explore(model, torch.rand(1, 3, 2 * side, 2 * side), tmp_path / "page.html")
    assert page.stat().st_size < most
    assert min(block["heads"]["levels"] for block in content(page)["images"][0]["blocks"]) >= levels


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="the page is tried by playwright, which is not installed")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("the page is tried in Chromium, which is not on this machine: apt-get install chromium")
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser, page):
    """Opens the page at a width; nothing may go wrong on it."""
    contexts, wrong = [], []

    def open_at(width, **options):
        context = browser.new_context(viewport={"width": width, "height": 800}, **options)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: wrong.append(message.text))
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("request", lambda request: wrong.append(request.url) if request.url.startswith("http") else None)
        tab.goto(page[2].as_uri())
        tab.wait_for_selector("#grid button[aria-pressed=true]")
        return tab

    yield open_at
    for context in contexts:
        context.close()
    assert wrong == []


def said(tab):
    return tab.inner_text("#said")


def test_a_pointer_move_shows_what_was_captured(opened, page):
    model, images, _ = page
    tab = opened(1000)
    tab.select_option("#block", "0")
    tab.select_option("#head", "3")
    box = tab.locator("#view").bounding_box()
    tab.mouse.move(box["x"] + 0.8 * box["width"], box["y"] + 0.3 * box["height"])
    maps = captured(model, images[:1] - 0.5)
    seen = maps["1.attn"]
    query = 2 * 12 + 9  # row 2 of 8 and column 9 of 12
    weights, text = seen.weights[0, 3, query], said(tab)
    row, column = divmod(int(weights.argmax()), 12)
    assert text.startswith(f"1.attn, head 3, from row 3, column 10 of 8×12: most at row {row + 1}, column {column + 1}")
    # What the script makes of the maps, cell by cell, the mean of heads and rollout among it.
    peaks = seen.weights[0, :, query].flatten(1).amax(1)
    for head, expected, error in (
        (1, seen.weights[0, 1, query], peaks[1] / 510),
        ("mean", seen.weights[0, :, query].mean(0), peaks.mean() / 510),
        ("rollout", maps.rollout()["1.attn"].weights[0, 0, query], 1 / 510),
    ):
        found = tab.evaluate(f"[...weightsOf(0, {json.dumps(head)}, {query})]")
        np.testing.assert_allclose(found, expected.flatten(), rtol=0, atol=error.item() if head != "rollout" else error)


def test_keys_fingers_blocks_heads_and_images_work_on_a_phone(opened):
    tab = opened(390, has_touch=True, color_scheme="dark")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    box = tab.locator("#view").bounding_box()
    tab.touchscreen.tap(box["x"] + 0.1 * box["width"], box["y"] + 0.9 * box["height"])
    tab.focus("#view")
    for key in ("ArrowRight", "ArrowRight", "ArrowUp", "ArrowDown", "ArrowDown"):  # the last stays inside
        tab.keyboard.press(key)
    assert "3.attn, mean, from row 4, column 3 of 4×6" in said(tab)
    tab.click("#grid button[data-block='0'][data-head='2']")
    assert "1.attn, head 2, from row 8, column 6 of 8×12" in said(tab)
    answers = tab.inner_text("#closings")
    tab.click("#images button >> nth=1")
    tab.wait_for_selector("#images button:nth-child(2)[aria-pressed=true]")
    assert tab.inner_text("#closings") != answers


def test_the_page_of_the_documentation_is_as_pages_are_now():
    root = Path(va.__file__).parents[1]
    template = (root / "vision_attn" / "tools" / "explorer" / "page.html").read_text()
    made = (root / "docs" / "explorer" / "digits.html").read_text()
    held = re.search(r'id="data">(.*?)</script>', made, re.DOTALL)[1]
    remedy = "run examples/attention_maps.py, and copy its page to docs/explorer/digits.html"
    assert made.replace(held, "/* DATA */") == template, remedy
    assert len(made) < 300_000
