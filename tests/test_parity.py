"""The block against attention that nobody here wrote: torch, torchvision and timm, with weights copied over.

Every parameter is random, maps are not square where the other side allows it, and all is in float64, under one
implementation: that they are equal is tested elsewhere. Where the definitions part, a test says so:

- torchvision's Swin lets real tokens see the zeros it pads a map with; ours masks them.
- timm's `MultiQueryAttention2d` strides keys and values by a depthwise convolution and batch norm, apart from each
  other; ours averages the map once.
- timm's `HaloAttn` lets a block see a halo around it, in which positions outside of the map are keys and values of zero
  that are not masked. We have no such pattern: the two are compared without a halo, where it is a window.
- timm's `BottleneckAttn` and `HaloAttn` have no projection of the output: ours is then the identity.
- timm computes the angles of sines and rotary positions in float32, whatever type is asked for.
"""

import inspect
from functools import partial

import pytest
import timm.layers
import torch
import torch.nn.functional as F
from timm.layers import attention2d as timm_attention2d
from timm.layers.bottleneck_attn import BottleneckAttn
from timm.layers.halo_attn import HaloAttn
from timm.layers.pos_embed_sincos import build_rotary_pos_embed, build_sincos2d_pos_embed, freq_bands
from timm.models import maxxvit
from torch import nn
from torchvision.models import maxvit
from torchvision.models.swin_transformer import ShiftedWindowAttention

import vision_attn as va

QKV = ("qkv.weight", "qkv.bias")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# --- what all comparisons share ---------------------------------------------------------------------------------------


def randomized(module):
    """A module in float64, with no parameter left at its initial zeros or ones."""
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=parameter[0].numel() ** -0.5)
    return module


def random_map(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def block_with(state, *arguments, block=va.Attention2d, **options):
    """Our block in float64 with the weights in `state`, which must be all that it has; those of linear layers fit."""
    block = block(*arguments, dtype=torch.float64, **options)
    shapes = {key: value.shape for key, value in block.state_dict().items()}
    state = {
        key: value.detach()[..., None, None] if value.dim() == 2 and len(shapes[key]) == 4 else value.detach()
        for key, value in state.items()
    }
    block.load_state_dict(state, strict=True)
    return block


def check(ours, theirs, *maps, tolerance=1e-12):
    """That two functions of maps give the same, and the same gradients of the maps."""
    results = []
    for function in (ours, theirs):
        leaves = [x.clone().requires_grad_() for x in maps]
        y = function(*leaves)
        weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
        results.append((y.detach(), *torch.autograd.grad((y * weight).sum(), leaves)))
    for found, expected in zip(*results, strict=True):
        assert expected.abs().max() > 0.1  # the comparison is of something
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def tokens_of(x):
    return x.flatten(2).mT


def map_of(tokens, size):
    return tokens.mT.unflatten(2, size)


def on_tokens(layer):
    """A layer for tokens, `(b, tokens, c)`, as one for maps."""
    return lambda x: map_of(layer(tokens_of(x)), x.shape[2:])


def state_of_linear(inner, outer, **others):
    """Two linear layers whose rows are in our order already."""
    weights = {"qkv.weight": inner.weight, "qkv.bias": inner.bias, "proj.weight": outer.weight, "proj.bias": outer.bias}
    return {**weights, **others}


def identity(channels):
    return torch.eye(channels, dtype=torch.float64)


# --- torch: MultiheadAttention, the encoder layer ---------------------------------------------------------------------


def random_mask(kind, shape):
    allowed, added = torch.rand(shape) < 0.6, torch.randn(shape, dtype=torch.float64)
    allowed[..., 0] = True  # a query that sees nothing is NaN in torch
    kinds = {"bool": allowed[:1, :1], "bool by head": allowed, "additive": added[:1, :1]}
    return {**kinds, "none": None, "additive by head": added.masked_fill(~allowed, -torch.inf)}[kind]


@pytest.mark.parametrize("mask", ["none", "bool", "bool by head", "additive", "additive by head"])
@pytest.mark.parametrize("context_channels", [None, 24, 10])
def test_torchs_multihead_attention_and_its_weights(context_channels, mask):
    width = context_channels or 24
    theirs = randomized(nn.MultiheadAttention(24, 3, kdim=width, vdim=width, batch_first=True))
    bias, proj = theirs.in_proj_bias, {f"proj.{key}": value for key, value in theirs.out_proj.state_dict().items()}
    if width == 24:
        block = block_with({"qkv.weight": theirs.in_proj_weight, "qkv.bias": bias, **proj}, 24, 3)
    else:  # where keys have another width than queries, torch has three weights but still one bias
        kv = {"kv.weight": torch.cat([theirs.k_proj_weight, theirs.v_proj_weight]), "kv.bias": bias[24:]}
        q = {"q.weight": theirs.q_proj_weight, "q.bias": bias[:24]}
        block = block_with({**q, **kv, **proj}, 24, 3, context_channels=width)
    maps = [random_map(2, 24, 3, 5)] + ([] if context_channels is None else [random_map(2, width, 4, 2)])
    mask = random_mask(mask, (2, 3, 15, maps[-1][0, 0].numel()))
    # Bool says who is blocked there, and masks by head are batch-major in one axis.
    their_mask = ~mask if mask is not None and mask.dtype == torch.bool else mask
    if mask is not None:
        their_mask = their_mask[0, 0] if mask.shape[0] == 1 else their_mask.flatten(0, 1)

    def attend(x, context=None, **options):
        source = tokens_of(x if context is None else context)
        return theirs(tokens_of(x), source, source, attn_mask=their_mask, **options)

    def ours(x, context=None):
        return block(x, mask, context)

    check(ours, lambda *maps: map_of(attend(*maps, need_weights=False)[0], (3, 5)), *maps)
    found = block.attention_weights(maps[0], mask, context=None if context_channels is None else maps[1])
    torch.testing.assert_close(found, attend(*maps, average_attn_weights=False)[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_torchs_encoder_layer(norm_first, activation, bias):
    shared = {"activation": activation, "norm_first": norm_first, "bias": bias}
    theirs = randomized(nn.TransformerEncoderLayer(24, 3, 40, dropout=0.0, batch_first=True, **shared))
    names = {"self_attn.in_proj_": "attn.qkv.", "self_attn.out_proj": "attn.proj", "linear1": "fc1", "linear2": "fc2"}
    state = theirs.state_dict()
    for name, our_name in names.items():
        state = {key.replace(name, our_name): value for key, value in state.items()}
    block = block_with(state, 24, 3, block=va.TransformerBlock2d, mlp_ratio=40 / 24, **shared)
    allowed = torch.rand(15, 15) < 0.7
    allowed.fill_diagonal_(True)
    check(lambda x: block(x, allowed), on_tokens(partial(theirs, src_mask=~allowed)), random_map(2, 24, 3, 5))


# --- torchvision: Swin, MaxViT ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "shift", "size"),
    [
        ((4, 4), (0, 0), (4, 12)),
        ((3, 3), (1, 1), (6, 9)),
        ((2, 4), (1, 3), (6, 8)),
        ((2, 4), (1, 0), (6, 8)),
        ((4, 4), (2, 1), (4, 8)),  # there is no shift along an axis that one window holds
        ((4, 4), (2, 1), (4, 4)),
        # The border cuts windows; one window is larger than one axis; or than both.
        ((3, 3), (1, 1), (5, 7)),
        ((2, 4), (1, 2), (5, 11)),
        ((4, 4), (2, 2), (3, 7)),
        ((4, 4), (2, 2), (3, 2)),
    ],
)
def test_torchvisions_swin_which_sees_its_padding_as_ours_does_when_the_map_has_it(window, shift, size):
    theirs = randomized(ShiftedWindowAttention(12, list(window), list(shift), 3))
    table = {"position.relative_position_bias_table": theirs.relative_position_bias_table}
    state = state_of_linear(theirs.qkv, theirs.proj, **table)
    block = block_with(state, 12, 3, pattern=va.Window(window, shift=shift), position=va.RelPosTable())
    bottom, right = (-length % side for length, side in zip(size, window, strict=True))
    x = random_map(2, 12, *size)

    def their_maps(x):
        return theirs(x.movedim(1, -1)).movedim(-1, 1)

    check(lambda x: block(F.pad(x, (0, right, 0, bottom)))[..., : size[0], : size[1]], their_maps, x)
    with torch.no_grad():
        assert ((block(x) - their_maps(x)).abs().max() > 1e-2) == bool(bottom or right)


@pytest.mark.parametrize(("partition", "size"), [("window", (3, 9)), ("grid", (9, 9))])  # their grids are of squares
def test_torchvisions_maxvit(partition, size):
    channels, side = 12, 3
    theirs = randomized(
        maxvit.PartitionAttentionLayer(channels, 4, side, partition, size, 2, nn.GELU, nn.LayerNorm, 0.0, 0.0, 0.0)
    )
    norm, attention, _ = theirs.attn_layer
    table = {"position.relative_position_bias_table": attention.relative_position_bias_table}
    state = state_of_linear(attention.to_qkv, attention.merge, **table)
    pattern = va.Window(side) if partition == "window" else va.Grid(side)
    # Their scale is that of all channels, not of a head.
    block = block_with(state, channels, 3, pattern=pattern, position=va.RelPosTable(), scale=channels**-0.5)

    def ours(x):
        x = x + block(on_tokens(norm)(x))
        return x + on_tokens(theirs.mlp_layer)(x)

    check(ours, theirs, random_map(2, channels, *size))


# --- timm: attention on maps ------------------------------------------------------------------------------------------


def state_of_maxxvit(theirs):
    """One `Attention2d` of timm or the other: `head_first` says how rows are ordered, and keys and shapes do not."""
    state = theirs.state_dict()
    if theirs.head_first:  # rows are ordered (heads, qkv, head_dim)
        for key in set(QKV) & set(state):
            state[key] = state[key].unflatten(0, (theirs.num_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    table = state.pop("rel_pos.relative_position_bias_table", None)
    if table is not None and table.dim() == 3:  # as in TensorFlow: by key less query, heads first
        table = table.flip(1, 2).flatten(1).T
    return state if table is None else {**state, "position.relative_position_bias_table": table}


@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize(("expand_first", "bias"), [(True, True), (False, False)])
def test_timms_attention2d(expand_first, head_first, bias):
    # No masks: where it does not run the fused kernel, timm takes a bool mask for an addition of ones.
    options = {"expand_first": expand_first, "head_first": head_first, "bias": bias}
    theirs = randomized(timm_attention2d.Attention2d(12, 18, num_heads=3, **options))
    widths = {"key_dim": theirs.dim_head, "value_dim": theirs.dim_head, "out_channels": 18}
    block = block_with(state_of_maxxvit(theirs), 12, 3, qkv_bias=bias, proj_bias=bias, **widths)
    check(block, theirs, random_map(2, 12, 3, 5))


@pytest.mark.parametrize("position", [None, "RelPosBias", "RelPosBiasTf"])
@pytest.mark.parametrize("head_first", [False, True])
def test_timms_maxxvit_attention2d(head_first, position):
    rel_pos_cls = position and partial(getattr(timm.layers, position), window_size=(3, 5))
    theirs = randomized(maxxvit.Attention2d(12, 18, dim_head=6, head_first=head_first, rel_pos_cls=rel_pos_cls))
    options = {"key_dim": 6, "value_dim": 6, "out_channels": 18, "position": position and va.RelPosTable((3, 5))}
    check(block_with(state_of_maxxvit(theirs), 12, 3, **options), theirs, random_map(2, 12, 3, 5))


@pytest.mark.parametrize(("name", "sides", "size"), [("window", (2, 3), (4, 9)), ("grid", (3, 2), (6, 10))])
def test_timms_maxvit(name, sides, size):
    theirs = randomized(maxxvit.Attention2d(12, dim_head=4, rel_pos_cls=partial(timm.layers.RelPosBias, sides)))
    pattern = va.Window(sides) if name == "window" else va.Grid(sides)
    block = block_with(state_of_maxxvit(theirs), 12, 3, pattern=pattern, position=va.RelPosTable())
    cut, join = (getattr(maxxvit, f"{name}_{step}_nchw") for step in ("partition", "reverse"))
    check(block, lambda x: join(theirs(cut(x, sides)), sides, size), random_map(2, 12, *size))


def state_of_pos_embed(theirs, factor=1.0):
    tables = {f"position.{name}_rel": getattr(theirs.pos_embed, f"{name}_rel") * factor for name in ("height", "width")}
    return {**tables, "proj.weight": identity(theirs.dim_out_v)}


@pytest.mark.parametrize("size", [(4, 4), (3, 6), (5, 2)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"qkv_bias": True, "scale_pos_embed": True},
        {"dim_head": 5, "dim_out": 18},  # values are 6 wide
        {"qk_ratio": 2.0, "qkv_bias": True},  # queries and keys 16, values 8
    ],
    ids=str,
)
def test_timms_bottleneck_attention(options, size):
    theirs = randomized(BottleneckAttn(24, feat_size=size, num_heads=3, **options))
    # timm may scale the logits of positions too, which then scales the tables.
    state = state_of_pos_embed(theirs, theirs.scale if theirs.scale_pos_embed else 1.0)
    state.update({key: value for key, value in theirs.state_dict().items() if key in QKV})
    widths = {"key_dim": theirs.dim_head_qk, "value_dim": theirs.dim_head_v, "out_channels": theirs.dim_out_v}
    given = {"qkv_bias": options.get("qkv_bias", False), "proj_bias": False, "position": va.RelPosDecomposed(size)}
    check(block_with(state, 24, 3, **widths, **given), theirs, random_map(2, 24, *size))


@pytest.mark.parametrize("size", [(4, 4), (2, 6)])  # even: at the border timm's average leaves out what we do not
def test_timms_bottleneck_attention_with_a_stride(size):
    theirs = randomized(BottleneckAttn(24, feat_size=size, stride=2, num_heads=3, qkv_bias=True))
    state = {"qkv.weight": theirs.qkv.weight, "qkv.bias": theirs.qkv.bias, **state_of_pos_embed(theirs)}
    state = {f"attn.{key}": value for key, value in state.items()}
    block = block_with(state, 24, 3, block=va.StridedAttention2d, stride=2, feat_size=size, proj_bias=False)
    check(block, theirs, random_map(2, 24, *size))


@pytest.mark.parametrize("dim_head", [4, 5])
def test_timms_halo_attention_without_a_halo_is_a_window(dim_head):
    theirs = randomized(HaloAttn(12, num_heads=3, dim_head=dim_head, block_size=3, halo_size=0, qkv_bias=True))
    state = state_of_pos_embed(theirs)
    for key in ("weight", "bias"):  # rows of `kv` are ordered (heads, [keys, values]): taken apart head by head
        kv = getattr(theirs.kv, key).unflatten(0, (3, -1)).split([theirs.dim_head_qk, theirs.dim_head_v], dim=1)
        state[f"qkv.{key}"] = torch.cat([getattr(theirs.q, key), *(rows.flatten(0, 1) for rows in kv)])
    options = {"key_dim": dim_head, "value_dim": 4, "pattern": va.Window(3), "position": va.RelPosDecomposed()}
    check(block_with(state, 12, 3, proj_bias=False, **options), theirs, random_map(2, 12, 3, 9))


MULTI_QUERY = {"num_kv_heads": 1, "key_dim": 5, "value_dim": 4, "out_channels": 18}


@pytest.mark.parametrize(("bias", "kv_stride"), [(False, 1), (True, 1), (False, 2)])
def test_timms_multi_query_attention(bias, kv_stride):
    options = {"key_dim": 5, "value_dim": 4, "kv_stride": kv_stride, "use_bias": bias}
    theirs = randomized(timm_attention2d.MultiQueryAttention2d(12, 18, num_heads=3, **options))
    parts = (theirs.query.proj, theirs.key.proj, theirs.value.proj)
    state = {"qkv.weight": torch.cat([part.weight for part in parts]), "proj.weight": theirs.output.proj.weight}
    if bias:
        state.update({"qkv.bias": torch.cat([part.bias for part in parts]), "proj.bias": theirs.output.proj.bias})
    block = block_with(state, 12, 3, **MULTI_QUERY, kv_stride=kv_stride, qkv_bias=bias, proj_bias=bias)
    x = random_map(2, 12, 5, 7)
    if kv_stride > 1:  # where it is learned, and other for keys than for values; that is all that differs
        with torch.no_grad():
            assert (block(x) - theirs.eval()(x)).abs().max() > 1e-2
        for part in (theirs.key, theirs.value):
            part.down_conv, part.norm = nn.AvgPool2d(2, ceil_mode=True), nn.Identity()
    check(block, theirs, x)


def test_timms_second_multi_query_attention():
    theirs = randomized(timm_attention2d.MultiQueryAttentionV2(12, 18, num_heads=3, key_dim=5, value_dim=4))
    rows = torch.cat([theirs.query_proj.flatten(0, 1), theirs.key_proj.T, theirs.value_proj.T])
    state = {"qkv.weight": rows, "proj.weight": theirs.out_proj.flatten(1)}
    block = block_with(state, 12, 3, **MULTI_QUERY, qkv_bias=False, proj_bias=False)
    check(block, theirs, random_map(2, 12, 3, 5))
    check(lambda x, context: block(x, context=context), theirs, random_map(2, 12, 3, 5), random_map(2, 12, 4, 2))


# --- timm: attention on tokens, with norms of queries and keys, gates, rotary positions -------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_timms_attention_on_tokens(qk_norm, causal):
    options = {"attn_head_dim": 5, "dim_out": 14, "qkv_bias": True, "qk_norm": qk_norm, "norm_layer": nn.LayerNorm}
    theirs = randomized(timm.layers.Attention(12, 3, **options))
    widths = {"key_dim": 5, "value_dim": 5, "out_channels": 14}
    block = block_with(theirs.state_dict(), 12, 3, qk_norm=qk_norm, causal=causal, **widths)
    check(block, on_tokens(partial(theirs, is_causal=causal)), random_map(2, 12, 3, 5))


@pytest.mark.skipif("gated" not in inspect.signature(timm.layers.Attention).parameters, reason="this timm has no gate")
def test_timms_gated_attention():
    theirs = randomized(timm.layers.Attention(12, 3, qkv_bias=True, gated=True))
    block = block_with(theirs.state_dict(), 12, 3, output_gate=True)
    check(block, on_tokens(theirs), random_map(2, 12, 3, 5))


# Bands between 16^0 and 16^(-3/4) are powers of two, which timm's float32 holds; it does not hold those of 10000. Sides
# of 4 and 8 it divides by without rounding.
@pytest.mark.parametrize(("temperature", "tolerance"), [(16.0, 1e-12), (10000.0, 1e-6)])
@pytest.mark.parametrize("feat_size", [None, (6, 4)])
@pytest.mark.parametrize("pattern", ["full", "rows"])
def test_timms_rotary_positions(pattern, feat_size, temperature, tolerance):
    theirs = randomized(timm.layers.AttentionRope(48, 3, num_prefix_tokens=0))
    position = va.Rope2d(temperature, feat_size=feat_size)
    block = block_with(theirs.state_dict(), 48, 3, position=position, pattern=pattern)
    bands = freq_bands(4, temperature=temperature, step=1).double()  # in float32 they are right to seven digits
    options = {"in_pixels": False, "ref_feat_shape": feat_size and list(feat_size), "dtype": torch.float64}
    rope = torch.cat(build_rotary_pos_embed([4, 8], bands=bands, **options), dim=-1)
    row = torch.arange(32) // 8
    layer = partial(theirs, rope=rope, attn_mask=None if pattern == "full" else row[:, None] == row)
    check(block, on_tokens(layer), random_map(2, 48, 4, 8), tolerance=tolerance)


def test_timms_sines_and_cosines():
    plain = randomized(va.Attention2d(16, 4))
    block = block_with(plain.state_dict(), 16, 4, position=va.SinCos(20.0))
    embedding = map_of(build_sincos2d_pos_embed([3, 7], dim=16, temperature=20.0).double()[None], (3, 7))
    check(block, lambda x: plain(x + embedding), random_map(2, 16, 3, 7), tolerance=1e-6)
