"""Conversion of single layers: from other libraries to blocks, and from blocks to layers of other libraries."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention.blocks import Attention
from vision_attn.attention.patterns import AnyPattern, Grid, Window
from vision_attn.checks import check_type
from vision_attn.networks.convert.equivalence import check_equivalence, check_source, random_map
from vision_attn.networks.convert.row import find_row, load_weights, run_on_tokens


def from_layer(module: nn.Module, *, rank: int | None = None, pattern: str | AnyPattern | None = None) -> Any:
    """Convert an attention layer of another library to a block for maps, with copies of its weights.

    ``layer(t)`` on the positions of ``x``, row by row, becomes ``block(x)``. The block has the layer's type, device and
    mode, and the same parameters are trained. The layer does not change. ``docs/convert.md`` lists the layers.

    - ``nn.MultiheadAttention``: pass ``~mask``, because torch's bool mask is True where attention is not allowed. With
      ``kdim`` equal to ``vdim``, call ``block(x, context=y)``.
    - Swin: maps are padded with zeros to whole windows, which are attended to, as in its network. Positions that a
      shift brings together do not attend to each other, where the network subtracts 100 from their logits. The small
      network that computes the biases of version 2 becomes a table, which is trained.
    - timm's Swin, and MaxViT: the input of the layer is windows or grids, which the block cuts: see ``pattern``.
    - ``BottleneckAttn`` and ``HaloAttn`` have no output projection: that of the block is the identity, not trained.
    - Keras, on torch: ``attention_axes`` becomes the pattern, ``use_gate`` the output gate. The layer has to be built.
      Pass masks to the block's call. The block is in evaluation mode: call ``.train()`` to train it.

    Args:
        module: the layer.
        rank: axes of the block's maps, 1, 2 or 3, if the input of the layer is tokens; 2 when None.
        pattern: how the network cuts the map, if the input of the layer is groups: a :class:`Window` or :class:`Grid`.
            For maps of one group when None; for Swin, windows without shift.

    Returns:
        :class:`Attention1d`, :class:`Attention2d` or :class:`Attention3d`; an :class:`AttentionBlock2d` if the layer
        adds its input.

    Raises:
        ValueError: the table has no row for the layer, or the block does not support one of its options.
        ConversionError: the block does not compute the same as the layer, on random weights and inputs: in float64, or
            in float32 if the library has no float64 kernel.

    >>> from_layer(nn.MultiheadAttention(64, num_heads=4))(torch.randn(2, 64, 14, 10)).shape
    torch.Size([2, 64, 14, 10])
    """
    check_type("module", module, nn.Module, "an nn.Module; a layer of Keras is one if KERAS_BACKEND=torch is set first")
    _, kind, row = find_row(module)
    swap_only = dict.fromkeys(row.swap_only, "call swap_ instead, which keeps this part of the layer")
    check_source(module, {**row.unsupported, **swap_only})
    options = {} if row.groups is None else row.groups(module)
    if pattern is not None:
        if row.groups is None or not isinstance(pattern, (Window, Grid)):
            expected = "None, or a Window or Grid if the input of the layer is groups"
            raise ValueError(f"pattern must be {expected}; got {pattern!r}")
        options["pattern"] = pattern
    if row.axes == "b t c":
        options["rank"] = 2 if rank is None else rank
    elif rank is not None:
        raise ValueError(f"rank must be None for a {kind.__name__}, whose maps have their own axes; got {rank}")

    def compute(copied: Any, x: Tensor, *args: Any) -> Any:
        block = row.make_block(copied).to(row.dtype)
        if isinstance(block, Attention):
            attend = partial(run_on_tokens, block, block.rank)
            return row.forward(copied, lambda x, _=None, context=None: attend(x, None, context), x, *args)
        return run_on_tokens(block, row.rank, x)

    check_equivalence(module, compute, row.arguments, row.make_copy, row.dtype, **row.call_options)
    with torch.inference_mode(False), torch.enable_grad():  # load_weights reads requires_grad
        return row.make_block(module, **options)


# --- from blocks to layers --------------------------------------------------------------------------------------------


def to_torch_mha(block: Attention) -> nn.MultiheadAttention:
    """Convert a block to an ``nn.MultiheadAttention`` on tokens, the positions of the block's map.

    Args:
        block: attention over the complete map, in heads of ``channels / num_heads``, without further parts.

    Returns:
        The layer, ``batch_first``, with copies of the weights.

    Raises:
        ValueError: the layer does not support an option of the block.

    >>> from vision_attn.attention.blocks import Attention2d
    >>> layer = to_torch_mha(Attention2d(64, 4))
    >>> layer(*[torch.randn(2, 140, 64)] * 3)[0].shape
    torch.Size([2, 140, 64])
    """
    check_type("block", block, Attention, "an Attention1d, Attention2d or Attention3d")
    bias = block.qkv.bias is not None
    options = {"dropout": block.attn_drop, "bias": bias, "batch_first": True, "device": "meta"}
    layer = nn.MultiheadAttention(block.channels, block.num_heads, **options)
    return convert_block(block, layer, {"in_proj_": "qkv", "out_proj.": "proj"})


def to_timm_attention(block: Attention) -> nn.Module:
    """Convert a block to the ``timm.layers.Attention`` of ViT, on tokens, the positions of the block's map.

    Args:
        block: attention over the complete map, without further parts except norms of queries and keys.

    Returns:
        The layer, with copies of the weights.

    Raises:
        ValueError: the layer does not support an option of the block.

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
    return convert_block(block, layer, names, "key_dim", "value_dim", "proj_drop")


def convert_block(block: Attention, layer: Any, names: dict[str, str], *supported: str) -> Any:
    """Load a block's weights into a layer on the meta device, by the layer's names, after comparing both.

    Options that are not supported are refused, by name if the comparison on a small map would not detect them.
    """
    options = {name: x for name, x in block.get_config().items() if name not in ("num_heads", *supported)}
    if options.pop("pattern") != "full" or options or block.proj_drop.p * ("proj_drop" not in supported):
        raise ValueError(f"block must be plain attention over the complete map, as the layer is; got {block}")

    def convert(block: Attention) -> Any:
        tensors = {
            f"{theirs}{key.removeprefix(f'{name}.')}": x.flatten(1) if x.dim() > 1 else x
            for theirs, name in names.items()
            for key, x in block.named_parameters()
            if key.startswith(f"{name}.")
        }
        return load_weights(layer, tensors, training=block.training)

    def compute(copied: Attention, x: Tensor) -> Tensor:
        convert(copied)
        tokens = x.flatten(2).mT
        y = layer(*[tokens] * 3)[0] if isinstance(layer, nn.MultiheadAttention) else layer(tokens)
        return y.mT.view(x.shape)

    check_equivalence(block, compute, lambda copied: (random_map(1, copied.channels, *(2, 3, 4)[: copied.rank]),))
    with torch.inference_mode(False), torch.enable_grad():
        return convert(block)
