"""Figures of attention maps: panels, labels and files."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from vision_attn.networks.capture import figures
from vision_attn.networks.capture.maps import AttentionMap


def seen():
    weights = torch.rand(2, 4, 2, 8, 8)
    return AttentionMap(weights / weights.sum((-2, -1), keepdim=True), ((1, 1), (5, 5)), (32, 32))


def overlays(figure):
    """Return the values and opacities of the overlays, panel by panel."""
    found = [axis.images[1] for axis in figure.axes if len(axis.images) == 2]
    return [(image.get_array().data, image.get_alpha()) for image in found]


@pytest.mark.parametrize("channels", [1, 3])
def test_the_figure_shows_images_queries_and_weights(channels):
    attention = seen()
    figure = attention.figure(torch.rand(2, channels, 32, 32), query=1, titles=["one", "two"])
    assert len(figure.axes) == 5  # There are two images with two panels each, and the scale.
    assert all(axis.patches[0].get_xy() == (20, 20) for axis in figure.axes[:4])
    titles = [axis.get_title(loc="left") for axis in figure.axes[:4]]
    assert titles == ["one", "attention, mean of 4 heads", "two", ""]
    for (shares, _), weights in zip(overlays(figure), attention.weights[:, :, 1], strict=True):
        np.testing.assert_allclose(shares, 64 * weights.mean(0), rtol=1e-5)


def test_heads_and_queries():
    attention, images = seen(), torch.rand(2, 3, 32, 32)
    weights = 64 * attention.weights[:, :, 0]
    for reduction, expected in (("max", weights.amax(1, keepdim=True)), ("none", weights)):
        figure = attention.figure(images, reduction=reduction)
        assert len(figure.axes) == 2 * (1 + expected.shape[1]) + 1
        np.testing.assert_allclose([shares for shares, _ in overlays(figure)], expected.flatten(0, 1), rtol=1e-5)
    assert [axis.get_title(loc="left") for axis in figure.axes[1:3]] == ["head 0", "head 1"]
    # Without titles, images are numbered, unless there is only one.
    assert [axis.get_title(loc="left") for axis in figure.axes[:10:5]] == ["image 0", "image 1"]
    one = AttentionMap(attention.weights[:1], attention.query_positions, (32, 32)).figure(images[:1])
    assert [axis.get_title(loc="left") for axis in one.axes[:2]] == ["image", "attention, mean of 4 heads"]
    # Each of several queries has a row.
    figure = attention.figure(images, query=[1, 0], titles=["one", "two"])
    titles = [axis.get_title(loc="left") for axis in figure.axes[:8:2]]
    assert titles == [f"{name}, query {query}" for name in ("one", "two") for query in ("1 (5, 5)", "0 (1, 1)")]
    assert [axis.patches[0].get_xy() for axis in figure.axes[:8:2]] == [(20, 20), (4, 4)] * 2
    expected = 64 * attention.weights.mean(1)[:, [1, 0]].flatten(0, 1)
    np.testing.assert_allclose([shares for shares, _ in overlays(figure)], expected, rtol=1e-5)


def test_queries_and_keys_can_have_different_resolutions():
    attention = AttentionMap(torch.rand(1, 1, 1, 4, 4), ((7, 2),), (32, 32), map_size=(8, 8), heads=("rollout",))
    figure = attention.figure(torch.rand(1, 3, 32, 32))
    assert figure.axes[1].patches[0].get_xy() == (8, 28)
    assert figure.axes[1].get_title(loc="left") == "attention, rollout"
    assert figure.axes[1].images[1].get_interpolation() == "nearest"


def test_a_video_has_a_panel_for_each_frame_of_the_map():
    video = torch.arange(8.0).view(1, 1, 8, 1, 1).expand(2, 3, 8, 16, 32) / 8
    weights = torch.rand(2, 4, 2, 4, 2, 4)
    weights = weights / weights.sum((-3, -2, -1), keepdim=True)
    attention = AttentionMap(weights, ((1, 0, 3), (3, 1, 0)), (8, 16, 32))
    figure = attention.figure(video, query=1)
    panels = figure.axes[:5]
    assert [axis.get_title(loc="left") for axis in panels] == ["image 0", "frame 1", "frame 3", "frame 5", "frame 7"]
    assert [axis.images[0].get_array().flat[0] for axis in panels] == [7 / 8, 1 / 8, 3 / 8, 5 / 8, 7 / 8]
    assert [[patch.get_xy() for patch in axis.patches] for axis in panels] == [[(0, 8)], [], [], [], [(0, 8)]]
    expected = 32 * weights[:, :, 1].mean(1).flatten(0, 1)
    np.testing.assert_allclose([shares for shares, _ in overlays(figure)], expected, rtol=1e-5)
    both = attention.figure(video, query=[0, 1], reduction="none")
    assert len(both.axes) == 4 * (1 + 4 * 4) + 1
    assert [axis.get_title(loc="left") for axis in both.axes[4:6]] == ["head 0, frame 7", "head 1, frame 1"]
    with pytest.raises(ValueError, match=r"images must be .*, got \(2, 3, 16, 32\) for a map with 3 axes"):
        attention.figure(video[:, :, 0])


def test_weights_near_an_even_share_are_transparent():
    image, even = torch.rand(1, 3, 32, 32), torch.full((1, 1, 1, 4, 4), 1 / 16)
    for weights in (even, torch.zeros_like(even)):  # The second case is a query that may not attend to any position.
        figure = AttentionMap(weights, ((0, 0),), (32, 32)).figure(image)
        assert (overlays(figure)[0][1] == 0).all()
    even[..., 0, :] *= torch.tensor([1.1, 1.5, 0.2, 2.0])
    for vmax, top in ((16.0, 0.25), (2.0, 1.0)):  # The scale does not depend on the largest weight.
        figure = AttentionMap(even, ((0, 0),), (32, 32)).figure(image, vmax=vmax)
        np.testing.assert_allclose(overlays(figure)[0][1][0], [0.11, 0.468, 0, 0.8], atol=1e-3)
        assert figure.axes[1].images[1].norm(2.0) == pytest.approx(top)
        assert figure.axes[-1].get_ylim() == pytest.approx((1, vmax))
        expected = "Mean effective width: 15.1 of 16 positions (94 %), so the attention is nearly uniform."
        assert figure.get_supxlabel() == expected
    one = torch.full((1, 1, 1, 4, 4), 0.5 / 15)
    one[..., 0] = 0.5
    for weights, top in ((even, 2), (one.clamp(max=0.2), 4), (one, 8), (one * 20, 16)):
        figure = AttentionMap(weights, ((0, 0),), (32, 32)).figure(image)
        assert figure.axes[-1].get_ylim() == pytest.approx((1, top))


def test_figures_are_written_as_png_svg_or_pdf(tmp_path):
    figure = AttentionMap(torch.rand(1, 1, 1, 4, 4), ((0, 0),), (32, 32)).figure(torch.rand(1, 3, 32, 32))
    for ending, begin in (("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")):
        figures.save_figure(figure, tmp_path / f"attention.{ending}")
        assert (tmp_path / f"attention.{ending}").read_bytes().startswith(begin)
    contents = (tmp_path / "attention.png").read_bytes(), figure._repr_png_()
    widths = [Image.open(io.BytesIO(content)).width for content in contents]
    assert widths[0] / widths[1] == pytest.approx(150 / 100, rel=4e-3), "dots per inch of a file and in a notebook"
    with pytest.raises(ValueError, match="txt"):
        figures.save_figure(figure, tmp_path / "attention.txt")
    assert not (tmp_path / "attention.txt").exists()


def test_wrong_arguments_are_rejected():
    images = torch.rand(2, 3, 32, 32)
    wrong = ("titles", ["one"]), ("query", [0, -1]), ("query", []), ("vmax", 1), ("reduction", "sum")
    for name, value in (*wrong, ("images .* 0…1, got 0.0…3.0. Pass the images before", 3 * images.round())):
        with pytest.raises(ValueError, match=name):
            seen().figure(**{"images": images, name.partition(" ")[0]: value})
