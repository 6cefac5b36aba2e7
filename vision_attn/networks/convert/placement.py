"""Where the windows or tokens that a swapped module is given lie on the feature map of an image.

A module that is given ``(b, c, h, w)`` has a feature map. The windows of a network lie as the module that cuts them
declares. Tokens in a row lie on the feature map that a module around was given, if it has as many positions, or else on
the grid of patches with the aspect of the image, after the class and register tokens that the network declares.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from vision_attn.attention.blocks import Attention
from vision_attn.attention.dispatch import AttentionInputs
from vision_attn.attention.patterns import AnyPattern, Grid, Grouping, Window, resolve_pattern
from vision_attn.checks import product
from vision_attn.networks.convert.swapped import Swap
from vision_attn.networks.insertion.record import token_grid

#: A call of a module: the module, its arguments and its keyword arguments.
Call: TypeAlias = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class Place(NamedTuple):
    """Where the queries and keys of a module lie."""

    #: sizes of the feature maps of queries and keys
    size: tuple[int, ...]
    keys_size: tuple[int, ...]
    #: how the windows or tokens lie on the map; None where the block is given the map
    grouping: Grouping | None = None
    #: number of tokens before those of the map
    prefix: int = 0


def running_calls() -> Iterator[Call]:
    """Yield the calls of modules that this thread is inside of, the innermost first.

    A hook on the model would also run for other threads, and would be in its copies.
    """
    frame, code = inspect.currentframe(), nn.Module._call_impl.__code__
    while frame is not None:
        if frame.f_code is code:
            yield frame.f_locals["self"], frame.f_locals["args"], frame.f_locals["kwargs"]
        frame = frame.f_back


def place_on_map(
    swap: Swap, inputs: AttentionInputs, sizes: Any, calls: Sequence[Call], images: int, image_size: Sequence[int]
) -> Place | str:
    """Return where the input of a block lies on each of so many images, or the reason why that is not known."""
    size, keys_size = sizes
    if swap.cut is None and swap.row.axes != "b t c":
        return Place(size, keys_size or size)
    pattern: AnyPattern = resolve_pattern("full")
    groups, prefix, on_map = len(inputs.q) // images, 0, partial(size_on_stack, calls, len(image_size), swap.block)
    if swap.cut is not None:
        # The windows may have another size than when the module was swapped.
        window = size if len(size) == 2 else pair(swap.cut.size)
        tiles = (1, 1) if groups == 1 else grid_of(groups, [image_size[axis] * window[1 - axis] for axis in (0, 1)])
        pattern, found = replace(swap.cut, size=window), tiles and tuple(map(int.__mul__, tiles, window))
    elif len(size) > 1:
        whole = on_map(groups * product(size)) if groups > 1 else None
        pattern, found = (pattern, size) if whole is None else (Window(size), whole)
    else:
        prefix = swap.prefix or 0
        found = on_map(count := size[0] - prefix)
        if found is None and swap.prefix is not None:
            grid = swap.grids.get(tuple(image_size))
            found = grid if grid and product(grid) == count else grid_of(count, image_size)
    if found is None:
        return f"it attends to {product(size)} tokens in a row, and nothing tells where they lie on the image"
    keys = keys_size or found
    if len(keys) != len(found):
        return f"its {product(keys)} keys do not lie on the feature map"
    return Place(found, keys, Grouping(pattern.for_rank(len(found)), found, keys, inputs.q.device), prefix)


def size_on_stack(calls: Sequence[Call], axes: int, block: Attention, count: int) -> tuple[int, ...] | None:
    """Return the size of the innermost feature map with so many positions that a module was given, or was told of.

    Any tokens would be a map with one axis, and a mask of keys has an axis of length one.
    """
    for _, *given in calls if axes > 1 else ():
        leaves = tree_leaves(given)
        maps = [x for x in leaves if isinstance(x, Tensor) and x.dim() == 2 + axes]
        numbers = [x for x in leaves if type(x) is int]
        sizes = [tuple(x.shape[2:]) for x in maps]
        sizes += [tuple(x.shape[1:-1]) for x in maps if x.shape[-1] == block.channels]
        sizes += [tuple(numbers[first : first + axes]) for first in range(len(numbers) - axes + 1)]
        if found := next((size for size in sizes if product(size) == count and min(size) > 1), None):
            return found
    return None


def grid_of(count: int, image_size: Sequence[int]) -> tuple[int, ...] | None:
    """Return the grid of so many patches with the aspect of an image; None if there is none.

    >>> grid_of(12, (64, 48)), grid_of(8, (32, 32, 32)), grid_of(7, (64, 48))
    ((4, 3), (2, 2, 2), None)
    """
    if len(image_size) == 2:
        return token_grid(count, *image_size)
    side = (count / product(image_size)) ** (1 / len(image_size))
    grid = tuple(round(length * side) for length in image_size)
    return grid if product(grid) == count > 1 else None


# --- what the modules around declare ----------------------------------------------------------------------------------

#: Parameters that are tokens before those of the map; CrossViT numbers those of its branches.
PREFIX = re.compile(r"((?:cls|class|dist|distillation|reg|register)_(?:token|embedding)s?)(_\d)?")


def note_place(swap: Swap, module: nn.Module, outers: Sequence[nn.Module]) -> None:
    """Note what the modules around a module declare of its windows or tokens, the innermost last."""
    for outer in outers:
        if type(outer).__module__ in CUTS:
            swap.cut = cut_of(outer, module) or swap.cut
        for holder in (outer, outer._modules.get("embeddings")):  # the latter of transformers
            note_tokens(swap, holder or nn.Identity())


def note_tokens(swap: Swap, holder: Any) -> None:
    """Note how many tokens come before those of the patches, and the grid of the patches."""
    parameters = holder.named_parameters(recurse=False)
    tokens = {match[1]: x for name, x in parameters if (match := PREFIX.fullmatch(name))}
    patches = [child for name, child in holder.named_children() if "patch_embed" in name]
    if isinstance(declared := getattr(holder, "num_prefix_tokens", None), int):
        swap.prefix = declared
    elif tokens or patches:
        swap.prefix = sum(1 if x.dim() == 1 else x.shape[-2] for x in tokens.values())
    sizes = ((getattr(child, "img_size", None), getattr(child, "grid_size", None)) for child in patches)
    swap.grids |= {size: grid for size, grid in sizes if isinstance(size, tuple) and isinstance(grid, tuple)}


def pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def cut_of(outer: Any, module: Any) -> Window | Grid | None:
    """How a module around cuts the map, if it does."""
    if any(size := pair(getattr(outer, "window_size", 0))):
        return Window(size, pair(getattr(outer, "shift_size", 0)))
    if hasattr(outer, "partition_type"):
        windows, size = outer.partition_type == "window", module.size
    elif type(outer).__name__.startswith(("PartitionAttention", "ParallelPartition")):
        windows = module is outer.attn_block if hasattr(outer, "attn_block") else outer.partition_block
        size = outer.partition_size
    else:
        return None
    return Window(pair(size)) if windows else Grid(pair(size))


#: Where the modules are that cut a map, each in words of its own.
CUTS = {
    *(f"timm.models.{name}" for name in ("davit", "gcvit", "hieradet_sam2", "maxxvit", "tiny_vit")),
    *(f"timm.models.{name}" for name in ("swin_transformer", "swin_transformer_v2")),
    "torchvision.models.maxvit",
    "transformers.models.maskformer.modeling_maskformer_swin",
    "transformers.models.swin.modeling_swin",
}
