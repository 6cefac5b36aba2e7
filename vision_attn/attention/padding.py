"""The valid positions of padded images, inside ``va.padded``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vision_attn.attention.patterns.grouping import in_graph
from vision_attn.attention.scopes import scoped_values


def valid_positions(block: Any, *maps: Tensor) -> list[Tensor] | None:
    """Return the valid positions of each feature map, bool ``(b, 1, *size)``; None outside ``va.padded``."""
    found = scoped_values("valid", block)
    if not found:
        return None
    if in_graph(maps[0]):
        raise ValueError("va.padded must not be part of a graph that is traced or exported. Pass mask= to the blocks")
    pixels: Tensor = found[-1](maps[0].device)
    if pixels.shape[0] != maps[0].shape[0]:
        raise ValueError(
            f"valid must have one entry per image, got {pixels.shape[0]} for a batch of {maps[0].shape[0]}"
        )
    return [resize_valid(pixels, y.shape[2:])[:, None] for y in maps]


def resize_valid(pixels: Tensor, size: Sequence[int]) -> Tensor:
    """Return the valid positions ``(b, *size)`` for valid pixels ``(b, *image_size)``, as in DETR.

    A position is valid if the pixel at its corner is.
    """
    lengths = pixels.shape[1:]
    # A feature map that is computed with one stride s along all axes has from (length / s) - 1 to (length / s) + 1
    # positions. Other feature maps show something else, such as the tokens of a text.
    least = max(length / (n + 1) for length, n in zip(lengths, size, strict=True))
    if least > min(length / max(n - 1, 0.5) for length, n in zip(lengths, size, strict=True)):
        what = f"a feature map of {tuple(size)} is not one of images of {tuple(lengths)}"
        raise ValueError(
            f"valid must have the size of the images, (batch, height, width): {what}. Pass a mask of that size"
        )
    for axis, length in enumerate(size, start=1):
        corners = torch.arange(length, device=pixels.device) * pixels.shape[axis] // length
        pixels = pixels.index_select(axis, corners)
    return pixels
