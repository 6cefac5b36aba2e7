"""Equations in Keras's letters, and the pattern that attention along some axes is."""

import importlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import vision_attn as va
from vision_attn.equations import attention_equations, attention_pattern, projection_equation


@pytest.fixture(scope="module")
def builders(keras):
    """The module in which Keras builds its equations."""
    return importlib.import_module("keras.src.layers.attention.multi_head_attention")


@st.composite
def rank_and_axes(draw):
    """A rank of inputs, 3 to 8, and some of their axes: in any order, counted from either end."""
    rank = draw(st.integers(3, 8))
    axes = draw(st.lists(st.integers(1, rank - 2), min_size=1, unique=True))
    return rank, tuple(draw(st.sampled_from((axis, axis - rank))) for axis in axes)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((2, 1, 2), ("abc,cde->abde", "de", 4)),  # queries, keys and values of a sequence
        ((2, 2, 1), ("abcd,cde->abe", "e", 3)),  # the output of it
        ((3, 1, 2), ("abcd,def->abcef", "ef", 5)),  # of a map
        ((0, 1, 1), ("a,ab->b", "b", 1)),
    ],
)
def test_projections_are_those_of_keras(arguments, expected):
    assert projection_equation(*arguments) == expected


@pytest.mark.parametrize(
    ("rank", "axes", "expected"),
    [
        (4, (1,), ("aecd,abcd->acbe", "acbe,aecd->abcd", 4)),
        (5, (2,), ("abfde,abcde->abdcf", "abdcf,abfde->abcde", 5)),
        (5, (1, 2), ("afgde,abcde->adbcfg", "adbcfg,afgde->abcde", 6)),
        (5, (-3,), ("abfde,abcde->abdcf", "abdcf,abfde->abcde", 5)),
    ],
)
def test_attention_is_that_of_keras(rank, axes, expected):
    assert attention_equations(rank, axes) == expected


@given(free=st.integers(0, 8), bound=st.integers(1, 8), output=st.integers(1, 8))
def test_projections_are_built_as_keras_builds_them(builders, free, bound, output):
    assert projection_equation(free, bound, output) == builders._build_proj_equation(free, bound, output)


@given(drawn=rank_and_axes())
def test_attention_is_built_as_keras_builds_it(builders, drawn):
    rank, axes = drawn
    queries = rank + 1  # heads and width take the place of channels
    counted = tuple(axis if axis > 0 else axis - 1 for axis in axes)  # from the width, one axis further
    assert attention_equations(queries, counted) == builders._build_attention_equation(queries, counted)


@given(drawn=rank_and_axes())
def test_a_layer_of_keras_has_these_equations(keras, drawn):
    rank, axes = drawn
    layer = keras.layers.MultiHeadAttention(1, 1, attention_axes=axes)
    layer.build((None, *range(2, rank), 1), (None, *range(2, rank), 1))
    of_input = tuple(axis % rank for axis in axes)  # a layer counts negative axes on its input
    logits, combine, _ = attention_equations(rank + 1, of_input)
    assert (logits, combine) == (layer._dot_product_equation, layer._combine_equation)
    assert layer.query_dense.equation == projection_equation(rank - 1, 1, 2)[0]
    assert layer.output_dense.equation == projection_equation(rank - 1, 2, 1)[0]


@pytest.mark.parametrize(
    ("size", "axes"),
    [
        ((5,), None),
        ((5,), (1,)),
        ((3, 4), None),
        ((3, 4), (1,)),
        ((3, 4), (2,)),
        ((3, 4), (2, 1)),
        ((3, 4), (-2,)),
        ((2, 3, 4), None),
        ((2, 3, 4), (1,)),
        ((2, 3, 4), (2, 3)),
        ((2, 3, 4), (3, 1)),
        ((2, 3, 4), (-2,)),
    ],
)
def test_the_equations_compute_what_keras_computes(keras, size, axes):
    keras.utils.set_random_seed(0)
    layer = keras.layers.MultiHeadAttention(
        2, 3, value_dim=5, attention_axes=axes, bias_initializer="random_normal", dtype="float64"
    )
    query, value, key = (torch.randn(2, *size, width, dtype=torch.float64) for width in (8, 6, 7))
    # Asked for the scores, it goes by its equations; else a sequence goes to a fused kernel, in float32.
    expected, scores = layer(query, value, key, return_attention_scores=True)
    torch.testing.assert_close(layer(query, value, key), expected, rtol=0, atol=1e-6)
    dense = (layer.query_dense, layer.key_dense, layer.value_dense, layer.output_dense)
    kernels = [one.kernel.value for one in dense]
    biases = [one.bias.value for one in dense]

    rank = query.dim()
    project, _, projected = projection_equation(free_dims=rank - 1, bound_dims=1, output_dims=2)
    q, k, v = (
        torch.einsum(project, x, kernel) + bias
        for x, kernel, bias in zip((query, key, value), kernels[:3], biases[:3], strict=True)
    )
    attended = tuple(axis % rank for axis in axes or range(1, rank - 1))
    logits, combine, dims = attention_equations(projected, attended)
    powers = torch.exp(torch.einsum(logits, k, q) / 3**0.5)
    weights = powers / powers.sum(tuple(range(dims - len(attended), dims)), keepdim=True)
    project, _, _ = projection_equation(free_dims=rank - 1, bound_dims=2, output_dims=1)
    y = torch.einsum(project, torch.einsum(combine, weights, v), kernels[3]) + biases[3]
    torch.testing.assert_close(weights, scores, rtol=0, atol=1e-12)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("axes", [(1,), (2,), (3,), (1, 2), (1, 3), (2, 3), (1, 2, 3), (2, -2), None])
def test_the_pattern_of_some_axes_is_the_equation_along_them(axes):
    if axes == (2, -2):
        axes = (1, -2)  # a negative axis counts from the channels
    torch.manual_seed(0)
    pattern = attention_pattern(axes, rank=5)
    block = va.Attention3d(8, 2, pattern=pattern, qkv_bias=False, proj_bias=False, dtype=torch.float64)
    x = torch.randn(2, 8, 2, 3, 4, dtype=torch.float64)
    channels_last = x.movedim(1, -1)
    project, _, _ = projection_equation(free_dims=4, bound_dims=1, output_dims=2)
    kernels = block.qkv.weight.view(3, 2, 4, 8).permute(0, 3, 1, 2)  # qkv, channels, heads, width
    q, k, v = (torch.einsum(project, channels_last, kernel) for kernel in kernels)
    attended = (1, 2, 3) if axes is None else tuple(axis % 5 for axis in axes)
    logits, combine, rank = attention_equations(rank=6, attention_axes=attended)
    scores = torch.einsum(logits, k, q) / 2
    assert scores.dim() == rank
    keys = tuple(range(rank - len(attended), rank))
    weights = torch.exp(scores) / torch.exp(scores).sum(keys, keepdim=True)
    project, _, _ = projection_equation(free_dims=4, bound_dims=2, output_dims=1)
    kernel = block.proj.weight.view(8, 2, 4).permute(1, 2, 0)
    expected = torch.einsum(project, torch.einsum(combine, weights, v), kernel).movedim(-1, 1)
    torch.testing.assert_close(block(x), expected, rtol=0, atol=1e-12)


def test_axes_with_a_name_are_called_by_it():
    assert [attention_pattern(axes, rank=4) for axes in ((1,), (2,), (1, 2), None)] == [
        "columns",
        "rows",
        "full",
        "full",
    ]
    assert attention_pattern((1,), rank=3) == "full"
    assert attention_pattern((-2,), rank=4) == "rows"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: projection_equation(-1, 1, 1), "free_dims must be a whole number of at least 0; got -1"),
        (lambda: projection_equation(1, 0, 1), "bound_dims must be a whole number of at least 1; got 0"),
        (lambda: projection_equation(1, 1, 1.0), "output_dims must be .* got 1.0"),
        (lambda: projection_equation(20, 5, 5), "an equation has at most 26 axes; got 30"),
        (lambda: attention_equations(4, ()), r"attention_axes must be different axes .* 1 to 1 of rank 4; got \(\)"),
        (lambda: attention_equations(4, (2,)), r"attention_axes must be .* got \(2,\)"),
        (lambda: attention_equations(5, (1, 1)), r"attention_axes must be different axes"),
        (lambda: attention_equations(4, (0,)), r"attention_axes must be"),
        (lambda: attention_pattern((3,), rank=4), r"attention_axes must be"),
        (lambda: attention_pattern((1,), rank=6), "rank must be 3, 4 or 5, .* got 6"),
    ],
)
def test_axes_that_are_not_there_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
