"""Positions on the feature map of an image, for the windows or tokens that are the input of a swapped module.

A module whose input is ``(b, c, h, w)`` has a feature map. Windows are cut by a module around it, as that module
declares. Tokens lie on the feature map that is an input of a module around it and has as many positions, or else on the
grid of patches with the aspect of the image, after the class and register tokens that the network declares.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from vision_attn.attention.dispatch import AttentionInputs
from vision_attn.attention.patterns import AnyPattern, Grid, Grouping, Window, resolve_pattern
from vision_attn.checks import product
from vision_attn.networks.insertion.record import token_grid

#: A call of a module: the module, its arguments and its keyword arguments.
Call: TypeAlias = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class Place(NamedTuple):
    """Where the queries and keys of a module lie."""

    #: sizes of the feature maps of queries and keys
    size: tuple[int, ...]
    keys_size: tuple[int, ...]
    #: how the windows or tokens lie on the map; None if the input of the block is the map
    grouping: Grouping | None = None
    #: number of tokens before those of the map
    prefix: int = 0


@dataclass
class Placement:
    """The windows or tokens of a module, as the modules around it declare them."""

    #: True if the input of the module is tokens
    tokens: bool
    channels: int
    #: how the network cuts the map into the module's windows; None if it does not
    windows: Window | Grid | None = None
    #: number of class and register tokens before those of the map; None if not known
    prefix: int | None = None
    #: grids of patches by the size of the image, if the network declares them
    grids: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)

    def read(self, module: nn.Module, outers: Sequence[nn.Module]) -> None:
        """Read the declarations of the modules around a module, the innermost last."""
        for outer in outers:
            if type(outer).__module__ in WINDOW_MODULES:
                self.windows = read_windows(outer, module) or self.windows
            self.read_tokens(outer)
            if "embeddings" in outer._modules:  # of transformers
                self.read_tokens(outer.embeddings)

    def read_tokens(self, holder: Any) -> None:
        """Read the number of tokens before those of the patches, and the grid of the patches."""
        parameters = holder.named_parameters(recurse=False)
        tokens = {match[1]: x for name, x in parameters if (match := PREFIX.fullmatch(name))}
        patches = [child for name, child in holder.named_children() if "patch_embed" in name]
        if isinstance(declared := getattr(holder, "num_prefix_tokens", None), int):
            self.prefix = declared
        elif tokens or patches:
            self.prefix = sum(1 if x.dim() == 1 else x.shape[-2] for x in tokens.values())
        sizes = ((getattr(child, "img_size", None), getattr(child, "grid_size", None)) for child in patches)
        self.grids |= {size: grid for size, grid in sizes if isinstance(size, tuple) and isinstance(grid, tuple)}


def running_calls() -> Iterator[Call]:
    """Yield the running calls of modules in this thread, the innermost first.

    A hook on the model would also run for other threads, and would be copied with the model.
    """
    frame, code = inspect.currentframe(), nn.Module._call_impl.__code__
    while frame is not None:
        if frame.f_code is code:
            yield frame.f_locals["self"], frame.f_locals["args"], frame.f_locals["kwargs"]
        frame = frame.f_back


def place_on_map(
    given: Placement, inputs: AttentionInputs, sizes: Any, calls: Sequence[Call], images: int, image_size: Sequence[int]
) -> Place | str:
    """Return where the input of a block lies on each of so many images, or the reason why that is not known."""
    size, keys_size = sizes
    if given.windows is None and not given.tokens:
        return Place(size, keys_size or size)
    pattern: AnyPattern = resolve_pattern("full")
    groups, prefix, found = len(inputs.q) // images, 0, None
    if given.windows is not None:
        # The windows may have another size than when the module was swapped.
        window = size if len(size) == 2 else to_pair(given.windows.size)
        tiles = (1, 1) if groups == 1 else find_grid(groups, [image_size[axis] * window[1 - axis] for axis in (0, 1)])
        pattern, found = replace(given.windows, size=window), tiles and tuple(map(int.__mul__, tiles, window))
    elif len(size) > 1:
        found = find_map(calls, len(image_size), given.channels, groups * product(size)) if groups > 1 else None
        pattern, found = (pattern, size) if found is None else (Window(size), found)
    else:
        prefix = given.prefix or 0
        count = size[0] - prefix
        found = find_map(calls, len(image_size), given.channels, count)
        if found is None and given.prefix is not None:
            grid = given.grids.get(tuple(image_size))
            found = grid if grid and product(grid) == count else find_grid(count, image_size)
    if found is None:
        return f"it attends to {product(size)} tokens in a row, and nothing tells where they lie on the image"
    keys = keys_size or found
    if len(keys) != len(found):
        return f"its {product(keys)} keys do not lie on the feature map"
    return Place(found, keys, Grouping(pattern.for_rank(len(found)), found, keys, inputs.q.device), prefix)


def find_map(calls: Sequence[Call], axes: int, channels: int, count: int) -> tuple[int, ...] | None:
    """Return the size of the innermost feature map with so many positions that is, or whose size is, an argument.

    Not for one axis: any tokens would be such a map. Sizes of one are left out, as a mask of keys has one.
    """
    for _, *given in calls if axes > 1 else ():
        leaves = tree_leaves(given)
        maps = [x for x in leaves if isinstance(x, Tensor) and x.dim() == 2 + axes]
        numbers = [x for x in leaves if type(x) is int]
        sizes = [tuple(x.shape[2:]) for x in maps]
        sizes += [tuple(x.shape[1:-1]) for x in maps if x.shape[-1] == channels]
        sizes += [tuple(numbers[first : first + axes]) for first in range(len(numbers) - axes + 1)]
        if found := next((size for size in sizes if product(size) == count and min(size) > 1), None):
            return found
    return None


def find_grid(count: int, image_size: Sequence[int]) -> tuple[int, ...] | None:
    """Return the grid of so many patches with the aspect of an image; None if there is none.

    >>> find_grid(12, (64, 48)), find_grid(8, (32, 32, 32)), find_grid(7, (64, 48))
    ((4, 3), (2, 2, 2), None)
    """
    if len(image_size) == 2:
        return token_grid(count, *image_size)
    side = (count / product(image_size)) ** (1 / len(image_size))
    grid = tuple(round(length * side) for length in image_size)
    return grid if product(grid) == count > 1 else None


# --- declarations -----------------------------------------------------------------------------------------------------

#: Parameters that are tokens before those of the map; CrossViT numbers those of its branches.
PREFIX = re.compile(r"((?:cls|class|dist|distillation|reg|register)_(?:token|embedding)s?)(_\d)?")

#: The modules of Python whose classes cut a map into windows, in different words.
WINDOW_MODULES = {
    *(f"timm.models.{name}" for name in ("davit", "gcvit", "hieradet_sam2", "maxxvit", "tiny_vit")),
    *(f"timm.models.{name}" for name in ("swin_transformer", "swin_transformer_v2")),
    "torchvision.models.maxvit",
    "transformers.models.maskformer.modeling_maskformer_swin",
    "transformers.models.swin.modeling_swin",
}


def to_pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def read_windows(outer: Any, module: Any) -> Window | Grid | None:
    """Return how a module around cuts the map; None if it does not."""
    if any(size := to_pair(getattr(outer, "window_size", 0))):
        return Window(size, to_pair(getattr(outer, "shift_size", 0)))
    if hasattr(outer, "partition_type"):
        windows, size = outer.partition_type == "window", module.size
    elif type(outer).__name__.startswith(("PartitionAttention", "ParallelPartition")):
        windows = module is outer.attn_block if hasattr(outer, "attn_block") else outer.partition_block
        size = outer.partition_size
    else:
        return None
    return Window(to_pair(size)) if windows else Grid(to_pair(size))
