"""Equations in Keras's letters, and the pattern that attention along some axes is."""

import importlib

import pytest
import torch
from hypothesis import given, settings, strategies as st

import vision_attn as va
from vision_attn.networks.convert.equations import attention_equations, attention_pattern, projection_equation


@pytest.fixture(scope="module")
def builders(keras):
    """The module in which Keras builds its equations."""
    return importlib.import_module("keras.src.layers.attention.multi_head_attention")


@given(free=st.integers(0, 8), bound=st.integers(1, 8), output=st.integers(1, 8))
def test_projections_are_built_as_keras_builds_them(builders, free, bound, output):
    assert projection_equation(free, bound, output) == builders._build_proj_equation(free, bound, output)


@settings(max_examples=30)
@given(data=st.data(), rank=st.integers(3, 8))
def test_attention_is_built_as_keras_builds_it(keras, builders, data, rank):
    """Axes are in any order, counted from either end."""
    axes = data.draw(st.lists(st.integers(1, rank - 2), min_size=1, unique=True))
    axes = tuple(data.draw(st.sampled_from((axis, axis - rank))) for axis in axes)
    counted = tuple(axis if axis > 0 else axis - 1 for axis in axes)  # from the width, one axis further
    assert attention_equations(rank + 1, counted) == builders._build_attention_equation(rank + 1, counted)
    layer = keras.layers.MultiHeadAttention(1, 1, attention_axes=axes)
    layer.build((None, *range(2, rank), 1), (None, *range(2, rank), 1))
    of_input = tuple(axis % rank for axis in axes)  # a layer counts negative axes on its input
    assert attention_equations(rank + 1, of_input)[:2] == (layer._dot_product_equation, layer._combine_equation)
    assert layer.query_dense.equation == projection_equation(rank - 1, 1, 2)[0]
    assert layer.output_dense.equation == projection_equation(rank - 1, 2, 1)[0]


def attended(q, k, v, axes, rank):
    """Attention by the equations, as Keras computes it; `axes` are those of an input of `rank`."""
    axes = tuple(axis % rank for axis in axes or range(1, rank - 1))
    logits, combine, dims = attention_equations(rank + 1, axes)
    powers = torch.exp(torch.einsum(logits, k, q) / q.shape[-1] ** 0.5)
    assert powers.dim() == dims
    weights = powers / powers.sum(tuple(range(dims - len(axes), dims)), keepdim=True)
    return torch.einsum(combine, weights, v), weights


@pytest.mark.parametrize(("size", "axes"), [((5,), None), ((3, 4), (-2,)), ((2, 3, 4), (3, 1))])
def test_the_equations_compute_what_keras_computes(keras, size, axes):
    keras.utils.set_random_seed(0)
    options = {"attention_axes": axes, "bias_initializer": "random_normal", "dtype": "float64"}
    layer = keras.layers.MultiHeadAttention(2, 3, value_dim=5, **options)
    query, value, key = (torch.randn(2, *size, width, dtype=torch.float64) for width in (8, 6, 7))
    # Asked for the scores, it goes by its equations; else a sequence goes to a fused kernel, in float32.
    expected, scores = layer(query, value, key, return_attention_scores=True)
    *heads, output = (layer.query_dense, layer.key_dense, layer.value_dense, layer.output_dense)
    rank = query.dim()
    q, k, v = (
        torch.einsum(projection_equation(rank - 1, 1, 2)[0], x, dense.kernel.value) + dense.bias.value
        for x, dense in zip((query, key, value), heads, strict=True)
    )
    y, weights = attended(q, k, v, axes, rank)
    y = torch.einsum(projection_equation(rank - 1, 2, 1)[0], y, output.kernel.value) + output.bias.value
    torch.testing.assert_close(weights, scores, rtol=0, atol=1e-12)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("axes", [(1,), (2,), (3,), (1, 2), (1, 3), (2, 3), (1, -2), None])
def test_the_pattern_of_some_axes_is_the_equation_along_them(axes):
    torch.manual_seed(0)
    options = {"pattern": attention_pattern(axes, rank=5), "qkv_bias": False, "proj_bias": False}
    block = va.Attention3d(8, 2, dtype=torch.float64, **options)
    x = torch.randn(2, 8, 2, 3, 4, dtype=torch.float64)
    kernels = block.qkv.weight.view(3, 2, 4, 8).permute(0, 3, 1, 2)  # qkv, channels, heads, width
    q, k, v = (torch.einsum(projection_equation(4, 1, 2)[0], x.movedim(1, -1), kernel) for kernel in kernels)
    y, _ = attended(q, k, v, axes, rank=5)
    expected = torch.einsum(projection_equation(4, 2, 1)[0], y, block.proj.weight.view(8, 2, 4).permute(1, 2, 0))
    torch.testing.assert_close(block(x), expected.movedim(-1, 1), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (projection_equation, (20, 5, 5), "26 axes; got 30"),
        (attention_equations, (4, ()), r"attention_axes .* 1 to 1 of rank 4"),
        (attention_equations, (5, (1, 1)), "attention_axes"),
        (attention_pattern, ((3,), 4), "attention_axes"),
        (attention_pattern, ((1,), 6), "rank .* got 6"),
    ],
)
def test_wrong_axes_are_refused(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(*arguments)
