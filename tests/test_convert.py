"""Converters; the oracle is always the other library, in float64, on maps that are not square, all weights random."""

import inspect
import itertools
import random
import re
import sys
import threading
import warnings
from dataclasses import replace
from functools import partial

import pytest
import timm
import timm.models.fastvit as fastvit
import timm.models.maxxvit as maxxvit
import timm.models.metaformer as metaformer
import timm.models.visformer as visformer
import torch
import torch.nn.functional as F
import torchvision.models.maxvit as torchvision_maxvit
from hypothesis import given, settings
from hypothesis import strategies as st
from test_families import CONVERTED
from timm.layers import Attention as TimmAttention
from timm.layers import RelPosBias, RelPosBiasTf, RelPosMlp, RmsNorm
from timm.layers.attention2d import Attention2d as TimmAttention2d
from timm.layers.attention2d import MultiQueryAttention2d
from timm.layers.bottleneck_attn import BottleneckAttn
from timm.models.beit import Attention as BeitAttention
from timm.models.nextvit import EfficientAttention
from timm.models.vision_transformer_relpos import RelPosAttention
from torch import nn
from torch.nn.utils import parametrizations
from torchvision.models.swin_transformer import ShiftedWindowAttention, ShiftedWindowAttentionV2

import vision_attn as va
from vision_attn.networks import convert
from vision_attn.networks.convert import ConversionError
from vision_attn.networks.convert.layer import LAYERS, converted
from vision_attn.networks.convert.swin import PaddedAttention2d

BLOCKS = {1: va.Attention1d, 2: va.Attention2d, 3: va.Attention3d}
TorchvisionMaxVit = torchvision_maxvit.RelativePositionalMultiHeadAttention
#: A later timm has gated attention.
HAS_GATE = "gated" in inspect.signature(TimmAttention).parameters
GATED = {"gated": True} if HAS_GATE else {}


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


def on_map(layer, x):
    return layer(x)


def on_tokens(layer, x):
    return layer(tokens(x)).transpose(1, 2).unflatten(2, x.shape[2:])


def channels_last(layer, x):
    return layer(x.movedim(1, -1)).movedim(-1, 1)


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


def changed(module, **parts):
    """The module with these parts, named by their path with ``__`` for a dot, in the place of its own."""
    for name, part in parts.items():
        path, _, last = name.replace("__", ".").rpartition(".")
        setattr(module.get_submodule(path), last, part)
    return module


# --- what a block computes --------------------------------------------------------------------------------------------


def multihead(layer, x, context=None):
    query, key = tokens(x), tokens(x if context is None else context)
    if not layer.batch_first:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    key, value = key.split([layer.kdim, layer.vdim], dim=-1) if layer.kdim != layer.vdim else (key, key)
    y, _ = layer(query, key, value)
    y = y if layer.batch_first else y.transpose(0, 1)
    return y.transpose(1, 2).unflatten(2, x.shape[2:])


def encoder(layer, x):
    if layer.self_attn.batch_first:
        return on_tokens(layer, x)
    return layer(x.flatten(2).permute(2, 0, 1)).permute(1, 2, 0).unflatten(2, x.shape[2:])


def encoder_without_biases(output_has_bias):
    layer = nn.TransformerEncoderLayer(8, 2, 13, batch_first=True)
    layer.self_attn = nn.MultiheadAttention(8, 2, bias=False, batch_first=True)
    if output_has_bias:
        layer.self_attn.out_proj.bias = nn.Parameter(torch.zeros(8))
    return layer


vit = partial(TimmAttention, 8, num_heads=2)
encoder_layer = partial(nn.TransformerEncoderLayer, 8, 2, 16)


def attention_of_vit():
    return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1).blocks[0].attn


def vit_norm(width, **options):
    return nn.LayerNorm(width, eps=0.1, **options)


REL_POS = [None, partial(RelPosBias, window_size=(3, 5)), partial(RelPosBiasTf, window_size=(3, 5))]


def maxvit(kind, **options):
    return getattr(maxxvit, kind)(8, 12, dim_head=4, **options)


def maxvit_partition(kind, partition, rel_pos):
    """timm's layer that cuts a map into windows or grids, and puts it together again."""
    config = maxxvit.MaxxVitTransformerCfg(4, rel_pos_type=rel_pos, window_size=(3, 5))
    return getattr(maxxvit, kind)(8, partition, config)


def run_maxvit(layer, x):
    run = channels_last if type(layer).__name__.endswith("Cl") else on_map
    return run(getattr(layer, "_partition_attn", layer), x)


def torchvision_partition(kind):
    args = (8, 2, 2, kind, (6, 6), 1, nn.GELU, nn.LayerNorm, 0.0, 0.0, 0.0)
    return torchvision_maxvit.PartitionAttentionLayer(*args)


def run_torchvision(layer, x):
    y = layer.partition_swap(layer.partition_op(x, layer.p))
    y = layer.departition_swap(layer.attn_layer[1](y))
    return layer.departition_op(y, layer.p, 6 // layer.p, 6 // layer.p)


def in_groups(layer, x, kind):
    """Windows or grids of three by three, cut by timm's functions, as torchvision's layer is given them."""
    partition, reverse = (getattr(maxxvit, f"{kind}_{what}") for what in ("partition", "reverse"))
    groups = partition(x.movedim(1, -1), [3, 3])
    y = layer(groups.flatten(1, 2)[:, None])[:, 0].view(groups.shape)
    return reverse(y, [3, 3], x.shape[2:]).movedim(-1, 1)


def run_timm_swin(layer, x):
    return layer._attn(x.movedim(1, -1)).movedim(-1, 1)


def each(**options):
    """All combinations of some options."""
    return [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]


PARITY = []


def add(name, make, run, *variants, shapes=((8, 3, 5),), part="", **options):
    """A converter and its options; a layer and its, and where in it the source is; how it is run, and on what maps."""
    PARITY.extend((name, make, variant, part, run, shapes, options) for variant in variants or [{}])


yes_no, other = [True, False], {"kdim": 6, "vdim": 6}
mha = partial(nn.MultiheadAttention, 8, 2)
add("from_torch_mha", mha, multihead, *each(bias=yes_no, batch_first=yes_no))
add("from_torch_mha", mha, multihead, shapes=[(8, 7)], rank=1)
add("from_torch_mha", mha, multihead, shapes=[(8, 2, 3, 4)], rank=3)
add("from_torch_mha", mha, multihead, other, shapes=[(8, 7), (6, 14)], rank=1)
add("from_torch_mha", mha, multihead, other | {"bias": False}, shapes=[(8, 3, 5), (6, 6, 10)])
add("from_torch_mha", mha, multihead, other, shapes=[(8, 2, 3, 4), (6, 4, 6, 8)], rank=3)
add(
    "from_torch_mha",
    mha,
    multihead,
    {"kdim": 5},
    {"kdim": 8, "vdim": 5, "bias": False},
    shapes=[(8, 3), (13, 4)],
    rank=1,
)

torch_encoder = partial(nn.TransformerEncoderLayer, 8, 2, 13, layer_norm_eps=0.01)
add("from_torch_encoder_layer", torch_encoder, encoder, *each(norm_first=yes_no, bias=yes_no))
add("from_torch_encoder_layer", torch_encoder, encoder, *each(activation=["gelu", nn.GELU(), nn.ReLU(), torch.relu]))
add("from_torch_encoder_layer", torch_encoder, encoder, {"batch_first": True})
add("from_torch_encoder_layer", encoder_without_biases, encoder, *each(output_has_bias=yes_no))

add("from_timm_attention", vit, on_tokens, {}, {"qkv_bias": True}, {"proj_bias": False}, {"attn_head_dim": 3})
add("from_timm_attention", vit, on_tokens, *each(qk_norm=[True], norm_layer=[nn.LayerNorm, vit_norm]))
add("from_timm_attention", vit, on_tokens, GATED, {"qkv_bias": True, **GATED})
add("from_timm_attention", attention_of_vit, on_tokens, shapes=[(192, 5)], rank=1)
add("from_timm_attention", partial(BeitAttention, 8, 2), on_tokens, {}, {"qkv_bias": True})
add("from_timm_attention", partial(RelPosAttention, 8, 2, qk_norm=True), on_tokens)
add("from_timm_attention", partial(EfficientAttention, 8, head_dim=4), on_tokens, {}, {"qkv_bias": False})
add("from_timm_attention", partial(metaformer.Attention, 8, head_dim=4), on_tokens)
add("from_timm_attention", partial(visformer.Attention, 8, 2, head_dim_ratio=0.5), on_map)
add("from_timm_attention", partial(fastvit.Attention, 8, 4, qkv_bias=True), on_map)
map_attention = partial(TimmAttention2d, 8, 12, num_heads=4)
add("from_timm_attention2d", map_attention, on_map, *each(head_first=yes_no, expand_first=yes_no, bias=yes_no))
queries = partial(MultiQueryAttention2d, 8, num_heads=4)
add("from_timm_multi_query_attention2d", queries, on_map, {}, {"use_bias": True})
add("from_timm_multi_query_attention2d", queries, on_map, {"key_dim": 3, "value_dim": 5, "dim_out": 6})
bottleneck = partial(BottleneckAttn, 8, feat_size=(3, 5), num_heads=2)
add("from_timm_bottleneck_attn", bottleneck, on_map, {}, {"qkv_bias": True}, {"scale_pos_embed": True})
add("from_timm_bottleneck_attn", bottleneck, on_map, {"dim_head": 5}, {"dim_out": 12, "dim_head": 5})

for kind in ("Attention2d", "AttentionCl"):
    variants = each(head_first=yes_no, rel_pos_cls=REL_POS)
    add("from_timm_maxxvit_attention", partial(maxvit, kind), run_maxvit, *variants)
    for partition, pattern in (("block", va.Window((3, 5))), ("grid", va.Grid((3, 5)))):
        make = partial(maxvit_partition, f"Partition{kind}", partition)
        inside = {"part": "attn", "shapes": [(8, 9, 10)], "pattern": pattern}
        add("from_timm_maxxvit_attention", make, run_maxvit, *each(rel_pos=["bias", "bias_tf", ""]), **inside)

swin = partial(ShiftedWindowAttention, 8, [2, 3], num_heads=2)
for size, bias in (((2, 9), False), ((8, 3), True), ((5, 7), True)):
    variants = each(shift_size=[[0, 0], [1, 2]], qkv_bias=[bias], proj_bias=[bias])
    add("from_torchvision_swin", swin, channels_last, *variants, shapes=[(8, *size)])

swin_v2 = partial(ShiftedWindowAttentionV2, 8, [2, 3], num_heads=2)
variants = each(shift_size=[[0, 0], [1, 1]], qkv_bias=yes_no)
add("from_torchvision_swin", swin_v2, channels_last, *variants, shapes=[(8, 5, 7)])
timm_swin, timm_swin_v2 = timm.models.swin_transformer, timm.models.swin_transformer_v2
for make, size in ((timm_swin.SwinTransformerBlock, (9, 10)), (timm_swin_v2.SwinTransformerV2Block, (9, 10))):
    make = partial(make, 8, size, 2, window_size=(3, 5))
    around = {"part": "attn", "shapes": [(8, *size)]}
    add("from_timm_swin", make, run_timm_swin, **around)
    add("from_timm_swin", make, run_timm_swin, {"shift_size": (1, 2)}, shift=(1, 2), **around)
    add("from_timm_swin", make, run_timm_swin, part="attn", shapes=[(8, 8, 11)])

given_groups = partial(TorchvisionMaxVit, 8, head_dim=2, max_seq_len=9)
for kind, pattern in (("window", va.Window), ("grid", va.Grid)):
    run = partial(in_groups, kind=kind)
    add("from_torchvision_maxvit", given_groups, run, shapes=[(8, 6, 9)], pattern=pattern(3))
    inside = {"part": "attn_layer.1", "shapes": [(8, 6, 6)], "pattern": pattern(2)}
    add("from_torchvision_maxvit", partial(torchvision_partition, kind), run_torchvision, **inside)


@pytest.mark.parametrize(
    ("name", "make", "variant", "part", "run", "shapes", "options"),
    PARITY,
    ids=[re.sub(" at 0x[0-9a-f]+", "", f"{name}-{case[1]}-{case[4]}-{case[5]}") for name, *case in PARITY],
)
def test_a_block_computes_what_its_source_does(name, make, variant, part, run, shapes, options):
    layer = randomised(make(**variant))
    block = getattr(convert, name)(layer.get_submodule(part), **options)
    if name.endswith("_swin"):
        assert isinstance(block, PaddedAttention2d)
    else:
        others = {"from_torch_encoder_layer": va.TransformerBlock2d}
        assert type(block) is others.get(name, BLOCKS[len(shapes[0]) - 1])
    assert_same(block, partial(run, layer), *shapes, atol=1e-10 if shapes[0][0] > 8 else 1e-11)


def test_every_converter_is_in_one_of_the_tables():
    others = {"ConversionError", "from_keras_gqa", "from_keras_mha", "from_linear_projections"}
    others |= {"convert_file", "read_keras_weights", "to_diffusers_attention", "to_timm_attention", "to_torch_mha"}
    others |= {name for name, *_ in CONVERTED.values()} - {"from_timm_multi_query_attention2d"}
    assert set(convert.__all__) == {name for name, *_ in PARITY} | others == set(SOURCES) | others


def test_torchs_mask_is_ours_the_other_way_round():
    layer = randomised(nn.MultiheadAttention(8, 2, batch_first=True))
    x, mask = torch.randn(2, 8, 3, 4, dtype=torch.float64), torch.rand(12, 12) < 0.5
    mask.fill_diagonal_(False)
    expected, _ = layer(tokens(x), tokens(x), tokens(x), attn_mask=mask)
    got = convert.from_torch_mha(layer)(x, mask=~mask)
    torch.testing.assert_close(tokens(got), expected, rtol=0, atol=1e-12)


def test_a_converted_block_is_the_one_that_its_arguments_make():
    block = convert.from_timm_attention(randomised(vit(qkv_bias=True, attn_head_dim=3, dim_out=10, **GATED)))
    expected = va.Attention2d(8, 2, key_dim=3, value_dim=3, out_channels=10, output_gate=HAS_GATE, dtype=torch.float64)
    expected.load_state_dict(block.state_dict())
    x = torch.randn(1, 8, 3, 4, dtype=torch.float64)
    assert torch.equal(expected(x), block(x))


def test_what_the_block_has_of_its_sources():
    block = convert.from_timm_bottleneck_attn(BottleneckAttn(8, feat_size=(3, 5), num_heads=2))
    assert block.position.specification == va.RelPosDecomposed(feat_size=(3, 5))
    block = convert.from_torchvision_swin(ShiftedWindowAttention(8, [2, 3], [1, 2], 2))
    assert block.pattern == va.Window((2, 3), (1, 2))
    assert convert.from_torchvision_maxvit(TorchvisionMaxVit(8, 2, 9), pattern=va.Window(3)).scale == 8**-0.5
    assert convert.from_timm_multi_query_attention2d(MultiQueryAttention2d(8, num_heads=4)).num_kv_heads == 1


@pytest.mark.parametrize("shift", [[0, 0], [1, 2]])
def test_torchvision_swin_attends_to_its_padding_and_so_does_the_block(shift):
    layer = randomised(ShiftedWindowAttention(8, [2, 3], shift, 2))
    block = convert.from_torchvision_swin(layer)
    for size in [(2, 4), (3, 3), (5, 7), (1, 1), (4, 6)]:
        x = torch.randn(2, 8, *size, dtype=torch.float64)
        torch.testing.assert_close(block(x), channels_last(layer, x), rtol=0, atol=1e-12)
        torch.testing.assert_close(block(x[0]), block(x)[0], rtol=0, atol=1e-12)
    x = torch.randn(1, 8, 5, 7, dtype=torch.float64).to(memory_format=torch.channels_last)
    assert block(x).is_contiguous(memory_format=torch.channels_last)
    mask = torch.ones(35, 35, dtype=torch.bool)
    with pytest.raises(
        ValueError, match="mask and context must be None for a map of 5×7, which is padded to whole wind"
    ):
        block(x, mask)
    plain = va.Attention2d(8, 2, pattern=block.pattern, position=va.RelPosTable(), dtype=torch.float64)
    plain.load_state_dict(block.state_dict())
    assert (plain(x) - block(x)).abs().max() > 0.01


def test_a_shift_of_timms_swin_is_for_maps_of_whole_windows():
    block = convert.from_timm_swin(SOURCES["from_timm_swin"](), shift=1)
    assert block(torch.randn(2, 8, 6, 10)).shape == (2, 8, 6, 10)
    with pytest.raises(ValueError, match=r"x must be of whole windows of \(3, 5\), .*; got 7×10: pad it"):
        block(torch.randn(2, 8, 7, 10))


# --- separate projections ---------------------------------------------------------------------------------------------


def projections(kind, heads, kv_heads, key_dim, value_dim, *, channels=6, context=None, out=7, bias=(True, True)):
    sizes = {
        "q": (channels, heads * key_dim),
        "k": (context or channels, kv_heads * key_dim),
        "v": (context or channels, kv_heads * value_dim),
        "out": (heads * value_dim, out),
    }
    kernel = () if kind is nn.Linear else (1,)
    return {
        name: randomised(kind(*size, *kernel, bias=bias[name == "out"]), seed)
        for seed, (name, size) in enumerate(sizes.items())
    }


def grouped_attention(layers, heads, kv_heads, scale):
    """The definition, head by head."""

    def project(name, t):
        return F.linear(t, layers[name].weight.flatten(1), layers[name].bias)

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
    rank=st.integers(1, 3),
)
def test_separate_projections(kind, kv_heads, group, key_dim, value_dim, context, scale, bias, rank):
    heads = kv_heads * group
    layers = projections(kind, heads, kv_heads, key_dim, value_dim, context=context, bias=bias)
    block = convert.from_linear_projections(**layers, num_heads=heads, num_kv_heads=kv_heads, scale=scale, rank=rank)
    others = [] if context is None else [(context, 4, 4, 2)[: rank + 1]]
    assert_same(block, grouped_attention(layers, heads, kv_heads, scale), (6, 3, 5, 2)[: rank + 1], *others)


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_a_padding_that_has_a_name_pads_nothing(padding):
    layers = projections(nn.Conv2d, 2, 2, 3, 3)
    layers["q"].padding = padding
    block = convert.from_linear_projections(**layers, num_heads=2)
    assert_same(block, grouped_attention(layers, 2, 2, None), (6, 3, 5))


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("exchanged", "heads", "message"),
    [
        ({"q": nn.Conv2d(6, 12, 3)}, (4, 2), r"q must be .* kernel_size 1; got \(3, 3\)"),
        ({"q": nn.Conv2d(6, 12, 1, stride=2)}, (4, 2), r"q must be .* stride 1; got \(2, 2\)"),
        ({"q": nn.Conv2d(6, 12, 1, padding=1)}, (4, 2), r"q must be .* padding 0; got \(1, 1\)"),
        ({"k": nn.Conv2d(6, 6, 1, groups=2)}, (4, 2), "k must be .* groups 1; got 2"),
        ({"v": nn.Identity()}, (4, 2), r"v must be .*; got torch.*\.Identity"),
        ({"q": None}, (4, 2), "q must be .*; got builtins.NoneType"),
        ({"q": Doubled(6, 12)}, (4, 2), "q must be a plain nn.Linear .*Doubled computes more"),
        ({"q": nn.DataParallel(nn.Linear(6, 12))}, (4, 2), "got torch.*DataParallel: take q.module, which it wraps"),
        ({}, (0, 2), "^num_heads must be"),
        ({}, (4, 0), "^num_kv_heads must be"),
        ({}, (4, 3), "^num_kv_heads must divide num_heads"),
        ({"v": nn.Linear(6, 7)}, (4, 2), "num_kv_heads must divide the rows of v"),
        ({}, (5, 5), "num_heads must divide the rows of q"),
        ({"v": nn.Linear(6, 8)}, (4, 4), "rows of k must be 12, .*; got 6"),
        ({"out": nn.Linear(8, 6)}, (4, 2), "channels of out must be 12, .*; got 8"),
        ({"v": nn.Linear(5, 6)}, (4, 2), "channels of v must be 6, .*; got 5"),
        ({"k": nn.Linear(6, 6, bias=False)}, (4, 2), "q, k, v must all have a bias, .* got none for k"),
        ({"q": nn.Linear(5, 12, bias=False)}, (4, 2), "q, k, v must all have a bias, .* got none for q"),
    ],
)
def test_projections_that_do_not_fit_are_refused(exchanged, heads, message):
    layers = {"q": nn.Linear(6, 12), "k": nn.Linear(6, 6), "v": nn.Linear(6, 6), "out": nn.Linear(12, 6), **exchanged}
    with pytest.raises(ValueError, match=message):
        convert.from_linear_projections(**layers, num_heads=heads[0], num_kv_heads=heads[1])


def test_projections_keep_their_type_and_are_trained_where_they_were():
    layers = [nn.Linear(8, 8).to(torch.bfloat16) for _ in range(4)]
    layers[3].requires_grad_(False)
    with torch.no_grad():
        block = convert.from_linear_projections(*layers, 2)
    assert {p.dtype for p in block.parameters()} == {torch.bfloat16}
    assert {key for key, p in block.named_parameters() if not p.requires_grad} == {"proj.weight", "proj.bias"}


class Llama(nn.Module):
    """As of transformers: a rotation is an argument of the call."""

    def __init__(self, **parts):
        super().__init__()
        self.layers = nn.ModuleDict(projections(nn.Linear, 2, 2, 3, 3))
        self.drop = nn.Dropout()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return x


class Rotated(Llama):
    def forward(self, x, position_embeddings):
        return x


def test_projections_of_a_module_that_does_more_with_them_are_refused():
    given = Llama()
    assert convert.from_linear_projections(**given.layers, num_heads=2, parent=given) is not None
    for parent, part in (
        (Llama(q_norm=nn.RMSNorm(3, elementwise_affine=False)), "q_norm"),
        (Llama(sinks=nn.Parameter(torch.ones(2))), "sinks"),
        (Llama(processor=object()), "processor"),
        (Rotated(), "position_embeddings"),
    ):
        with pytest.raises(ValueError, match=rf"does more than its projections say: .* for its {part}; give no parent"):
            convert.from_linear_projections(**parent.layers, num_heads=2, parent=parent)


# --- Keras ------------------------------------------------------------------------------------------------------------


def built(layer, query, value=None, key=None):
    """The layer built for these shapes, with random numbers for every weight."""
    shapes = [(None, *query), (None, *(value or query)), *([(None, *key)] if key else [])]
    layer.build(*shapes)
    generator = torch.Generator().manual_seed(0)
    for variable in layer.weights:
        variable.assign(torch.randn(variable.shape, generator=generator, dtype=torch.float64) * 0.4)
    return layer


def run_keras(layer, x, context=None):
    query, value = (y.movedim(1, -1) for y in (x, x if context is None else context))
    # With the weights asked for, Keras computes them in float64; its fused kernel rounds them to float32.
    y, _ = layer(query, value, training=False, return_attention_scores=True)
    return y.movedim(-1, 1)


@pytest.mark.parametrize(
    ("options", "size", "pattern"),
    [
        ({}, (7,), "full"),
        ({"attention_axes": (1,)}, (7,), "full"),
        ({}, (3, 5), "full"),
        ({"attention_axes": (1, 2)}, (3, 5), "full"),
        ({"attention_axes": (1,)}, (3, 5), "columns"),
        ({"attention_axes": (2,)}, (3, 5), "rows"),
        ({"attention_axes": (-2,)}, (3, 5), "rows"),
        ({}, (2, 3, 4), "full"),
        ({"attention_axes": (3,)}, (2, 3, 4), "rows"),
        ({"attention_axes": (1, 3)}, (2, 3, 4), va.Pattern("b n d t h w -> (b h) n (t w) d")),
        ({"num_heads": 1}, (3, 5), "full"),
        ({"use_bias": False}, (3, 5), "full"),
        ({"value_dim": 5}, (3, 5), "full"),
        ({"output_shape": 4}, (3, 5), "full"),
        ({"output_shape": (4,), "value_dim": 1}, (3, 5), "full"),
        ({"use_gate": True}, (3, 5), "full"),
        ({"use_gate": True, "num_heads": 4, "use_bias": False, "value_dim": 2}, (3, 5), "full"),
        ({"dropout": 0.3}, (3, 5), "full"),
    ],
    ids=str,
)
def test_keras_multihead(keras, options, size, pattern):
    layer = keras.layers.MultiHeadAttention(**{"num_heads": 2, "key_dim": 3, "dtype": "float64", **options})
    block = convert.from_keras_mha(built(layer, (*size, 6)))
    assert type(block) is BLOCKS[len(size)]
    assert block.pattern == pattern
    assert (block.attn_drop, block.proj_drop.p) == (options.get("dropout", 0.0), 0.0)
    frozen = {name for name, p in block.named_parameters() if not p.requires_grad}
    assert frozen == ({"gate.bias"} if "use_gate" in options and "use_bias" in options else set())
    assert_same(block, partial(run_keras, layer), (6, *size))


@pytest.mark.parametrize("channels", [6, 7])
def test_keras_multihead_between_two_maps(keras, channels):
    layer = built(keras.layers.MultiHeadAttention(2, 3, dtype="float64"), (3, 5, 6), (4, 2, channels))
    block = convert.from_keras_mha(layer)
    assert block.context_channels == (None if channels == 6 else channels)
    assert_same(block, partial(run_keras, layer), (6, 3, 5), (channels, 4, 2))


@pytest.mark.parametrize("options", [{}, {"use_bias": False, "use_gate": True}, {"use_gate": True}], ids=str)
@pytest.mark.parametrize("value", [None, (9, 5)])
def test_keras_grouped_query_attention(keras, options, value):
    layer = built(keras.layers.GroupQueryAttention(3, 6, 2, dtype="float64", **options), (7, 8), value)
    block = convert.from_keras_gqa(layer)
    assert (type(block), block.num_heads, block.num_kv_heads) == (va.Attention1d, 6, 2)
    others = [] if value is None else [value[::-1]]
    assert_same(block, partial(run_keras, layer), (8, 7), *others)


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


def test_a_keras_layer_built_for_sizes_that_are_not_known_is_taken(keras):
    layer = built(keras.layers.MultiHeadAttention(2, 3, attention_axes=(2,)), (None, None, 6), (4, 5, 6))
    assert convert.from_keras_mha(layer).pattern == "rows"


DENSE = ("_query_dense", "_key_dense", "_value_dense", "_output_dense", "_gate_dense")


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # in Keras, which quantizes
def test_keras_layers_that_are_refused(keras):
    mha, gqa, shape = keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention, (3, 5, 6)

    def dense(name, change, *arguments):
        layer = built(mha(2, 3, use_gate=True), shape)
        getattr(getattr(layer, name), change)(*arguments)
        return layer

    for layer, message in (
        (mha(2, 3), "layer must be built"),
        (built(mha(2, 3, sliding_window=2), (7, 6)), r"\.sliding_window .* got 2"),
        (built(mha(2, 3, output_shape=(2, 2)), shape), r"_output_dense\.kernel\.shape"),
        (built(mha(2, 3), (5, 6), (4, 7), (4, 6)), r"_key_dense\.kernel\.shape .* give keys 7 channels"),
        (built(mha(2, 3), shape, (4, 6)), r"_key_dense\.equation"),
        (built(mha(2, 3), (2, 2, 2, 2, 6)), "rank must be 3, 4 or 5"),
        (keras.layers.Dense(3), r"layer must be a keras\.src.*MultiHeadAttention; got keras\.src.*Dense"),
        *((dense(name, "enable_lora", 2), rf"{name}\.lora_enabled") for name in DENSE),
        *((dense(name, "quantize", "int8"), rf"{name}\.quantization_mode") for name in DENSE[-2:]),
    ):
        with pytest.raises(ValueError, match=message):
            convert.from_keras_mha(layer)
    with pytest.raises(ValueError, match=r"layer must be a keras\.src.*GroupedQueryAttention"):
        convert.from_keras_gqa(mha(2, 3))
    with pytest.raises(ValueError, match=r"query_shape=\(None, 3, 5, 6\)"):
        convert.from_keras_gqa(built(gqa(3, 4, 2), shape))


def test_a_keras_layer_of_another_backend_is_refused():
    kind = type("MultiHeadAttention", (), {"__module__": "keras.src.layers.attention.multi_head_attention"})
    with pytest.raises(ValueError, match=r"in the torch backend of Keras.* set KERAS_BACKEND=torch before"):
        convert.from_keras_mha(kind())


def halving(layer):
    call = layer.call
    layer.call = lambda *args, **kwargs: call(*args, **kwargs) / 2


CHANGES = {
    "factor": lambda layer: setattr(layer, "factor", 1.25),
    "call": halving,
    "scale": lambda layer: setattr(layer, "_inverse_sqrt_key_dim", 1.0),
    "activation": lambda layer: setattr(layer._output_dense, "activation", torch.tanh),
}


@pytest.mark.parametrize(
    ("change", "dtype"),
    [*((change, "float64") for change in CHANGES), ("call", "bfloat16"), ("scale", "mixed_float16")],
)
def test_a_keras_layer_that_does_what_its_configuration_does_not_say_is_found_out(keras, change, dtype):
    class Scaled(keras.layers.MultiHeadAttention):
        factor = 1.0

        def call(self, *args, **kwargs):
            return super().call(*args, **kwargs) * self.factor

    layer = built(Scaled(2, 9, use_bias=False, dtype=dtype), (3, 5, 6))
    layer._output_dense.set_weights([torch.zeros(2, 9, 6)])  # its own numbers would hide any difference
    assert isinstance(convert.from_keras_mha(layer), va.Attention2d)
    CHANGES[change](layer)
    with pytest.raises(ConversionError, match="what was made of this Scaled does not compute"):
        convert.from_keras_mha(layer)


def test_a_keras_layer_that_cannot_be_run_is_refused(keras):
    layer = built(keras.layers.MultiHeadAttention(2, 3), (3, 5, 6))
    layer.call = lambda *args: None
    with pytest.raises(ConversionError, match="MultiHeadAttention cannot be run"):
        convert.from_keras_mha(layer)


HOOKS = {
    "register_forward_pre_hook": "forward pre hooks",
    "register_forward_hook": "forward hooks",
    "register_full_backward_pre_hook": "backward pre hooks",
    "register_full_backward_hook": "backward hooks",
}


def assert_hooks_are_refused(converter, source, *parts):
    for part in parts:
        for register, name in HOOKS.items():
            hook = getattr(part, register)(lambda *_: None)
            with pytest.raises(ValueError, match=f"has {name}, which cannot be carried over"):
                converter(source)
            hook.remove()
    assert converter(source) is not None


def test_a_keras_layer_with_hooks_is_refused(keras):
    layer = built(keras.layers.MultiHeadAttention(2, 3), (3, 5, 6))
    assert_hooks_are_refused(convert.from_keras_mha, layer, layer, layer._query_dense, layer._output_dense)


# --- what all of them keep --------------------------------------------------------------------------------------------

SOURCES = {
    "from_torch_mha": lambda: nn.MultiheadAttention(8, 2),
    "from_torch_encoder_layer": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "from_timm_attention": partial(vit, qkv_bias=True, qk_norm=True, norm_layer=nn.LayerNorm, **GATED),
    "from_timm_attention2d": lambda: TimmAttention2d(8, num_heads=2, head_first=True),
    "from_timm_multi_query_attention2d": lambda: MultiQueryAttention2d(8, num_heads=2),
    "from_timm_bottleneck_attn": lambda: BottleneckAttn(8, feat_size=(3, 5), num_heads=2),
    "from_timm_maxxvit_attention": lambda: maxxvit.Attention2d(8, dim_head=4, rel_pos_cls=REL_POS[2]),
    "from_timm_swin": lambda: timm_swin.WindowAttention(8, 2, window_size=(3, 5)),
    "from_torchvision_swin": lambda: ShiftedWindowAttention(8, [2, 3], [1, 1], 2),
    "from_torchvision_maxvit": lambda: TorchvisionMaxVit(8, 4, 9),
}


@pytest.mark.parametrize("name", SOURCES)
def test_type_mode_and_whether_it_is_trained_are_kept_and_the_source_is_left_as_it_is(name):
    for training in (True, False):
        source = SOURCES[name]().to(torch.bfloat16).train(training)
        before = {key: x.clone() for key, x in source.state_dict().items()}
        state = torch.get_rng_state()
        block = getattr(convert, name)(source)
        assert torch.equal(torch.get_rng_state(), state)
        assert {module.training for module in block.modules()} == {training}
        assert {module.training for module in source.modules()} == {training}
        assert {(p.dtype, p.device) for p in block.parameters()} == {(torch.bfloat16, torch.device("cpu"))}
        assert all(p.is_contiguous() for p in block.parameters())
        own = {"proj.weight"} if name == "from_timm_bottleneck_attn" else set()
        assert {key for key, p in block.named_parameters() if not p.requires_grad} == own
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.fill_(7.0)
        assert all(torch.equal(x, before[key]) for key, x in source.state_dict().items())
        assert not any(p.requires_grad for p in getattr(convert, name)(source.requires_grad_(False)).parameters())


@pytest.mark.parametrize("name", SOURCES)
def test_a_block_made_without_gradients_can_be_trained(name):
    source = SOURCES[name]()
    with torch.inference_mode():
        block = getattr(convert, name)(source)
    size = {"from_torchvision_maxvit": (3, 3)}.get(name, (3, 5))
    block(torch.randn(2, 8, *size)).sum().backward()
    assert all(p.grad is not None for p in block.parameters() if p.requires_grad)


def drops(block):
    return block.attn_drop, block.proj_drop.p


def test_dropouts_are_carried():
    assert drops(convert.from_torch_mha(nn.MultiheadAttention(8, 2, dropout=0.3))) == (0.3, 0.0)
    swin = ShiftedWindowAttention(8, [2, 3], [0, 0], 2, True, True, 0.1, 0.2)
    assert drops(convert.from_torchvision_swin(swin)) == (0.1, 0.2)
    layer = nn.TransformerEncoderLayer(8, 2, dropout=0.25)
    layer.self_attn.dropout, layer.dropout1.p = 0.125, 0.5
    block = convert.from_torch_encoder_layer(layer)
    assert (*drops(block.attn), block.mlp_drop.p) == (0.125, 0.5, 0.25)
    layer.dropout = layer.dropout1 = layer.dropout2 = nn.Identity()
    block = convert.from_torch_encoder_layer(layer)
    assert (*drops(block.attn), block.mlp_drop.p) == (0.125, 0.0, 0.0)
    both = {"attn_drop": 0.1, "proj_drop": 0.2}
    for converter, layer, last in (
        (convert.from_timm_attention, vit(**both), "proj_drop"),
        (convert.from_timm_attention2d, TimmAttention2d(8, None, 2, **both), "proj_drop"),
        (convert.from_timm_multi_query_attention2d, MultiQueryAttention2d(8, None, 2, **both), "output__drop"),
        (convert.from_timm_maxxvit_attention, maxxvit.AttentionCl(8, dim_head=4, **both), "proj_drop"),
    ):
        assert drops(converter(layer)) == (0.1, 0.2), converter.__name__
        without = changed(layer, **{"attn_drop": nn.Identity(), last: nn.Identity()})
        assert drops(converter(without)) == (0.0, 0.0), converter.__name__


# --- what is refused --------------------------------------------------------------------------------------------------

normed = partial(vit, qk_norm=True, norm_layer=nn.LayerNorm)
#: By converter: what a source may not have, and such a source.
REFUSED = {
    "from_torch_mha": [
        ("bias_k", lambda: mha(add_bias_kv=True)),
        ("add_zero_attn", lambda: mha(add_zero_attn=True)),
    ],
    "from_torch_encoder_layer": [
        ("activation", lambda: encoder_layer(activation=F.silu)),
        ("activation", lambda: encoder_layer(activation=nn.GELU(approximate="tanh"))),
        ("norm1", lambda: changed(encoder_layer(), norm1=nn.RMSNorm(8))),
        ("norm1", lambda: changed(encoder_layer(), norm1=nn.LayerNorm(8, elementwise_affine=False))),
        ("norm2.eps", lambda: changed(encoder_layer(), norm2__eps=0.1)),
        ("norm2.bias", lambda: changed(encoder_layer(), norm2=nn.LayerNorm(8, bias=False))),
        ("linear2.bias", lambda: changed(encoder_layer(), linear2=nn.Linear(16, 8, bias=False))),
        ("linear2.bias", lambda: changed(encoder_layer(), linear1=nn.Linear(8, 16, bias=False))),
        ("self_attn.kdim", lambda: changed(encoder_layer(), self_attn=mha(kdim=5, vdim=5))),
        ("add_zero_attn", lambda: changed(encoder_layer(), self_attn__add_zero_attn=True)),
        ("dropout2", lambda: changed(encoder_layer(), dropout2__p=0.5)),
        ("dropout", lambda: changed(encoder_layer(), dropout=nn.Dropout1d(0.1))),
        ("dropout1", lambda: changed(encoder_layer(), dropout1=nn.Dropout1d(0.1))),
        ("dropout2", lambda: changed(encoder_layer(), dropout2=nn.Dropout1d(0.1))),
    ],
    "from_timm_attention": [
        ("attn_drop", lambda: changed(vit(), attn_drop=nn.AlphaDropout(0.1))),
        ("k_norm", lambda: changed(normed(), q_norm=nn.Identity())),
        ("k_norm", lambda: changed(normed(), k_norm=nn.Identity())),
        ("q_norm", lambda: vit(qk_norm=True, norm_layer=RmsNorm)),
        ("q_norm", lambda: vit(qk_norm=True, norm_layer=lambda d, **kw: nn.LayerNorm(d, bias=False))),
        ("norm", lambda: vit(scale_norm=True, norm_layer=nn.LayerNorm)),
        ("rel_pos", lambda: RelPosAttention(8, 2, rel_pos_cls=REL_POS[1])),
        ("relative_position_bias_table", lambda: BeitAttention(8, 2, window_size=(2, 3))),
        ("sr", lambda: EfficientAttention(8, head_dim=4, sr_ratio=2)),
    ],
    "from_timm_multi_query_attention2d": [
        ("kv_stride", lambda: queries(kv_stride=2)),
        ("query_strides", lambda: queries(query_strides=2)),
    ],
    "from_timm_bottleneck_attn": [("pool", lambda: BottleneckAttn(8, feat_size=(4, 6), stride=2))],
    "from_timm_maxxvit_attention": [
        ("rel_pos", lambda: maxvit("Attention2d", rel_pos_cls=partial(RelPosMlp, window_size=(3, 5)))),
        ("rel_pos.prefix_tokens", lambda: maxvit("Attention2d", rel_pos_cls=partial(REL_POS[1], prefix_tokens=1))),
    ],
}


@pytest.mark.parametrize(
    ("name", "attribute", "make"), [(name, *source) for name, sources in REFUSED.items() for source in sources]
)
def test_what_the_block_does_not_do_is_refused_by_name(name, attribute, make):
    with pytest.raises(ValueError, match=rf"(?s)^\w+\.{attribute} cannot be carried over: got "):
        getattr(convert, name)(make())


class Adapted(nn.Module):
    """As of a library of adapters: a layer in another one, which has no weight of its own."""

    def __init__(self, layer):
        super().__init__()
        self.base_layer = layer

    def forward(self, x):
        return self.base_layer(x)


@pytest.mark.parametrize("name", SOURCES)
def test_projections_that_are_wrapped_or_exchanged_are_refused(name):
    for path, layer in SOURCES[name]().named_modules():
        if not isinstance(layer, (nn.Linear, nn.Conv2d)):
            continue
        for part, message in (
            (nn.Identity(), "torch.nn.modules.linear.Identity: merge adapters, and convert before quantizing"),
            (Adapted(layer), r".*\.Adapted: merge adapters"),
            (nn.DataParallel(layer), r"torch.*: take \w+.*\.module, which it wraps"),
        ):
            message = rf"\w\.{path.split('.', 1)[-1]} must be an nn.Linear or a 1×1 convolution; got {message}"
            with pytest.raises(ValueError, match=message):
                getattr(convert, name)(changed(SOURCES[name](), **{path.replace(".", "__"): part}))


@pytest.mark.parametrize("name", SOURCES)
def test_hooks_are_refused(name):
    source = SOURCES[name]()
    *_, part = source.children()
    assert_hooks_are_refused(getattr(convert, name), source, source, part)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("from_torch_encoder_layer", "self_attn"),
        ("from_torch_encoder_layer", "dropout1"),
        ("from_timm_attention", "attn_drop"),
        ("from_timm_multi_query_attention2d", "output.drop"),
    ],
)
def test_dropouts_in_another_mode_are_refused(name, path):
    source = SOURCES[name]()
    source.get_submodule(path).eval()
    with pytest.raises(ValueError, match=rf"one mode; got (\w+) with training=True and \1.{path} with training=False"):
        getattr(convert, name)(source)
    # That of a projection does not matter.
    assert not convert.from_timm_attention(changed(vit().eval(), proj=nn.Linear(8, 8))).training


@pytest.mark.parametrize("name", SOURCES)
def test_parametrizations_are_refused_and_not_run(name):
    source = SOURCES[name]()
    linear = next(part for part in source.modules() if isinstance(part, (nn.Linear, nn.Conv2d)))
    parametrizations.spectral_norm(linear)
    before = {key: x.clone() for key, x in source.state_dict().items()}
    with pytest.raises(ValueError, match=r"has parametrizations, .*remove_parametrizations\(…, leave_parametrized=T"):
        getattr(convert, name)(source)
    assert all(torch.equal(x, before[key]) for key, x in source.state_dict().items())


@pytest.mark.parametrize("name", SOURCES)
def test_what_is_of_another_kind_or_has_no_weights_is_refused(name):
    converter, source = getattr(convert, name), SOURCES[name]()
    for other, got in (
        (nn.Linear(8, 8), "torch.nn.modules.linear.Linear$"),
        (None, "builtins.NoneType$"),
        (nn.DataParallel(source), ".*: take module.module, which it wraps"),
    ):
        with pytest.raises(ValueError, match=rf"module must be a .*; got {got}"):
            converter(other)
    with pytest.raises(ConversionError, match=r"cannot be copied, .* meta tensor; no data"):
        converter(source.to("meta"))


def test_quantized_layers_are_refused():
    """Of torch, which are of another class, and of bitsandbytes, which are linear layers of integers."""
    with warnings.catch_warnings(action="ignore"):  # torch's quantization is on its way out
        quantized = torch.ao.quantization.quantize_dynamic(encoder_layer().eval(), {nn.Linear})
    with pytest.raises(
        ValueError, match=r"got torch.*quantized.*Linear: merge adapters, and convert before quantizing"
    ):
        convert.from_torch_encoder_layer(quantized)
    layer = mha()
    layer.out_proj.weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"MultiheadAttention.out_proj must be .*: .* convert before quantizing"):
        convert.from_torch_mha(layer)


def test_an_encoder_with_other_attention_is_refused():
    with pytest.raises(ValueError, match=r"module.self_attn must be a torch.*MultiheadAttention; got .*Identity"):
        convert.from_torch_encoder_layer(changed(encoder_layer(), self_attn=nn.Identity()))


@pytest.mark.parametrize("name", ["from_timm_maxxvit_attention", "from_torchvision_maxvit"])
def test_only_windows_and_grids_are_patterns_of_maxvit(name):
    for pattern in ("rows", va.Window(3, shift=1), va.Window(3, shift=(0, 1)), va.Neighborhood(3)):
        with pytest.raises(ValueError, match="pattern must be 'full', a Window without shift or a Grid"):
            getattr(convert, name)(SOURCES[name](), pattern=pattern)
    with pytest.raises(ValueError, match=r"feat_size must be that of the pattern's groups, \(7, 7\); got"):
        getattr(convert, name)(SOURCES[name](), pattern=va.Window(7))


@pytest.mark.parametrize("name", ["from_torch_mha", "from_timm_attention", "from_linear_projections"])
def test_a_rank_that_no_map_has_is_refused(name):
    arguments = [SOURCES[name]()] if name in SOURCES else [nn.Linear(8, 8) for _ in range(4)] + [2]
    for rank in (0, 4, True, "2", 2.0, [2]):
        with pytest.raises(ValueError, match="rank must be the axes of a map, 1, 2 or 3"):
            getattr(convert, name)(*arguments, rank=rank)


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
    ("room", "function", "name"),
    [
        ("timm_tokens", "heads_first", "from_timm_attention2d"),
        ("timm_tokens", "heads_first", "from_timm_maxxvit_attention"),
        ("timm_tokens", "rows_of", "from_timm_attention"),
        ("timm_maps", "rows_of", "from_timm_multi_query_attention2d"),
        ("timm_maps", "rows_of", "from_timm_bottleneck_attn"),
        ("torch_layers", "rows_of", "from_torch_mha"),
        ("torch_layers", "rows_of", "from_torch_encoder_layer"),
        ("timm_tokens", "rows_of", "from_torchvision_swin"),
        ("maxvit", "rows_of", "from_torchvision_maxvit"),
    ],
)
def test_rows_in_a_wrong_order_are_found_out_even_where_the_output_is_zero(monkeypatch, room, function, name):
    arguments = [SOURCES[name]()] if name in SOURCES else [nn.Linear(8, 8) for _ in range(4)] + [2]
    for layer in arguments:
        if isinstance(layer, nn.Module):
            for parameter in layer.parameters():
                nn.init.zeros_(parameter)
    getattr(convert, name)(*arguments)
    module = sys.modules[f"vision_attn.networks.convert.{room}"]
    wrong = unchanged if function == "heads_first" else backwards(module.rows_of)
    monkeypatch.setattr(module, function, wrong)
    with pytest.raises(ConversionError, match=r"does not compute what it does: outputs have a difference of [\d.]+"):
        getattr(convert, name)(*arguments)


def test_a_table_in_a_wrong_order_is_found_out(monkeypatch):
    module = sys.modules["vision_attn.networks.convert.maxvit"]
    monkeypatch.setitem(module.TABLES, "RelPosBiasTf", lambda table: table.flatten(1).T)
    with pytest.raises(ConversionError, match="outputs have a difference of"):
        convert.from_timm_maxxvit_attention(SOURCES["from_timm_maxxvit_attention"]())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keras_kernels_in_a_wrong_order_are_found_out(keras, monkeypatch, dtype):
    layer = built(keras.layers.MultiHeadAttention(2, 3, dtype=dtype), (3, 5, 6))
    module = sys.modules["vision_attn.networks.convert.keras_layers"]
    kernel_rows = module.kernel_rows
    monkeypatch.setattr(module, "kernel_rows", lambda kernel, bias: kernel_rows(kernel.flip(1), bias))
    with pytest.raises(ConversionError, match="what was made of this MultiHeadAttention does not compute"):
        convert.from_keras_mha(layer)


def altered(kind, change):
    """A layer of a subclass whose forward gives something else."""

    def forward(self, *args, **kwargs):
        return change(kind.forward(self, *args, **kwargs))

    return type("Altered", (kind,), {"forward": forward})(8, num_heads=2)


def times(factor):
    return lambda output: (factor * output[0], output[1])


REMEDY = "load its weights into a plain layer of its library, convert that, and do around the block what it did besides"


@pytest.mark.parametrize(
    ("name", "kind", "change", "message"),
    [
        ("from_torch_mha", nn.MultiheadAttention, times(2), "this Altered does not compute what it does"),
        ("from_torch_mha", nn.MultiheadAttention, times(1 + 1e-4), "outputs have a difference of"),
        ("from_torch_mha", nn.MultiheadAttention, times(float("nan")), "outputs have a difference of nan"),
        (
            "from_torch_mha",
            nn.MultiheadAttention,
            lambda y: (torch.cat([y[0], y[0]], -1), None),
            r"not \(5, 2, 16\)",
        ),
        ("from_torch_mha", nn.MultiheadAttention, lambda y: (None, None), "cannot be run .* it gives a NoneType"),
        (
            "from_timm_attention",
            TimmAttention,
            lambda y: y.nothing,
            r"this Altered cannot be run .* \(AttributeError: ",
        ),
    ],
)
def test_a_subclass_that_computes_something_else_is_found_out(name, kind, change, message):
    with pytest.raises(ConversionError, match=f"(?s){message}.*{REMEDY}$"):
        getattr(convert, name)(altered(kind, change))


def test_what_only_the_layers_call_adds_to_the_logits_is_not_taken_for_the_blocks():
    layer = BeitAttention(8, 2, window_size=(2, 3))
    known = replace(LAYERS["timm.models.beit.Attention"], around={})  # whose table would be refused by name
    with pytest.raises(ConversionError, match="what was made of this Attention does not compute"):
        converted(layer, known)


@pytest.mark.parametrize("trained", [True, False])
def test_an_encoder_layer_is_not_proven_by_the_kernel_that_passes_over_its_parts(trained):
    layer = changed(encoder_layer(batch_first=True), linear1=Doubled(8, 16)).requires_grad_(trained)
    with pytest.raises(ConversionError, match="TransformerEncoderLayer does not compute what it does"):
        convert.from_torch_encoder_layer(layer)


def test_what_cannot_be_copied_is_refused():
    layer = nn.MultiheadAttention(8, 2)
    for what, error in (
        (layer(*[torch.randn(3, 1, 8)] * 3)[0], "RuntimeError"),  # of which torch makes no copy, with its graph
        (threading.Lock(), "TypeError"),
    ):
        layer.last = what
        with pytest.raises(ConversionError, match=rf"(?s)this MultiheadAttention cannot be copied, .*\({error}: .*"):
            convert.from_torch_mha(layer)
