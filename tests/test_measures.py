"""What is measured of attention maps, on cases worked by hand."""

import math

import pytest
import torch

import vision_attn as va
from vision_attn.networks.capture.rollout import overlaps


def seen(rows, size, cells, image_size=(4, 6), map_size=()):
    """One image; ``rows`` are weights by head and query."""
    weights = torch.tensor(rows, dtype=torch.float32)[None].unflatten(-1, size)
    return va.AttentionMap(weights, tuple(cells), image_size, map_size)


def test_entropy_is_the_logarithm_of_how_many_cells_are_looked_at():
    one = seen([[[1, 0, 0, 0], [0.25] * 4], [[0.5, 0.5, 0, 0], [0, 0, 0, 0]]], (2, 2), [(0, 0), (1, 1)])
    torch.testing.assert_close(one.entropy(), torch.tensor([[[0, math.log(4)], [math.log(2), 0]]]))
    # What goes to tokens beside the map is left out of it.
    torch.testing.assert_close(
        seen([[[0.25, 0.25, 0, 0]]], (2, 2), [(0, 0)]).entropy(), torch.full((1, 1, 1), math.log(2))
    )


def test_distance_is_in_pixels_between_the_middles_of_cells():
    # An image of 4×6 pixels with 2×2 cells of 2×3: the neighbours are 2 and 3 away, the diagonal √13.
    one = seen([[[0.5, 0, 0, 0.5], [0, 0.25, 0.75, 0]]], (2, 2), [(0, 0), (1, 1)])
    torch.testing.assert_close(one.distance(), torch.tensor([[[math.sqrt(13) / 2, 0.25 * 2 + 0.75 * 3]]]))
    # Keys of one cell, in the middle of the image, seen from the first of 2×2: (1, 1.5) to (2, 3).
    strided = seen([[[1]]], (1, 1), [(0, 0)], map_size=(2, 2))
    torch.testing.assert_close(strided.distance(), torch.full((1, 1, 1), math.hypot(1, 1.5)))
    block = va.Attention2d(8, 2, kv_stride=2)
    with va.capture(block) as maps:
        block(torch.randn(1, 8, 4, 6))
    assert maps[""].map_size == (4, 6)
    assert maps[""].distance().shape == (1, 2, 24)
    line = va.AttentionMap(torch.ones(1, 1, 1, 4) / 4, ((0,),), (8,))
    assert line.distance().item() == pytest.approx(3)
    with pytest.raises(ValueError, match="as many axes as the image, 2; got 1"):
        va.AttentionMap(torch.ones(1, 1, 1, 4) / 4, ((0,),), (2, 2)).distance()


def test_similarity_of_heads_is_one_where_they_agree_and_zero_where_they_share_no_cell():
    heads = [[[0.5, 0.5, 0, 0]], [[0.5, 0.5, 0, 0]], [[0, 0, 1, 0]], [[1, 0, 0, 0]]]
    found = seen(heads, (2, 2), [(0, 0)]).similarity()[0]
    # Of (½, ½) and (1, 0): the middle (¾, ¼) has 0.8113 bits, the two 1 and 0.
    half = 1 - (2 - 0.75 * math.log2(3) - 0.5)
    expected = [[1, 1, 0, half], [1, 1, 0, half], [0, 0, 1, 0], [half, half, 0, 1]]
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-6, rtol=0)


def test_rollout_goes_through_blocks_and_sizes_of_map():
    cells = [(0, 0), (0, 1)]
    first = seen([[[0, 1], [0, 1]], [[0, 1], [1, 0]]], (1, 2), cells)  # the mean of heads: to the right; evenly
    second = seen([[[1, 0], [1, 0]]], (1, 2), cells)
    found = va.rollout({"a": first, "b": second})
    # A_1 = [[½, ½], [¼, ¾]] and A_2 = [[1, 0], [½, ½]], their product A_2 A_1.
    torch.testing.assert_close(found["a"].weights[0, 0, :, 0], torch.tensor([[0.5, 0.5], [0.25, 0.75]]))
    torch.testing.assert_close(found["b"].weights[0, 0, :, 0], torch.tensor([[0.5, 0.5], [0.375, 0.625]]))
    assert va.rollout({"b": second}, residual=0)["b"].weights[0, 0, :, 0].tolist() == [[1, 0], [1, 0]]
    # A block on one cell that covers both: half of either, and what each of these saw.
    small = seen([[[1]]], (1, 1), [(0, 0)])
    torch.testing.assert_close(
        va.rollout({"a": first, "s": small})["s"].weights.flatten(), torch.tensor([0.375, 0.625])
    )
    # Of rows that may look at nothing the stream is all.
    closed = seen([[[0, 0], [0, 0]]], (1, 2), cells)
    assert va.rollout({"c": closed})["c"].weights[0, 0, :, 0].tolist() == [[1, 0], [0, 1]]


def test_cells_of_one_map_overlap_those_of_another_by_area():
    thirds = torch.tensor([[2 / 3, 1 / 3, 0], [0, 1 / 3, 2 / 3]])
    torch.testing.assert_close(overlaps((2,), (3,)), thirds)
    torch.testing.assert_close(overlaps((1, 2), (2, 3)), torch.cat([thirds, thirds], 1) / 2)
    torch.testing.assert_close(overlaps((7, 5), (14, 3)).sum(1), torch.ones(35))
    torch.testing.assert_close(overlaps((3, 4), (3, 4)), torch.eye(12), atol=1e-6, rtol=0)


def test_rollout_refuses_what_it_cannot_multiply():
    one = seen([[[1, 0]]], (1, 2), [(0, 0)])
    for maps, residual, message in (
        ({}, 0.5, "maps must hold one at least"),
        ({"a": one}, 0.5, "'a' is of 1 of 2: capture without queries"),
        ({"a": one}, 2, "residual must be a probability between 0 and 1; got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            va.rollout(maps, residual=residual)
