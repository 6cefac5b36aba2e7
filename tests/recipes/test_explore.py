"""The explorer page: its data and its behavior in a browser."""

import base64
import io
import json
import re
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from small_networks import Net, captured
from timm.models import create_model
from torch import nn

import vision_attn as va
from vision_attn.networks.capture.figures import OPAQUE
from vision_attn.networks.capture.maps import AttentionMap

CLASSES = ("cat", "dog </script><script>alert(1)</script>", "bécasse")


#: Classifier with clearly different scores of three classes.
CLASSIFIER = Net(lambda net, x: 5 * x.mean((2, 3))[:, :3])


def network():
    """Create a network with blocks on feature maps of 8×12 and 4×6, whose branches are as large as their inputs."""
    torch.manual_seed(0)
    blocks = [va.AttentionBlock2d(8, 4, gate_init=1.0), va.AttentionBlock2d(8, 2, gate_init=1.0, pattern=va.Window(3))]
    for block in blocks:
        block.attn.qkv.weight.data.mul_(5)
    return nn.Sequential(nn.Conv2d(3, 8, 2, 2), blocks[0], nn.Conv2d(8, 8, 2, 2), blocks[1], CLASSIFIER).eval()


def content(page):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    return json.loads(found[1])


def unpacked(part):
    """Decode weights like the page, ``(heads, queries, positions)``, and return the largest rounding error."""
    peaks = np.frombuffer(base64.b64decode(part["peaks"]), "<f4").reshape(len(part["names"]), -1, 1)
    maps = np.frombuffer(zlib.decompress(base64.b64decode(part["maps"])), np.uint8)
    maps = maps.reshape(*peaks.shape[:2], np.prod(part["keys"]))
    return maps * (peaks / part["levels"]), peaks / (2 * part["levels"])


def assert_close(part, weights, first=0):
    found, error = (values[:, first:] for values in unpacked(part))
    assert (np.abs(found - weights.flatten(2).numpy()) <= error + 1e-7).all()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    model, images = network(), torch.rand(2, 3, 16, 24, generator=torch.Generator().manual_seed(1))
    path = tmp_path_factory.mktemp("explorer") / "report.html"
    assert va.explore(model, images, path, normalize=lambda x: x - 0.5, classes=CLASSES, titles=["a", "<b>"]) == path
    return model, images, path


def test_the_page_has_the_maps_within_their_rounding(page):
    model, images, path = page
    for image, one in zip(images, content(path)["images"], strict=True):
        picture = Image.open(io.BytesIO(base64.b64decode(one["source"].partition(",")[2])))
        assert one["size"] == [16, 24]
        assert np.abs(np.asarray(picture) / 255 - image.movedim(0, 2).numpy()).mean() < 0.1
        maps = captured(model, image[None] - 0.5)
        assert [block["site"] for block in one["blocks"]] == list(maps) == ["1.attn", "3.attn"]
        for kind, expected in (("heads", maps), ("rollout", maps.rollout())):
            for block, seen in zip(one["blocks"], expected.values(), strict=True):
                assert block[kind]["levels"] == 255
                assert_close(block[kind], seen.weights[0])
        for block, seen in zip(one["blocks"], maps.values(), strict=True):
            assert (block["tokens"], block["selects"]) == ([], seen.describe_width())
            assert block["distance"] == pytest.approx(seen.distance()[0].mean(1).tolist())
            assert block["width"] == pytest.approx(seen.width()[0].mean(1).tolist())
            assert "so the attention selects positions." in block["selects"]
        largest = [seen.weights.max().item() * seen.weights[0, 0, 0].numel() for seen in maps.values()]
        assert [block["largest"] for block in one["blocks"]] == pytest.approx(largest)
    assert "</script><script>alert" not in path.read_text()
    assert CLASSES[2] in path.read_text(), "names can be read in the file"
    assert content(path)["about"].startswith("Sequential, ")
    assert not re.search(r"https?://", path.read_text())


def test_the_page_has_the_prediction_without_each_block(page):
    model, images, path = page
    one, x = content(path)["images"][1], images[1:] - 0.5
    with torch.no_grad():
        scores = model(x).softmax(1)[0]
        order = scores.argsort(descending=True)
        assert [name for name, _ in one["prediction"]] == [CLASSES[label] for label in order]
        np.testing.assert_allclose([score for _, score in one["prediction"]], scores[order], atol=1e-6)
        report = va.contribution(model, x)
        for line, sites in zip(one["ablations"], (["1"], ["3"], ["1", "3"]), strict=True):
            with va.disabled(model, sites):
                others = model(x).softmax(1)[0]
            assert abs(others[order[0]] - scores[order[0]]) > 1e-3
            assert line["probability"] == pytest.approx(others[order[0]].item(), abs=1e-6)
            assert line["name"] == CLASSES[others.argmax()]
    assert [line["disabled"] for line in one["ablations"]] == ["1", "3", "all blocks"]
    assert [line["ratio"] for line in one["ablations"]][:2] == pytest.approx([b.ratio for b in report.blocks], abs=1e-5)


WITH_PREFIXES = [
    ("test_vit", {"reg_tokens": 2}, ["prefix token 1", "prefix token 2", "prefix token 3"]),
    ("deit_tiny_distilled_patch16_224", {"depth": 1}, ["prefix token 1", "prefix token 2"]),
]


@pytest.mark.parametrize(("name", "options", "tokens"), WITH_PREFIXES)
def test_class_and_register_tokens_are_queries_too(tmp_path, name, options, tokens):
    model, image = create_model(name, img_size=32, **options).eval(), torch.rand(1, 3, 32, 32)
    va.swap_(model)
    seen = captured(model, image)
    (one,) = content(va.explore(model, image, tmp_path / "page.html"))["images"]
    for block in one["blocks"]:
        assert block["tokens"] == tokens
        assert_close(block["heads"], seen[block["site"]].prefix[0], first=4)


def test_positions_of_large_maps_are_merged(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), va.AttentionBlock2d(4, 1, pattern="rows"))
    one, two = content(va.explore(model, torch.rand(2, 3, 56, 20), tmp_path / "page.html"))["images"]
    assert (one["title"], two["title"], model.training) == ("image 1", "image 2", True)
    # The only score of this network is the logit 3 of the second class.
    model = Net(lambda net, x: {"logits": 0 * net.block(x).mean((2, 3))[:, :1] + 3}, block=va.AttentionBlock2d(1, 1))
    (found,) = content(va.explore(model, torch.rand(1, 1, 8, 8), tmp_path / "page.html"))["images"]
    assert found["prediction"] == [["class 1", pytest.approx(0.952574)], ["class 0", pytest.approx(0.047426)]]
    assert (one["prediction"], one["ablations"]) == ([], [])  # a feature map is not a prediction
    heads = one["blocks"][0]["heads"]
    assert (heads["map"], heads["keys"], heads["step"]) == ([28, 10], [28, 10], 2)
    (found,), _ = unpacked(heads)
    np.testing.assert_allclose(found.sum(1), 1, atol=0.02)
    assert found.reshape(28, 10, 28, 10).sum(3)[7, 3, 7] == pytest.approx(1, abs=0.02)  # a query attends to its row


def test_invalid_arguments_raise_errors(tmp_path):
    model, image = network(), torch.rand(1, 3, 16, 24)
    flat = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Flatten(2), va.blocks.Attention1d(8, 2))
    for one, images, titles, message in (
        *((model, x, (), re.escape(f"≥ 1, got {tuple(x.shape)}")) for x in (image[0], image[:, :2], image[:0])),
        *((model, image + by, (), rf"images must be in 0…1, got {by}…{by + 1}") for by in (0.5, -0.5)),
        (model, image, ("a", "b"), "titles must be one text for each of the 1 images, got 2"),
        (flat, image, (), "expected feature maps with 2 axes, got 1 at '2'"),
    ):
        with pytest.raises(ValueError, match=message):
            va.explore(one, images, tmp_path / "page.html", titles=titles)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def opened(browser, page):
    """Open the page at a width, and fail after any error in the browser."""
    contexts, wrong = [], []

    def open_at(width, address="", path=page[2], **options):
        context = browser.new_context(viewport={"width": width, "height": 800}, **options)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: wrong.append(message.text))
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("request", lambda request: wrong.append(request.url) if request.url.startswith("http") else None)
        tab.goto(path.as_uri() + address)
        tab.wait_for_selector("#grid button[aria-pressed=true]")
        return tab

    yield open_at
    for context in contexts:
        context.close()
    assert wrong == []


def status(tab):
    return tab.inner_text("#status")


@pytest.mark.slow
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
    weights, text = seen.weights[0, 3, query], status(tab)
    row, column = divmod(int(weights.argmax()), 12)
    largest = f"largest weight at row {row + 1}, column {column + 1}"
    assert text.startswith(f"1.attn, head 3, query row 3, column 10 of 8×12: {largest}")
    # The decoded weights of heads, of their mean and of the rollout.
    peaks = seen.weights[0, :, query].flatten(1).amax(1)
    for head, expected, error in (
        (1, seen.weights[0, 1, query], peaks[1] / 510),
        ("mean", seen.weights[0, :, query].mean(0), peaks.mean() / 510),
        ("rollout", maps.rollout()["1.attn"].weights[0, 0, query], 1 / 510),
    ):
        found = tab.evaluate(f"[...weightsOf(blocksOf(0)[0], {json.dumps(head)}, {query})]")
        np.testing.assert_allclose(found, expected.flatten(), rtol=0, atol=error.item() if head != "rollout" else error)


def query(tab):
    return re.search(r"query (row \d+, column \d+|prefix token 2)", status(tab))[1]


@pytest.mark.slow
def test_a_click_locks_the_query_until_another_click_or_escape(opened):
    tab = opened(1000)
    box = tab.locator("#view").bounding_box()

    def at(column, act=tab.mouse.move):
        act(box["x"] + (column - 0.5) / 6 * box["width"], box["y"] + 1)
        return query(tab)

    assert at(2) == "row 1, column 2"
    for release in (lambda: at(5, tab.mouse.click), *(partial(tab.keyboard.press, key) for key in ("Escape", "Enter"))):
        assert at(3, tab.mouse.click) == "row 1, column 3"
        assert status(tab).endswith("Locked.")
        assert at(4) == "row 1, column 3"
        release()
        assert not status(tab).endswith("Locked.")
        assert at(6) == "row 1, column 6"

    tab.focus("#view")
    steps = {"ArrowLeft": (1, 5), "ArrowDown": (2, 5), "Home": (2, 1), "End": (2, 6), "ArrowRight": (2, 6)}
    steps |= {"ArrowUp": (1, 6), "Control+Home": (1, 1), "Control+End": (4, 6)}
    for key, (row, column) in steps.items():
        tab.keyboard.press(key)
        assert query(tab) == f"row {row}, column {column}"
    assert "query row 4, column 6 of 4×6" in tab.get_attribute("#view", "aria-label")


@pytest.mark.slow
def test_touch_gestures_on_a_phone(opened):
    tab = opened(390, has_touch=True)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    box = tab.locator("#view").bounding_box()
    tab.touchscreen.tap(box["x"] + 0.1 * box["width"], box["y"] + 0.9 * box["height"])
    assert query(tab) == "row 4, column 1"
    session, x, y = tab.context.new_cdp_session(tab), box["x"] + 90, box["y"] + 150
    for kind, up in (("touchStart", 0), *(("touchMove", up) for up in range(30, 301, 30)), ("touchEnd", None)):
        points = [] if up is None else [{"x": x, "y": y - up}]
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    tab.wait_for_timeout(100)
    assert tab.evaluate("scrollY") > 200
    assert query(tab) == "row 4, column 1"


@pytest.mark.slow
def test_uniform_attention_is_named_above_the_image_and_the_scale_is_that_of_the_image(opened, tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 8, 2, 2), va.AttentionBlock2d(8, 2))
    nn.init.zeros_(model[1].attn.qkv.weight)
    path = va.explore(model, torch.rand(2, 3, 16, 24), tmp_path / "page.html")
    first, _, second = (text := path.read_text()).rpartition('"largest": ')
    path.write_text(f'{first}"largest": 9{second[second.index(",") :]}')
    assert text != path.read_text()
    tab = opened(1000, path=path)
    expected = "Mean effective width: 96.0 of 96 positions (100 %), so the attention is nearly uniform."
    assert tab.inner_text("#selects") == expected
    assert (tab.input_value("#top"), tab.inner_text("#ticks").split()) == ("0", ["1×", "2×"])
    tab.evaluate("() => { state.panes[0].image = 1; writeAddress(); }")  # before this image is decoded
    tab.wait_for_timeout(400)
    tab.locator("#images button").nth(1).click()
    tab.locator("#ticks span", has_text="16×").wait_for()  # after the second image is decoded; fails after 30 s
    assert tab.inner_text("#ticks").split()[-1] == "16×"
    places = [tab.locator(one).bounding_box()["y"] for one in ("#help", "#selects", "#view")]
    assert places == sorted(places)


@pytest.mark.slow
def test_the_page_and_figures_have_the_same_color_scale(opened):
    tab, shares = opened(1000), np.array([0, 0.5, 1, 1.1, 1.5, 2, 4, 9, 16, 22])
    found = np.array(tab.evaluate(f"{shares.tolist()}.map(colorOf)"))
    seen = AttentionMap(torch.tensor(shares).view(1, 1, 1, 2, 5) / 10, ((0, 0),), (20, 50))
    shown = seen.figure(torch.zeros(1, 3, 20, 50)).axes[1].images[1]
    expected = shown.to_rgba(shown.get_array()).reshape(10, 4)
    assert np.abs(found[:, :3] - 255 * expected[:, :3]).max() < 4  # the page interpolates between 17 colors
    np.testing.assert_allclose(found[:, 3] / 255, shown.get_alpha().flatten(), atol=0.003)
    assert (found[:3, 3] == 0).all()
    assert found[3, 3] < 0.15 * 255  # 1.1× uniform is almost transparent
    assert (found[5:, 3] == round(255 * OPAQUE)).all()


@pytest.mark.slow
def test_two_maps_are_compared_and_restored_from_the_address(opened):
    tab = opened(1000)
    tab.click("#split")
    answers = tab.inner_text("#ablations")
    tab.click("#images button >> nth=1")  # in the right pane
    tab.wait_for_selector("#images button:nth-child(2)[aria-pressed=true]")
    assert tab.inner_text("#ablations") != answers
    tab.select_option("#head", "1")
    tab.select_option("#active", "0")
    tab.select_option("#head", "rollout")
    tab.select_option("#top", "64")
    box, other = (tab.locator(one).bounding_box() for one in ("#view", "#view2"))
    assert other["x"] > box["x"] + box["width"]
    assert other["y"] == box["y"]
    tab.mouse.click(other["x"] + 0.9 * other["width"], other["y"] + 0.1 * other["height"])
    texts = status(tab), tab.inner_text("#status2")
    assert texts[0].startswith("3.attn, rollout, query row 1, column 6 of 4×6")
    assert texts[1].startswith("1.attn, head 1, query row 1, column 11 of 8×12")
    assert [tab.inner_text(one) for one in ("#caption", "#caption2")] == ["a: 3.attn, rollout", "<b>: 1.attn, head 1"]
    sent = opened(390, tab.evaluate("address()"))
    tab.wait_for_url(re.compile("locked=1"))
    assert (status(sent), sent.inner_text("#status2"), sent.input_value("#top")) == (*texts, "64")
    for nonsense in ("#image=9&block=%00&head=x&y=2&x=NaN&top=5&cover=-1&order=__proto__&token=7", "#%"):
        assert status(opened(390, nonsense)).startswith("3.attn, mean, query row 3, column 4 of 4×6")


@pytest.mark.slow
def test_a_button_saves_the_maps_as_png(opened):
    tab = opened(1000)
    for panes in (1, 2):
        with tab.expect_download() as download:
            tab.click("#save")
        assert download.value.suggested_filename.startswith("a_3.attn_mean")
        saved = Image.open(download.value.path()).convert("RGB")
        assert saved.width == 24 + panes * (560 + 24)
        assert tuple(tab.evaluate("colorOf(1e9).slice(0, 3)")) in {color for _, color in saved.getcolors(10**6)}
        tab.click("#split")


@pytest.mark.slow
def test_tokens_are_selected_and_a_note_is_shown(opened, tmp_path):
    model, image = create_model("test_vit", img_size=32, reg_tokens=1).eval(), torch.rand(1, 3, 32, 32)
    for block in model.blocks:
        block.attn.qkv.weight.data.mul_(30)
    va.swap_(model)
    path = va.explore(model, image, tmp_path / "page.html", note="The weights are <random>.")
    tab, (name, seen) = opened(1000, path=path), list(captured(model, image).items())[-1]
    assert tab.inner_text("#note") == "The weights are <random>."
    tab.select_option("#from", label="prefix token 2")
    tab.select_option("#head", "1")
    tab.hover("#view")
    row, column = divmod(int(seen.prefix[0, 1, 1].argmax()), 2)
    largest = f"largest weight at row {row + 1}, column {column + 1} of 2×2"
    assert status(tab).startswith(f"{name}, head 1, query prefix token 2: {largest}")
    tab.select_option("#head", "rollout")
    assert "not available" in status(tab)
    assert "rollout, query prefix token 2" in status(opened(390, tab.evaluate("address()"), path=path))
    tab.click("#view", position={"x": 300, "y": 300})  # unlocks the query
    assert query(tab) == "row 2, column 2"


def test_the_page_of_the_documentation_is_current():
    root = Path(va.__file__).parents[1]
    made = (root / "docs" / "explorer" / "recall.html").read_text()
    held = re.search(r'id="data">(.*?)</script>', made, re.DOTALL)[1]
    remedy = "run examples/attention_maps.py, and copy its page to docs/explorer/recall.html"
    assert made.replace(held, "/* DATA */") == (root / "vision_attn/recipes/explore.html").read_text(), remedy
