"""The padding of images inside ``va.padded``, which is excluded from attention."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vision_attn.attention.masks import Mask, broadcast_mask, combine_masks
from vision_attn.attention.position import Rope


def mask_padding(
    block: Any, pixels: Any, x: Tensor, mask: Mask, context: Tensor | None
) -> tuple[Tensor, Mask, Tensor | None, list[Tensor]]:
    """Exclude the padding of images from the inputs of a block.

    Args:
        block: an :class:`.Attention`.
        pixels: ``pixels(device)`` returns the valid pixels of the images, and ``pixels.in_context`` is True if the
            context consists of the same images.
        x: as in :meth:`.Attention.forward`.
        mask: as in :meth:`.Attention.forward`.
        context: as in :meth:`.Attention.forward`.

    Returns:
        ``x`` with zeros in the padding, the mask without the padding, ``context`` with zeros in the padding, and the
        valid positions of ``x`` and of the keys' feature map before pooling, bool ``(b, 1, *size)``.
    """
    refuse_scaled_positions(block, pixels, x, context)
    valid = valid_positions(pixels, x)
    x = x.masked_fill(valid.logical_not(), 0.0)  # a value of NaN would reach every position: 0 · NaN is NaN
    if context is None:
        keys = valid
    elif pixels.in_context:
        keys = valid_positions(pixels, context)
        context = context.masked_fill(keys.logical_not(), 0.0)
    else:
        return x, mask, context, [valid, torch.ones_like(context[:, :1], dtype=torch.bool)]
    allowed = block.pool_kv(keys.to(x.dtype)).flatten(1)[:, None, None] > 0
    return x, allowed if mask is None else combine_masks(broadcast_mask(mask), allowed), context, [valid, keys]


def latest_pixels(values: Sequence[Any], graph: bool) -> Any:
    """Return the value of the innermost ``va.padded``, or None outside; raise while a graph is traced or exported."""
    if values and graph:
        raise ValueError("va.padded must not be part of a graph that is traced or exported. Pass mask= to the blocks")
    return values[-1] if values else None


def refuse_scaled_positions(block: Any, pixels: Any, x: Tensor, context: Tensor | None) -> None:
    """Raise if rotary positions depend on the size of the padded feature map."""
    rope = block.position.config if block.position is not None else None
    causes = {"kv_stride": block.kv_stride > 1, "va.context": not pixels.in_context}
    causes["a context of another size"] = context is not None and context.shape[2:] != x.shape[2:]
    cause = next((name for name, holds in causes.items() if holds), None)
    if isinstance(rope, Rope) and (rope.normalized or cause):
        what = repr(rope) if rope.normalized else f"{rope!r} with {cause}"
        why = "its positions are scaled to the size of the padded feature map"
        raise ValueError(f"va.padded does not support {what}: {why}. Run images of one size together")


def valid_positions(pixels: Any, x: Tensor) -> Tensor:
    """Return the valid positions of a feature map ``(b, c, *size)``, bool ``(b, 1, *size)``, as in DETR.

    A position is valid if the pixel at its corner is.
    """
    valid: Tensor = pixels(x.device)
    size, image_size = x.shape[2:], valid.shape[1:]
    if valid.shape[0] != x.shape[0]:
        raise ValueError(f"valid must have one entry per image, got {valid.shape[0]} for a batch of {x.shape[0]}")
    if len(image_size) != len(size) or not can_show(size, image_size):
        what = f"a feature map of {tuple(size)} is not one of images of {tuple(image_size)}"
        size_rule = "valid must have the size of the images, (batch, height, width)"
        raise ValueError(f"{size_rule}: {what}. Pass a mask of that size")
    for axis, length in enumerate(size, start=1):
        total, index = valid.shape[axis], torch.arange(length, device=valid.device)
        stride = 2 ** max(0, round(math.log2(total / length)))
        is_rounded_up = -(-total // stride) == length  # as by convolutions with a stride of two
        corners = index * stride if is_rounded_up else index * total // length
        valid = valid.index_select(axis, corners)
    return valid[:, None]


def can_show(size: Sequence[int], image_size: Sequence[int]) -> bool:
    """Return True if a feature map of this size can show an image, and False for example for the tokens of a text.

    A feature map that is computed with one stride s along all axes has from (length / s) - 1 to (length / s) + 1
    positions.
    """
    least = max(length / (n + 1) for length, n in zip(image_size, size, strict=True))
    return least <= min(length / max(n - 1, 0.5) for length, n in zip(image_size, size, strict=True))
