"""One layer at a time: another library's as a block of ours, and a block as another library's layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vision_attn.attention.blocks import Attention
from vision_attn.attention.patterns import AnyPattern, Grid, Window
from vision_attn.checks import check_count, check_divides
from vision_attn.networks.convert.proof import check_source, check_without, difference, path_of, random_map
from vision_attn.networks.convert.row import BLOCKS, block_of, filled, input_projections, parameters_of, rows_of
from vision_attn.networks.convert.table import TABLE, row_of
from vision_attn.text import markdown

__all__ = ["from_layer", "from_linear_projections", "table_of_layers", "to_timm_attention", "to_torch_mha"]

Layer = TypeVar("Layer", bound=nn.Module)

#: What a projection computes by, if it is none that does more.
PLAIN = (nn.Linear.forward, nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward)

#: What a convolution has that looks at one position at a time.
ONES, ZEROS = (1, (1,), (1, 1), (1, 1, 1)), ((0,), (0, 0), (0, 0, 0), "same", "valid")
POINTWISE: dict[str, tuple[Any, ...]] = {"kernel_size": ONES, "stride": ONES, "groups": ONES, "padding": ZEROS}


def from_layer(module: nn.Module, *, rank: int | None = None, pattern: str | AnyPattern | None = None) -> Any:
    """The block that does on a map what another library's attention layer does, with copies of its weights.

    ``layer(t)`` of the positions of ``x``, row by row, becomes ``block(x)``. The block has the layer's type, device and
    mode, and is trained where the layer is. The layer stays as it is. The table of layers is in ``docs/convert.md``.

    - Of ``nn.MultiheadAttention``: give ``~mask``, as torch's bool mask says where not to look. With ``kdim`` and
      ``vdim`` it is ``block(x, context=y)``; if they differ, ``y`` holds the channels of the keys, then the values'.
    - Of Swin: maps are padded with zeros to whole windows, and attended to with them, as in its network. Positions that
      a shift brings together do not see each other, where the network takes 100 off their logits. The small network
      that gives the biases of version 2 becomes a table, which is trained.
    - Of timm's Swin and of MaxViT: the layer is given windows or grids, which the block cuts itself: see ``pattern``.
    - Of ``BottleneckAttn`` and ``HaloAttn``, which have no output projection: the block's is the identity, not trained.
    - Of ``NonLocalAttn``: the batch norm, in evaluation mode, becomes part of the output projection.
    - Of Keras, on torch: ``attention_axes`` becomes the pattern, ``use_gate`` the output gate. The layer has to be
      built. Masks are arguments of the block's call. The block is in evaluation mode: call ``.train()`` to train it.

    Args:
        module: the layer.
        rank: axes of the maps that the block is for, 1, 2 or 3, where the layer takes tokens; 2 when None.
        pattern: how its network cuts the map whose groups the layer is given, where it does: a :class:`Window` or
            :class:`Grid`. For maps of one group when None; for Swin's, windows without shift.

    Returns:
        :class:`Attention1d`, :class:`Attention2d` or :class:`Attention3d`; an :class:`AttentionBlock2d` where the layer
        adds its input; a :class:`TransformerBlock2d` of an encoder layer.

    Raises:
        ValueError: no row is for the layer, or it does what the block does not; the message says what.
        ConversionError: the block does not compute what the layer does, in float64 on random weights and numbers.

    >>> from_layer(nn.MultiheadAttention(64, num_heads=4))(torch.randn(2, 64, 14, 10)).shape
    torch.Size([2, 64, 14, 10])
    """
    if not isinstance(module, nn.Module):
        keras = "; Keras has to run on torch: set KERAS_BACKEND=torch before it is imported"
        raise ValueError(f"module must be an nn.Module; got {path_of(type(module))}{keras}")
    _, kind, row = row_of(module)
    row.refuse(module)
    check_without(module, dict.fromkeys(row.around, "let swap_ run a block inside the layer, which keeps doing it"))
    options: dict[str, Any] = {}
    if row.axes == "b t c":
        options["rank"] = 2 if rank is None else check_rank(rank)
    elif rank is not None:
        raise ValueError(
            f"rank must be None for a {kind.__name__}, whose maps have the axes that they have; got {rank}"
        )
    if row.groups is not None and (pattern in (None, "full") or isinstance(pattern, (Window, Grid))):
        options |= row.groups(module, pattern)
    elif pattern is not None:
        expected = "None" if row.groups is None else "a Window or a Grid, as its network cuts the map"
        raise ValueError(f"pattern must be {expected} for a {kind.__name__}; got {pattern!r}")

    def compute(twin: Any, *args: Any) -> Any:
        whole = row.whole(row, twin, 2)
        if whole is None:
            block = row.block(twin).double()
            return row.forward(twin, lambda x, mask=None, context=None: block(x, None, context), *args)
        maps = [x if x.dim() == 4 else x.mT[..., None] for x in args]
        y = whole(*maps) if len(maps) == 1 else whole(maps[0], None, maps[1])
        return y if args[0].dim() == 4 else y.flatten(2).mT

    difference(module, compute, row.arguments, row.twin, **row.told)
    with torch.inference_mode(False), torch.enable_grad():  # which the weights say by whether they are trained
        whole = row.whole(row, module, options.get("rank", 2))
        return row.block(module, **options) if whole is None else whole


def check_rank(rank: int) -> int:
    if isinstance(rank, bool) or not isinstance(rank, int) or rank not in BLOCKS:
        raise ValueError(f"rank must be the axes of a map, 1, 2 or 3, for Attention1d, 2d or 3d; got {rank!r}")
    return rank


def table_of_layers() -> str:
    """The table of the layers that are known, as Markdown, made from its rows.

    >>> table_of_layers().splitlines()[0]
    '| layer | `from_layer` refuses | `swap_` leaves to the layer |'
    """
    lines: dict[tuple[str, str], list[str]] = {}
    for path, row in TABLE.items():
        refused = ", ".join(f"`{name}`" for name in (*row.refuses, *row.around)) or "—"
        left = (row.serves_itself or "—") if row.swaps else "all: it is not swapped"
        lines.setdefault((refused, left), []).append(f"`{path}`")
    rows = [(", ".join(paths), *cells) for cells, paths in lines.items()]
    return markdown([("layer", "`from_layer` refuses", "`swap_` leaves to the layer"), *rows], left=(0, 1, 2))


# --- separate projections ---------------------------------------------------------------------------------------------


def from_linear_projections(
    wq: nn.Module,
    wk: nn.Module,
    wv: nn.Module,
    wo: nn.Module,
    num_heads: int,
    num_kv_heads: int | None = None,
    *,
    scale: float | None = None,
    rank: int = 2,
) -> Attention:
    """The block of four projections: ``wo(attention(wq(x), wk(x), wv(x)))``, heads beside each other in their rows.

    In Llama they are ``q_proj, k_proj, v_proj, o_proj``. What is around them in such models, a norm, a residual, a
    rotation of queries and keys, is not part of the block. There is no layer to compare the block with, so the
    projections have to be plain.

    Args:
        wq: projection of queries, an ``nn.Linear`` or a 1×1 convolution, to ``num_heads · key_dim`` rows.
        wk: of keys, to ``num_kv_heads · key_dim`` rows.
        wv: of values, to ``num_kv_heads · value_dim`` rows.
        wo: of the output, from ``num_heads · value_dim``.
        num_heads: heads of queries.
        num_kv_heads: heads of keys and values, each shared by as many heads of queries in a row; ``num_heads`` if None.
        scale: factor on the logits; ``key_dim ** -0.5`` when None.
        rank: axes of the maps that the block is for: 1, 2 or 3.

    Returns:
        :class:`Attention1d`, :class:`Attention2d` or :class:`Attention3d` by ``rank``, with copies of the weights and
        without dropout; it takes a ``context`` where keys and values are of other channels than queries.

    Raises:
        ValueError: the projections are of other kinds or do not fit each other; the message says which.

    >>> wq, wo = (nn.Linear(64, 64, bias=False) for _ in range(2))
    >>> wk, wv = (nn.Linear(64, 16, bias=False) for _ in range(2))
    >>> from_linear_projections(wq, wk, wv, wo, num_heads=8, num_kv_heads=2)(torch.randn(2, 64, 14, 10)).shape
    torch.Size([2, 64, 14, 10])
    """
    check_rank(rank)
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    check_projections({"wq": wq, "wk": wk, "wv": wv, "wo": wo}, num_heads, num_kv_heads)
    with torch.inference_mode(False), torch.enable_grad():
        weights = {**input_projections(rows_of(wq), rows_of(wk), rows_of(wv)), "proj": rows_of(wo)}
        block = block_of(rank, weights, scale=scale, num_heads=num_heads, num_kv_heads=num_kv_heads)
        return filled(block, parameters_of(weights, rank), training=wq.training)


def check_projections(layers: dict[str, Any], num_heads: int, num_kv_heads: int) -> None:
    """Refuse projections that are not plain, or do not fit each other."""
    check_count("num_heads", num_heads)
    check_count("num_kv_heads", num_kv_heads)
    check_divides("num_kv_heads", num_kv_heads, "num_heads", num_heads)
    for name, layer in layers.items():
        plain = type(layer).forward in PLAIN if isinstance(layer, nn.Module) else False
        if not plain or any(getattr(layer, key, usual[0]) not in usual for key, usual in POINTWISE.items()):
            raise ValueError(f"{name} must be an nn.Linear or a 1×1 convolution, and plain; got {layer}")
        check_source(layer)
    shapes = {name: tuple(rows_of(layer).weight.shape) for name, layer in layers.items()}
    d, e = shapes["wq"][0] // num_heads, shapes["wv"][0] // num_kv_heads
    context = shapes["wk"][1]
    fitting = {
        "wq": (num_heads * d, shapes["wq"][1]),
        "wk": (num_kv_heads * d, context),
        "wv": (num_kv_heads * e, context),
        "wo": (shapes["wo"][0], num_heads * e),
    }
    for name, expected in fitting.items():
        if shapes[name] != expected:
            raise ValueError(
                f"{name}.weight must be of shape {expected} with {num_heads} heads of queries and {num_kv_heads} of "
                f"keys, of wq {shapes['wq']} and wv {shapes['wv']}; got {shapes[name]}"
            )


# --- the other way ----------------------------------------------------------------------------------------------------


def to_torch_mha(block: Attention) -> nn.MultiheadAttention:
    """The ``nn.MultiheadAttention`` that does with tokens what a block does with the positions of a map.

    Args:
        block: a block that attends to its whole map, in heads of ``channels / num_heads``, without further parts.

    Returns:
        The layer, ``batch_first``, with copies of the weights.

    Raises:
        ValueError: the block does what the layer does not; the message says what.

    >>> from vision_attn.attention.blocks import Attention2d
    >>> layer = to_torch_mha(Attention2d(64, 4))
    >>> layer(*[torch.randn(2, 140, 64)] * 3)[0].shape
    torch.Size([2, 140, 64])
    """
    check_plain(block)
    if (block.qkv.bias is None) != (block.proj.bias is None):
        raise ValueError("block must have both biases, of qkv and of proj, or none; give it one of zeros")

    def convert(block: Attention) -> nn.MultiheadAttention:
        options = {"dropout": block.attn_drop, "bias": block.qkv.bias is not None, "batch_first": True}
        layer = nn.MultiheadAttention(block.channels, block.num_heads, device="meta", **options)
        return layer_filled(layer, block, {"in_proj_": "qkv", "out_proj.": "proj"})

    return proven(block, convert)


def to_timm_attention(block: Attention) -> nn.Module:
    """The ``timm.layers.Attention``, of ViT, that does with tokens what a block does with the positions of a map.

    Args:
        block: a block that attends to its whole map, without further parts but norms of queries and keys.

    Returns:
        The layer, with copies of the weights.

    Raises:
        ValueError: the block does what the layer does not; the message says what.

    >>> from vision_attn.attention.blocks import Attention2d
    >>> to_timm_attention(Attention2d(64, 4))(torch.randn(2, 140, 64)).shape
    torch.Size([2, 140, 64])
    """
    check_plain(block, "key_dim", "value_dim", "proj_drop")

    def convert(block: Attention) -> nn.Module:
        from timm.layers import Attention as TimmAttention

        layer = TimmAttention(
            block.channels,
            block.num_heads,
            attn_head_dim=block.key_dim,
            qkv_bias=block.qkv.bias is not None,
            qk_norm=block.q_norm is not None,
            norm_layer=nn.LayerNorm,
            proj_bias=block.proj.bias is not None,
            attn_drop=block.attn_drop,
            proj_drop=block.proj_drop.p,
            device="meta",
        )
        for name in ("q_norm", "k_norm"):
            if isinstance(ours := getattr(block, name), nn.LayerNorm):
                getattr(layer, name).eps = ours.eps
        return layer_filled(layer, block, {f"{name}.": name for name in ("qkv", "proj", "q_norm", "k_norm")})

    return proven(block, convert)


def check_plain(block: Attention, *carried: str) -> None:
    """Refuse by name what a block does more; what has no name here the proof finds."""
    if not isinstance(block, Attention):
        raise ValueError(f"block must be an Attention1d, Attention2d or Attention3d; got {type(block).__name__}")
    own = {name: value for name, value in block.specification().items() if name not in ("num_heads", *carried)}
    if own.pop("pattern") != "full" or own or block.proj_drop.p * ("proj_drop" not in carried):
        raise ValueError(
            f"block must be plain attention of the whole map, which is all that the layer does; got {block}"
        )


def layer_filled(layer: Layer, block: Attention, names: dict[str, str]) -> Layer:
    """The layer with copies of the block's parameters, convolutions as matrices; names are its own to the block's."""
    parameters = dict(block.named_parameters())
    tensors = {
        f"{theirs}{key}": x.flatten(1) if x.dim() > 1 else x
        for theirs, ours in names.items()
        for key in ("weight", "bias")
        if (x := parameters.get(f"{ours}.{key}")) is not None
    }
    return filled(layer, tensors, training=block.training)


def proven(block: Attention, convert: Callable[[Attention], Layer]) -> Layer:
    """The layer, after a copy of the block with random weights was seen to compute the same."""

    def compute(twin: Attention, x: Tensor) -> Tensor:
        layer, tokens = convert(twin), x.flatten(2).mT
        y = layer(*[tokens] * 3)[0] if isinstance(layer, nn.MultiheadAttention) else layer(tokens)
        return y.mT.view(x.shape)

    difference(block, compute, lambda twin: (random_map(1, twin.channels, *(2, 3, 4)[: twin.rank]),))
    with torch.inference_mode(False), torch.enable_grad():
        return convert(block)
