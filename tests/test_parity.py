"""The block against attention that nobody here wrote: torch, torchvision and timm, with weights copied over.

Every parameter is random, maps are not square where the other side allows it, and all is in float64. Where the
definitions part, a test says so and shows that nothing else does:

- torchvision's Swin lets real tokens see the zeros it pads a map with; ours masks them.
- timm's `MultiQueryAttention2d` strides keys and values by a depthwise convolution and batch norm, apart from each
  other; ours averages the map once.
- timm's `HaloAttn` lets a block see a halo around it, in which places outside of the map are keys and values of zero
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

pytestmark = pytest.mark.parametrize("impl", va.IMPLS)
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


def block_with(state, *arguments, **options):
    """Our block in float64 with the weights in `state`, which must be all that it has."""
    block = va.Attention2d(*arguments, dtype=torch.float64, **options)
    block.load_state_dict({key: value.detach() for key, value in state.items()}, strict=True)
    return block


def check(impl, ours, theirs, *maps, tolerance=1e-12):
    """That two functions of maps give the same, and the same gradients of the maps where there is a backward pass."""
    backward = impl != "flex"  # which has none on the CPU
    results = []
    for function in (ours, theirs):
        leaves = [x.clone().requires_grad_(backward) for x in maps]
        with torch.set_grad_enabled(backward):
            y = function(*leaves)
        weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
        gradients = torch.autograd.grad((y * weight).sum(), leaves) if backward else ()
        results.append((y.detach(), *gradients))
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


def kernels(linear):
    """The weight of a linear layer as that of a 1×1 convolution."""
    return linear[:, :, None, None]


def state_of_linear(theirs, inner="qkv", outer="proj"):
    """Two linear layers whose rows are in our order already."""
    inner, outer = getattr(theirs, inner), getattr(theirs, outer)
    return {
        "qkv.weight": kernels(inner.weight),
        "qkv.bias": inner.bias,
        "proj.weight": kernels(outer.weight),
        "proj.bias": outer.bias,
    }


def heads_first_to_ours(rows, heads):
    """Rows ordered (heads, qkv, head_dim) in our order, (qkv, heads, head_dim)."""
    return rows.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)


def identity(channels):
    return kernels(torch.eye(channels, dtype=torch.float64))


# --- torch.nn.MultiheadAttention --------------------------------------------------------------------------------------

MASKS = ("none", "bool", "bool by head", "additive", "additive by head")


def random_mask(kind, batch, heads, queries, keys):
    allowed = torch.rand(batch, heads, queries, keys) < 0.6
    allowed[..., 0] = True  # a query that sees nothing is NaN in torch
    added = torch.randn(batch, heads, queries, keys, dtype=torch.float64)
    return {
        "none": None,
        "bool": allowed[:1, :1],
        "bool by head": allowed,
        "additive": added[:1, :1],
        "additive by head": added.masked_fill(~allowed, -torch.inf),
    }[kind]


def torchs_mask(mask):
    """Bool says who is blocked there, and masks by head are batch-major in one axis."""
    if mask is None:
        return None
    mask = ~mask if mask.dtype == torch.bool else mask
    return mask[0, 0] if mask.shape[0] == 1 else mask.flatten(0, 1)


def state_of_multihead(theirs):
    return {
        "qkv.weight": kernels(theirs.in_proj_weight),
        "qkv.bias": theirs.in_proj_bias,
        "proj.weight": kernels(theirs.out_proj.weight),
        "proj.bias": theirs.out_proj.bias,
    }


def state_of_split_multihead(theirs):
    """Where keys have another width than queries, torch has three weights but still one bias."""
    width = theirs.embed_dim
    return {
        "q.weight": kernels(theirs.q_proj_weight),
        "q.bias": theirs.in_proj_bias[:width],
        "kv.weight": kernels(torch.cat([theirs.k_proj_weight, theirs.v_proj_weight])),
        "kv.bias": theirs.in_proj_bias[width:],
        "proj.weight": kernels(theirs.out_proj.weight),
        "proj.bias": theirs.out_proj.bias,
    }


def check_multihead(impl, block, theirs, x, context, mask):
    """Output, gradients, and the weights of each head and of their mean; `context` None for attention to itself."""
    maps = (x,) if context is None else (x, context)

    def their_attention(x, context=None, **options):
        source = tokens_of(x if context is None else context)
        return theirs(tokens_of(x), source, source, attn_mask=torchs_mask(mask), **options)

    def their_maps(*maps):
        return map_of(their_attention(*maps, need_weights=False)[0], x.shape[2:])

    check(impl, lambda x, context=None: block(x, mask, context), their_maps, *maps)
    found = block.attention_weights(x, mask, context=context)
    _, weights = their_attention(*maps, average_attn_weights=False)
    _, mean = their_attention(*maps)
    torch.testing.assert_close(found, weights, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.mean(1), mean, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mask", MASKS)
def test_torchs_multihead_attention(impl, mask):
    theirs = randomized(nn.MultiheadAttention(24, 3, batch_first=True))
    block = block_with(state_of_multihead(theirs), 24, 3, impl=impl)
    check_multihead(impl, block, theirs, random_map(2, 24, 3, 5), None, random_mask(mask, 2, 3, 15, 15))


@pytest.mark.parametrize("mask", MASKS)
def test_torchs_cross_attention_with_the_same_width(impl, mask):
    theirs = randomized(nn.MultiheadAttention(24, 3, batch_first=True))
    block = block_with(state_of_multihead(theirs), 24, 3, impl=impl)
    x, context = random_map(2, 24, 3, 5), random_map(2, 24, 4, 2)
    check_multihead(impl, block, theirs, x, context, random_mask(mask, 2, 3, 15, 8))


@pytest.mark.parametrize("mask", MASKS)
def test_torchs_cross_attention_with_another_width_of_keys(impl, mask):
    theirs = randomized(nn.MultiheadAttention(24, 3, kdim=10, vdim=10, batch_first=True))
    block = block_with(state_of_split_multihead(theirs), 24, 3, context_channels=10, impl=impl)
    x, context = random_map(2, 24, 3, 5), random_map(2, 10, 4, 2)
    check_multihead(impl, block, theirs, x, context, random_mask(mask, 2, 3, 15, 8))


# --- torch's grouped heads --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (4, 2), (6, 2), (6, 3)])
def test_torchs_grouped_heads(impl, heads, kv_heads, masked):
    key_dim, value_dim = 5, 3
    block = randomized(
        va.Attention2d(12, heads, num_kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim, impl=impl)
    )
    mask = random_mask("bool by head", 2, heads, 15, 15) if masked else None

    def theirs(x):
        rows = tokens_of(F.conv2d(x, block.qkv.weight, block.qkv.bias))
        parts = rows.split([heads * key_dim, kv_heads * key_dim, kv_heads * value_dim], dim=2)
        counts = (heads, kv_heads, kv_heads)
        q, k, v = (part.unflatten(2, (n, -1)).transpose(1, 2) for part, n in zip(parts, counts, strict=True))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return F.conv2d(map_of(y.transpose(1, 2).flatten(2), x.shape[2:]), block.proj.weight, block.proj.bias)

    check(impl, lambda x: block(x, mask), theirs, random_map(2, 12, 3, 5))


# --- torchvision's Swin -----------------------------------------------------------------------------------------------


def swin_and_ours(impl, window, shift):
    """Torchvision's first Swin, as a function of maps, and our block with its weights."""
    theirs = randomized(ShiftedWindowAttention(12, list(window), list(shift), 3))
    state = state_of_linear(theirs)
    state["position.relative_position_bias_table"] = theirs.relative_position_bias_table
    pattern = va.Window(window, shift=shift)
    block = block_with(state, 12, 3, impl=impl, pattern=pattern, position=va.RelPosTable())
    return (lambda x: theirs(x.movedim(1, -1)).movedim(-1, 1)), block


@pytest.mark.parametrize(
    ("window", "shift", "size"),
    [
        ((4, 4), (0, 0), (8, 8)),
        ((4, 4), (2, 2), (8, 8)),
        ((4, 4), (0, 0), (4, 12)),
        ((3, 3), (1, 1), (6, 9)),
        ((2, 4), (0, 0), (6, 8)),
        ((2, 4), (1, 3), (6, 8)),
        ((2, 4), (1, 0), (6, 8)),
        ((2, 4), (0, 2), (6, 8)),
    ],
)
def test_torchvisions_swin_on_maps_that_windows_fill(impl, window, shift, size):
    theirs, block = swin_and_ours(impl, window, shift)
    check(impl, block, theirs, random_map(2, 12, *size))


@pytest.mark.parametrize("size", [(4, 8), (8, 4), (4, 4)])
def test_torchvisions_swin_has_no_shift_along_an_axis_that_one_window_holds(impl, size):
    theirs, block = swin_and_ours(impl, (4, 4), (2, 1))
    check(impl, block, theirs, random_map(2, 12, *size))


# The border cuts windows; one window is larger than one axis; or than both. Shifts bring real tokens of both sides
# together beside padding.
UNEVEN = [
    ((3, 3), (0, 0), (5, 7)),
    ((3, 3), (1, 1), (5, 7)),
    ((2, 4), (1, 2), (5, 11)),
    ((4, 4), (2, 2), (3, 7)),
    ((4, 4), (2, 2), (3, 2)),
]


@pytest.mark.parametrize(("window", "shift", "size"), UNEVEN)
def test_torchvisions_swin_sees_its_padding_and_ours_does_when_the_map_has_it(impl, window, shift, size):
    theirs, block = swin_and_ours(impl, window, shift)
    bottom, right = (-length % side for length, side in zip(size, window, strict=True))
    x = random_map(2, 12, *size)
    check(impl, lambda x: block(F.pad(x, (0, right, 0, bottom)))[..., : size[0], : size[1]], theirs, x)
    with torch.no_grad():
        assert (block(x) - theirs(x)).abs().max() > 1e-2  # which is where they differ


def mask_of_windows(size, window, shift, table):
    """Swin's windows and table pair by pair, `(heads, tokens, tokens)`: a bias in the same window, else minus infinity.

    Where Swin rolls the map and tells apart what the roll brought together, windows here just begin at the shift.
    """
    (height, width), (rows, columns) = size, window
    down, right = (0 if length <= side else by for length, side, by in zip(size, window, shift, strict=True))
    mask = torch.full((table.shape[1], height * width, height * width), -torch.inf, dtype=table.dtype)
    for i in range(height * width):
        for j in range(height * width):
            (y, x), (key_y, key_x) = divmod(i, width), divmod(j, width)
            same_row = (y - down) // rows == (key_y - down) // rows
            same_column = (x - right) // columns == (key_x - right) // columns
            if same_row and same_column:
                mask[:, i, j] = table[(y - key_y + rows - 1) * (2 * columns - 1) + x - key_x + columns - 1]
    return mask


@pytest.mark.parametrize(("window", "shift", "size"), UNEVEN)
def test_windows_over_the_border_attend_between_real_tokens_only(impl, window, shift, size):
    _, block = swin_and_ours(impl, window, shift)
    mask = mask_of_windows(size, window, shift, block.position.relative_position_bias_table.detach())

    def dense(x):
        rows = tokens_of(F.conv2d(x, block.qkv.weight, block.qkv.bias))
        q, k, v = rows.unflatten(2, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return F.conv2d(map_of(y.transpose(1, 2).flatten(2), size), block.proj.weight, block.proj.bias)

    check(impl, block, dense, random_map(2, 12, *size))


# --- torchvision's and timm's MaxViT ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("partition", "size"),
    [("window", (6, 6)), ("window", (3, 9)), ("grid", (6, 6)), ("grid", (9, 9))],  # their grids need square maps
)
def test_torchvisions_maxvit(impl, partition, size):
    channels, side = 12, 3
    theirs = randomized(
        maxvit.PartitionAttentionLayer(channels, 4, side, partition, size, 2, nn.GELU, nn.LayerNorm, 0.0, 0.0, 0.0)
    )
    norm, attention, _ = theirs.attn_layer
    state = state_of_linear(attention, "to_qkv", "merge")
    state["position.relative_position_bias_table"] = attention.relative_position_bias_table
    pattern = va.Window(side) if partition == "window" else va.Grid(side)
    # Their scale is that of all channels, not of a head.
    block = block_with(state, channels, 3, impl=impl, pattern=pattern, position=va.RelPosTable(), scale=channels**-0.5)

    def ours(x):
        x = x + block(on_tokens(norm)(x))
        return x + on_tokens(theirs.mlp_layer)(x)

    check(impl, ours, theirs, random_map(2, channels, *size))


@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize(("partition", "sides", "size"), [("window", (2, 3), (4, 9)), ("grid", (3, 2), (6, 10))])
def test_timms_maxvit(impl, partition, sides, size, head_first):
    position = partial(timm.layers.RelPosBias, window_size=sides)
    theirs = randomized(maxxvit.Attention2d(12, dim_head=4, head_first=head_first, rel_pos_cls=position))
    pattern = va.Window(sides) if partition == "window" else va.Grid(sides)
    block = block_with(state_of_maxxvit(theirs), 12, 3, impl=impl, pattern=pattern, position=va.RelPosTable())
    cut, join = {
        "window": (maxxvit.window_partition_nchw, maxxvit.window_reverse_nchw),
        "grid": (maxxvit.grid_partition_nchw, maxxvit.grid_reverse_nchw),
    }[partition]
    check(impl, block, lambda x: join(theirs(cut(x, sides)), sides, size), random_map(2, 12, *size))


# --- timm's attention on maps -----------------------------------------------------------------------------------------


def state_of_maxxvit(theirs):
    """One `Attention2d` of timm or the other: `head_first` says how rows are ordered, and keys and shapes do not."""
    state = theirs.state_dict()
    if theirs.head_first:
        state.update({key: heads_first_to_ours(state[key], theirs.num_heads) for key in QKV if key in state})
    table = state.pop("rel_pos.relative_position_bias_table", None)
    if table is not None and table.dim() == 3:  # as in TensorFlow: by key less query, heads first
        table = table.flip(1, 2).flatten(1).T
    return state if table is None else {**state, "position.relative_position_bias_table": table}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize("expand_first", [False, True])
def test_timms_attention2d(impl, expand_first, head_first, bias):
    # No masks: where it does not run the fused kernel, timm takes a bool mask for an addition of ones.
    theirs = randomized(
        timm_attention2d.Attention2d(12, 18, num_heads=3, expand_first=expand_first, head_first=head_first, bias=bias)
    )
    width = theirs.dim_head
    block = block_with(
        state_of_maxxvit(theirs),
        12,
        3,
        key_dim=width,
        value_dim=width,
        out_channels=18,
        qkv_bias=bias,
        proj_bias=bias,
        impl=impl,
    )
    check(impl, block, theirs, random_map(2, 12, 3, 5))


@pytest.mark.parametrize("position", [None, "RelPosBias", "RelPosBiasTf"])
@pytest.mark.parametrize("head_first", [False, True])
def test_timms_maxxvit_attention2d(impl, head_first, position):
    size = (3, 5)
    rel_pos_cls = position and partial(getattr(timm.layers, position), window_size=size)
    theirs = randomized(maxxvit.Attention2d(12, 18, dim_head=6, head_first=head_first, rel_pos_cls=rel_pos_cls))
    block = block_with(
        state_of_maxxvit(theirs),
        12,
        3,
        key_dim=6,
        value_dim=6,
        out_channels=18,
        position=position and va.RelPosTable(feat_size=size),
        impl=impl,
    )
    check(impl, block, theirs, random_map(2, 12, *size))


# --- timm's tokens: norms of queries and keys, gates, rotary positions ------------------------------------------------


def state_of_timm_tokens(theirs):
    state = theirs.state_dict()
    linear = ("qkv.weight", "proj.weight", "gate.weight")
    return {key: kernels(value) if key in linear else value for key, value in state.items()}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_timms_attention_on_tokens(impl, qk_norm, causal):
    theirs = randomized(
        timm.layers.Attention(
            12, 3, attn_head_dim=5, dim_out=14, qkv_bias=True, qk_norm=qk_norm, norm_layer=nn.LayerNorm
        )
    )
    block = block_with(
        state_of_timm_tokens(theirs),
        12,
        3,
        key_dim=5,
        value_dim=5,
        out_channels=14,
        qk_norm=qk_norm,
        causal=causal,
        impl=impl,
    )
    check(impl, block, on_tokens(partial(theirs, is_causal=causal)), random_map(2, 12, 3, 5))


@pytest.mark.skipif("gated" not in inspect.signature(timm.layers.Attention).parameters, reason="this timm has no gate")
def test_timms_gated_attention(impl):
    theirs = randomized(timm.layers.Attention(12, 3, qkv_bias=True, gated=True))
    block = block_with(state_of_timm_tokens(theirs), 12, 3, output_gate=True, impl=impl)
    check(impl, block, on_tokens(theirs), random_map(2, 12, 3, 5))


def timm_rope(size, head_dim, temperature, feat_size=None):
    """Timm's sines and cosines by its own bands, in float64: as float32 its bands are right only to seven digits."""
    bands = freq_bands(head_dim // 4, temperature=temperature, step=1).double()
    embedding = build_rotary_pos_embed(
        list(size),
        bands=bands,
        in_pixels=False,
        ref_feat_shape=None if feat_size is None else list(feat_size),
        dtype=torch.float64,
    )
    return torch.cat(embedding, dim=-1)


# Bands between 16^0 and 16^(-3/4) are powers of two, which timm's float32 holds; it does not hold those of 10000. Sides
# of 4 and 8 it divides by without rounding.
@pytest.mark.parametrize(("temperature", "tolerance"), [(16.0, 1e-12), (10000.0, 1e-6)])
@pytest.mark.parametrize("feat_size", [None, (6, 4), (4, 8)])
@pytest.mark.parametrize("pattern", ["full", "rows"])
def test_timms_rotary_positions(impl, pattern, feat_size, temperature, tolerance):
    size = (4, 8)
    theirs = randomized(timm.layers.AttentionRope(48, 3, num_prefix_tokens=0))
    block = block_with(
        state_of_timm_tokens(theirs),
        48,
        3,
        position=va.Rope2d(temperature, feat_size=feat_size),
        pattern=pattern,
        impl=impl,
    )
    row = torch.arange(32) // 8
    layer = partial(
        theirs,
        rope=timm_rope(size, 16, temperature, feat_size),
        attn_mask=None if pattern == "full" else row[:, None] == row,
    )
    check(impl, block, on_tokens(layer), random_map(2, 48, *size), tolerance=tolerance)


@pytest.mark.parametrize("temperature", [10000.0, 20.0])
def test_timms_sines_and_cosines(impl, temperature):
    plain = randomized(va.Attention2d(16, 4, impl=impl))
    block = block_with(plain.state_dict(), 16, 4, position=va.SinCos(temperature), impl=impl)
    embedding = build_sincos2d_pos_embed([3, 7], dim=16, temperature=temperature)
    embedding = map_of(embedding.double()[None], (3, 7))
    check(impl, block, lambda x: plain(x + embedding), random_map(2, 16, 3, 7), tolerance=1e-6)


# --- timm's bottleneck and halo attention -----------------------------------------------------------------------------


def state_of_bottleneck(theirs):
    """Keys as ours; timm may scale the logits of positions too, which then scales the tables."""
    factor = theirs.scale if theirs.scale_pos_embed else 1.0
    return {
        **{key: value for key, value in theirs.state_dict().items() if key in QKV},
        "position.height_rel": theirs.pos_embed.height_rel * factor,
        "position.width_rel": theirs.pos_embed.width_rel * factor,
        "proj.weight": identity(theirs.dim_out_v),
    }


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
def test_timms_bottleneck_attention(impl, options, size):
    theirs = randomized(BottleneckAttn(24, feat_size=size, num_heads=3, **options))
    block = block_with(
        state_of_bottleneck(theirs),
        24,
        3,
        key_dim=theirs.dim_head_qk,
        value_dim=theirs.dim_head_v,
        out_channels=theirs.dim_out_v,
        qkv_bias=options.get("qkv_bias", False),
        proj_bias=False,
        position=va.RelPosDecomposed(feat_size=size),
        impl=impl,
    )
    check(impl, block, theirs, random_map(2, 24, *size))


def state_of_halo(theirs):
    """Rows of `kv` are ordered (heads, [keys, values]): they are taken apart head by head."""

    def rows(q, kv):
        kv = kv.unflatten(0, (theirs.num_heads, -1))
        k, v = kv.split([theirs.dim_head_qk, theirs.dim_head_v], dim=1)
        return torch.cat([q, k.flatten(0, 1), v.flatten(0, 1)])

    return {
        "qkv.weight": rows(theirs.q.weight, theirs.kv.weight),
        "qkv.bias": rows(theirs.q.bias, theirs.kv.bias),
        "position.height_rel": theirs.pos_embed.height_rel,
        "position.width_rel": theirs.pos_embed.width_rel,
        "proj.weight": identity(theirs.dim_out_v),
    }


@pytest.mark.parametrize("size", [(6, 6), (3, 9)])
@pytest.mark.parametrize("dim_head", [4, 5])
def test_timms_halo_attention_without_a_halo_is_a_window(impl, dim_head, size):
    theirs = randomized(HaloAttn(12, num_heads=3, dim_head=dim_head, block_size=3, halo_size=0, qkv_bias=True))
    block = block_with(
        state_of_halo(theirs),
        12,
        3,
        key_dim=dim_head,
        value_dim=4,
        proj_bias=False,
        pattern=va.Window(3),
        position=va.RelPosDecomposed(),
        impl=impl,
    )
    check(impl, block, theirs, random_map(2, 12, *size))


# --- timm's multi-query attention -------------------------------------------------------------------------------------


def multi_query_and_ours(impl, bias=False, kv_stride=1):
    theirs = randomized(
        timm_attention2d.MultiQueryAttention2d(
            12, 18, num_heads=3, key_dim=5, value_dim=4, kv_stride=kv_stride, use_bias=bias
        )
    )
    parts = (theirs.query.proj, theirs.key.proj, theirs.value.proj)
    state = {"qkv.weight": torch.cat([part.weight for part in parts]), "proj.weight": theirs.output.proj.weight}
    if bias:
        state["qkv.bias"] = torch.cat([part.bias for part in parts])
        state["proj.bias"] = theirs.output.proj.bias
    block = block_with(
        state,
        12,
        3,
        num_kv_heads=1,
        key_dim=5,
        value_dim=4,
        out_channels=18,
        kv_stride=kv_stride,
        qkv_bias=bias,
        proj_bias=bias,
        impl=impl,
    )
    return theirs, block


@pytest.mark.parametrize("bias", [False, True])
def test_timms_multi_query_attention(impl, bias):
    theirs, block = multi_query_and_ours(impl, bias=bias)
    check(impl, block, theirs, random_map(2, 12, 3, 5))


@pytest.mark.parametrize("size", [(4, 6), (5, 7)])
def test_timms_multi_query_attention_strides_otherwise_and_differs_in_nothing_else(impl, size):
    """Timm's depthwise convolution and batch norm are learned, and others for keys than for values; ours is a mean."""
    theirs, block = multi_query_and_ours(impl, kv_stride=2)
    x = random_map(2, 12, *size)
    with torch.no_grad():
        assert (block(x) - theirs.eval()(x)).abs().max() > 1e-2
    for part in (theirs.key, theirs.value):
        part.down_conv = nn.AvgPool2d(2, ceil_mode=True)
        part.norm = nn.Identity()
    check(impl, block, theirs, x)


@pytest.mark.parametrize("crossed", [False, True])
def test_timms_second_multi_query_attention(impl, crossed):
    theirs = randomized(timm_attention2d.MultiQueryAttentionV2(12, 18, num_heads=3, key_dim=5, value_dim=4))
    rows = [theirs.query_proj.flatten(0, 1), theirs.key_proj.T, theirs.value_proj.T]
    block = block_with(
        {"qkv.weight": kernels(torch.cat(rows)), "proj.weight": kernels(theirs.out_proj.flatten(1))},
        12,
        3,
        num_kv_heads=1,
        key_dim=5,
        value_dim=4,
        out_channels=18,
        qkv_bias=False,
        proj_bias=False,
        impl=impl,
    )
    maps = [random_map(2, 12, 3, 5), random_map(2, 12, 4, 2)][: 1 + crossed]
    check(impl, lambda x, context=None: block(x, context=context), theirs, *maps)
