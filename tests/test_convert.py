"""``from_layer`` and the ways back; the oracle is always the other library, in float64, on maps that are not square."""

import inspect
import itertools
import re
import threading
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import timm
import timm.models.fastvit as fastvit
import timm.models.maxxvit as maxxvit
import timm.models.metaformer as metaformer
import timm.models.visformer as visformer
import torch
import torch.nn.functional as F
import torchvision.models.maxvit as torchvision_maxvit
from stand_ins import diffusers_attention, natten
from timm.layers import Attention as TimmAttention
from timm.layers import RelPosBias, RelPosBiasTf, RelPosMlp, RmsNorm
from timm.layers.attention2d import Attention2d as TimmAttention2d
from timm.layers.attention2d import MultiQueryAttention2d, MultiQueryAttentionV2
from timm.layers.attention_pool2d import AttentionPool2d
from timm.layers.bottleneck_attn import BottleneckAttn
from timm.layers.halo_attn import HaloAttn
from timm.layers.non_local_attn import NonLocalAttn
from timm.models.beit import Attention as BeitAttention
from timm.models.efficientformer import Attention as EfficientFormerAttention
from timm.models.nextvit import EfficientAttention
from timm.models.vision_transformer_relpos import RelPosAttention
from torch import nn
from torch.nn.utils import parametrizations
from torchvision.models.swin_transformer import ShiftedWindowAttention, ShiftedWindowAttentionV2

import vision_attn as va
from vision_attn.networks import convert
from vision_attn.networks.convert import ConversionError
from vision_attn.networks.convert.row import PaddedAttention2d
from vision_attn.networks.convert.table import TABLE, row_of

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


def add(make, run, *variants, shapes=((8, 3, 5),), part="", **options):
    """A layer and its options, and where in it the source is; how it is run, on what maps, and converted."""
    PARITY.extend((make, variant, part, run, shapes, options) for variant in variants or [{}])


yes_no, other = [True, False], {"kdim": 6, "vdim": 6}
mha = partial(nn.MultiheadAttention, 8, 2)
add(mha, multihead, *each(bias=yes_no, batch_first=yes_no))
add(mha, multihead, shapes=[(8, 7)], rank=1)
add(mha, multihead, shapes=[(8, 2, 3, 4)], rank=3)
add(mha, multihead, other, shapes=[(8, 7), (6, 14)], rank=1)
add(mha, multihead, other | {"bias": False}, shapes=[(8, 3, 5), (6, 6, 10)])
add(mha, multihead, other, shapes=[(8, 2, 3, 4), (6, 4, 6, 8)], rank=3)
add(
    mha,
    multihead,
    {"kdim": 5},
    {"kdim": 8, "vdim": 5, "bias": False},
    shapes=[(8, 3), (13, 4)],
    rank=1,
)

torch_encoder = partial(nn.TransformerEncoderLayer, 8, 2, 13, layer_norm_eps=0.01)
add(torch_encoder, encoder, *each(norm_first=yes_no, bias=yes_no))
add(torch_encoder, encoder, *each(activation=["gelu", nn.GELU(), nn.ReLU(), torch.relu]))
add(torch_encoder, encoder, {"batch_first": True})
add(encoder_without_biases, encoder, *each(output_has_bias=yes_no))

add(vit, on_tokens, {}, {"qkv_bias": True}, {"proj_bias": False}, {"attn_head_dim": 3})
add(vit, on_tokens, *each(qk_norm=[True], norm_layer=[nn.LayerNorm, vit_norm]))
add(vit, on_tokens, GATED, {"qkv_bias": True, **GATED})
add(attention_of_vit, on_tokens, shapes=[(192, 5)], rank=1)
add(partial(BeitAttention, 8, 2), on_tokens, {}, {"qkv_bias": True})
add(partial(RelPosAttention, 8, 2, qk_norm=True), on_tokens)
add(partial(EfficientAttention, 8, head_dim=4), on_tokens, {}, {"qkv_bias": False})
add(partial(metaformer.Attention, 8, head_dim=4), on_tokens)
add(partial(visformer.Attention, 8, 2, head_dim_ratio=0.5), on_map)
add(partial(fastvit.Attention, 8, 4, qkv_bias=True), on_map)
map_attention = partial(TimmAttention2d, 8, 12, num_heads=4)
add(map_attention, on_map, *each(head_first=yes_no, expand_first=yes_no, bias=yes_no))
queries = partial(MultiQueryAttention2d, 8, num_heads=4)
add(queries, on_map, {}, {"use_bias": True})
add(queries, on_map, {"key_dim": 3, "value_dim": 5, "dim_out": 6})
bottleneck = partial(BottleneckAttn, 8, feat_size=(3, 5), num_heads=2)
add(bottleneck, on_map, {}, {"qkv_bias": True}, {"scale_pos_embed": True})
add(bottleneck, on_map, {"dim_head": 5}, {"dim_out": 12, "dim_head": 5})

for kind in ("Attention2d", "AttentionCl"):
    variants = each(head_first=yes_no, rel_pos_cls=REL_POS)
    add(partial(maxvit, kind), run_maxvit, *variants)
    for partition, pattern in (("block", va.Window((3, 5))), ("grid", va.Grid((3, 5)))):
        make = partial(maxvit_partition, f"Partition{kind}", partition)
        inside = {"part": "attn", "shapes": [(8, 9, 10)], "pattern": pattern}
        add(make, run_maxvit, *each(rel_pos=["bias", "bias_tf", ""]), **inside)

swin = partial(ShiftedWindowAttention, 8, [2, 3], num_heads=2)
for size, bias in (((2, 9), False), ((8, 3), True), ((5, 7), True)):
    variants = each(shift_size=[[0, 0], [1, 2]], qkv_bias=[bias], proj_bias=[bias])
    add(swin, channels_last, *variants, shapes=[(8, *size)])

swin_v2 = partial(ShiftedWindowAttentionV2, 8, [2, 3], num_heads=2)
variants = each(shift_size=[[0, 0], [1, 1]], qkv_bias=yes_no)
add(swin_v2, channels_last, *variants, shapes=[(8, 5, 7)])
timm_swin, timm_swin_v2 = timm.models.swin_transformer, timm.models.swin_transformer_v2
for make, size in ((timm_swin.SwinTransformerBlock, (9, 10)), (timm_swin_v2.SwinTransformerV2Block, (9, 10))):
    make = partial(make, 8, size, 2, window_size=(3, 5))
    around = {"part": "attn", "shapes": [(8, *size)]}
    add(make, run_timm_swin, **around)
    add(make, run_timm_swin, {"shift_size": (1, 2)}, pattern=va.Window((3, 5), shift=(1, 2)), **around)
    add(make, run_timm_swin, part="attn", shapes=[(8, 8, 11)])

given_groups = partial(TorchvisionMaxVit, 8, head_dim=2, max_seq_len=9)
for kind, pattern in (("window", va.Window), ("grid", va.Grid)):
    run = partial(in_groups, kind=kind)
    add(given_groups, run, shapes=[(8, 6, 9)], pattern=pattern(3))
    inside = {"part": "attn_layer.1", "shapes": [(8, 6, 6)], "pattern": pattern(2)}
    add(partial(torchvision_partition, kind), run_torchvision, **inside)

add(partial(natten, 8, 2, (3, 4), (1, 2), (2, 1), (True, False)), channels_last, shapes=[(8, 7, 6)])
add(partial(natten, 8, 2, (3,)), channels_last, shapes=[(8, 7)])
add(partial(natten, 8, 2, (2, 2, 3), (2, 1, 1)), channels_last, shapes=[(8, 4, 3, 5)])
add(partial(HaloAttn, 12, num_heads=3, dim_head=5, block_size=2, halo_size=1), on_map, shapes=[(12, 4, 6)])
add(partial(MultiQueryAttentionV2, 8, 6, 3, key_dim=5, value_dim=4), on_map)
add(partial(NonLocalAttn, 16), on_map, shapes=[(16, 3, 4)])
diffusers_norm = partial(diffusers_attention, 8, heads=2, dim_head=4, norm_num_groups=4, residual_connection=True)
add(diffusers_norm, on_map)
add(partial(diffusers_attention, 8, heads=2, dim_head=3), on_tokens)


@pytest.mark.parametrize(
    ("make", "variant", "part", "run", "shapes", "options"),
    PARITY,
    ids=[re.sub(" at 0x[0-9a-f]+", "", f"{case[0]}-{case[3]}-{case[4]}") for case in PARITY],
)
def test_a_block_computes_what_its_layer_does(make, variant, part, run, shapes, options):
    layer = randomised(make(**variant))
    block = convert.from_layer(layer.get_submodule(part), **options)
    name = type(layer.get_submodule(part)).__name__
    if "Window" in name:
        assert isinstance(block, PaddedAttention2d)
    elif make is diffusers_norm or name == "NonLocalAttn":
        assert type(block) is va.AttentionBlock2d
    else:
        assert type(block) is {"TransformerEncoderLayer": va.TransformerBlock2d}.get(name, BLOCKS[len(shapes[0]) - 1])
    assert_same(block, partial(run, layer), *shapes, atol=1e-10 if shapes[0][0] > 8 else 1e-11)


def test_every_row_is_converted_or_says_why_not():
    tried = {row_of(make(**variant).get_submodule(part))[0] for make, variant, part, *_ in PARITY}
    old = "timm.models.vision_transformer.Attention"
    swapped_only = {"timm.models.efficientformer.Attention", "timm.layers.attention_pool2d.AttentionPool2d"}
    assert tried | swapped_only | {old} | {path for path in TABLE if path.startswith("keras.")} == set(TABLE)


def test_the_table_of_the_docs_is_that_of_the_rows():
    page = (Path(__file__).parents[1] / "docs/convert.md").read_text()
    table = page.partition("<!-- table of layers -->\n")[2].partition("\n<!-- end of the table -->")[0]
    assert table == convert.table_of_layers(), "write what va.convert.table_of_layers() gives between the markers"


def test_torchs_mask_is_ours_the_other_way_round():
    layer = randomised(nn.MultiheadAttention(8, 2, batch_first=True))
    x, mask = torch.randn(2, 8, 3, 4, dtype=torch.float64), torch.rand(12, 12) < 0.5
    mask.fill_diagonal_(False)
    expected, _ = layer(tokens(x), tokens(x), tokens(x), attn_mask=mask)
    got = convert.from_layer(layer)(x, mask=~mask)
    torch.testing.assert_close(tokens(got), expected, rtol=0, atol=1e-12)


def test_a_converted_block_is_the_one_that_its_arguments_make():
    block = convert.from_layer(randomised(vit(qkv_bias=True, attn_head_dim=3, dim_out=10, **GATED)))
    expected = va.Attention2d(8, 2, key_dim=3, value_dim=3, out_channels=10, output_gate=HAS_GATE, dtype=torch.float64)
    expected.load_state_dict(block.state_dict())
    x = torch.randn(1, 8, 3, 4, dtype=torch.float64)
    assert torch.equal(expected(x), block(x))


def test_what_the_block_has_of_its_sources():
    block = convert.from_layer(BottleneckAttn(8, feat_size=(3, 5), num_heads=2))
    assert block.position.specification == va.RelPosDecomposed(feat_size=(3, 5))
    block = convert.from_layer(ShiftedWindowAttention(8, [2, 3], [1, 2], 2))
    assert block.pattern == va.Window((2, 3), (1, 2))
    assert convert.from_layer(TorchvisionMaxVit(8, 2, 9), pattern=va.Window(3)).scale == 8**-0.5
    assert convert.from_layer(MultiQueryAttention2d(8, num_heads=4)).num_kv_heads == 1


@pytest.mark.parametrize("shift", [[0, 0], [1, 2]])
def test_torchvision_swin_attends_to_its_padding_and_so_does_the_block(shift):
    layer = randomised(ShiftedWindowAttention(8, [2, 3], shift, 2))
    block = convert.from_layer(layer)
    for size in [(2, 4), (3, 3), (5, 7), (1, 1), (4, 6)]:
        x = torch.randn(2, 8, *size, dtype=torch.float64)
        torch.testing.assert_close(block(x), channels_last(layer, x), rtol=0, atol=1e-12)
        torch.testing.assert_close(block(x[0]), block(x)[0], rtol=0, atol=1e-12)
    x = torch.randn(1, 8, 5, 7, dtype=torch.float64).to(memory_format=torch.channels_last)
    assert block(x).is_contiguous(memory_format=torch.channels_last)
    mask = torch.ones(35, 35, dtype=torch.bool)
    with pytest.raises(
        ValueError, match="with a mask or a context x must be of whole windows of 2×3; got 5×7: pad it yourself"
    ):
        block(x, mask)
    plain = va.Attention2d(8, 2, pattern=block.pattern, position=va.RelPosTable(), dtype=torch.float64)
    plain.load_state_dict(block.state_dict())
    assert (plain(x) - block(x)).abs().max() > 0.01


def test_a_shift_of_timms_swin_is_for_maps_of_whole_windows():
    block = convert.from_layer(SOURCES["timm_swin"](), pattern=va.Window((3, 5), shift=1))
    assert block(torch.randn(2, 8, 6, 10)).shape == (2, 8, 6, 10)
    with pytest.raises(ValueError, match="x must be of whole windows of 3×5; got 7×10: pad it"):
        block(torch.randn(2, 8, 7, 10))


# --- separate projections ---------------------------------------------------------------------------------------------


def projections(kind, heads, kv_heads, d, e, context=6, bias=True):
    sizes = {"wq": (6, heads * d), "wk": (context, kv_heads * d), "wv": (context, kv_heads * e), "wo": (heads * e, 7)}
    kernel = () if kind is nn.Linear else (1,)
    made = {name: kind(*size, *kernel, bias=bias) for name, size in sizes.items()}
    return {name: randomised(layer, seed) for seed, (name, layer) in enumerate(made.items())}


def grouped_attention(layers, heads, kv_heads, scale):
    def run(x, context=None):
        maps = (x, *[x if context is None else context] * 2)
        q, k, v = (
            F.linear(tokens(y), layers[name].weight.flatten(1), layers[name].bias).unflatten(2, (n, -1)).transpose(1, 2)
            for name, n, y in zip(("wq", "wk", "wv"), (heads, kv_heads, kv_heads), maps, strict=True)
        )
        y = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True).transpose(1, 2).flatten(2)
        y = F.linear(y, layers["wo"].weight.flatten(1), layers["wo"].bias)
        return y.transpose(1, 2).unflatten(2, x.shape[2:])

    return run


@pytest.mark.parametrize(
    ("kind", "heads", "d", "e", "context", "scale", "bias", "rank"),
    [
        (nn.Linear, (4, 4), 3, 3, None, None, True, 2),
        (nn.Linear, (4, 2), 3, 2, None, 1.0, False, 2),
        (nn.Linear, (6, 1), 2, 4, 5, None, True, 1),
        (nn.Conv1d, (2, 2), 3, 3, 5, None, False, 2),
        (nn.Conv2d, (4, 2), 1, 3, None, None, True, 3),
        (nn.Conv3d, (3, 3), 2, 1, None, 1.0, True, 1),
    ],
)
def test_separate_projections(kind, heads, d, e, context, scale, bias, rank):
    layers = projections(kind, *heads, d, e, context or 6, bias)
    if kind is nn.Conv2d:
        layers["wq"].padding = "same"  # which pads nothing here
    block = convert.from_linear_projections(**layers, num_heads=heads[0], num_kv_heads=heads[1], scale=scale, rank=rank)
    assert type(block) is BLOCKS[rank]
    others = [] if context is None else [(context, 4, 4, 2)[: rank + 1]]
    assert_same(block, grouped_attention(layers, *heads, scale), (6, 3, 5, 2)[: rank + 1], *others)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("replaced", "heads", "message"),
    [
        *(
            ({"wq": layer}, (4, 2), "wq must be an nn.Linear or a 1×1 convolution, and plain; got ")
            for layer in (
                nn.Conv2d(6, 12, 3),
                nn.Conv2d(6, 12, 1, stride=2),
                nn.Conv2d(6, 12, 1, padding=1),
                nn.Conv2d(6, 12, 1, groups=2),
                nn.Identity(),
                None,
                Doubled(6, 12),
                nn.DataParallel(nn.Linear(6, 12)),
            )
        ),
        ({}, (0, 2), "^num_heads must be"),
        ({}, (4, 0), "^num_kv_heads must be"),
        ({}, (4, 3), "^num_kv_heads must divide num_heads"),
        ({"wv": nn.Linear(6, 7)}, (4, 2), r"wv.weight must be of shape \(6, 6\)"),
        ({}, (5, 5), r"wq.weight must be of shape \(10, 6\)"),
        ({"wv": nn.Linear(6, 8)}, (4, 4), r"wk.weight must be of shape \(12, 6\) .*; got \(6, 6\)"),
        ({"wo": nn.Linear(8, 6)}, (4, 2), r"wo.weight must be of shape \(6, 12\) .*; got \(6, 8\)"),
        ({"wv": nn.Linear(5, 6)}, (4, 2), r"wv.weight must be of shape \(6, 6\) .*; got \(6, 5\)"),
        ({"wk": nn.Linear(6, 6, bias=False)}, (4, 2), "q, k, v must all have a bias, .* got none for k"),
    ],
)
def test_projections_that_do_not_fit_are_refused(replaced, heads, message):
    layers = {"wq": nn.Linear(6, 12), "wk": nn.Linear(6, 6), "wv": nn.Linear(6, 6), "wo": nn.Linear(12, 6), **replaced}
    with pytest.raises(ValueError, match=message):
        convert.from_linear_projections(**layers, num_heads=heads[0], num_kv_heads=heads[1])


def test_projections_keep_their_type_and_are_trained_where_they_were():
    layers = [nn.Linear(8, 8).to(torch.bfloat16) for _ in range(4)]
    layers[3].requires_grad_(False)
    with torch.no_grad():
        block = convert.from_linear_projections(*layers, 2)
    assert {p.dtype for p in block.parameters()} == {torch.bfloat16}
    assert {key for key, p in block.named_parameters() if not p.requires_grad} == {"proj.weight", "proj.bias"}


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
    block = convert.from_layer(built(layer, (*size, 6)))
    assert type(block) is BLOCKS[len(size)]
    assert block.pattern == pattern
    assert (block.attn_drop, block.proj_drop.p) == (options.get("dropout", 0.0), 0.0)
    frozen = {name for name, p in block.named_parameters() if not p.requires_grad}
    assert frozen == ({"gate.bias"} if "use_gate" in options and "use_bias" in options else set())
    assert_same(block, partial(run_keras, layer), (6, *size))


@pytest.mark.parametrize("channels", [6, 7])
def test_keras_multihead_between_two_maps(keras, channels):
    layer = built(keras.layers.MultiHeadAttention(2, 3, dtype="float64"), (3, 5, 6), (4, 2, channels))
    block = convert.from_layer(layer)
    assert block.context_channels == (None if channels == 6 else channels)
    assert_same(block, partial(run_keras, layer), (6, 3, 5), (channels, 4, 2))


@pytest.mark.parametrize("options", [{}, {"use_bias": False, "use_gate": True}, {"use_gate": True}], ids=str)
@pytest.mark.parametrize("value", [None, (9, 5)])
def test_keras_grouped_query_attention(keras, options, value):
    layer = built(keras.layers.GroupQueryAttention(3, 6, 2, dtype="float64", **options), (7, 8), value)
    block = convert.from_layer(layer)
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
    state = torch.get_rng_state()
    block = convert.from_layer(layer)
    assert torch.equal(torch.get_rng_state(), state)
    assert {dense.dtype_policy.name for dense in (layer, layer._query_dense)} == {dtype}
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


def test_keras_layers_that_are_refused(keras):
    mha, gqa, shape = keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention, (3, 5, 6)
    for layer, message in (
        (mha(2, 3), "layer must be built"),
        (built(mha(2, 3, sliding_window=2), (7, 6)), r"sliding_window cannot be carried over: got 2"),
        (built(mha(2, 3, output_shape=(2, 2)), shape), "cannot be run by what was made of it"),
        (built(mha(2, 3), (5, 6), (4, 7), (4, 6)), "cannot be run"),
        (built(mha(2, 3), shape, (4, 6)), "cannot be run"),
        (built(mha(2, 3), (2, 2, 2, 2, 6)), "cannot be run"),
        (built(gqa(3, 4, 2), shape), "cannot be run"),
        (keras.layers.Dense(3), r"no row of the table is for keras\.src.*Dense"),
    ):
        with pytest.raises((ValueError, ConversionError), match=message):
            convert.from_layer(layer)


def test_a_keras_layer_of_another_backend_is_refused():
    kind = type("MultiHeadAttention", (), {"__module__": "keras.src.layers.attention.multi_head_attention"})
    with pytest.raises(ValueError, match=r"module must be an nn.Module; got .*: set KERAS_BACKEND=torch before"):
        convert.from_layer(kind())


def halving(layer):
    call = layer.call
    layer.call = lambda *args, **kwargs: (call(*args, **kwargs)[0] / 2, None)


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
            y = super().call(*args, **kwargs)  # with the weights, which the proof asks for
            return (y[0] * self.factor, *y[1:])

    layer = built(Scaled(2, 9, use_bias=False, dtype=dtype), (3, 5, 6))
    layer._output_dense.set_weights([torch.zeros(2, 9, 6)])  # its own numbers would hide any difference
    assert isinstance(convert.from_layer(layer), va.Attention2d)
    CHANGES[change](layer)
    with pytest.raises(ConversionError, match="what was made of this Scaled does not compute"):
        convert.from_layer(layer)


# --- what all of them keep, and what is refused -----------------------------------------------------------------------

SOURCES = {
    "torch_mha": lambda: nn.MultiheadAttention(8, 2),
    "torch_encoder_layer": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "timm_attention": partial(vit, qkv_bias=True, qk_norm=True, norm_layer=nn.LayerNorm, **GATED),
    "timm_attention2d": lambda: TimmAttention2d(8, num_heads=2, head_first=True),
    "timm_multi_query_attention2d": lambda: MultiQueryAttention2d(8, num_heads=2),
    "timm_bottleneck_attn": lambda: BottleneckAttn(8, feat_size=(3, 5), num_heads=2),
    "timm_maxxvit_attention": lambda: maxxvit.Attention2d(8, dim_head=4, rel_pos_cls=REL_POS[2]),
    "timm_swin": lambda: timm_swin.WindowAttention(8, 2, window_size=(3, 5)),
    "torchvision_swin": lambda: ShiftedWindowAttention(8, [2, 3], [1, 1], 2),
    "torchvision_maxvit": lambda: TorchvisionMaxVit(8, 4, 9),
}


@pytest.mark.parametrize("name", SOURCES)
def test_type_mode_and_whether_it_is_trained_are_kept_and_the_layer_is_left_as_it_is(name):
    for training in (True, False):
        source = SOURCES[name]().to(torch.bfloat16).train(training)
        before = {key: x.clone() for key, x in source.state_dict().items()}
        state = torch.get_rng_state()
        with torch.inference_mode():
            block = convert.from_layer(source)
        assert torch.equal(torch.get_rng_state(), state)
        assert {module.training for module in block.modules()} == {training}
        assert {module.training for module in source.modules()} == {training}
        assert {(p.dtype, p.device) for p in block.parameters()} == {(torch.bfloat16, torch.device("cpu"))}
        assert all(p.is_contiguous() for p in block.parameters())
        own = {"proj.weight"} if name == "timm_bottleneck_attn" else set()
        assert {key for key, p in block.named_parameters() if not p.requires_grad} == own
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.fill_(7.0)
        assert all(torch.equal(x, before[key]) for key, x in source.state_dict().items())
        assert not any(p.requires_grad for p in convert.from_layer(source.requires_grad_(False)).parameters())


def drops(block):
    return block.attn_drop, block.proj_drop.p


def test_dropouts_are_carried():
    assert drops(convert.from_layer(nn.MultiheadAttention(8, 2, dropout=0.3))) == (0.3, 0.0)
    swin = ShiftedWindowAttention(8, [2, 3], [0, 0], 2, True, True, 0.1, 0.2)
    assert drops(convert.from_layer(swin)) == (0.1, 0.2)
    layer = nn.TransformerEncoderLayer(8, 2, dropout=0.25)
    layer.self_attn.dropout, layer.dropout1.p = 0.125, 0.5
    block = convert.from_layer(layer)
    assert (*drops(block.attn), block.mlp_drop.p) == (0.125, 0.5, 0.25)
    both = {"attn_drop": 0.1, "proj_drop": 0.2}
    for layer, last in (
        (vit(**both), "proj_drop"),
        (TimmAttention2d(8, None, 2, **both), "proj_drop"),
        (MultiQueryAttention2d(8, None, 2, **both), "output__drop"),
        (maxxvit.AttentionCl(8, dim_head=4, **both), "proj_drop"),
    ):
        assert drops(convert.from_layer(layer)) == (0.1, 0.2)
        without = changed(layer, **{"attn_drop": nn.Identity(), last: nn.Identity()})
        assert drops(convert.from_layer(without)) == (0.0, 0.0)


normed = partial(vit, qk_norm=True, norm_layer=nn.LayerNorm)
#: What a layer may not have, by name, and such a layer.
REFUSED = [
    ("bias_k cannot", lambda: mha(add_bias_kv=True)),
    ("add_zero_attn cannot", lambda: mha(add_zero_attn=True)),
    ("add_zero_attn cannot", lambda: changed(encoder_layer(), self_attn__add_zero_attn=True)),
    ("dropout2 must be 0.1 as dropout", lambda: changed(encoder_layer(), dropout2__p=0.5)),
    ("dropout must drop single elements", lambda: changed(encoder_layer(), dropout=nn.Dropout1d(0.1))),
    ("dropout1 must drop single elements", lambda: changed(encoder_layer(), dropout1=nn.Dropout1d(0.1))),
    ("attn_drop must drop single elements", lambda: changed(vit(), attn_drop=nn.AlphaDropout(0.1))),
    ("rel_pos cannot", lambda: RelPosAttention(8, 2, rel_pos_cls=REL_POS[1])),
    ("relative_position_bias_table cannot", lambda: BeitAttention(8, 2, window_size=(2, 3))),
    ("attention_biases cannot", lambda: EfficientFormerAttention(8, 3, 2, 1.5, resolution=(2, 3))),
    ("pos_embed cannot", lambda: AttentionPool2d(8, (3, 4), num_heads=2)),
    ("sr cannot", lambda: EfficientAttention(8, head_dim=4, sr_ratio=2)),
    ("kv_stride cannot", lambda: queries(kv_stride=2)),
    ("query_strides cannot", lambda: queries(query_strides=2)),
    ("pool cannot", lambda: BottleneckAttn(8, feat_size=(4, 6), stride=2)),
    ("block_stride cannot", lambda: HaloAttn(8, num_heads=2, block_size=4, stride=2)),
    ("rel_pos.mlp cannot", lambda: maxvit("Attention2d", rel_pos_cls=partial(RelPosMlp, window_size=(3, 5)))),
    ("norm_q cannot", lambda: diffusers_attention(8, heads=2, dim_head=4, qk_norm="layer_norm")),
    ("norm_cross cannot", lambda: diffusers_attention(8, heads=2, dim_head=4, cross_attention_norm="layer_norm")),
    ("training cannot", lambda: NonLocalAttn(16).train()),
    ("no row of the table is for torch.nn.modules.linear.Linear", lambda: nn.Linear(8, 8)),
    ("if it wraps a layer, give the layer", lambda: nn.DataParallel(mha())),
    ("module must be an nn.Module; got builtins.NoneType", lambda: None),
    ("rotated by an argument", lambda: timm.models.eva.EvaAttention(8, 2, scale_norm=False)),
]
#: What the proof finds.
FOUND = {
    "silu": lambda: encoder_layer(activation=F.silu),
    "tanh": lambda: encoder_layer(activation=nn.GELU(approximate="tanh")),
    "RMS norm": lambda: changed(encoder_layer(), norm1=nn.RMSNorm(8, eps=1e-5)),
    "a token before the map": lambda: maxvit("Attention2d", rel_pos_cls=partial(REL_POS[1], prefix_tokens=1)),
    "norm without weight": lambda: changed(encoder_layer(), norm1=nn.LayerNorm(8, elementwise_affine=False)),
    "norm without bias": lambda: changed(encoder_layer(), norm2=nn.LayerNorm(8, bias=False)),
    "eps of one norm": lambda: changed(encoder_layer(), norm2__eps=1.1e-5),
    "one bias": lambda: changed(encoder_layer(), linear2=nn.Linear(16, 8, bias=False)),
    "other attention": lambda: changed(encoder_layer(), self_attn__in_proj_weight=None),
    "one norm": lambda: changed(normed(), q_norm=nn.Identity()),
    "the other norm": lambda: changed(normed(), k_norm=nn.Identity()),
    "RMS norms": lambda: vit(qk_norm=True, norm_layer=RmsNorm),
    "norms without bias": lambda: vit(qk_norm=True, norm_layer=lambda d, **kw: nn.LayerNorm(d, bias=False)),
    "norm before the output": lambda: vit(scale_norm=True, norm_layer=nn.LayerNorm),
    "adapter": lambda: changed(vit(), qkv=Adapted(nn.Linear(8, 24))),
    "no projection": lambda: changed(vit(), proj=nn.Identity()),
    "doubled": lambda: changed(vit(), proj=Doubled(8, 8)),
    "processor": lambda: with_processor(lambda attn, hidden_states, **others: 2 * hidden_states),
    "meta": lambda: mha(device="meta"),
    "encoder, doubled": lambda: changed(encoder_layer(batch_first=True), linear1=Doubled(8, 16)).requires_grad_(False),
}


def with_processor(processor):
    layer = diffusers_attention(8, heads=2, dim_head=4)
    layer.set_processor(processor)
    return layer


class Adapted(nn.Module):
    """As of a library of adapters: what it adds is nothing at first."""

    def __init__(self, layer):
        super().__init__()
        self.base_layer, self.update = layer, nn.Linear(8, 24, bias=False)
        self.weight, self.bias = layer.weight, layer.bias
        nn.init.zeros_(self.update.weight)

    def forward(self, x):
        return self.base_layer(x) + self.update(x)


@pytest.mark.parametrize(("message", "make"), REFUSED, ids=[message for message, _ in REFUSED])
def test_what_the_block_does_not_do_is_refused_by_name(message, make):
    with pytest.raises(ValueError, match=message):
        convert.from_layer(make())


@pytest.mark.parametrize("name", FOUND)
def test_what_the_block_does_not_do_is_found_by_the_proof(name):
    with pytest.raises(ConversionError, match="is it a subclass with a forward of its own, was a part of it replaced"):
        convert.from_layer(FOUND[name]())


@pytest.mark.parametrize("name", SOURCES)
def test_hooks_and_parametrizations_are_refused(name):
    source = SOURCES[name]()
    *_, part = source.children()
    for register in (part.register_forward_pre_hook, part.register_forward_hook, part.register_full_backward_hook):
        hook = register(lambda *_: None)
        with pytest.raises(ValueError, match=r"has hooks, which a block would not run"):
            convert.from_layer(source)
        hook.remove()
    parametrizations.spectral_norm(next(part for part in source.modules() if isinstance(part, (nn.Linear, nn.Conv2d))))
    before = {key: x.clone() for key, x in source.state_dict().items()}
    with pytest.raises(
        ValueError, match="has parametrizations: call torch.nn.utils.parametrize.remove_parametrizations"
    ):
        convert.from_layer(source)
    assert all(torch.equal(x, before[key]) for key, x in source.state_dict().items())


def test_dropouts_in_another_mode_are_refused():
    for name, path in (("torch_encoder_layer", "self_attn"), ("timm_multi_query_attention2d", "output.drop")):
        source = SOURCES[name]()
        source.get_submodule(path).eval()
        with pytest.raises(ValueError, match=rf"one mode; got (\w+) with training=True and \1.{path} with training=F"):
            convert.from_layer(source)
    assert not convert.from_layer(changed(vit().eval(), proj=nn.Linear(8, 8))).training


def test_quantized_layers_are_refused():
    with warnings.catch_warnings(action="ignore"):  # torch's quantization is on its way out
        quantized = torch.ao.quantization.quantize_dynamic(encoder_layer().eval(), {nn.Linear})
    with pytest.raises(ConversionError, match="by an adapter or by quantizing"):
        convert.from_layer(quantized)


def test_ranks_and_patterns_that_do_not_go_with_the_layer_are_refused():
    for rank in (0, 4, True, "2", 2.0, [2]):
        with pytest.raises(ValueError, match="rank must be the axes of a map, 1, 2 or 3"):
            convert.from_layer(mha(), rank=rank)
    with pytest.raises(ValueError, match="rank must be None for a ShiftedWindowAttention"):
        convert.from_layer(SOURCES["torchvision_swin"](), rank=2)
    with pytest.raises(ValueError, match="pattern must be None for a MultiheadAttention; got 'rows'"):
        convert.from_layer(mha(), pattern="rows")
    for name in ("timm_maxxvit_attention", "torchvision_maxvit"):
        with pytest.raises(ValueError, match=r"pattern must be a Window or a Grid, as its network cuts the map"):
            convert.from_layer(SOURCES[name](), pattern=va.Neighborhood(3))
        with pytest.raises(ValueError, match=r"feat_size must be that of the pattern's groups, \(7, 7\); got"):
            convert.from_layer(SOURCES[name](), pattern=va.Window(7))


# --- the proof --------------------------------------------------------------------------------------------------------


def backwards(weights):
    """Rows that come in another order, and fit as well."""

    def turned(layer):
        found = weights(layer)
        return {n: x._replace(weight=x.weight.flip(0)) if n in ("q", "qkv", "kv") else x for n, x in found.items()}

    return turned


def test_rows_in_a_wrong_order_are_found_out_even_where_the_output_is_zero(monkeypatch):
    """Those of each layer: in ``test_swap_layers.py``."""
    layer = nn.MultiheadAttention(8, 2)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    path, _, row = row_of(layer)
    convert.from_layer(layer)
    monkeypatch.setitem(TABLE, path, replace(row, weights=backwards(row.weights)))
    with pytest.raises(ConversionError, match=r"does not compute what it does, outputs have a difference of [\d.]+"):
        convert.from_layer(layer)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keras_kernels_in_a_wrong_order_are_found_out(keras, monkeypatch, dtype):
    layer = built(keras.layers.MultiHeadAttention(2, 3, dtype=dtype), (3, 5, 6))
    path, _, row = row_of(layer)
    monkeypatch.setitem(TABLE, path, replace(row, weights=backwards(row.weights)))
    with pytest.raises(ConversionError, match="what was made of this MultiHeadAttention does not compute"):
        convert.from_layer(layer)


def altered(kind, change):
    """A layer of a subclass whose forward gives something else."""

    def forward(self, *args, **kwargs):
        return change(kind.forward(self, *args, **kwargs))

    return type("Altered", (kind,), {"forward": forward})(8, num_heads=2)


def times(factor):
    return lambda output: (factor * output[0], output[1])


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (nn.MultiheadAttention, times(2), "this Altered does not compute what it does"),
        (nn.MultiheadAttention, times(1 + 1e-8), "outputs have a difference of"),
        (nn.MultiheadAttention, times(float("nan")), "outputs have a difference of nan"),
        (nn.MultiheadAttention, lambda y: (torch.cat([y[0], y[0]], -1), None), r"not \(5, 2, 16\)"),
        (nn.MultiheadAttention, lambda y: (None, None), "cannot be run .* it gives a NoneType"),
        (TimmAttention, lambda y: y.nothing, r"this Altered cannot be run .* \(AttributeError: "),
    ],
)
def test_a_subclass_that_computes_something_else_is_found_out(kind, change, message):
    with pytest.raises(ConversionError, match=f"(?s){message}"):
        convert.from_layer(altered(kind, change))


class OtherEps(TimmAttention):
    """Computes with another ``eps`` than its norms say."""

    def forward(self, x, attn_mask=None, is_causal=False):
        eps, self.q_norm.eps = self.q_norm.eps, 1.1 * self.q_norm.eps
        y = super().forward(x, attn_mask, is_causal)
        self.q_norm.eps = eps
        return y


def test_a_norm_with_another_eps_is_found_out():
    with pytest.raises(ConversionError, match="outputs have a difference of"):
        convert.from_layer(OtherEps(8, 2, qk_norm=True, norm_layer=nn.LayerNorm))


def test_what_shows_in_small_inputs_alone_is_found_out():
    def forward(self, x, attn_mask=None, is_causal=False):
        y = TimmAttention.forward(self, x, attn_mask, is_causal)
        return y if x.abs().max() > 0.1 else 2 * y

    with pytest.raises(ConversionError, match="outputs have a difference of"):
        convert.from_layer(type("Small", (TimmAttention,), {"forward": forward})(8, 2))


def test_what_only_the_layers_call_adds_to_the_logits_is_not_taken_for_the_blocks(monkeypatch):
    path = "timm.models.beit.Attention"
    monkeypatch.setitem(TABLE, path, replace(TABLE[path], around={}))  # whose table would be refused by name
    with pytest.raises(ConversionError, match="what was made of this Attention does not compute"):
        convert.from_layer(BeitAttention(8, 2, window_size=(2, 3)))


def test_what_cannot_be_copied_is_refused():
    layer = nn.MultiheadAttention(8, 2)
    layer.last = threading.Lock()
    with pytest.raises(ConversionError, match=r"(?s)this MultiheadAttention cannot be copied, .*\(TypeError: .*"):
        convert.from_layer(layer)


# --- the other way ----------------------------------------------------------------------------------------------------

PLAIN = {"qkv_bias": False, "proj_bias": False}
WIDE = {"key_dim": 3, "value_dim": 3, "proj_drop": 0.2}


@pytest.mark.parametrize(
    ("there", "options"),
    [
        (convert.to_torch_mha, {"attn_drop": 0.1}),
        (convert.to_torch_mha, PLAIN),
        (convert.to_timm_attention, {"attn_drop": 0.1, **WIDE}),
        (convert.to_timm_attention, {"qk_norm": True}),
        (convert.to_timm_attention, PLAIN),
    ],
)
def test_there_and_back_is_the_same_block(there, options):
    block = va.Attention2d(8, 2, **options).double().eval()
    block.qkv.weight.requires_grad_(False)
    layer = there(block)
    again = convert.from_layer(layer)
    assert again.specification() == block.specification()
    assert drops(again) == drops(block)
    assert again.state_dict().keys() == block.state_dict().keys()
    assert all(torch.equal(x, y) for x, y in zip(block.parameters(), again.parameters(), strict=True))
    assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in block.parameters()]
    x = torch.randn(2, 8, 3, 4, dtype=torch.float64)
    run = multihead if isinstance(layer, nn.MultiheadAttention) else on_tokens
    torch.testing.assert_close(run(layer, x), block(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("there", "options"),
    [
        (convert.to_torch_mha, {"key_dim": 3, "value_dim": 3}),
        (convert.to_torch_mha, {"qk_norm": True}),
        (convert.to_torch_mha, {"proj_drop": 0.1}),
        (convert.to_torch_mha, {"proj_bias": False}),
        (convert.to_timm_attention, {"qk_norm": "cosine"}),
        (convert.to_timm_attention, {"output_gate": True}),
        (convert.to_timm_attention, {"value_dim": 3}),
        (convert.to_timm_attention, {"scale": 1.0}),
        (convert.to_timm_attention, {"causal": True}),
        (convert.to_timm_attention, {"num_kv_heads": 1}),
        (convert.to_timm_attention, {"pattern": va.Window(7)}),
        (convert.to_timm_attention, {"position": va.Rope2d()}),
    ],
)
def test_what_the_other_layer_does_not_do_is_refused(there, options):
    with pytest.raises((ValueError, ConversionError), match=r"block must|what was made of|cannot be run by what was"):
        there(va.Attention2d(8, 2, **options))
    with pytest.raises(ValueError, match="block must be an Attention1d"):
        there(nn.Linear(8, 8))


def test_a_wrong_way_back_is_found_out(monkeypatch):
    def turned(layer, tensors, **options):
        return filled(layer, {key: x.flip(0) for key, x in tensors.items()}, **options)

    filled = inspect.getmodule(convert.to_torch_mha).filled
    monkeypatch.setattr(inspect.getmodule(convert.to_torch_mha), "filled", turned)
    for there in (convert.to_torch_mha, convert.to_timm_attention):
        with pytest.raises(ConversionError, match="does not compute what it does"):
            there(va.Attention2d(8, 2))
