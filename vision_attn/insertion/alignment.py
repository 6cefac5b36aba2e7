"""Whether what looks like a map is one of the image: a change of the image shows at its place."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from vision_attn.insertion.elements import Element, pick
from vision_attn.insertion.layout import Layout
from vision_attn.insertion.running import run_quietly

__all__ = ["misaligned"]

#: Where the image is changed, as shares of its height and width. No two are mirror images of each other.
PLACES = ((0.2, 0.3), (0.75, 0.6), (0.4, 0.85), (0.9, 0.15))

#: How much of either side is changed.
SIDE = 1 / 8


def misaligned(
    model: nn.Module, maps: dict[str, tuple[Element, Layout]], example: Tensor, at: str = "after"
) -> set[str]:
    """The modules whose tensor, read as a map of that layout, does not change most where the image does.

    Each of four places of the image is changed in turn, and three of them at least must show, give or take a cell: deep
    in a network every position sees the whole image, but none as much of a place as the one that stands for it.
    """
    if not maps or example.is_meta:
        return set()
    generator = torch.Generator().manual_seed(0)
    noise = 0.1 * torch.randn(example.shape, generator=generator).to(example)
    plain = seen(model, maps, noise, at)
    touched = [seen(model, maps, touch(noise, y, x), at) for y, x in PLACES]
    wrong = set()
    for name, (_, layout) in maps.items():
        changes = torch.stack([layout.to_map(t[name] - plain[name])[0].double().norm(dim=0) for t in touched])
        if not shows(changes.nan_to_num()):
            wrong.add(name)
    return wrong


def shows(changes: Tensor) -> bool:
    """Whether what changes for each place ``(places, h, w)`` does so there.

    A cell is judged by its change, or by how much of its change is due to one place: deep in a network some cells
    change more than others with anything.
    """
    share = changes / (changes.mean(0) + 1e-3 * changes.max() + torch.finfo(changes.dtype).tiny)
    return max(hits(changes), hits(share)) >= 3


def hits(changes: Tensor) -> int:
    """For how many places the cell that changes most is where the place is."""
    height, width = changes.shape[1:]
    count = 0
    for (y, x), change in zip(PLACES, changes, strict=True):
        row, column = divmod(int(change.argmax()), width)
        near = abs(row + 0.5 - y * height) <= reach(height) and abs(column + 0.5 - x * width) <= reach(width)
        count += near and bool(change.any())
    return count


def reach(side: int) -> float:
    """How far from the middle of the change its cell may be: within the change, and one cell more."""
    return side * SIDE / 2 + 1.5


def touch(images: Tensor, y: float, x: float) -> Tensor:
    """The images with a square around a place turned to large values."""
    rows, columns = images.shape[-2:]
    high, wide = math.ceil(rows * SIDE), math.ceil(columns * SIDE)
    top = min(max(0, round(y * rows - high / 2)), rows - high)
    left = min(max(0, round(x * columns - wide / 2)), columns - wide)
    touched = images.clone()
    touched[..., top : top + high, left : left + wide] += 3
    return touched


def seen(model: nn.Module, maps: dict[str, tuple[Element, Layout]], images: Tensor, at: str) -> dict[str, Tensor]:
    """The tensors in question for some images."""
    found: dict[str, Tensor] = {}

    def look(name: str, element: Element) -> Callable[..., None]:
        def hook(module: nn.Module, args: object, kwargs: object, output: object) -> None:
            value = output if at == "after" else kwargs if isinstance(element, str) else args
            found[name] = pick(value, element).clone()

        return hook

    handles = [
        model.get_submodule(name).register_forward_hook(look(name, element), with_kwargs=True)
        for name, (element, _) in maps.items()
    ]
    try:
        run_quietly(model, images)
    finally:
        for handle in handles:
            handle.remove()
    return found
