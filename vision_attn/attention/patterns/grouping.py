"""A pattern for feature maps of one size: the layouts of queries and keys, and their mask."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vision_attn.attention.graphs import can_cache, outside_graph
from vision_attn.attention.masks import Mask, align_mask, broadcast_mask, combine_masks, unmask_empty_rows
from vision_attn.attention.patterns.expression_patterns import resolve_pattern
from vision_attn.attention.patterns.layout import Size, TokenLayout, inverse_index, outer, padding_last
from vision_attn.attention.patterns.pattern import AnyPattern, AxisTiles
from vision_attn.checks import product


class Grouping:
    """A pattern for queries from feature maps of one size and keys from feature maps of one size.

    With ``causal``, queries attend to no later key in row-major order. With ``pattern_as_mask``, the complete feature
    map is one group, and the pattern is a mask of queries and keys.
    """

    def __init__(
        self,
        pattern: AnyPattern,
        size: Size,
        keys_size: Size,
        device: torch.device,
        causal: bool = False,
        pattern_as_mask: bool = False,
    ) -> None:
        split = pattern.axis_as_one_tile if pattern_as_mask else pattern.axis_tiles
        axes = [split(axis, length, device) for axis, length in enumerate(size)]
        if tuple(keys_size) != tuple(size):  # only global patterns support keys from another size
            keys = [split(axis, length, device).keys for axis, length in enumerate(keys_size)]
            axes = [axis._replace(keys=layout) for axis, layout in zip(axes, keys, strict=True)]
        partition = resolve_pattern("full").expand_to_rank(len(size)) if pattern_as_mask else pattern
        #: True if every query may attend to every key of the feature map.
        self.is_global: bool = pattern.is_global
        #: True if queries attend to no later key.
        self.causal: bool = causal
        #: True if the feature map is one group and the pattern is a mask.
        self.pattern_as_mask: bool = pattern_as_mask
        self.window_shape: tuple[int | None, ...] = pattern.window_shape
        self.axes: list[AxisTiles] = axes

        self.query_layout: TokenLayout = TokenLayout(size, [axis.queries for axis in axes], partition.rearrangement)
        self.key_layout: TokenLayout = self.query_layout
        if any(axis.queries is not axis.keys for axis in axes):
            keys = [axis.keys for axis in axes]
            self.key_layout = TokenLayout(keys_size, keys, partition.rearrangement, pattern.zero_padded)
        self.groups: int = self.query_layout.groups
        #: True in a graph, where sizes may be symbolic.
        self.in_graph: bool = torch.compiler.is_compiling()
        #: True if queries attend to all keys of their group, so that :meth:`allowed` is None.
        self.is_dense: bool = not causal and all(axis.allowed is None for axis in axes)
        self.cache: dict[Any, Any] = {}

    def cached(self, key: Any, compute: Callable[[], Any]) -> Any:
        """Return a cached value that depends on the pattern and the size only; compute it on the first call.

        In a graph, compute it in each call.
        """
        value = None if self.in_graph else self.cache.get(key)  # in a graph, the key may contain symbolic sizes
        if value is None:
            value = outside_graph((*self.query_layout.size, *self.key_layout.size), compute)
            if not self.in_graph and can_cache(torch.empty(())):
                self.cache[key] = value
        return value

    @property
    def relative_coords(self) -> list[Tensor]:
        """For each axis, key minus query in steps of the pattern, ``(tiles or 1, queries, keys)``."""
        return self.cached("coords", lambda: [*map(relative_coords, self.axes, self.window_shape)])

    def allowed(self) -> Mask:
        """Return the keys that each query may attend to, ``(1, groups, 1, i, j)`` bool; None if all of its group."""
        if self.is_dense:
            return None
        # The mask of a complete feature map is large, and only attention maps need it.
        return self.compute_allowed() if self.pattern_as_mask else self.cached("allowed", self.compute_allowed)

    def compute_allowed(self) -> Tensor:
        pairs = outer([*map(allowed_pairs, self.axes)], torch.logical_and)
        if self.causal:
            queries, keys = self.query_layout.index()[:, :, None], self.key_layout.index()[:, None, :]
            # Padding queries attend to every key: their output is dropped, and an empty row would have NaN gradients.
            pairs = torch.logical_and(pairs, torch.logical_or(keys <= queries, queries < 0))
        return pairs[None, :, None]

    def attn_mask(self, dtype: torch.dtype) -> Mask:
        """Return :meth:`allowed` for a kernel: bool on a CPU; on other devices, additive with aligned rows."""
        if (allowed := self.allowed()) is None or allowed.is_cpu:
            return allowed
        return self.cached(("attn_mask", dtype), lambda: align_mask(allowed, dtype))

    def combine(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Combine the user's mask, broadcastable to ``(b, n, tokens, key tokens)``, and the mask of the pattern.

        Returns:
            The mask ``(b or 1, groups or 1, n or 1, i, j)``, and the rows with at least one allowed key.
        """
        return unmask_empty_rows(combine_masks(self.partition_mask(broadcast_mask(mask)), self.allowed()))

    def partition_mask(self, mask: Tensor) -> Tensor:
        """Partition a mask of the feature map ``(b, n, tokens, tokens)`` into groups, ``(b, groups, n, i, j)``.

        Padding is not masked.
        """
        if self.query_layout.is_identity and self.key_layout.is_identity:
            return mask[:, None]
        queries, keys = self.query_layout.index()[:, :, None], self.key_layout.index()[:, None, :]
        rows, columns = queries.clamp(0, mask.shape[2] - 1), keys.clamp(0, mask.shape[3] - 1)
        partitioned = mask[:, :, rows, columns].transpose(1, 2)
        is_padding, fill = torch.logical_or(queries < 0, keys < 0)[:, None], float(mask.dtype == torch.bool)
        return partitioned.masked_fill(is_padding, fill)  # traces do not support bool as the value

    def zero_padding(self, k: Tensor) -> Tensor:
        """Set keys ``(b·groups, m, j, d)`` outside the feature map to zero, if the pattern is zero-padded."""
        if not self.key_layout.zero_padded:
            return k
        is_padding = self.cached("is_padding", lambda: (self.key_layout.index() < 0)[:, None, :, None])
        return k.reshape(-1, *is_padding.shape[:1], *k.shape[1:]).masked_fill(is_padding, 0.0).flatten(0, 1)

    def locate(self, queries: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the group of each query and its index in the group; ``queries`` are row-major, or None for all."""
        index = self.query_layout.index().flatten()
        token = inverse_index(index, product(self.query_layout.size))
        token = token if queries is None else token[queries]
        return token // self.query_layout.tokens, token % self.query_layout.tokens

    def scatter_to_map(self, weights: Tensor, group: Tensor) -> Tensor:
        """Scatter weights ``(b, n, i, j)`` of queries in groups ``(i or 1,)`` to all keys, ``(b, n, i, tokens)``."""
        tokens = product(self.key_layout.size)
        columns = padding_last(self.key_layout.index(), tokens)[group]
        dense = weights.new_zeros(*weights.shape[:3], tokens + 1)
        return dense.scatter(3, columns.expand_as(weights), weights)[..., :tokens]


def relative_coords(axis: AxisTiles, window: int | None) -> Tensor:
    steps = axis.keys.coords[:, None, :] - axis.queries.coords[:, :, None]
    # Keys outside a query's window are masked, and the tables of relative positions have no rows for them.
    return steps if window is None else steps.clamp(1 - window, window - 1)


def allowed_pairs(axis: AxisTiles) -> Tensor:
    """Return a bool tensor ``(tiles, queries, keys)``, True if the query may attend to the key."""
    if axis.allowed is not None:
        return axis.allowed
    positions = axis.queries.positions
    return positions.new_ones((), dtype=torch.bool).expand(*positions.shape, axis.keys.positions.shape[1])
