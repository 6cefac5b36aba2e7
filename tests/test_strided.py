"""Attention in the place of a convolution: against timm's bottleneck attention, and of the size of the convolution."""

import pytest
import torch
import torch.nn.functional as F
from timm.layers.bottleneck_attn import BottleneckAttn
from torch import nn

import vision_attn as va
from vision_attn.blocks import StridedAttention2d

DIFFERENTIABLE = tuple(impl for impl in va.IMPLS if impl != "flex")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def without_projection(block):
    """timm's bottleneck attention has none: ours is the identity."""
    weight = block.attn.proj.weight
    with torch.no_grad():
        weight.copy_(torch.eye(len(weight), dtype=weight.dtype)[:, :, None, None])
    return block


@pytest.mark.parametrize("impl", DIFFERENTIABLE)
@pytest.mark.parametrize("qkv_bias", [False, True])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [(4, 4), (2, 6)])  # even: at the border timm's average leaves out what we do not
def test_it_is_timms_bottleneck_attention(impl, size, stride, qkv_bias):
    theirs = BottleneckAttn(24, feat_size=size, stride=stride, num_heads=3, qkv_bias=qkv_bias, dtype=torch.float64)
    ours = StridedAttention2d(
        24,
        3,
        stride=stride,
        feat_size=size,
        qkv_bias=qkv_bias,
        proj_bias=False,
        impl=impl,
        dtype=torch.float64,
    )
    state = {"attn." + key.replace("pos_embed", "position"): value for key, value in theirs.state_dict().items()}
    missing = ours.load_state_dict(state, strict=False)
    assert missing == (["attn.proj.weight"], [])
    without_projection(ours)
    x = torch.randn(2, 24, *size, dtype=torch.float64)
    weight = torch.randn(2, 24, *(side // stride for side in size), dtype=torch.float64)
    results = []
    for block in (ours, theirs):
        leaf = x.clone().requires_grad_()
        y = block(leaf)
        results.append((y, *torch.autograd.grad((y * weight).sum(), [leaf, *block.parameters()][:2])))
    for found, expected in zip(*results, strict=True):
        assert expected.abs().max() > 0.1
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("stride", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [(1, 1), (4, 7), (5, 6), (8, 3)])
def test_the_map_is_as_large_as_that_of_the_convolution(size, stride):
    block = StridedAttention2d(8, 2, stride=stride, out_channels=12)
    x = torch.randn(2, 8, *size)
    assert block(x).shape == nn.Conv2d(8, 12, 3, stride, padding=1)(x).shape


def test_a_square_over_the_border_is_averaged_over_what_there_is():
    block = StridedAttention2d(8, 2, stride=2, dtype=torch.float64)
    x = torch.randn(2, 8, 5, 3, dtype=torch.float64)
    y, whole = block(x), block.attn(x)
    torch.testing.assert_close(y[:, :, 2, 1], whole[:, :, 4, 2])
    torch.testing.assert_close(y[:, :, 2, 0], whole[:, :, 4, :2].mean(-1))
    torch.testing.assert_close(y[:, :, 0, 1], whole[:, :, :2, 2].mean(-1))
    torch.testing.assert_close(y[:, :, :2, :1], F.avg_pool2d(whole[:, :, :4, :2], 2))


def test_its_keys_are_those_of_attention_and_capture_finds_it():
    block = StridedAttention2d(8, 2, stride=2, feat_size=(4, 6))
    inner = va.Attention2d(8, 2, position=va.RelPosDecomposed((4, 6)))
    assert set(block.state_dict()) == {f"attn.{key}" for key in inner.state_dict()}
    with va.capture(block, queries=[(0, 0)]) as maps:
        block(torch.randn(1, 8, 4, 6))
    assert maps["attn"].weights.shape == (1, 2, 1, 4, 6)


def test_a_position_that_is_given_is_the_one_that_it_has():
    assert StridedAttention2d(8, 2, feat_size=4).attn.position.specification == va.RelPosDecomposed(4)
    assert StridedAttention2d(8, 2, feat_size=4, position=va.Rope2d()).attn.position.specification == va.Rope2d()
    assert StridedAttention2d(8, 2).attn.position is None


def test_mask_and_context_reach_attention_and_the_memory_format_is_kept():
    block = StridedAttention2d(8, 2, stride=2)
    x, context = torch.randn(1, 8, 4, 4), torch.randn(1, 8, 3, 5)
    mask = torch.rand(16, 15) < 0.5
    expected = F.avg_pool2d(block.attn(x, mask, context), 2)
    assert torch.equal(block(x, mask, context), expected)
    assert not torch.equal(block(x), expected)
    assert block(x.to(memory_format=torch.channels_last)).is_contiguous(memory_format=torch.channels_last)
    assert block(x).is_contiguous()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stride": 0}, "stride must be a whole number of at least 1; got 0"),
        ({"feat_size": (0, 3)}, "feat_size must be a whole number of at least 1"),
        ({"num_heads": 3}, "num_heads must divide channels"),
    ],
)
def test_mistakes_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        StridedAttention2d(8, **options)
    with pytest.raises(TypeError, match="padding"):
        StridedAttention2d(8, padding=1)
