"""Converters; the oracle is always the other library, in float64, on maps that are not square, all weights random."""

import inspect
import random
import subprocess
import sys
import threading
from functools import partial

import pytest
import timm.layers.attention2d
import timm.models.maxxvit as maxxvit
import torch
import torch.nn.functional as F
import torchvision.models.maxvit as torchvision_maxvit
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import Attention as TimmAttention
from timm.layers import RelPosBias, RelPosBiasTf, RelPosMlp, RmsNorm
from timm.layers.attention2d import Attention2d as TimmAttention2d
from timm.layers.attention2d import MultiQueryAttention2d
from timm.layers.bottleneck_attn import BottleneckAttn
from torch import nn
from torch.nn.utils import parametrizations
from torchvision.models.swin_transformer import ShiftedWindowAttention, ShiftedWindowAttentionV2

import vision_attn as va
from vision_attn import convert
from vision_attn.convert import ConversionError


def randomised(module, seed=0):
    """The module in float64 with random numbers for every parameter, in evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return module


def tokens(x):
    return x.flatten(2).transpose(1, 2)


def on_tokens(layer, x, *context):
    """A layer of ``(b, tokens, c)`` on the positions of a map."""
    return layer(tokens(x), *map(tokens, context)).transpose(1, 2).unflatten(2, x.shape[2:])


def assert_same(block, theirs, *shapes, atol=1e-12):
    """Outputs and slopes, for two maps of each shape ``(c, h, w)``: the map itself, and what it attends to if given."""
    generator = torch.Generator().manual_seed(1)
    maps = [torch.randn(2, *shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    got = block(maps[0], context=maps[1]) if len(maps) > 1 else block(maps[0])
    expected = theirs(*maps)
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)
    assert expected.std() > 1e-3
    slope = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    for ours, other in zip(
        torch.autograd.grad(got, maps, slope), torch.autograd.grad(expected, maps, slope), strict=True
    ):
        torch.testing.assert_close(ours, other, rtol=0, atol=10 * atol)


# --- torch ------------------------------------------------------------------------------------------------------------


def run_mha(layer):
    def run(x, context=None):
        query, key = tokens(x), tokens(x if context is None else context)
        if not layer.batch_first:
            query, key = query.transpose(0, 1), key.transpose(0, 1)
        y, _ = layer(query, key, key)
        y = y if layer.batch_first else y.transpose(0, 1)
        return y.transpose(1, 2).unflatten(2, x.shape[2:])

    return run


@settings(max_examples=15, deadline=None)
@given(heads=st.integers(1, 4), width=st.integers(1, 5), bias=st.booleans(), batch_first=st.booleans())
def test_torch_multihead(heads, width, bias, batch_first):
    layer = randomised(nn.MultiheadAttention(heads * width, heads, bias=bias, batch_first=batch_first))
    block = convert.from_torch_mha(layer)
    assert isinstance(block, va.Attention2d)
    assert_same(block, run_mha(layer), (heads * width, 3, 5))


@pytest.mark.parametrize(("rank", "size"), [(1, (7,)), (2, (3, 5)), (3, (2, 3, 4))])
@pytest.mark.parametrize("context", [None, 6])
def test_torch_multihead_on_maps_with_any_number_of_axes(rank, size, context):
    layer = randomised(nn.MultiheadAttention(8, 2, kdim=context, vdim=context))
    block = convert.from_torch_mha(layer, rank=rank)
    assert type(block) is (va.Attention1d, va.Attention2d, va.Attention3d)[rank - 1]
    others = [] if context is None else [(context, *(2 * side for side in size))]
    assert_same(block, run_mha(layer), (8, *size), *others)


def test_torchs_mask_is_ours_the_other_way_round():
    layer = randomised(nn.MultiheadAttention(8, 2, batch_first=True))
    x, mask = torch.randn(2, 8, 3, 4, dtype=torch.float64), torch.rand(12, 12) < 0.5
    mask.fill_diagonal_(False)
    expected, _ = layer(tokens(x), tokens(x), tokens(x), attn_mask=mask)
    got = convert.from_torch_mha(layer)(x, mask=~mask)
    torch.testing.assert_close(tokens(got), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu", nn.GELU(), nn.ReLU(), torch.relu])
@pytest.mark.parametrize("bias", [True, False])
def test_torch_encoder_layer(norm_first, activation, bias):
    layer = nn.TransformerEncoderLayer(
        8, 2, 13, norm_first=norm_first, activation=activation, bias=bias, batch_first=bias, layer_norm_eps=0.01
    )
    layer = randomised(layer)

    def run(x):
        y = layer(tokens(x) if bias else tokens(x).transpose(0, 1))
        return (y if bias else y.transpose(0, 1)).transpose(1, 2).unflatten(2, x.shape[2:])

    block = convert.from_torch_encoder_layer(layer)
    assert isinstance(block, va.TransformerBlock2d)
    assert_same(block, run, (8, 3, 5), atol=1e-11)


@pytest.mark.parametrize("output_has_bias", [True, False])
def test_torch_encoder_layer_whose_attention_has_fewer_biases(output_has_bias):
    layer = nn.TransformerEncoderLayer(8, 2, 13, batch_first=True)
    layer.self_attn = nn.MultiheadAttention(8, 2, bias=False, batch_first=True)
    if output_has_bias:
        layer.self_attn.out_proj.bias = nn.Parameter(torch.zeros(8))
    layer = randomised(layer)
    assert_same(convert.from_torch_encoder_layer(layer), partial(on_tokens, layer), (8, 3, 5), atol=1e-11)


def test_dropouts_of_torch_are_carried():
    block = convert.from_torch_mha(nn.MultiheadAttention(8, 2, dropout=0.3))
    assert (block.attn_drop, block.proj_drop.p) == (0.3, 0.0)
    layer = nn.TransformerEncoderLayer(8, 2, dropout=0.25)
    layer.self_attn.dropout, layer.dropout1.p = 0.125, 0.5
    block = convert.from_torch_encoder_layer(layer)
    assert (block.attn.attn_drop, block.attn.proj_drop.p, block.mlp_drop.p) == (0.125, 0.5, 0.25)
    layer.dropout = layer.dropout1 = layer.dropout2 = nn.Identity()
    block = convert.from_torch_encoder_layer(layer)
    assert (block.attn.attn_drop, block.attn.proj_drop.p, block.mlp_drop.p) == (0.125, 0.0, 0.0)


# --- separate projections ---------------------------------------------------------------------------------------------


def projections(kind, heads, kv_heads, key_dim, value_dim, *, channels=6, context=None, out=7, bias=(True, True)):
    sizes = {
        "q": (channels, heads * key_dim),
        "k": (context or channels, kv_heads * key_dim),
        "v": (context or channels, kv_heads * value_dim),
        "out": (heads * value_dim, out),
    }
    make = {nn.Linear: nn.Linear}.get(kind, lambda i, o, bias: kind(i, o, 1, bias=bias))
    return {
        name: randomised(make(*size, bias=bias[name == "out"]), seed) for seed, (name, size) in enumerate(sizes.items())
    }


def grouped_attention(layers, heads, kv_heads, scale):
    """The definition, head by head."""

    def project(name, t):
        weight = layers[name].weight.flatten(1)
        return F.linear(t, weight, layers[name].bias)

    def run(x, context=None):
        source = tokens(x if context is None else context)
        q, k, v = project("q", tokens(x)), project("k", source), project("v", source)
        d, e = q.shape[2] // heads, v.shape[2] // kv_heads
        outputs = []
        for head in range(heads):
            kv = head // (heads // kv_heads)
            qh, kh, vh = q[..., head * d : (head + 1) * d], k[..., kv * d : (kv + 1) * d], v[..., kv * e : (kv + 1) * e]
            weights = torch.softmax(qh @ kh.mT * (d**-0.5 if scale is None else scale), dim=-1)
            outputs.append(weights @ vh)
        return project("out", torch.cat(outputs, dim=-1)).transpose(1, 2).unflatten(2, x.shape[2:])

    return run


@settings(max_examples=20, deadline=None)
@given(
    kind=st.sampled_from([nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d]),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    key_dim=st.integers(1, 4),
    value_dim=st.integers(1, 4),
    context=st.sampled_from([None, 5]),
    scale=st.sampled_from([None, 1.0]),
    bias=st.tuples(st.booleans(), st.booleans()),
)
def test_separate_projections(kind, kv_heads, group, key_dim, value_dim, context, scale, bias):
    heads = kv_heads * group
    layers = projections(kind, heads, kv_heads, key_dim, value_dim, context=context, bias=bias)
    block = convert.from_linear_projections(**layers, num_heads=heads, num_kv_heads=kv_heads, scale=scale)
    others = [] if context is None else [(context, 4, 4)]
    assert_same(block, grouped_attention(layers, heads, kv_heads, scale), (6, 3, 5), *others)


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_a_padding_that_has_a_name_pads_nothing(padding):
    layers = projections(nn.Conv2d, 2, 2, 3, 3)
    layers["q"].padding = padding
    block = convert.from_linear_projections(**layers, num_heads=2)
    assert_same(block, grouped_attention(layers, 2, 2, None), (6, 3, 5))


@pytest.mark.parametrize("rank", [1, 3])
def test_separate_projections_for_other_maps(rank):
    layers = projections(nn.Linear, 2, 2, 3, 3)
    block = convert.from_linear_projections(**layers, num_heads=2, rank=rank)
    assert_same(block, grouped_attention(layers, 2, 2, None), (6, 2, 3, 4)[: rank + 1])


# --- timm -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"qkv_bias": True},
        {"proj_bias": False},
        {"qkv_bias": True, "attn_head_dim": 3, "dim_out": 10},
        {"qk_norm": True, "norm_layer": nn.LayerNorm},
        {"qk_norm": True, "norm_layer": lambda d, **kw: nn.LayerNorm(d, eps=0.1, **kw)},
        {"gated": True},
        {"gated": True, "qkv_bias": True},
    ],
    ids=lambda options: " ".join(options),
)
def test_timm_attention(options):
    if not options.keys() <= inspect.signature(TimmAttention).parameters.keys():
        pytest.skip("this timm has no gated attention")
    layer = randomised(TimmAttention(8, num_heads=2, **options))
    block = convert.from_timm_attention(layer)
    assert_same(block, lambda x: on_tokens(layer, x), (8, 3, 5))
    if "norm_layer" not in options:  # whose eps is no argument of the block
        expected = va.Attention2d(
            8,
            2,
            key_dim=layer.head_dim,
            value_dim=layer.head_dim,
            out_channels=options.get("dim_out"),
            qkv_bias=options.get("qkv_bias", False),
            proj_bias=options.get("proj_bias", True),
            output_gate=options.get("gated", False),
            dtype=torch.float64,
        )
        expected.load_state_dict(block.state_dict())
        x = torch.randn(1, 8, 3, 4, dtype=torch.float64)
        assert torch.equal(expected(x), block(x))


def test_timm_attention_of_a_vision_transformer():
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
    layer = randomised(model.blocks[0].attn)
    block = convert.from_timm_attention(layer, rank=1)
    assert_same(block, lambda x: on_tokens(layer, x), (192, 5), atol=1e-10)


@settings(max_examples=12, deadline=None)
@given(heads=st.integers(1, 4), width=st.integers(1, 4), bias=st.booleans(), head_first=st.booleans())
def test_timm_attention2d(heads, width, bias, head_first):
    layer = TimmAttention2d(heads * width, num_heads=heads, bias=bias, head_first=head_first)
    layer = randomised(layer)
    assert_same(convert.from_timm_attention2d(layer), layer, (heads * width, 3, 5))


@pytest.mark.parametrize("expand_first", [True, False])
def test_timm_attention2d_with_other_channels(expand_first):
    layer = randomised(TimmAttention2d(8, 12, num_heads=4, expand_first=expand_first, head_first=True))
    assert_same(convert.from_timm_attention2d(layer), layer, (8, 3, 5))


@pytest.mark.parametrize("options", [{}, {"use_bias": True}, {"key_dim": 3, "value_dim": 5, "dim_out": 6}], ids=str)
def test_timm_multi_query_attention2d(options):
    layer = randomised(MultiQueryAttention2d(8, num_heads=4, **options))
    block = convert.from_timm_multi_query_attention2d(layer)
    assert block.num_kv_heads == 1
    assert_same(block, layer, (8, 3, 5))


@pytest.mark.parametrize(
    "options",
    [{}, {"qkv_bias": True}, {"dim_head": 5}, {"dim_out": 12, "dim_head": 5}, {"scale_pos_embed": True}],
    ids=str,
)
def test_timm_bottleneck_attn(options):
    layer = randomised(BottleneckAttn(8, feat_size=(3, 5), num_heads=2, **options))
    block = convert.from_timm_bottleneck_attn(layer)
    assert_same(block, layer, (8, 3, 5))
    assert block.position.specification == va.RelPosDecomposed(feat_size=(3, 5))
    assert {name for name, p in block.named_parameters() if not p.requires_grad} == {"proj.weight"}


REL_POS = {
    None: None,
    "bias": lambda **kw: RelPosBias(window_size=(3, 5), **kw),
    "bias_tf": lambda **kw: RelPosBiasTf(window_size=(3, 5), **kw),
}


@pytest.mark.parametrize("kind", ["Attention2d", "AttentionCl"])
@pytest.mark.parametrize("rel_pos", REL_POS)
@pytest.mark.parametrize("head_first", [True, False])
def test_timm_maxxvit_attention_on_a_whole_map(kind, rel_pos, head_first):
    form = getattr(maxxvit, kind)
    layer = randomised(form(8, 12, dim_head=4, head_first=head_first, rel_pos_cls=REL_POS[rel_pos]))

    def run(x):
        return layer(x) if kind == "Attention2d" else layer(x.movedim(1, -1)).movedim(-1, 1)

    assert_same(convert.from_timm_maxxvit_attention(layer), run, (8, 3, 5))


@pytest.mark.parametrize("form", [maxxvit.PartitionAttentionCl, maxxvit.PartitionAttention2d])
@pytest.mark.parametrize(("partition", "pattern"), [("block", va.Window((3, 5))), ("grid", va.Grid((3, 5)))])
@pytest.mark.parametrize("rel_pos", ["bias", "bias_tf", ""])
def test_timm_maxxvit_attention_in_windows_and_grids(form, partition, pattern, rel_pos):
    config = maxxvit.MaxxVitTransformerCfg(
        dim_head=4, window_size=(3, 5), rel_pos_type=rel_pos, norm_layer="layernorm2d"
    )
    layer = randomised(form(8, partition, config))

    def run(x):
        if form is maxxvit.PartitionAttention2d:
            return layer._partition_attn(x)
        return layer._partition_attn(x.movedim(1, -1)).movedim(-1, 1)

    assert_same(convert.from_timm_maxxvit_attention(layer.attn, pattern=pattern), run, (8, 9, 10))


def test_dropouts_of_timm_are_carried():
    makers = {
        convert.from_timm_attention: TimmAttention(8, num_heads=2, attn_drop=0.1, proj_drop=0.2),
        convert.from_timm_attention2d: TimmAttention2d(8, num_heads=2, attn_drop=0.1, proj_drop=0.2),
        convert.from_timm_multi_query_attention2d: MultiQueryAttention2d(8, num_heads=2, attn_drop=0.1, proj_drop=0.2),
        convert.from_timm_maxxvit_attention: maxxvit.AttentionCl(8, dim_head=4, attn_drop=0.1, proj_drop=0.2),
    }
    for converter, layer in makers.items():
        block = converter(layer)
        assert (block.attn_drop, block.proj_drop.p) == (0.1, 0.2), converter.__name__
        layer.attn_drop = nn.Identity()
        setattr(getattr(layer, "output", layer), "drop" if hasattr(layer, "output") else "proj_drop", nn.Identity())
        block = converter(layer)
        assert (block.attn_drop, block.proj_drop.p) == (0.0, 0.0), converter.__name__


# --- torchvision ------------------------------------------------------------------------------------------------------


def run_swin(layer):
    return lambda x: layer(x.movedim(1, -1)).movedim(-1, 1)


@pytest.mark.parametrize("shift", [[0, 0], [1, 2], [0, 1]])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [(4, 6), (2, 9), (8, 3), (2, 3)])
def test_torchvision_swin(shift, bias, size):
    layer = ShiftedWindowAttention(8, [2, 3], shift, 2, qkv_bias=bias, proj_bias=bias)
    layer = randomised(layer)
    block = convert.from_torchvision_swin(layer)
    assert block.pattern == va.Window((2, 3), tuple(shift))
    assert_same(block, run_swin(layer), (8, *size))


def test_torchvision_swin_attends_to_its_padding_and_the_block_does_not():
    layer = randomised(ShiftedWindowAttention(8, [2, 3], [0, 0], 2))
    block = convert.from_torchvision_swin(layer)
    x = torch.randn(1, 8, 2, 4, dtype=torch.float64)
    theirs = run_swin(layer)(x)
    torch.testing.assert_close(block(x)[..., :3], theirs[..., :3], rtol=0, atol=1e-12)
    assert (block(x)[..., 3] - theirs[..., 3]).abs().max() > 0.01
    # The last column is a window of its own then: alone it is attended to as in a map of one column.
    torch.testing.assert_close(block(x)[..., 3:], block(x[..., 3:]), rtol=0, atol=1e-12)


def test_dropouts_of_torchvision_are_carried():
    block = convert.from_torchvision_swin(ShiftedWindowAttention(8, [2, 3], [0, 0], 2, True, True, 0.1, 0.2))
    assert (block.attn_drop, block.proj_drop.p) == (0.1, 0.2)


@pytest.mark.parametrize(
    ("pattern", "partition", "reverse"),
    [
        (va.Window(3), maxxvit.window_partition, maxxvit.window_reverse),
        (va.Grid(3), maxxvit.grid_partition, maxxvit.grid_reverse),
    ],
)
def test_torchvision_maxvit(pattern, partition, reverse):
    layer = randomised(torchvision_maxvit.RelativePositionalMultiHeadAttention(8, head_dim=2, max_seq_len=9))

    def run(x):
        groups = partition(x.movedim(1, -1), [3, 3])
        y = layer(groups.flatten(1, 2)[:, None])[:, 0].view(groups.shape)
        return reverse(y, [3, 3], x.shape[2:]).movedim(-1, 1)

    block = convert.from_torchvision_maxvit(layer, pattern=pattern)
    assert block.scale == 8**-0.5
    assert_same(block, run, (8, 6, 9))


@pytest.mark.parametrize(("kind", "pattern"), [("window", va.Window(2)), ("grid", va.Grid(2))])
def test_torchvision_maxvit_with_its_own_windows_and_grids(kind, pattern):
    layer = torchvision_maxvit.PartitionAttentionLayer(8, 2, 2, kind, (6, 6), 1, nn.GELU, nn.LayerNorm, 0.0, 0.0, 0.0)
    layer = randomised(layer)
    attention = layer.attn_layer[1]

    def run(x):
        y = layer.partition_swap(layer.partition_op(x, layer.p))
        return layer.departition_op(layer.departition_swap(attention(y)), layer.p, 6 // layer.p, 6 // layer.p)

    assert_same(convert.from_torchvision_maxvit(attention, pattern=pattern), run, (8, 6, 6))


# --- Keras ------------------------------------------------------------------------------------------------------------


def built(layer, query, value=None):
    """The layer built for these shapes, with random numbers for every weight."""
    layer.build((None, *query), (None, *(value or query)))
    generator = torch.Generator().manual_seed(0)
    for variable in layer.weights:
        variable.assign(torch.randn(variable.shape, generator=generator, dtype=torch.float64) * 0.4)
    return layer


def run_keras(layer):
    def run(x, context=None):
        query, value = (y.movedim(1, -1) for y in (x, x if context is None else context))
        # With the weights asked for, Keras computes them in float64; its fused kernel rounds them to float32.
        y, _ = layer(query, value, training=False, return_attention_scores=True)
        return y.movedim(-1, 1)

    return run


@pytest.mark.parametrize(
    ("size", "axes", "pattern"),
    [
        ((7,), None, "full"),
        ((7,), (1,), "full"),
        ((3, 5), None, "full"),
        ((3, 5), (1, 2), "full"),
        ((3, 5), (1,), "columns"),
        ((3, 5), (2,), "rows"),
        ((3, 5), (-2,), "rows"),
        ((2, 3, 4), None, "full"),
        ((2, 3, 4), (3,), "rows"),
        ((2, 3, 4), (1, 3), va.Pattern("b n d t h w -> (b h) n (t w) d")),
    ],
    ids=str,
)
def test_keras_multihead_on_maps_with_any_number_of_axes(keras, size, axes, pattern):
    layer = keras.layers.MultiHeadAttention(2, 3, attention_axes=axes, dtype="float64")
    built(layer, (*size, 6))
    block = convert.from_keras_mha(layer)
    assert type(block) is (va.Attention1d, va.Attention2d, va.Attention3d)[len(size) - 1]
    assert block.pattern == pattern
    assert_same(block, run_keras(layer), (6, *size))


@pytest.mark.parametrize(
    "options",
    [
        {"use_bias": False},
        {"value_dim": 5},
        {"output_shape": 4},
        {"output_shape": (4,), "value_dim": 1},
        {"use_gate": True},
        {"use_gate": True, "use_bias": False, "value_dim": 2},
        {"dropout": 0.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("heads", [1, 4])
def test_keras_multihead_with_its_options(keras, options, heads):
    layer = keras.layers.MultiHeadAttention(heads, 3, dtype="float64", **options)
    built(layer, (3, 5, 6))
    block = convert.from_keras_mha(layer)
    assert (block.attn_drop, block.proj_drop.p) == (options.get("dropout", 0.0), 0.0)
    frozen = {name for name, p in block.named_parameters() if not p.requires_grad}
    assert frozen == ({"gate.bias"} if "use_gate" in options and "use_bias" in options else set())
    assert_same(block.eval(), run_keras(layer), (6, 3, 5))


def test_keras_multihead_between_two_maps(keras):
    layer = keras.layers.MultiHeadAttention(2, 3, dtype="float64")
    built(layer, (3, 5, 6), (4, 2, 7))
    block = convert.from_keras_mha(layer)
    assert block.context_channels == 7
    assert_same(block, run_keras(layer), (6, 3, 5), (7, 4, 2))
    layer = keras.layers.MultiHeadAttention(2, 3, dtype="float64")
    built(layer, (3, 5, 6), (4, 2, 6))
    assert_same(convert.from_keras_mha(layer), run_keras(layer), (6, 3, 5), (6, 4, 2))


@pytest.mark.parametrize("options", [{}, {"use_bias": False, "use_gate": True}, {"use_gate": True}], ids=str)
@pytest.mark.parametrize("value", [None, (9, 5)])
def test_keras_grouped_query_attention(keras, options, value):
    layer = built(keras.layers.GroupQueryAttention(3, 6, 2, dtype="float64", **options), (7, 8), value)
    block = convert.from_keras_gqa(layer)
    assert (type(block), block.num_heads, block.num_kv_heads) == (va.Attention1d, 6, 2)
    others = [] if value is None else [value[::-1]]
    assert_same(block, run_keras(layer), (8, 7), *others)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "mixed_float16"])
def test_a_keras_layer_is_left_as_it_is_and_its_traits_are_kept(keras, dtype):
    layer = built(keras.layers.MultiHeadAttention(2, 3, dtype=dtype, dropout=0.5, activity_regularizer="l2"), (3, 5, 6))
    layer.trainable = False
    seed = keras.src.random.seed_generator.global_seed_generator().state
    before = [variable.value.clone() for variable in (*layer.variables, seed)]
    versions = [variable.value._version for variable in layer.variables]
    states = random.getstate(), torch.get_rng_state()
    block = convert.from_keras_mha(layer)
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert [variable.value._version for variable in layer.variables] == versions
    assert layer.losses == []
    assert layer.training
    assert not any(module.training for module in block.modules())
    assert {p.dtype for p in block.parameters()} == {getattr(torch, dtype.replace("mixed_float16", "float32"))}
    assert not any(p.requires_grad for p in block.parameters())
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.zero_()
    after = [variable.value for variable in (*layer.variables, seed)]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # in Keras, which quantizes
def test_keras_layers_that_are_refused(keras):
    mha, shape = keras.layers.MultiHeadAttention, (3, 5, 6)
    refused = [
        (lambda: mha(2, 3), "layer must be built, which its first call does"),
        (
            lambda: built(mha(2, 3, sliding_window=2), (7, 6)),
            r"MultiHeadAttention.sliding_window .* got 2; make the layer without it, .* a mask",
        ),
        (lambda: built(mha(2, 3, output_shape=(2, 2)), shape), r"MultiHeadAttention.output_shape .* got \(2, 2\)"),
        (
            lambda: keyed(mha(2, 3), (5, 6), (4, 7), (4, 6)),
            r"key_dense.kernel.shape\[0\] .* got 6; .* give keys 7 channels",
        ),
        (lambda: built(mha(2, 3), shape, (4, 6)), "key_dense.equation cannot be carried over"),
        (lambda: built(mha(2, 3), (2, 2, 2, 2, 6)), "rank must be 3, 4 or 5"),
        *(
            (partial(adapted, mha(2, 3, use_gate=True), shape, name), f"{name}.lora_enabled cannot be .*: got True")
            for name in DENSE
        ),
        *(
            (partial(quantized, mha(2, 3, use_gate=True), shape, name), f"{name}.quantization_mode .*: got 'int8'")
            for name in DENSE
        ),
        (
            lambda: built(mha(2, 3, attention_axes=(1,)), (3, 5, 6), (4, 5, 6)),
            r"MultiHeadAttention.value_shape .* got \(None, 4, 5, 6\); with pattern='columns' .* is \(None, 3, 5, 6\)",
        ),
        (
            lambda: built(mha(2, 3, attention_axes=(2,)), (3, None, 6), (4, 5, 6)),
            r"MultiHeadAttention.value_shape .* with pattern='rows'",
        ),
        (lambda: keras.layers.Dense(3), r"layer must be a keras.layers.MultiHeadAttention; got keras\.src.*Dense"),
    ]
    for make, message in refused:
        layer = make()
        with pytest.raises(ValueError, match=message):
            convert.from_keras_mha(layer)
    with pytest.raises(ValueError, match=r"layer must be a keras.layers.GroupQueryAttention; got .*MultiHeadAttention"):
        convert.from_keras_gqa(mha(2, 3))
    with pytest.raises(ValueError, match=r"Attention.query_shape .* got \(None, 3, 5, 6\); it attends along sequences"):
        convert.from_keras_gqa(built(keras.layers.GroupQueryAttention(3, 4, 2), shape))


DENSE = ("_query_dense", "_key_dense", "_value_dense", "_output_dense", "_gate_dense")


def test_a_keras_layer_built_for_sizes_that_are_not_known_is_taken(keras):
    layer = built(keras.layers.MultiHeadAttention(2, 3, attention_axes=(2,)), (None, None, 6), (4, 5, 6))
    assert convert.from_keras_mha(layer).pattern == "rows"


def keyed(layer, query, value, key):
    layer.build((None, *query), (None, *value), (None, *key))
    return layer


def adapted(layer, shape, name):
    getattr(built(layer, shape), name).enable_lora(2)
    return layer


def quantized(layer, shape, name):
    getattr(built(layer, shape), name).quantize("int8")
    return layer


def test_a_keras_layer_of_another_backend_is_refused():
    kind = type("MultiHeadAttention", (), {"__module__": "keras.src.layers.attention.multi_head_attention"})
    kind.get_config = lambda self: {}
    with pytest.raises(ValueError, match=r"in the torch backend of Keras.* set KERAS_BACKEND=torch before"):
        convert.from_keras_mha(kind())


def test_a_keras_subclass_that_computes_something_else_is_found_out(keras):
    class Halved(keras.layers.MultiHeadAttention):
        def call(self, *args, **kwargs):
            return super().call(*args, **kwargs) / 2

    with pytest.raises(ConversionError, match="Attention2d made of this Halved does not compute what it does"):
        convert.from_keras_mha(built(Halved(2, 3), (3, 5, 6)))


def halving(layer):
    call = layer.call
    layer.call = lambda *args, **kwargs: call(*args, **kwargs) / 2


CHANGES = {
    "factor": lambda layer: setattr(layer, "factor", 1.25),
    "call": halving,
    "scale": lambda layer: setattr(layer, "_inverse_sqrt_key_dim", 1.0),
    "activation": lambda layer: setattr(layer._output_dense, "activation", torch.tanh),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "mixed_float16"])
@pytest.mark.parametrize("zeros", [True, False])
def test_a_keras_layer_that_does_what_its_configuration_does_not_say_is_found_out(keras, change, dtype, zeros):
    class Scaled(keras.layers.MultiHeadAttention):
        factor = 1.0

        def call(self, *args, **kwargs):
            return super().call(*args, **kwargs) * self.factor

    layer = built(Scaled(2, 9, use_bias=False, dtype=dtype), (3, 5, 6))
    if zeros:
        layer._output_dense.set_weights([torch.zeros(2, 9, 6)])
    assert isinstance(convert.from_keras_mha(layer), va.Attention2d)
    CHANGES[change](layer)
    with pytest.raises(ConversionError, match="Attention2d made of this Scaled does not compute"):
        convert.from_keras_mha(layer)


def test_a_keras_layer_that_cannot_be_made_anew_or_run_is_refused(keras):
    class Narrow(keras.layers.MultiHeadAttention):
        def __init__(self, num_heads):
            super().__init__(num_heads, 3)

    with pytest.raises(
        ConversionError, match=r"(?s)this Narrow cannot be copied, .* \(TypeError: .* load its weights into"
    ):
        convert.from_keras_mha(built(Narrow(2), (3, 5, 6)))
    layer = built(keras.layers.MultiHeadAttention(2, 3), (3, 5, 6))
    layer.call = lambda *args: None
    with pytest.raises(
        ConversionError, match=r"MultiHeadAttention cannot be run .* load its weights into a plain layer"
    ):
        convert.from_keras_mha(layer)


HOOKS = {
    "register_forward_pre_hook": "forward pre hooks",
    "register_forward_hook": "forward hooks",
    "register_full_backward_pre_hook": "backward pre hooks",
    "register_full_backward_hook": "backward hooks",
}


@pytest.mark.parametrize("register", HOOKS)
@pytest.mark.parametrize("name", ["", "_query_dense", "_output_dense"])
def test_a_keras_layer_with_hooks_is_refused(keras, register, name):
    layer = built(keras.layers.MultiHeadAttention(2, 3), (3, 5, 6))
    getattr(layer.get_submodule(name), register)(lambda *_: None)
    with pytest.raises(
        ValueError, match=rf"MultiHeadAttention\.?{name} has {HOOKS[register]}, which cannot be carried"
    ):
        convert.from_keras_mha(layer)


# --- what all of them keep --------------------------------------------------------------------------------------------

SOURCES = {
    "from_torch_mha": lambda: nn.MultiheadAttention(8, 2),
    "from_torch_encoder_layer": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "from_timm_attention": lambda: TimmAttention(8, 2, qkv_bias=True, qk_norm=True, norm_layer=nn.LayerNorm),
    "from_timm_attention2d": lambda: TimmAttention2d(8, num_heads=2, head_first=True),
    "from_timm_multi_query_attention2d": lambda: MultiQueryAttention2d(8, num_heads=2),
    "from_timm_bottleneck_attn": lambda: BottleneckAttn(8, feat_size=(3, 5), num_heads=2),
    "from_timm_maxxvit_attention": lambda: maxxvit.Attention2d(8, dim_head=4, rel_pos_cls=REL_POS["bias_tf"]),
    "from_torchvision_swin": lambda: ShiftedWindowAttention(8, [2, 3], [1, 1], 2),
    "from_torchvision_maxvit": lambda: torchvision_maxvit.RelativePositionalMultiHeadAttention(8, 4, 9),
}


def test_every_converter_is_in_one_of_the_tables():
    others = {"ConversionError", "from_keras_gqa", "from_keras_mha", "from_linear_projections"}
    assert set(convert.__all__) == set(SOURCES) | others


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("training", [True, False])
def test_type_mode_and_whether_it_is_trained_are_kept_and_the_source_is_left_as_it_is(name, training):
    source = SOURCES[name]().to(torch.bfloat16).train(training)
    before = {key: x.clone() for key, x in source.state_dict().items()}
    state = torch.get_rng_state()
    block = getattr(convert, name)(source)
    assert torch.equal(torch.get_rng_state(), state)
    assert {module.training for module in block.modules()} == {training}
    assert {module.training for module in source.modules()} == {training}
    assert {p.dtype for p in block.parameters()} == {torch.bfloat16}
    assert {p.device for p in block.parameters()} == {torch.device("cpu")}
    assert all(p.is_contiguous() for p in block.parameters())
    own = {"proj.weight"} if name == "from_timm_bottleneck_attn" else set()
    assert {key for key, p in block.named_parameters() if not p.requires_grad} == own
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.fill_(7.0)
    assert all(torch.equal(x, before[key]) for key, x in source.state_dict().items())


@pytest.mark.parametrize("training", [True, False])
def test_projections_keep_their_type_and_mode(training):
    layers = [nn.Linear(8, 8).to(torch.bfloat16).train(training) for _ in range(4)]
    layers[3].requires_grad_(False)
    block = convert.from_linear_projections(*layers, 2)
    assert {module.training for module in block.modules()} == {training} == {layers[0].training}
    assert {p.dtype for p in block.parameters()} == {torch.bfloat16}
    assert {key for key, p in block.named_parameters() if not p.requires_grad} == {"proj.weight", "proj.bias"}


@pytest.mark.parametrize("name", SOURCES)
def test_a_frozen_source_gives_a_frozen_block(name):
    block = getattr(convert, name)(SOURCES[name]().requires_grad_(False))
    assert not any(p.requires_grad for p in block.parameters())


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_block_made_without_gradients_can_be_trained(name, mode):
    source = SOURCES[name]()
    with mode():
        block = getattr(convert, name)(source)
    size = {"from_torchvision_maxvit": (3, 3)}.get(name, (3, 5))
    block(torch.randn(2, 8, *size)).sum().backward()
    assert all(p.grad is not None for p in block.parameters() if p.requires_grad)


@pytest.mark.parametrize("register", HOOKS)
@pytest.mark.parametrize("name", SOURCES)
def test_hooks_are_refused(name, register):
    source = SOURCES[name]()
    *_, part = source.children()
    for module in (source, part):
        hook = getattr(module, register)(lambda *_: None)
        with pytest.raises(ValueError, match=f"has {HOOKS[register]}, which cannot be carried over: remove them"):
            getattr(convert, name)(source)
        hook.remove()


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("from_torch_encoder_layer", "self_attn"),
        ("from_torch_encoder_layer", "dropout"),
        ("from_torch_encoder_layer", "dropout1"),
        ("from_timm_attention", "attn_drop"),
        ("from_timm_multi_query_attention2d", "output.drop"),
    ],
)
def test_dropouts_in_another_mode_are_refused(name, path):
    source = SOURCES[name]()
    source.get_submodule(path).eval()
    message = rf"one mode; got (\w+) in training mode and \1.{path} in evaluation mode: call .train\(\) or .eval\(\) on"
    with pytest.raises(ValueError, match=message):
        getattr(convert, name)(source)


def test_the_mode_of_a_projection_does_not_matter():
    layer = changed(TimmAttention(8, 2).eval(), proj=nn.Linear(8, 8))
    assert not convert.from_timm_attention(layer).training


@pytest.mark.parametrize("name", SOURCES)
def test_parametrizations_are_refused_and_not_run(name):
    source = SOURCES[name]()
    linear = next(part for part in source.modules() if isinstance(part, (nn.Linear, nn.Conv2d)))
    parametrizations.spectral_norm(linear)
    before = {key: x.clone() for key, x in source.state_dict().items()}
    message = (
        r"has parametrizations, .* call torch.nn.utils.parametrize.remove_parametrizations\(…, leave_parametrized=T"
    )
    with pytest.raises(ValueError, match=message):
        getattr(convert, name)(source)
    assert all(torch.equal(x, before[key]) for key, x in source.state_dict().items())


@pytest.mark.parametrize("name", SOURCES)
def test_what_is_of_another_kind_or_has_no_weights_is_refused(name):
    converter, source = getattr(convert, name), SOURCES[name]()
    with pytest.raises(ValueError, match=r"module must be a .*; got torch.nn.modules.linear.Linear"):
        converter(nn.Linear(8, 8))
    with pytest.raises(ValueError, match=r"module must be a .*; got builtins.NoneType"):
        converter(None)
    for wrapper, path in ((torch.compile, "_orig_mod"), (nn.DataParallel, "module")):
        with pytest.raises(ValueError, match=rf"module must be a .*: take module.{path}, which it wraps"):
            converter(wrapper(source))
    with pytest.raises(ValueError, match=r"must hold floating-point numbers to be carried over; got .* on meta"):
        converter(source.to("meta"))


def test_importing_the_room_loads_no_other_library():
    code = (
        "import sys, vision_attn.convert; "
        "print([name for name in ('timm', 'torchvision', 'keras', 'einx') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


# --- what is refused --------------------------------------------------------------------------------------------------


def encoder(change=lambda layer: None, **options):
    layer = nn.TransformerEncoderLayer(8, 2, 16, **options)
    change(layer)
    return layer


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        (
            "from_torch_mha",
            lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True),
            r"MultiheadAttention.bias_k cannot be carried over: got a tensor of shape \(1, 1, 8\); .*add_bias_kv=False",
        ),
        (
            "from_torch_mha",
            lambda: nn.MultiheadAttention(8, 2, add_zero_attn=True),
            "MultiheadAttention.add_zero_attn cannot be carried over: got True; .* set it to False",
        ),
        (
            "from_torch_mha",
            lambda: nn.MultiheadAttention(8, 2, kdim=5),
            "MultiheadAttention.vdim cannot be carried over: got 8; .* and kdim is 5",
        ),
        (
            "from_torch_encoder_layer",
            lambda: encoder(activation=F.silu),
            "TransformerEncoderLayer.activation cannot be carried over: got .*silu.*; the block has 'relu' and 'gelu'",
        ),
        (
            "from_torch_encoder_layer",
            lambda: encoder(activation=nn.GELU(approximate="tanh")),
            "TransformerEncoderLayer.activation .* got GELU",
        ),
        (
            "from_torch_encoder_layer",
            lambda: encoder(lambda layer: setattr(layer, "norm1", nn.RMSNorm(8))),
            "TransformerEncoderLayer.norm1 .* got RMSNorm.* layer norms",
        ),
        (
            "from_torch_encoder_layer",
            lambda: encoder(lambda layer: setattr(layer.norm2, "eps", 0.1)),
            r"TransformerEncoderLayer.norm2.eps .* got 0.1; .* norm1's is 1e-05",
        ),
        (
            "from_torch_encoder_layer",
            lambda: encoder(lambda layer: setattr(layer.dropout2, "p", 0.5)),
            r"TransformerEncoderLayer.dropout2.p .* got 0.5; .* dropout.p is 0.1",
        ),
        (
            "from_torch_encoder_layer",
            lambda: encoder(lambda layer: setattr(layer.self_attn, "add_zero_attn", True)),
            "MultiheadAttention.add_zero_attn",
        ),
        (
            "from_torch_encoder_layer",
            lambda: encoder(lambda layer: setattr(layer, "self_attn", nn.Identity())),
            r"module.self_attn must be a torch.nn.MultiheadAttention; got .*Identity",
        ),
        (
            "from_torch_encoder_layer",
            lambda: encoder(lambda layer: setattr(layer, "self_attn", nn.MultiheadAttention(8, 2, kdim=5, vdim=5))),
            "TransformerEncoderLayer.self_attn.kdim cannot be carried over: got 5; .* its own map, of 8 channels",
        ),
        (
            "from_torch_encoder_layer",
            lambda: encoder(lambda layer: setattr(layer, "linear2", nn.Linear(16, 8, bias=False))),
            r"TransformerEncoderLayer.linear2.bias .* got None; .* linear1's is a tensor of shape \(16,\)",
        ),
        (
            "from_torch_encoder_layer",
            lambda: encoder(lambda layer: setattr(layer, "norm2", nn.LayerNorm(8, bias=False))),
            r"TransformerEncoderLayer.norm2.bias .* got None; .* linear1's is a tensor of shape \(16,\)",
        ),
        (
            "from_torch_encoder_layer",
            lambda: encoder(lambda layer: setattr(layer, "linear1", nn.Linear(8, 16, bias=False))),
            r"TransformerEncoderLayer.linear2.bias .* got a tensor of shape \(8,\); .* linear1's is None",
        ),
        (
            "from_torch_encoder_layer",
            lambda: encoder(lambda layer: setattr(layer, "norm1", nn.LayerNorm(8, elementwise_affine=False))),
            "TransformerEncoderLayer.norm1 cannot be carried over: got LayerNorm.* with a weight",
        ),
        *(
            (
                "from_torch_encoder_layer",
                lambda name=name: encoder(lambda layer: setattr(layer, name, nn.Dropout1d(0.1))),
                f"TransformerEncoderLayer.{name} cannot be carried over: got Dropout1d.* use an nn.Dropout or",
            )
            for name in ("dropout", "dropout1", "dropout2")
        ),
        (
            "from_timm_attention",
            lambda: changed(TimmAttention(8, 2), attn_drop=nn.AlphaDropout(0.1)),
            "Attention.attn_drop cannot be carried over: got AlphaDropout.* use an nn.Dropout or an nn.Identity",
        ),
        *(
            (
                "from_timm_attention",
                lambda name=name: changed(
                    TimmAttention(8, 2, qk_norm=True, norm_layer=nn.LayerNorm), **{name: nn.Identity()}
                ),
                "Attention.k_norm cannot be carried over: got .*; the block normalises queries and keys, or neither",
            )
            for name in ("q_norm", "k_norm")
        ),
        (
            "from_timm_attention",
            lambda: TimmAttention(8, 2, qk_norm=True, norm_layer=RmsNorm),
            "Attention.q_norm cannot be carried over: got RmsNorm.* by layer norm",
        ),
        (
            "from_timm_attention",
            lambda: TimmAttention(8, 2, qk_norm=True, norm_layer=lambda d, **kw: nn.LayerNorm(d, bias=False)),
            "Attention.q_norm cannot be carried over: got LayerNorm.* with weight and bias",
        ),
        (
            "from_timm_attention",
            lambda: TimmAttention(8, 2, scale_norm=True, norm_layer=nn.LayerNorm),
            "Attention.norm cannot be carried over: got LayerNorm.* without scale_norm",
        ),
        (
            "from_timm_multi_query_attention2d",
            lambda: MultiQueryAttention2d(8, num_heads=2, kv_stride=2),
            "MultiQueryAttention2d.kv_stride cannot be carried over: got 2; .* strides of 1",
        ),
        (
            "from_timm_multi_query_attention2d",
            lambda: MultiQueryAttention2d(8, num_heads=2, query_strides=2),
            r"MultiQueryAttention2d.query_strides cannot be carried over: got \(2, 2\)",
        ),
        (
            "from_timm_multi_query_attention2d",
            lambda: MultiQueryAttention2d(8, num_heads=2, padding=1),
            r"key.proj must be a convolution with padding 0; got \(1, 1\)",
        ),
        (
            "from_timm_bottleneck_attn",
            lambda: BottleneckAttn(8, feat_size=(4, 6), stride=2),
            r"BottleneckAttn.pool cannot be carried over: got AvgPool2d.* put nn.AvgPool2d\(2, 2\) behind the block",
        ),
        (
            "from_timm_maxxvit_attention",
            lambda: maxxvit.Attention2d(8, dim_head=4, rel_pos_cls=lambda **kw: RelPosMlp(window_size=(3, 5), **kw)),
            "Attention2d.rel_pos cannot be carried over: got RelPosMlp.*counterpart of RelPosBias and RelPosBiasTf",
        ),
        (
            "from_timm_maxxvit_attention",
            lambda: maxxvit.Attention2d(
                8, dim_head=4, rel_pos_cls=lambda **kw: RelPosBias(window_size=(3, 5), prefix_tokens=1, **kw)
            ),
            "Attention2d.rel_pos.prefix_tokens cannot be carried over: got 1",
        ),
        (
            "from_torchvision_swin",
            lambda: ShiftedWindowAttentionV2(8, [2, 3], [0, 0], 2),
            r"ShiftedWindowAttentionV2.logit_scale cannot be carried over: .* only the first version of Swin",
        ),
    ],
)
def test_what_the_block_does_not_do_is_refused_by_name(name, make, message):
    source = make()
    with pytest.raises(ValueError, match="(?s)" + message):
        getattr(convert, name)(source)


def changed(module, **parts):
    for name, part in parts.items():
        path, _, last = name.rpartition(".")
        setattr(module.get_submodule(path), last, part)
    return module


class Adapted(nn.Module):
    """As of a library of adapters: a layer in another one, which has no weight of its own."""

    def __init__(self, layer):
        super().__init__()
        self.base_layer = layer

    def forward(self, x):
        return self.base_layer(x)


PROJECTIONS = {
    "from_torch_mha": ("out_proj",),
    "from_torch_encoder_layer": ("self_attn.out_proj", "linear1", "linear2"),
    "from_timm_attention": ("qkv", "proj"),
    "from_timm_attention2d": ("qkv", "proj"),
    "from_timm_multi_query_attention2d": ("query.proj", "key.proj", "value.proj", "output.proj"),
    "from_timm_bottleneck_attn": ("qkv",),
    "from_timm_maxxvit_attention": ("qkv", "proj"),
    "from_torchvision_swin": ("qkv", "proj"),
    "from_torchvision_maxvit": ("to_qkv", "merge"),
}


@pytest.mark.parametrize(("name", "path"), [(name, path) for name in SOURCES for path in PROJECTIONS[name]])
def test_projections_that_are_wrapped_or_exchanged_are_refused(name, path):
    layer = SOURCES[name]().get_submodule(path)
    for part, message in (
        (nn.Identity(), "got torch.nn.modules.linear.Identity: merge adapters, and convert before quantizing"),
        (Adapted(layer), r"got .*\.Adapted: merge adapters"),
        (torch.compile(layer), r"got torch._dynamo.*: take \w+.*\._orig_mod, which it wraps"),
    ):
        with pytest.raises(ValueError, match=rf"\w\.{path.split('.', 1)[-1]} must be an nn.Linear or .*; {message}"):
            getattr(convert, name)(changed(SOURCES[name](), **{path: part}))


@pytest.mark.skipif("gated" not in inspect.signature(TimmAttention).parameters, reason="of a later timm")
def test_a_gate_that_is_exchanged_is_refused():
    layer = changed(TimmAttention(8, 2, gated=True), gate=Adapted(nn.Linear(8, 8)))
    with pytest.raises(ValueError, match=r"Attention\.gate must be an nn.Linear or a 1×1 convolution; got"):
        convert.from_timm_attention(layer)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")  # in torch
@pytest.mark.parametrize("name", ["from_torch_encoder_layer", "from_timm_attention", "from_torchvision_swin"])
def test_quantized_layers_are_refused(name):
    quantized = torch.ao.quantization.quantize_dynamic(SOURCES[name]().eval(), {nn.Linear})
    with pytest.raises(
        ValueError, match=r"must be an nn.Linear or a .*quantized.*: merge adapters, and convert before"
    ):
        getattr(convert, name)(quantized)


@pytest.mark.parametrize("pattern", ["rows", va.Window(3, shift=1), va.Window(3, shift=(0, 1)), va.Neighborhood(3)])
@pytest.mark.parametrize("name", ["from_timm_maxxvit_attention", "from_torchvision_maxvit"])
def test_only_windows_and_grids_are_patterns_of_maxvit(name, pattern):
    with pytest.raises(ValueError, match="pattern must be 'full', a Window without shift or a Grid, as in MaxViT; got"):
        getattr(convert, name)(SOURCES[name](), pattern=pattern)


@pytest.mark.parametrize("name", ["from_timm_maxxvit_attention", "from_torchvision_maxvit"])
def test_a_table_for_another_size_than_the_windows_is_refused(name):
    with pytest.raises(ValueError, match=r"feat_size must be that of the pattern's groups, \(7, 7\); got"):
        getattr(convert, name)(SOURCES[name](), pattern=va.Window(7))


@pytest.mark.parametrize("name", ["from_torch_mha", "from_timm_attention", "from_linear_projections"])
@pytest.mark.parametrize("rank", [0, 4, True, "2", 2.0, [2]])
def test_a_rank_that_no_map_has_is_refused(name, rank):
    arguments = [SOURCES[name]()] if name in SOURCES else [nn.Linear(8, 8) for _ in range(4)] + [2]
    with pytest.raises(ValueError, match="rank must be the axes of a map, 1, 2 or 3"):
        getattr(convert, name)(*arguments, rank=rank)


def hooked(layer):
    layer.register_forward_hook(lambda *_: None)
    return layer


@pytest.mark.parametrize(
    ("changed", "heads", "message"),
    [
        ({"q": nn.Conv2d(6, 12, 3)}, (4, 2), r"q must be a convolution with kernel_size 1; got \(3, 3\)"),
        ({"q": nn.Conv2d(6, 12, 1, stride=2)}, (4, 2), r"q must be a convolution with stride 1; got \(2, 2\)"),
        ({"k": nn.Conv2d(6, 6, 1, groups=2)}, (4, 2), "k must be a convolution with groups 1; got 2"),
        (
            {"v": nn.Identity()},
            (4, 2),
            r"v must be an nn.Linear or a 1×1 convolution; got torch.*\.Identity: merge ada",
        ),
        ({"q": None}, (4, 2), "q must be an nn.Linear or a 1×1 convolution; got builtins.NoneType"),
        ({"q": nn.DataParallel(nn.Linear(6, 12))}, (4, 2), "got torch.*DataParallel: take q.module, which it wraps"),
        ({}, (0, 2), "num_heads must be a whole number of at least 1; got 0"),
        ({}, (4, 0), "num_kv_heads must be a whole number of at least 1; got 0"),
        ({}, (4, 3), "num_kv_heads must divide num_heads"),
        ({"v": nn.Linear(6, 7)}, (4, 2), "num_kv_heads must divide the rows of v; got the rows of v=7 and"),
        ({"k": hooked(nn.Linear(6, 6))}, (4, 2), "Linear has forward hooks, which cannot be carried over"),
        ({"out": nn.Linear(12, 6, device="meta")}, (4, 2), "Linear.weight must hold floating-point numbers"),
        ({"v": nn.Linear(6, 6).eval()}, (4, 2), "one mode; got q in training mode and v in evaluation mode"),
        ({}, (5, 5), "num_heads must divide the rows of q; got the rows of q=12 and num_heads=5"),
        ({"v": nn.Linear(6, 8)}, (4, 4), "k must have 12 rows, 4 heads of 3 as of q; got 6"),
        ({"out": nn.Linear(8, 6)}, (4, 2), "out must take 12 channels, 4 heads of 3 as of v; got 8"),
        ({"v": nn.Linear(5, 6)}, (4, 2), "v must take 6 channels, as k does; got 5"),
        (
            {"k": nn.Linear(6, 6, bias=False)},
            (4, 2),
            "q, k, v must all have a bias, or none of them; got none for k: give it one of zeros",
        ),
        ({"q": nn.Linear(5, 12, bias=False)}, (4, 2), "q, k, v must all have a bias, or none of them; got none for q"),
        (
            {"k": nn.Linear(6, 6).requires_grad_(False)},
            (4, 2),
            "weights of q, k, v .* agree in requires_grad; got True",
        ),
        (
            {"k": nn.Linear(6, 6).half()},
            (4, 2),
            "the weights of q, k, v .* must agree in dtype; got torch.float32, torch.f",
        ),
    ],
)
def test_projections_that_do_not_fit_are_refused(changed, heads, message):
    layers = {"q": nn.Linear(6, 12), "k": nn.Linear(6, 6), "v": nn.Linear(6, 6), "out": nn.Linear(12, 6), **changed}
    with pytest.raises(ValueError, match=message):
        convert.from_linear_projections(**layers, num_heads=heads[0], num_kv_heads=heads[1])


def test_integers_are_no_weights():
    layer = nn.MultiheadAttention(8, 2)
    layer.out_proj.weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"MultiheadAttention.out_proj.weight must hold .* got torch.int8 on cpu"):
        convert.from_torch_mha(layer)


# --- the proof --------------------------------------------------------------------------------------------------------


def unchanged(rows, num_heads):
    return rows


def backwards(rows_of):
    """Rows that come in another order, and fit as well."""

    def reversed_rows(layer):
        rows = rows_of(layer)
        return rows._replace(weight=rows.weight.flip(0), bias=None if rows.bias is None else rows.bias.flip(0))

    return reversed_rows


@pytest.mark.parametrize(
    ("room", "function", "wrong", "name"),
    [
        ("timm_layers", "heads_first", unchanged, "from_timm_attention2d"),
        ("timm_layers", "heads_first", unchanged, "from_timm_maxxvit_attention"),
        ("timm_layers", "rows_of", backwards, "from_timm_attention"),
        ("timm_layers", "rows_of", backwards, "from_timm_multi_query_attention2d"),
        ("timm_layers", "rows_of", backwards, "from_timm_bottleneck_attn"),
        ("torch_layers", "rows_of", backwards, "from_torch_mha"),
        ("torch_layers", "rows_of", backwards, "from_torch_encoder_layer"),
        ("torchvision_layers", "rows_of", backwards, "from_torchvision_swin"),
        ("torchvision_layers", "rows_of", backwards, "from_torchvision_maxvit"),
        ("linear_layers", "rows_of", backwards, "from_linear_projections"),
    ],
)
def test_rows_in_a_wrong_order_are_found_out_even_where_the_output_is_zero(monkeypatch, room, function, wrong, name):
    module = sys.modules[f"vision_attn.convert.{room}"]
    arguments = [SOURCES[name]()] if name in SOURCES else [nn.Linear(8, 8) for _ in range(4)] + [2]
    for layer in arguments:
        if isinstance(layer, nn.Module):
            for parameter in layer.parameters():
                nn.init.zeros_(parameter)
    getattr(convert, name)(*arguments)
    monkeypatch.setattr(module, function, wrong(getattr(module, function)) if wrong is backwards else wrong)
    with pytest.raises(
        ConversionError, match=r"does not compute what it does: outputs have a difference of [\d.]+ where the l"
    ):
        getattr(convert, name)(*arguments)


def test_a_table_in_a_wrong_order_is_found_out(monkeypatch):
    module = sys.modules["vision_attn.convert.timm_maxxvit"]
    monkeypatch.setitem(module.TABLES, "RelPosBiasTf", lambda table: table.flatten(1).T)
    with pytest.raises(ConversionError, match="outputs have a difference of"):
        convert.from_timm_maxxvit_attention(SOURCES["from_timm_maxxvit_attention"]())


def test_keras_kernels_in_a_wrong_order_are_found_out(keras, monkeypatch):
    layer = built(keras.layers.MultiHeadAttention(2, 3), (3, 5, 6))
    module = sys.modules["vision_attn.convert.keras_layers"]
    kernel_rows = module.kernel_rows
    monkeypatch.setattr(module, "kernel_rows", lambda kernel, bias: kernel_rows(kernel.flip(1), bias))
    with pytest.raises(ConversionError, match="Attention2d made of this MultiHeadAttention does not compute"):
        convert.from_keras_mha(layer)


def scaled(factor):
    class Scaled(nn.MultiheadAttention):
        def forward(self, *args, **kwargs):
            y, weights = super().forward(*args, **kwargs)
            return factor * y, weights

    return Scaled(8, 2)


class Widened(nn.MultiheadAttention):
    def forward(self, *args, **kwargs):
        y, weights = super().forward(*args, **kwargs)
        return torch.cat([y, y], dim=-1), weights


REMEDY = (
    "load its weights into a plain layer of its library, convert that, and do around the block what it did besides$"
)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (scaled(2), "made of this Scaled does not compute what it does: .*is it a subclass with a forward of its own"),
        (scaled(1.001), "outputs have a difference of"),
        (scaled(1 + 1e-4), "outputs have a difference of"),
        (scaled(float("nan")), "outputs have a difference of nan"),
        (Widened(8, 2), r"outputs have shape \(1, 8, 3, 4\), not \(1, 16, 3, 4\)"),
    ],
)
def test_a_subclass_that_computes_something_else_is_found_out(layer, message):
    with pytest.raises(ConversionError, match=f"(?i){message}.*{REMEDY}"):
        convert.from_torch_mha(layer)


def test_an_encoder_layer_is_not_proven_by_the_kernel_that_passes_over_its_parts():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    for layer in (encoder(batch_first=True), encoder(batch_first=True).requires_grad_(False)):
        with pytest.raises(ConversionError, match="TransformerEncoderLayer does not compute what it does"):
            convert.from_torch_encoder_layer(changed(layer, linear1=Doubled(8, 16).requires_grad_(False)))


class Unpaired(nn.MultiheadAttention):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)[0]


class Rotated(TimmAttention):
    def forward(self, x, rope):
        return super().forward(x)


class Upcast(TimmAttention):
    def forward(self, x):
        return super().forward(x.float())


class Paired(TimmAttention2d):
    def forward(self, x):
        return super().forward(x), None


@pytest.mark.parametrize(
    ("name", "layer", "message"),
    [
        ("from_torch_mha", Unpaired(8, 2), r"this Unpaired cannot be run as a layer of its class is \(ValueError: "),
        ("from_timm_attention", Rotated(8, 2), r"this Rotated cannot be run .* \(TypeError: .*rope"),
        ("from_timm_attention", Upcast(8, 2), r"this Upcast cannot be run .* \(RuntimeError: "),
        ("from_timm_attention2d", Paired(8, num_heads=2), "this Paired gives a tuple where a layer of its class gives"),
    ],
)
def test_a_subclass_that_cannot_be_run_as_its_class_is_refused(name, layer, message):
    with pytest.raises(ConversionError, match=f"(?s){message}.*{REMEDY}"):
        getattr(convert, name)(layer)


def test_what_cannot_be_copied_is_refused():
    layer = nn.MultiheadAttention(8, 2)
    layer.last = layer(*[torch.randn(3, 1, 8)] * 3)[0]  # of which torch makes no copy, with its graph
    with pytest.raises(
        ConversionError, match=r"this MultiheadAttention cannot be copied, .*\(RuntimeError: .*" + REMEDY
    ):
        convert.from_torch_mha(layer)
    layer.last = threading.Lock()
    with pytest.raises(
        ConversionError, match=r"cannot be copied, .*\(TypeError: .* take from it what is no weight, or"
    ):
        convert.from_torch_mha(layer)
