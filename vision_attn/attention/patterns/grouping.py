"""A pattern on feature maps of one size: the layouts of queries and keys, their mask, and a cache by size."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from vision_attn.attention.masks import Mask, broadcast_mask, combine_masks, unmask_empty_rows
from vision_attn.attention.patterns.layout import Size, TokenLayout, beyond, inverse_index, is_fixed, outer
from vision_attn.attention.patterns.line import AXES, Rearrangement
from vision_attn.attention.patterns.pattern import AnyPattern, AxisLayout, AxisTiles
from vision_attn.checks import product

#: Sizes of feature maps whose groupings a block keeps.
CACHED_SIZES = 4


class Grouping:
    """A pattern on maps of one size, with keys from maps of one size; ``as_one_group`` masks the map instead."""

    def __init__(
        self, pattern: AnyPattern, size: Size, keys_size: Size, device: torch.device, *, as_one_group: bool = False
    ) -> None:
        cut = pattern.axis_as_one_tile if as_one_group else pattern.axis_tiles
        axes = [cut(axis, length, device) for axis, length in enumerate(size)]
        if tuple(keys_size) != tuple(size):  # of a pattern with one group
            keys = [cut(axis, length, device).keys for axis, length in enumerate(keys_size)]
            axes = [axis._replace(keys=own) for axis, own in zip(axes, keys, strict=True)]
        names = AXES[-pattern.rank :]
        line = Rearrangement(tuple((name,) for name in names), (), names) if as_one_group else pattern.line
        #: whether every query may attend to every key of the map
        self.is_global: bool = pattern.is_global
        #: whether the map is one group that the pattern masks, instead of groups
        self.masks_map: bool = as_one_group
        self.window_shape: tuple[int | None, ...] = pattern.window_shape
        self.axes: list[AxisTiles] = axes

        def layout(size: Size, layouts: list[AxisLayout], zero_padded: bool = False) -> TokenLayout:
            whole = (pattern.is_global or as_one_group) and all(one.sizes is not None for one in layouts)
            return TokenLayout(size, layouts, line, is_whole=whole, zero_padded=zero_padded)

        self.query_layout: TokenLayout = layout(size, [axis.queries for axis in axes])
        self.key_layout: TokenLayout = self.query_layout
        if any(axis.queries is not axis.keys for axis in axes):
            self.key_layout = layout(keys_size, [axis.keys for axis in axes], pattern.zero_padded)
        self.groups: int = self.query_layout.groups
        #: which keys of its group a query may attend to, ``(1, groups, 1, i, j)`` bool; None: all of them
        self.mask: Mask = None if as_one_group else self.dense_mask()
        self.cache: dict[Any, Any] = {}

    def cached(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what depends on the pattern and the size alone: made once, if it lasts."""
        if torch.compiler.is_compiling():  # a key may hold symbolic sizes, and a graph has each tensor once anyway
            with outside_graph((*self.query_layout.size, *self.key_layout.size)):
                return make()
        value = self.cache.get(key)
        if value is None:
            with torch.inference_mode(False):  # for training too
                value = make()
            if outlives_call(torch.empty(())):
                self.cache[key] = value
        return value

    @property
    def relative_coords(self) -> list[Tensor]:
        """For each axis, the steps of the pattern from query to key, ``(tiles or 1, queries, keys)``."""
        return self.cached("coords", lambda: [*map(relative_coords, self.axes, self.window_shape)])

    def dense_mask(self) -> Mask:
        """Return :attr:`mask`, which one group for the whole map does not store."""
        if all(axis.allowed is None for axis in self.axes):
            return None
        return outer([*map(every_pair, self.axes)], torch.logical_and)[None, :, None]

    def causal_mask(self) -> Tensor:
        """Return which keys of :attr:`mask` do not follow the query on the map, row by row."""

        def make() -> Tensor:
            queries, keys = self.query_layout.index()[:, :, None], self.key_layout.index()[:, None, :]
            # Padding attends to everything: its output is dropped, and an empty row would have gradients of NaN.
            return combine_masks(torch.logical_or(keys <= queries, queries < 0)[None, :, None], self.dense_mask())

        return self.cached("causal", make)

    def build_attn_mask(self, mask: Mask, causal: bool, has_bias: bool) -> tuple[Mask, Mask, bool]:
        """Build one mask ``(b or 1, groups or 1, n or 1, i, j)`` of the pattern, the user's mask and causality.

        ``mask`` is the user's, on the map, broadcastable to ``(b, n, tokens, key tokens)``. With it come the rows that
        have a key to attend to (None: all), and whether the kernel hides later keys, which it does where nothing else
        is masked.
        """
        in_kernel = causal and self.is_global and mask is None and not has_bias
        built = self.dense_mask() if self.masks_map else self.mask
        if causal and not in_kernel:
            built = self.causal_mask()
        if mask is None:
            return built, None, in_kernel
        return *unmask_empty_rows(combine_masks(self.partition_mask(broadcast_mask(mask)), built)), in_kernel

    def partition_mask(self, mask: Tensor) -> Tensor:
        """Cut a mask ``(b, n, tokens, tokens)`` on the map for its groups, ``(b, groups, n, i, j)``.

        It does not apply beyond the map: padding stays unmasked.
        """
        if self.query_layout.is_whole and self.key_layout.is_whole:
            return mask[:, None]
        queries, keys = self.query_layout.index()[:, :, None], self.key_layout.index()[:, None, :]
        rows = queries.clamp(min=0) if mask.shape[2] > 1 else torch.zeros_like(queries)
        columns = keys.clamp(min=0) if mask.shape[3] > 1 else torch.zeros_like(keys)
        cut = mask[:, :, rows, columns].transpose(1, 2)
        return cut.masked_fill(torch.logical_or(queries < 0, keys < 0)[:, None], mask.dtype == torch.bool)

    def zero_padding(self, k: Tensor) -> Tensor:
        """Return keys ``(b·groups, m, j, d)`` with zeros beyond the map, if they are attended to as zeros."""
        if not self.key_layout.zero_padded:
            return k
        beyond = self.cached("beyond", lambda: (self.key_layout.index() < 0)[:, None, :, None])
        return k.reshape(-1, *beyond.shape[:1], *k.shape[1:]).masked_fill(beyond, 0.0).flatten(0, 1)

    def locate(self, wanted: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the group of each wanted query of the map, row-major, and its row in the group; of all if None."""
        index = self.query_layout.index().flatten()
        token = inverse_index(index, product(self.query_layout.size))
        token = token if wanted is None else token[wanted]
        return token // self.query_layout.tokens, token % self.query_layout.tokens

    def scatter_to_map(self, weights: Tensor, group: Tensor) -> Tensor:
        """Spread weights ``(b, n, i, j)`` of queries over the map, ``(b, n, i, tokens)``, with zeros elsewhere."""
        tokens = product(self.key_layout.size)
        columns = beyond(self.key_layout.index(), tokens)[group]
        dense = weights.new_zeros(*weights.shape[:3], tokens + 1)
        return dense.scatter(3, columns.expand(*weights.shape[:2], -1, -1), weights)[..., :tokens]


class GroupingCache:
    """The groupings of the sizes that a block last saw. Copies and pickles of a block start with an empty cache."""

    def __init__(self, pattern: AnyPattern) -> None:
        self.pattern = pattern
        self.kept: dict[Any, Grouping] = {}
        #: read while a CUDA graph was captured, whose replays read the same memory: never removed
        self.captured: dict[Any, Grouping] = {}

    def __reduce__(self) -> Any:
        return GroupingCache, (self.pattern,)

    def get(self, x: Tensor, keys_size: Size, masks_map: bool = False, unmasked: bool = True) -> Grouping:
        """Return the grouping of maps of the size of ``x`` with keys from maps of another size.

        With ``masks_map`` a pattern that is not a plain reshape, or has another mask beside it, masks the whole map.
        """
        size = tuple(x.shape[2:])
        key = (size, keys_size, x.device, masks_map and unmasked, masks_map)
        plain = type(x) is Tensor and type(size[0]) is int and not torch.compiler.is_compiling()
        grouping = (self.captured.get(key) or self.kept.get(key)) if plain else None
        if grouping is None:
            with outside_graph((*size, *keys_size)), torch.inference_mode(False):  # for training too
                grouping = Grouping(self.pattern, size, keys_size, x.device)
                is_reshape = grouping.key_layout is grouping.query_layout and grouping.query_layout.line is not None
                if masks_map and not grouping.is_global and not (unmasked and is_reshape):
                    grouping = Grouping(self.pattern, size, keys_size, x.device, as_one_group=True)
            if plain and outlives_call(grouping.axes[0].queries.positions):
                if len(self.kept) >= CACHED_SIZES:
                    self.kept.clear()
                self.kept[key] = grouping
        elif not torch.compiler.is_compiling() and is_capturing():
            self.captured[key] = grouping
        return grouping


def outside_graph(size: Size) -> AbstractContextManager[object]:
    """Return a context whose tensors ``torch.export`` stores as constants, if the size is fixed.

    Otherwise the graph makes them in each call, in steps that not every runtime supports.
    """
    return _disable_current_modes() if torch.compiler.is_compiling() and is_fixed(size) else nullcontext()


def outlives_call(x: Tensor) -> bool:
    """Return True unless a tensor is of a mode or transform that ends, or made by a CUDA graph."""
    if torch.compiler.is_compiling() or is_capturing():
        return False
    return type(x) is Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def is_capturing() -> bool:
    """Return True while a CUDA graph is captured."""
    return has_driver(query := torch.cuda.is_current_stream_capturing) and query()


@cache
def has_driver(query: Callable[[], bool]) -> bool:
    """Return False for a query that needs a driver that is not installed."""
    try:
        query()
    except RuntimeError:
        return False
    return True


def relative_coords(axis: AxisTiles, window: int | None) -> Tensor:
    steps = axis.keys.coords[:, None, :] - axis.queries.coords[:, :, None]
    # Keys of the tile that are too far for a query are masked, and have no row in a table.
    return steps if window is None else steps.clamp(1 - window, window - 1)


def every_pair(axis: AxisTiles) -> Tensor:
    """Return which keys of its tile a query may attend to, ``(tiles, queries, keys)``."""
    if axis.allowed is not None:
        return axis.allowed
    positions = axis.queries.positions
    return positions.new_ones((), dtype=torch.bool).expand(*positions.shape, axis.keys.positions.shape[1])
