"""Convert single layers of other libraries to blocks."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention.patterns import AnyPattern, Grid, Window
from vision_attn.networks.convert.conversion import find_conversion, run_converted
from vision_attn.networks.convert.equivalence import check_equivalence, check_source


def from_layer(module: nn.Module, *, rank: int | None = None, pattern: str | AnyPattern | None = None) -> Any:
    """Convert an attention layer of another library to a block for feature maps, with copies of its weights.

    ``block(x)`` on a feature map ``x`` equals ``layer(t)`` on its positions ``t`` in row-major order. The block has the
    dtype, device and mode of the layer, and is frozen if the layer is frozen. The layer does not change.
    ``docs/convert.md`` lists the supported layers.

    - ``nn.MultiheadAttention``: pass ``~mask``, because torch's boolean mask is True where attention is not allowed. If
      ``kdim`` equals ``vdim``, call ``block(x, context=y)``.
    - Swin: feature maps are padded with zeros to complete windows, and the padding is attended to, as in the network.
      The block masks pairs of positions that are adjacent only because of the shift; the network subtracts 100 from
      their logits. In Swin v2, the network that computes the position biases is replaced by a trainable table.
    - timm's Swin and MaxViT: the input of the layer is windows or grids. The block partitions the feature map itself;
      see ``pattern``.
    - ``BottleneckAttn`` and ``HaloAttn`` have no output projection. The output projection of the block is an identity
      that is not trained.
    - Keras with the torch backend: ``attention_axes`` is converted to the pattern, and ``use_gate`` to the output gate.
      The layer must be built. Pass masks when calling the block. The block is in evaluation mode.

    Args:
        module: the layer.
        rank: number of axes of the block's feature maps (1, 2 or 3), if the input of the layer is tokens; 2 by default.
        pattern: a :class:`Window` or :class:`Grid`, if the input of the layer is groups of a feature map. By default,
            the block expects feature maps of one group, and a block for Swin uses windows without a shift.

    Returns:
        A block: :class:`Attention1d`, :class:`Attention2d` or :class:`Attention3d`.

    Raises:
        ValueError: the layer or one of its options is not supported, or some of its parameters are frozen.
        ConversionError: the outputs of block and layer differ. They are compared on random weights and inputs, in
            float64.

    >>> from_layer(nn.MultiheadAttention(64, num_heads=4))(torch.randn(2, 64, 14, 10)).shape
    torch.Size([2, 64, 14, 10])
    """
    path, kind, conversion = find_conversion(module)
    if conversion.only_swap:
        raise ValueError(f"{path} is supported only by va.swap_: {conversion.only_swap}")
    swap_only = dict.fromkeys(conversion.swap_only, "call va.swap_ instead, which keeps this part of the layer")
    check_source(module, {**conversion.unsupported, **swap_only})
    options = {} if conversion.groups is None else conversion.groups(module)
    if pattern is not None:
        if conversion.groups is None or not isinstance(pattern, (Window, Grid)):
            expected = "None, or a Window or Grid if the input of the layer is groups of a feature map"
            raise ValueError(f"pattern must be {expected}, got {pattern!r}")
        options["pattern"] = pattern
    if conversion.axes == "b t c":
        options["rank"] = 2 if rank is None else rank
    elif rank is not None:
        raise ValueError(f"rank must be None for {kind.__name__}, because its class determines the rank, got {rank}")

    def compute(copied: Any, x: Tensor, *args: Any) -> Any:
        block = conversion.make_block(copied)
        attend = partial(run_converted, block, block.rank)
        return conversion.forward(copied, lambda x, _=None, context=None: attend(x, None, context), x, *args)

    check_equivalence(module, compute, conversion)
    with torch.inference_mode(False), torch.enable_grad():  # weights keep requires_grad
        return conversion.make_block(module, **options)
