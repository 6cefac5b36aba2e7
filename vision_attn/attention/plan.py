"""The plan of a forward pass: the groups of the pattern, and the selected implementations.

The groups depend on the :class:`.Kind` of a call and the :class:`.AttentionConfig` of the block, which never changes. A
block makes a plan once for each kind and keeps it. Plans made in graphs, traces and transforms are not kept, because
sizes may be symbolic and tensors belong to the graph.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vision_attn.attention.dispatch import attend_chunked, repeat_kv
from vision_attn.attention.graphs import can_cache, is_capturing, outside_graph
from vision_attn.attention.kind import AttentionConfig, Kind, check_kind, pooled_size
from vision_attn.attention.masks import Mask, zero_fully_masked_rows
from vision_attn.attention.patterns.grouping import Grouping
from vision_attn.attention.position.encoding import PositionBias

#: Maximum number of groupings, and of plans, that a block keeps.
CACHED_SIZES, CACHED_PLANS = 4, 32


class AttentionInputs(NamedTuple):
    """The inputs of a kernel: attention in the groups of a pattern."""

    q: Tensor  # (b·groups, n, i, d)
    k: Tensor  # (b·groups, m, j, d)
    v: Tensor  # (b·groups, m, j, e)
    scale: float
    grouping: Grouping
    bias: PositionBias | None = None
    mask: Mask = None  # the mask passed by the user, broadcastable to (b, n, tokens, key tokens)


class Plan(NamedTuple):
    """The groups and the implementations of a forward pass, and the active ``with`` blocks."""

    kind: Kind
    #: The groups of the pattern for this size.
    grouping: Grouping
    #: The selected implementations, by the properties of the inputs that are not in the kind.
    selected: dict[Any, Callable[..., Tensor]]
    #: Functions of the active ``with`` blocks, which receive the inputs of attention.
    hooks: Sequence[Callable[..., object]] = ()
    #: The valid positions of padded images, on the feature maps of queries and of keys before pooling.
    valid: Sequence[Tensor] | None = None

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """Compute attention in the groups of the pattern, ``(b·groups, n, i, e)``; fully masked rows are zero."""
        kind, kernel, row_has_key = self.kind, self.kind.kernel, None
        if kind.autocast:  # it would compute the logits in half precision
            with torch.autocast(kind.device.type, enabled=False):
                return self._replace(kind=kind._replace(autocast=False)).attend(inputs)
        if kernel.attend_pattern is not None:
            return kernel.attend_pattern(inputs, kind.dropout)
        q, k, v, scale, grouping, bias, mask = inputs
        if k.shape[1] != q.shape[1]:
            k, v = repeat_kv(q, k), repeat_kv(q, v)
        # The causal order alone is left to the kernel, which then skips later keys.
        causal = kind.causal and grouping.is_global and mask is None and bias is None
        if mask is not None:
            mask, row_has_key = grouping.combine(mask)
        elif not causal and not grouping.is_dense:
            mask = grouping.attn_mask(q.dtype)
        if bias is not None and bias.rel_logits is not None and kind.can_chunk:
            chunk = partial(kernel.attend, scale=scale, dropout=kind.dropout)
            y = attend_chunked(chunk, q, k, v, mask, bias.rel_logits(q), grouping.groups)
        else:
            if bias is not None:
                q, k, scale = bias.fold(q, k, scale)
                mask = bias.attn_mask(mask)
            key = q.dtype, q.requires_grad, mask is not None and mask.requires_grad
            if (attend := self.selected.get(key)) is None:
                attend = kernel.attend if kernel.select is None else kernel.select(q, k, mask, kind.dropout)
                self.selected[key] = attend
            y = attend(q, k, v, mask=mask, causal=causal, scale=scale, dropout=kind.dropout)
        return y if row_has_key is None else zero_fully_masked_rows(y, row_has_key)


class PlanCache:
    """The plans of a block for recent kinds of calls; copies and pickles of a block have none."""

    def __init__(self, config: AttentionConfig) -> None:
        self.config = config
        self.groupings: dict[Any, Grouping] = {}
        self.recent: dict[tuple[Any, ...], Plan] = {}
        #: Groupings that a captured CUDA graph uses. They are never removed: each replay reads the same memory.
        self.captured: set[Grouping] = set()

    def __reduce__(self) -> Any:
        return PlanCache, (self.config,)

    def make(self, kind: Kind) -> Plan | None:
        """Make a plan, and keep it unless its tensors belong to a graph; return None if the inputs are empty.

        Raises:
            ValueError: the mask or the context is invalid.
        """
        check_kind(kind, self.config)
        if 0 in kind.shape:  # some implementations and patterns do not support empty tensors
            return None
        grouping = self.find(kind)
        if kind.kernel.attend_pattern is not None and not grouping.is_global:
            # A kernel for patterns receives the feature map as one group, unless the groups are a plain reshape.
            layout = grouping.query_layout
            is_reshape = layout is grouping.key_layout and layout.rearrangement is not None
            if not is_reshape or kind.mask is not None or kind.causal:
                grouping = self.find(kind, pattern_as_mask=True)
        plan = Plan(kind, grouping, {})
        if not kind.in_graph and can_cache(grouping.axes[0].queries.positions):
            if len(self.recent) >= CACHED_PLANS:
                self.recent.clear()
            self.recent[kind] = plan
        return plan

    def find(self, kind: Kind, pattern_as_mask: bool = False) -> Grouping:
        """Return a grouping, which the plans for a size share."""
        size, keys_size = tuple(kind.shape[2:]), pooled_size((kind.context or kind.shape)[2:], self.config.kv_stride)
        key = (size, keys_size, kind.device, kind.causal, pattern_as_mask)  # in the order of Grouping's arguments
        grouping = None if kind.in_graph else self.groupings.get(key)
        if grouping is None:
            grouping = outside_graph((*size, *keys_size), partial(Grouping, self.config.resolved_pattern, *key))
            if not kind.in_graph and can_cache(grouping.axes[0].queries.positions):
                if len(self.groupings) >= CACHED_SIZES:
                    self.groupings.clear()
                    self.recent.clear()
                self.groupings[key] = grouping
        elif is_capturing():
            self.captured.add(grouping)
        return grouping
