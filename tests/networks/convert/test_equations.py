"""Einsum equations of Keras, and the pattern for a choice of attention axes."""

import importlib

import pytest
import torch
from hypothesis import given, settings, strategies as st

import vision_attn as va
from vision_attn.convert import attention_equations, attention_pattern, projection_equation


@pytest.fixture(scope="module")
def builders(keras):
    """Return the module in which Keras builds its equations."""
    return importlib.import_module("keras.src.layers.attention.multi_head_attention")


@given(free=st.integers(0, 8), bound=st.integers(1, 8), output=st.integers(1, 8))
def test_projection_equations_equal_those_of_keras(builders, free, bound, output):
    assert projection_equation(free, bound, output) == builders._build_proj_equation(free, bound, output)


@settings(max_examples=30)
@given(data=st.data(), rank=st.integers(3, 8))
def test_attention_equations_equal_those_of_keras(keras, builders, data, rank):
    """Axes can be in any order, and positive or negative."""
    axes = data.draw(st.lists(st.integers(1, rank - 2), min_size=1, unique=True))
    axes = tuple(data.draw(st.sampled_from((axis, axis - rank))) for axis in axes)
    counted = tuple(axis if axis > 0 else axis - 1 for axis in axes)  # relative to the width, one axis more
    assert attention_equations(rank + 1, counted) == builders._build_attention_equation(rank + 1, counted)
    layer = keras.layers.MultiHeadAttention(1, 1, attention_axes=axes)
    layer.build((None, *range(2, rank), 1), (None, *range(2, rank), 1))
    of_input = tuple(axis % rank for axis in axes)  # in a layer, negative axes refer to the input
    assert attention_equations(rank + 1, of_input)[:2] == (layer._dot_product_equation, layer._combine_equation)
    assert layer.query_dense.equation == projection_equation(rank - 1, 1, 2)[0]
    assert layer.output_dense.equation == projection_equation(rank - 1, 2, 1)[0]


@pytest.mark.parametrize("axes", [(2,), (1, 3), (1, -2), None])
def test_attention_patterns_equal_equations_along_the_same_axes(axes):
    options = {"pattern": attention_pattern(axes, rank=5), "qkv_bias": False, "proj_bias": False}
    block = va.blocks.Attention3d(8, 2, dtype=torch.float64, **options)
    x = torch.randn(2, 8, 2, 3, 4, dtype=torch.float64)
    kernels = block.qkv.weight.view(3, 2, 4, 8).permute(0, 3, 1, 2)  # qkv, channels, heads, width
    q, k, v = (torch.einsum(projection_equation(4, 1, 2)[0], x.movedim(1, -1), kernel) for kernel in kernels)
    logits, combine, dims = attention_equations(6, tuple(axis % 5 for axis in axes or (1, 2, 3)))
    powers = torch.exp(torch.einsum(logits, k, q) / 2)
    y = torch.einsum(combine, powers / powers.sum(tuple(range(dims - len(axes or (1, 2, 3)), dims)), keepdim=True), v)
    expected = torch.einsum(projection_equation(4, 2, 1)[0], y, block.proj.weight.view(8, 2, 4).permute(1, 2, 0))
    torch.testing.assert_close(block(x), expected.movedim(-1, 1), rtol=0, atol=1e-12)


#: A function, its arguments, and the message of the error.
WRONG_AXES = [
    (attention_equations, (4, ()), r"attention_axes .* 1 to 1 of rank 4"),
    (attention_equations, (5, (1, 1)), "attention_axes"),
    (attention_pattern, ((3,), 4), "attention_axes"),
    (attention_pattern, ((1,), 6), "rank .* got 6"),
]


@pytest.mark.parametrize(("function", "arguments", "message"), WRONG_AXES)
def test_wrong_axes_are_rejected(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(*arguments)
