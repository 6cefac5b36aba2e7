"""One layer at a time: another library's as a block of ours, and a block as another library's layer."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention.blocks import Attention
from vision_attn.attention.patterns import AnyPattern, Grid, Window
from vision_attn.checks import check_type
from vision_attn.networks.convert.proof import check_without, difference, path_of, random_map
from vision_attn.networks.convert.row import filled, run_on_tokens
from vision_attn.networks.convert.table import row_of


def from_layer(module: nn.Module, *, rank: int | None = None, pattern: str | AnyPattern | None = None) -> Any:
    """The block that does on a map what another library's attention layer does, with copies of its weights.

    ``layer(t)`` of the positions of ``x``, row by row, becomes ``block(x)``. The block has the layer's type, device and
    mode, and is trained where the layer is. The layer stays as it is. The table of layers is in ``docs/convert.md``.

    - Of ``nn.MultiheadAttention``: give ``~mask``, as torch's bool mask says where not to look. With a ``kdim`` equal
      to ``vdim`` it is ``block(x, context=y)``.
    - Of Swin: maps are padded with zeros to whole windows, and attended to with them, as in its network. Positions that
      a shift brings together do not see each other, where the network takes 100 off their logits. The small network
      that gives the biases of version 2 becomes a table, which is trained.
    - Of timm's Swin and of MaxViT: the layer is given windows or grids, which the block cuts itself: see ``pattern``.
    - Of ``BottleneckAttn`` and ``HaloAttn``, which have no output projection: the block's is the identity, not trained.
    - Of Keras, on torch: ``attention_axes`` becomes the pattern, ``use_gate`` the output gate. The layer has to be
      built. Masks are arguments of the block's call. The block is in evaluation mode: call ``.train()`` to train it.

    Args:
        module: the layer.
        rank: axes of the maps that the block is for, 1, 2 or 3, where the layer takes tokens; 2 when None.
        pattern: how its network cuts the map whose groups the layer is given, where it does: a :class:`Window` or
            :class:`Grid`. For maps of one group when None; for Swin's, windows without shift.

    Returns:
        :class:`Attention1d`, :class:`Attention2d` or :class:`Attention3d`; an :class:`AttentionBlock2d` where the layer
        adds its input.

    Raises:
        ValueError: no row is for the layer, or it does what the block does not; the message says what.
        ConversionError: the block does not compute what the layer does, on random weights and numbers: in float64, or
            in float32 where the library has no kernel for more.

    >>> from_layer(nn.MultiheadAttention(64, num_heads=4))(torch.randn(2, 64, 14, 10)).shape
    torch.Size([2, 64, 14, 10])
    """
    if not isinstance(module, nn.Module):
        needed = "an nn.Module, as a layer of Keras is if KERAS_BACKEND=torch is set before it is imported"
        raise ValueError(f"module must be {needed}; got {path_of(type(module))}")
    _, kind, row = row_of(module)
    row.refuse(module)
    check_without(module, dict.fromkeys(row.around, "let swap_ run a block inside the layer, which keeps doing it"))
    options = {} if row.groups is None else row.groups(module)
    if pattern is not None:
        if row.groups is None or not isinstance(pattern, (Window, Grid)):
            raise ValueError(f"pattern must be None, or a Window or Grid if a layer is given groups; got {pattern!r}")
        options["pattern"] = pattern
    if row.axes == "b t c":
        options["rank"] = 2 if rank is None else rank
    elif rank is not None:
        raise ValueError(f"rank must be None for a {kind.__name__}, whose maps have their own axes; got {rank}")

    def compute(twin: Any, x: Tensor, *args: Any) -> Any:
        block = row.block(twin).to(row.dtype)
        if isinstance(block, Attention):
            attend = partial(run_on_tokens, block, block.rank)
            return row.forward(twin, lambda x, _=None, context=None: attend(x, None, context), x, *args)
        return run_on_tokens(block, row.rank, x)

    difference(module, compute, row.arguments, row.twin, row.dtype, **row.told)
    with torch.inference_mode(False), torch.enable_grad():  # which the weights say by whether they are trained
        return row.block(module, **options)


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
    check_type("block", block, Attention, "an Attention1d, Attention2d or Attention3d")
    bias = block.qkv.bias is not None
    options = {"dropout": block.attn_drop, "bias": bias, "batch_first": True, "device": "meta"}
    layer = nn.MultiheadAttention(block.channels, block.num_heads, **options)
    return taken_back(block, layer, {"in_proj_": "qkv", "out_proj.": "proj"})


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
    from timm.layers import Attention as TimmAttention

    check_type("block", block, Attention, "an Attention1d, Attention2d or Attention3d")
    layer: Any = TimmAttention(
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
    if isinstance(block.q_norm, nn.LayerNorm) and isinstance(block.k_norm, nn.LayerNorm):
        layer.q_norm.eps, layer.k_norm.eps = block.q_norm.eps, block.k_norm.eps
    names = {f"{name}.": name for name in ("qkv", "proj", "q_norm", "k_norm")}
    return taken_back(block, layer, names, "key_dim", "value_dim", "proj_drop")


def taken_back(block: Attention, layer: Any, names: dict[str, str], *carried: str) -> Any:
    """The layer with the block's weights, by the names that the layer has for them, proven on a copy of the block.

    What the layer does not carry over is refused, by name where the proof on a small map would not find it.
    """
    own = {name: value for name, value in block.get_config().items() if name not in ("num_heads", *carried)}
    if own.pop("pattern") != "full" or own or block.proj_drop.p * ("proj_drop" not in carried):
        raise ValueError(f"block must be plain attention of the whole map, as all that the layer does; got {block}")

    def convert(block: Attention) -> Any:
        tensors = {
            f"{theirs}{key.removeprefix(f'{name}.')}": x.flatten(1) if x.dim() > 1 else x
            for theirs, name in names.items()
            for key, x in block.named_parameters()
            if key.startswith(f"{name}.")
        }
        return filled(layer, tensors, training=block.training)

    def compute(twin: Attention, x: Tensor) -> Tensor:
        convert(twin)
        tokens = x.flatten(2).mT
        y = layer(*[tokens] * 3)[0] if isinstance(layer, nn.MultiheadAttention) else layer(tokens)
        return y.mT.view(x.shape)

    difference(block, compute, lambda twin: (random_map(1, twin.channels, *(2, 3, 4)[: twin.rank]),))
    with torch.inference_mode(False), torch.enable_grad():
        return convert(block)
