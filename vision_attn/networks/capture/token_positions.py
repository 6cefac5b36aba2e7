"""Positions on the feature map for the windows or tokens that are the input of a swapped module.

The input of a module is a feature map ``(b, c, h, w)``, windows or tokens. The attributes of a parent module determine
the position of windows. The feature map of tokens is an input of a parent module with the same number of positions. If
there is none, it is a grid of patches with the aspect ratio of the image, after the class and register tokens that a
parent module declares, whether its forward runs or not.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, zip_longest
from typing import Any, NamedTuple

from torch import Tensor

from vision_attn.attention.patterns import AnyPattern, Grid, Grouping, Window, resolve_pattern
from vision_attn.attention.plan import AttentionInputs
from vision_attn.checks import product
from vision_attn.networks.convert.swapped import MAP_SIZES
from vision_attn.networks.inspection.example import tree_leaves
from vision_attn.networks.inspection.feature_maps import token_grid
from vision_attn.networks.inspection.network import Call


class TokenPositions(NamedTuple):
    """Positions of the queries and keys of a module."""

    #: size of the feature map of the queries
    size: tuple[int, ...]
    #: size of the feature map of the keys
    keys_size: tuple[int, ...]
    #: positions of the windows or tokens on the feature map; None if the input of the block is the feature map
    grouping: Grouping | None = None
    #: number of tokens before the tokens of the feature map
    prefix: int = 0


def locate_tokens(
    inputs: AttentionInputs, parents: Sequence[Any], calls: Sequence[Call], images: int, image_size: Sequence[int]
) -> TokenPositions | str:
    """Return the positions of a block's input on each image of a batch, or the reason why they are unknown.

    ``parents`` are the swapped module and its parent modules. ``calls`` are the running calls of the block and of its
    parent modules, innermost first.
    """
    size, keys_size = vars(calls[0][0])[MAP_SIZES]
    module, *outers = parents
    windows = find_windows(module, outers)
    if windows is None and module.swapped.conversion.axes != "b t c":
        return TokenPositions(size, keys_size or size)
    pattern: AnyPattern = resolve_pattern("full")
    groups, prefix, map_size, padded = len(inputs.q) // images, 0, None, None
    on_map = partial(find_map, calls, len(image_size), module.running_block.channels)
    if windows is not None:
        window = size if len(size) > 1 else to_tuple(windows.size)
        ratios = [length * product(window) // side for length, side in zip(image_size, window, strict=True)]
        tiles = (1,) * len(window) if groups == 1 else find_grid(groups, ratios)
        pattern, map_size = replace(windows, size=window), tiles and tuple(map(int.__mul__, tiles, window))
        if map_size and len(map_size) > 2:  # MONAI pads the feature map before it shifts it
            padded, map_size = map_size, on_map(product(map_size), window) or map_size
    elif len(size) > 1:
        map_size = on_map(groups * product(size)) if groups > 1 else None
        pattern, map_size = (pattern, size) if map_size is None else (Window(size), map_size)
    else:
        declared, grids = read_tokens(outers)
        prefix = declared or 0
        count = size[0] - prefix
        map_size = on_map(count)
        if map_size is None and declared is not None:
            grid = grids.get(tuple(image_size))
            map_size = grid if grid and product(grid) == count else find_grid(count, image_size)
    if map_size is None:
        return f"the positions of its {product(size)} tokens on the image are unknown"
    keys = keys_size or map_size
    if len(keys) != len(map_size):
        return f"its {product(keys)} keys are not positions of the feature map"
    pattern, padded = pattern.expand_to_rank(len(map_size)), padded or map_size
    grouping = Grouping(pattern, padded, padded if keys == map_size else keys, inputs.q.device)
    return TokenPositions(map_size, keys, grouping, prefix)


def find_map(
    calls: Sequence[Call], axes: int, channels: int, count: int, window: Sequence[int] = ()
) -> tuple[int, ...] | None:
    """Find the size of the feature map of tokens: search the arguments of the running calls, innermost call first.

    The argument is the feature map with ``count`` positions, after padding to complete windows, or its size. Feature
    maps with an axis of size 1 are ignored, because masks have such axes. The result is None for one axis, because any
    tokens would match.

    >>> from torch import empty, nn
    >>> find_map([(nn.Identity(), (empty(2, 1, 1, 15), empty(2, 8, 3, 5)), {})], axes=2, channels=8, count=15)
    (3, 5)
    >>> find_map([(nn.Identity(), (empty(2, 3, 5, 8),), {})], axes=2, channels=8, count=15)
    (3, 5)
    >>> find_map([(nn.Identity(), (empty(2, 10, 8), 2, 5), {})], axes=2, channels=8, count=10)
    (2, 5)
    """
    for _, *arguments in calls if axes > 1 else ():
        leaves = tree_leaves(arguments)
        maps = [x for x in leaves if isinstance(x, Tensor) and x.dim() == 2 + axes]
        numbers = [leaf for leaf in leaves if type(leaf) is int]
        sizes = [tuple(x.shape[2:]) for x in maps]
        sizes += [tuple(x.shape[1:-1]) for x in maps if x.shape[-1] == channels]
        sizes += [tuple(numbers[first : first + axes]) for first in range(len(numbers) - axes + 1)]
        for size in sizes:
            padded = [-(-length // side) * side for length, side in zip_longest(size, window, fillvalue=1)]
            if product(padded) == count and min(size) > 1:
                return size
    return None


def find_grid(count: int, image_size: Sequence[int]) -> tuple[int, ...] | None:
    """Return the grid of ``count`` patches with the aspect ratio of an image; None if there is none.

    >>> find_grid(12, (64, 48)), find_grid(8, (32, 32, 32)), find_grid(7, (64, 48))
    ((4, 3), (2, 2, 2), None)
    """
    if len(image_size) == 2:
        return token_grid(count, *image_size)
    side = (count / product(image_size)) ** (1 / len(image_size))
    grid = tuple(round(length * side) for length in image_size)
    return grid if product(grid) == count > 1 else None


# --- declarations -----------------------------------------------------------------------------------------------------

#: Names of parameters that are tokens before the patches; in CrossViT, they end in the number of the branch.
PREFIX = re.compile(r"((?:cls|class|dist|distillation|reg|register)_(?:token|embedding)s?)(_\d)?")


def read_tokens(outers: Sequence[Any]) -> tuple[int | None, dict[Any, Any]]:
    """Return the number of tokens before the patches, and the grids of patches by the size of the image.

    Both are read from the parent modules of a module, ordered from the innermost. The number is None if it is not
    declared.
    """
    prefix: int | None = None
    grids: dict[Any, Any] = {}
    inner = ((outer, dict(outer.named_children()).get("embeddings")) for outer in reversed(outers))
    # A wrapper of torch.compile has no truth value.
    for holder in (module for module in chain.from_iterable(inner) if module is not None):
        parameters = holder.named_parameters(recurse=False)
        tokens = {match[1]: x for name, x in parameters if (match := PREFIX.fullmatch(name))}
        patches = [child for name, child in holder.named_children() if "patch_embed" in name]
        if isinstance(declared := getattr(holder, "num_prefix_tokens", None), int):
            prefix = declared
        elif tokens or patches:
            prefix = sum(1 if x.dim() == 1 else x.shape[-2] for x in tokens.values())
        sizes = ((getattr(child, "img_size", None), getattr(child, "grid_size", None)) for child in patches)
        grids |= {size: grid for size, grid in sizes if isinstance(size, tuple) and isinstance(grid, tuple)}
    return prefix, grids


#: Python modules with classes that partition a feature map into windows, each with different attributes.
WINDOW_MODULES = re.compile(
    r"timm\.models\.(davit|gcvit|hieradet_sam2|maxxvit|swin_transformer|swin_transformer_v2|tiny_vit)"
    r"|torchvision\.models\.maxvit|monai\.networks\.nets\.swin_unetr|transformers\.models\.\w+\.modeling_swin"
)


def find_windows(module: Any, outers: Sequence[Any]) -> Window | Grid | None:
    """Return the windows of the innermost parent module that partitions the feature map; None if there is none."""
    for outer in outers:
        if not WINDOW_MODULES.fullmatch(type(outer).__module__):
            continue
        if any(size := to_tuple(getattr(outer, "window_size", 0))):
            return Window(size, to_tuple(getattr(outer, "shift_size", 0)))
        if hasattr(outer, "partition_type"):
            return (Window if outer.partition_type == "window" else Grid)(to_tuple(module.size))
        if type(outer).__name__.startswith(("PartitionAttention", "ParallelPartition")):
            windows = module is outer.attn_block if hasattr(outer, "attn_block") else outer.partition_block
            return (Window if windows else Grid)(to_tuple(outer.partition_size))
    return None


def to_tuple(size: Any) -> tuple[int, ...]:
    return (size, size) if isinstance(size, int) else tuple(size)
