"""Attention maps of all implementations, and measures on cases that were computed by hand."""

import copy
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import timm
import torch
from launches import Operations
from small_networks import Net, captured
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchvision.models.swin_transformer import ShiftedWindowAttention

import vision_attn as va
from vision_attn.networks.capture.maps import AttentionMap, AttentionMaps


def network():
    torch.manual_seed(0)
    model = timm.create_model("resnet20").eval()
    va.insert_(model, names=["layer2", "layer3"], num_heads=4, gate_init=1.0)
    return model


def test_queries_are_image_positions_sites_are_selected_and_heads_are_reduced():
    model, x = network(), torch.randn(2, 3, 32, 32)
    with va.capture(model) as everything:
        expected = model(x)
    for queries in ([(0, 0), (31, 8.5)], np.array([[0, 0], [31, 8.5]]), torch.tensor([[0, 0], [31, 8.5]])):
        with va.capture(model, queries=queries) as maps:
            assert torch.equal(model(x=x), expected)
        assert list(maps) == ["layer2.2.inserted.attn", "layer3.2.inserted.attn"]
        for (path, found), side, cell in zip(maps.items(), (16, 8), ((15, 4), (7, 2)), strict=True):
            assert (found.query_positions, found.weights.shape) == (((0, 0), cell), (2, 4, 2, side, side))
            torch.testing.assert_close(found.weights, everything[path].weights[:, :, [0, cell[0] * side + cell[1]]])
            torch.testing.assert_close(found.weights.sum((-2, -1)), torch.ones(2, 4, 2))
    last = "layer3.2.inserted.attn"
    chosen = maps[last].weights[:, [3, 1]]
    for sites, reduction, heads, expected in (
        ("layer3.*.inserted.attn", None, ("head 3", "head 1"), chosen),
        (["layer3.2"], "mean", ("mean of 2 heads",), chosen.mean(1, keepdim=True)),
        ("layer3", "max", ("max of 2 heads",), chosen.amax(1, keepdim=True)),
    ):
        with va.capture(model, queries, names=sites, reduction=reduction, heads=[3, 1]) as maps:
            model(x)
        assert maps[last].heads == heads
        torch.testing.assert_close(maps[last].weights, expected)
    with pytest.raises(KeyError, match=r"'layer2'.*'layer3\.2\.inserted\.attn'"):
        maps["layer2"]


def test_strided_keys_are_captured():
    """``test_reference.py`` compares the weights with masks, and of every pattern."""
    block = va.Attention2d(8, 2, kv_stride=2)
    with va.capture(block, queries=[(0, 0)]) as maps:
        block(torch.randn(1, 8, 6, 7))
    assert (maps[""].weights.shape, maps[""].map_size) == ((1, 2, 1, 3, 4), (6, 7))
    assert maps[""].key_lengths == (2 / 6, 2 / 7)
    last = replace(maps[""], weights=torch.eye(12)[-1].view(1, 1, 1, 3, 4), query_positions=((5, 6),))  # of one column
    torch.testing.assert_close(last.distance(), torch.full((1, 1, 1), 0.5))
    torch.testing.assert_close(last.spread()[0, 0, 0, :, 6], torch.tensor([0, 0, 0, 0, 0.5, 0.5]))
    assert torch.equal(
        AttentionMaps({"": replace(last, map_size=(1, 1))}).rollout()[""].weights, torch.ones(1, 1, 1, 1, 1)
    )
    model = nn.Sequential(nn.Conv2d(3, 16, 16, 16), va.AttentionBlock2d(16, 2, kv_stride=8))
    assert [*captured(model, torch.rand(1, 3, 32, 320))] == ["1.attn"]


UNIFORM = ({}, {"pattern": va.Window(4, shift=1)}, {"pattern": "rows"}, {"pattern": va.Halo(4, 1)}, {"causal": True})


@pytest.mark.parametrize("options", UNIFORM, ids=str)
def test_uniform_attention_to_the_allowed_positions_is_described_as_uniform(options):
    block, x = va.Attention2d(8, 2, qkv_bias=False, **options), torch.randn(2, 8, 6, 7)
    nn.init.zeros_(block.qkv.weight)
    with va.capture(block) as maps, va.padded(block, [(6, 7), (6, 4)]):
        block(x)
    torch.testing.assert_close(maps[""].width(), torch.ones(2, 2, 42))
    assert "(100 %), so the attention is nearly uniform" in maps[""].describe_width()


def test_converted_windows_are_captured_without_their_padding():
    block = va.convert.from_layer(ShiftedWindowAttention(3, [2, 2], [0, 0], 1))
    x = torch.randn(1, 3, 5, 5)
    for args, kwargs in (((x,), {}), ((), {"x": x})):
        with torch.no_grad(), va.capture(block, queries=[(0, 0)]) as maps:
            block(*args, **kwargs)
        assert maps[""].weights.shape == (1, 1, 1, 5, 5)


def test_maps_are_from_the_last_pass():
    block = va.AttentionBlock2d(8, 2)
    model, x = nn.Sequential(block, nn.Hardtanh(), block), torch.randn(1, 8, 3, 4)
    with va.capture(model) as maps:
        model(x)
        model(x)
    assert list(maps) == ["0.attn", "0.attn:2"]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_the_recomputation_of_activation_checkpointing_is_not_captured(use_reentrant):
    model, x = network(), torch.randn(1, 3, 32, 32, requires_grad=True)
    with va.capture(model) as expected:
        model(x)
    for stage in (model.layer2, model.layer3):
        stage.forward = partial(checkpoint, stage.forward, use_reentrant=use_reentrant)
    with va.capture(model) as maps:
        for _ in range(2):
            model(x).sum().backward()
            assert list(maps) == list(expected)
            assert all(torch.equal(maps[path].weights, one.weights) for path, one in expected.items())


RANKS = [(va.blocks.Attention1d, (12,), (11,), r"\(x\)")]
RANKS += [(va.blocks.Attention3d, (2, 6, 4), (1, 3, 2.5), r"\(t, y, x\)")]


@pytest.mark.parametrize(("kind", "size", "point", "axes"), RANKS)
def test_one_and_three_dimensional_feature_maps(kind, size, point, axes):
    block, x = kind(8, 2), torch.randn(2, 8, *size)
    with va.capture(block) as every, va.capture(block, [point]) as maps:
        block(x)
    assert every[""].weights.shape == (2, 2, math.prod(size), *size)
    assert maps[""].query_positions == (tuple(map(int, point)),)
    row = every[""].query_positions.index(maps[""].query_positions[0])
    torch.testing.assert_close(maps[""].weights[:, :, 0], every[""].weights[:, :, row])
    with pytest.raises(ValueError, match=f"queries .*{axes}"), va.capture(block, [(0, 0)]):
        block(x)


def test_large_maps_are_rejected(monkeypatch):
    model = nn.Sequential(va.Attention2d(8, 2), va.Attention2d(8, 2)).bfloat16()
    x = torch.randn(1, 8, 16, 16, dtype=torch.bfloat16)
    # The map of all positions has 2 · 256 · 256 · 4 bytes, in at least float32.
    monkeypatch.setattr("vision_attn.networks.capture.recording.MAX_BYTES", 600_000)
    with pytest.raises(ValueError, match=r"'1' .*allow_large"), va.capture(model, "all"):
        model(x)
    for options in ({"queries": [(0, 0)]}, {"allow_large": True}, {"reduction": "mean"}, {"names": "1"}):
        with va.capture(model, **options) as maps:
            model(x)
        assert maps


def test_a_single_query_stores_one_row():
    # All weights would be 4096 · 1024 for each head.
    block, x, sizes = va.Attention2d(8, 4, pattern=va.Window(32)), torch.randn(1, 8, 64, 64), []

    def record(func, inputs, outputs):
        sizes.extend(tensor.untyped_storage().nbytes() // tensor.itemsize for tensor in outputs)

    with torch.no_grad(), Operations(record), va.capture(block, [(0, 0), (63, 63)]):
        block(x)
    assert max(sizes) <= 4 * 1024 * 1024  # This is the mask of the windows, which the kernel receives as well.


def test_wrong_arguments_are_rejected():
    model, x = network(), torch.randn(1, 3, 32, 32)
    other = r"capture\. 0 \(MultiheadAttention\): it belongs to another library"
    for wrong, message in (
        (nn.ReLU(), "Attention2d to capture. Call va.insert_"),
        (nn.Sequential(nn.MultiheadAttention(8, 2)), other),
    ):
        with pytest.raises(ValueError, match=message), va.capture(wrong):
            pass
    for query in ((-1, 0), (0, 32), (1, 2, 3)):
        with pytest.raises(ValueError, match=r"in pixels of an image of \(32, 32\)"), va.capture(model, [query]):
            model(x)
    detector = Net(lambda net, images: [net.body(image[None]) for image in images], body=model)
    with pytest.raises(ValueError, match="images of one size"), va.capture(detector):
        detector([torch.rand(3, 32, 32), torch.rand(3, 32, 64)])
    with pytest.raises(RuntimeError, match="model itself"), va.capture(model):
        model.forward_features(x)
    with pytest.raises(ValueError, match=r"not available inside torch\.vmap"), va.capture(model):
        torch.vmap(lambda image: model(image[None]))(x)
    with va.capture(model) as maps:  # the tensors of torch.func.grad cannot be copied
        torch.func.grad(lambda image: model(image).sum())(x)
    assert copy.deepcopy(next(iter(maps.values())).weights).isfinite().all()
    for arguments, message in (
        ({"queries": "each"}, "queries"),
        ({"reduction": "sum"}, "reduction"),
        ({"heads": [4]}, "heads .* between 0 and 3"),
        ({"names": "layer1"}, "names and where .* layer2"),
        ({"where": lambda name, module: name == "fc"}, "names and where .* layer2"),
    ):
        with pytest.raises(ValueError, match=message), va.capture(model, **arguments):
            pass


def seen(rows, size, cells, image_size=(4, 6), map_size=()):
    """Return the map of one image; ``rows`` are weights by head and query."""
    weights = torch.tensor(rows, dtype=torch.float32)[None].unflatten(-1, size)
    return AttentionMap(weights, tuple(cells), image_size, map_size)


def test_entropy_is_the_logarithm_of_the_number_of_attended_positions():
    one = seen([[[1, 0, 0, 0], [0.25] * 4], [[0.5, 0.5, 0, 0], [0, 0, 0, 0]]], (2, 2), [(0, 0), (1, 1)])
    torch.testing.assert_close(one.entropy(), torch.tensor([[[0, math.log(4)], [math.log(2), 0]]]))
    # Weights of tokens outside the feature map are excluded.
    partial = seen([[[0.25, 0.25, 0, 0]]], (2, 2), [(0, 0)])
    torch.testing.assert_close(partial.entropy(), torch.full((1, 1, 1), math.log(2)))


def test_distance_is_in_pixels_between_centers_of_positions():
    # An image of 4×6 pixels has 2×2 positions of 2×3 pixels: neighbors are at distances 2 and 3, and √13 diagonally.
    one = seen([[[0.5, 0, 0, 0.5], [0, 0.25, 0.75, 0]]], (2, 2), [(0, 0), (1, 1)])
    torch.testing.assert_close(one.distance(), torch.tensor([[[math.sqrt(13) / 2, 0.25 * 2 + 0.75 * 3]]]))
    # One key at the center (2, 3) of the image, and a query at the first of 2×2 positions, (1, 1.5).
    strided = seen([[[1]]], (1, 1), [(0, 0)], map_size=(2, 2))
    torch.testing.assert_close(strided.distance(), torch.full((1, 1, 1), math.hypot(1, 1.5)))
    assert AttentionMap(torch.ones(1, 1, 1, 4) / 4, ((0,),), (8,)).distance().item() == pytest.approx(3)


def test_head_similarity_is_one_for_equal_and_zero_for_disjoint_weights():
    heads = [[[0.5, 0.5, 0, 0]], [[0.5, 0.5, 0, 0]], [[0, 0, 1, 0]], [[1, 0, 0, 0]]]
    found = seen(heads, (2, 2), [(0, 0)]).similarity()[0]
    # The mean (¾, ¼) of (½, ½) and (1, 0) has 0.8113 bits, and the two have 1 bit and 0 bits.
    half = 1 - (2 - 0.75 * math.log2(3) - 0.5)
    expected = [[1, 1, 0, half], [1, 1, 0, half], [0, 0, 1, 0], [half, half, 0, 1]]
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-6, rtol=0)


def test_rollout_across_blocks_and_feature_map_sizes():
    cells = [(0, 0), (0, 1)]
    # The mean over heads is (0, 1) for the first query and uniform for the second.
    first = seen([[[0, 1], [0, 1]], [[0, 1], [1, 0]]], (1, 2), cells)
    second = seen([[[1, 0], [1, 0]]], (1, 2), cells)
    found = AttentionMaps({"a": first, "b": second}).rollout()
    # A_1 = [[½, ½], [¼, ¾]] and A_2 = [[1, 0], [½, ½]], their product A_2 A_1.
    torch.testing.assert_close(found["a"].weights[0, 0, :, 0], torch.tensor([[0.5, 0.5], [0.25, 0.75]]))
    torch.testing.assert_close(found["b"].weights[0, 0, :, 0], torch.tensor([[0.5, 0.5], [0.375, 0.625]]))
    (alone,) = AttentionMaps({"b": second}).rollout(residual=0).values()
    assert (alone.heads, alone.weights[0, 0, :, 0].tolist()) == (("rollout",), [[1, 0], [1, 0]])
    # One position covers both positions of the first block, with weight ½ each.
    found = AttentionMaps({"a": first, "s": seen([[[1]]], (1, 1), [(0, 0)])}).rollout()["s"].weights.flatten()
    torch.testing.assert_close(found, torch.tensor([0.375, 0.625]))
    # For a query that may not attend to any position, only the shortcut remains.
    closed = seen([[[0, 0], [0, 0]]], (1, 2), cells)
    assert AttentionMaps({"c": closed}).rollout()["c"].weights[0, 0, :, 0].tolist() == [[1, 0], [0, 1]]
    with pytest.raises(ValueError, match="'a' has 1 of 2"):
        AttentionMaps({"a": seen([[[1, 0]]], (1, 2), [(0, 0)])}).rollout()


def test_rollout_starts_anew_at_a_second_call():
    """The second call may be for another image, as in a Siamese network."""
    first, second = (seen([[row, [1, 0]]], (1, 2), [(0, 0), (0, 1)]) for row in ([0, 1], [1, 0]))
    found = AttentionMaps({"a": first, "b": second, "a:2": second, "b:2": first, "c": second}).rollout()
    for part in ({"a": first, "b": second}, {"a:2": second, "b:2": first}, {"c": second}):
        for path, expected in AttentionMaps(part).rollout().items():
            assert torch.equal(found[path].weights, expected.weights)
