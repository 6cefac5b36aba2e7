"""Attention maps of any implementation."""

import numpy as np
import pytest
import timm
import torch
from torch import nn

import vision_attn as va
import vision_attn.models


def network():
    torch.manual_seed(0)
    model = timm.create_model("resnet20").eval()
    va.insert_(model, names=["layer2", "layer3"], num_heads=4, gate_init=1.0)
    return model


@pytest.mark.parametrize("impl", va.IMPLS)
@pytest.mark.parametrize("context_size", [None, (4, 2)])
def test_maps_are_the_weights_that_the_block_used(impl, context_size):
    torch.manual_seed(0)
    block = va.Attention2d(8, 2, impl=impl, dtype=torch.float64)
    x = torch.randn(2, 8, 3, 5, dtype=torch.float64)
    source = x if context_size is None else torch.randn(2, 8, *context_size, dtype=torch.float64)
    mask = torch.rand(15, source[0, 0].numel()) < 0.7
    with va.capture(block) as maps, torch.no_grad():
        y = block(x, mask=mask, context=source)
    assert maps[""].weights.shape == (2, 2, 15, *source.shape[2:])
    weights = maps[""].weights.flatten(3)
    assert (weights.flatten(0, 1)[:, ~mask] == 0).all()
    v = block.qkv(source)[:, 16:].unflatten(1, (2, 4)).flatten(3).mT
    torch.testing.assert_close(block.proj((weights @ v).mT.reshape(2, 8, 3, 5)), y)


def test_queries_are_points_of_the_image():
    model, x = network(), torch.randn(2, 3, 32, 32)
    with va.capture(model) as everything:
        expected = model(x)
    with va.capture(model, queries=[(0, 0), (31, 8.5)]) as maps:
        assert torch.equal(model(x=x), expected)
    assert list(maps) == ["layer2.2.inserted.attn", "layer3.2.inserted.attn"]
    assert maps["layer2.2.inserted.attn"].cells == ((0, 0), (15, 4))
    assert maps["layer3.2.inserted.attn"].cells == ((0, 0), (7, 2))
    for path, found in maps.items():
        side = 16 if "layer2" in path else 8
        assert found.weights.shape == (2, 4, 2, side, side)
        rows = torch.tensor([row * side + column for row, column in found.cells])
        torch.testing.assert_close(found.weights, everything[path].weights[:, :, rows])
        torch.testing.assert_close(found.weights.sum((-2, -1)), torch.ones(2, 4, 2))


def test_queries_may_be_an_array_or_a_tensor():
    model, x = network(), torch.randn(1, 3, 32, 32)
    for points in (np.array([[0, 0], [31, 8]]), torch.tensor([[0, 0], [31, 8]])):
        with va.capture(model, queries=points) as maps:
            model(x)
        assert maps["layer3.2.inserted.attn"].cells == ((0, 0), (7, 2))


def test_a_mask_for_each_query_a_window_and_strided_keys_are_followed():
    block, x = va.Attention2d(8, 2), torch.randn(1, 8, 2, 2)
    mask = torch.eye(4, dtype=torch.bool)
    for given, expected in ((mask, [0, 0, 1, 0]), (mask[0], [1, 0, 0, 0])):
        with va.capture(block, queries=[(1, 0)]) as maps:
            block(x, given)
        assert maps[""].weights[0, 0, 0].flatten().tolist() == expected
    block = va.StridedAttention2d(8, 2, pattern=va.Window(3))
    with va.capture(block, queries=[(4, 1)]) as maps:
        block(torch.randn(1, 8, 6, 7))
    inside = torch.zeros(6, 7, dtype=torch.bool)
    inside[3:6, 0:3] = True
    assert torch.equal(maps["attn"].weights[0, 0, 0] > 0, inside)
    block = va.Attention2d(8, 2, kv_stride=2)
    with va.capture(block, queries=[(0, 0)]) as maps:
        block(torch.randn(1, 8, 6, 7))
    assert maps[""].weights.shape == (1, 2, 1, 3, 4)


def test_capturing_ends_with_the_block():
    model, x = network(), torch.randn(1, 3, 32, 32)
    hooks = [len(module._forward_hooks) for module in model.modules()]
    with pytest.raises(RuntimeError, match="on purpose"), va.capture(model) as maps:
        raise RuntimeError("on purpose")
    model(x)
    assert maps == {}
    assert [len(module._forward_hooks) for module in model.modules()] == hooks


def test_what_cannot_be_captured_is_refused():
    model, x = network(), torch.randn(1, 3, 32, 32)
    with pytest.raises(ValueError, match="model has no Attention2d to capture"), va.capture(nn.ReLU()):
        pass
    for query in ((-1, 0), (0, 32), (32, 0)):
        with pytest.raises(ValueError, match=r"in pixels of an image of 32×32; got"), va.capture(model, [query]):
            model(x)
    with pytest.raises(RuntimeError, match="call the model itself"), va.capture(model):
        model.forward_features(x)
    with pytest.raises(ValueError, match="or None for every cell; got none"), va.capture(model, queries=[]):
        pass
