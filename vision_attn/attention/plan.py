"""The plan of a forward pass: every decision that depends on the kind of its inputs, and not on their values.

A plan is a function of two values: the :class:`.Kind` of a call, and the :class:`.AttentionConfig` of the block, which
never changes. A block makes a plan once for each kind and keeps it. In graphs, traces and transforms, where sizes may
be symbolic and tensors belong to the graph, it makes a plan in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vision_attn.attention import dispatch
from vision_attn.attention.dispatch import attend_chunked, repeat_kv
from vision_attn.attention.graphs import can_cache, outside_graph
from vision_attn.attention.inputs import AttentionInputs, PositionBias
from vision_attn.attention.kernels import Kernel
from vision_attn.attention.kind import AttentionConfig, Kind, check_kind, pooled_size
from vision_attn.attention.masks import Mask, zero_fully_masked_rows
from vision_attn.attention.patterns.grouping import Grouping

#: Maximum number of groupings, and of plans, that a block keeps.
CACHED_SIZES, CACHED_PLANS = 4, 32


class Plan(NamedTuple):
    """The decisions of a forward pass, in the order in which it needs them."""

    #: Partitions feature maps, and splits and merges heads.
    kernel: Kernel
    #: The groups of the pattern for this size.
    grouping: Grouping
    #: True if queries, keys and values are projections of one partitioned feature map.
    one_input: bool
    #: ``attend_heads(q, k, v, mask=…, causal=…)``: the selected implementation, with scale and dropout.
    attend_heads: Callable[..., Tensor]
    #: The same, for a mask that requires gradients, such as the bias of a position encoding.
    attend_trained_mask: Callable[..., Tensor]
    scale: float
    dropout: float
    #: True if nothing but the pattern restricts or changes the logits, so that the kernel is called directly.
    is_direct: bool
    #: True if attention may run in chunks that fit into the caches of a CPU.
    can_chunk: bool
    #: The keys that each query may attend to, if the kernel is called directly.
    mask: Mask
    #: True if the kernel excludes later keys itself, which it then skips.
    causal: bool
    #: The type of the device whose autocast is off during attention: it would compute the logits in half precision.
    autocast: str | None
    #: True if the output is in channels-last memory format.
    channels_last: bool
    #: True if the output is one large feature map, which is transposed as a matrix.
    as_matrix: bool
    #: Functions of the active ``with`` blocks, which receive the inputs of attention.
    hooks: Sequence[Callable[..., object]] = ()
    #: The valid positions of padded images, on the feature maps of queries and of keys before pooling.
    valid: Sequence[Tensor] | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: PositionBias | None, mask: Mask) -> Tensor:
        """Compute attention in the groups of the pattern, ``(b·groups, n, i, e)``; fully masked rows are zero."""
        if self.autocast is not None:
            with torch.autocast(self.autocast, enabled=False):
                return self._replace(autocast=None).attend(q, k, v, bias, mask)
        if self.kernel.attend_pattern is not None:
            inputs = AttentionInputs(q, k, v, self.scale, self.grouping, bias, mask)
            return self.kernel.attend_pattern(inputs, self.dropout)
        if k.shape[1] != q.shape[1]:
            k, v = repeat_kv(q, k), repeat_kv(q, v)
        row_has_key, scale = None, self.scale
        if mask is not None:
            mask, row_has_key = self.grouping.combine(mask)
        elif not self.causal and not self.grouping.is_dense:
            mask = self.grouping.attn_mask(q.dtype)
        if bias is not None and bias.is_chunkable and self.can_chunk:
            chunk = partial(self.kernel.attend, scale=self.scale, dropout=self.dropout)
            y = attend_chunked(chunk, q, k, v, mask, bias.rel_logits(q), self.grouping.groups)
        else:
            if bias is not None:
                q, k, scale = bias.fold(q, k, scale)
                mask = bias.attn_mask(mask)
            is_trained = mask is not None and mask.requires_grad
            attend = self.attend_trained_mask if is_trained else self.attend_heads
            y = attend(q, k, v, mask=mask, causal=self.causal, scale=scale)
        return y if row_has_key is None else zero_fully_masked_rows(y, row_has_key)


def make_plan(kind: Kind, config: AttentionConfig, find: Callable[..., Grouping]) -> Plan | None:
    """Decide how a block attends on inputs of this kind; None if they are empty.

    ``find(size, keys_size, device, causal=…, as_mask=…)`` returns a grouping of the block's pattern.
    """
    if 0 in kind.shape:  # some implementations and patterns do not support empty tensors
        return None
    size, kernel, causal = tuple(kind.shape[2:]), kind.kernel, kind.causal
    keys_shape = kind.shape if kind.context is None else kind.context.shape
    find = partial(find, size, pooled_size(keys_shape[2:], config.kv_stride), kind.device, causal=causal)

    # The groups. A kernel for patterns gets the feature map as one group, unless the groups are a plain reshape.
    grouping = find()
    queries, keys = grouping.query_layout, grouping.key_layout
    if kernel.attend_pattern is not None and not grouping.is_global:
        is_reshape = keys is queries and queries.rearrangement is not None
        if not is_reshape or kind.mask is not None or causal:
            grouping = find(as_mask=True)

    # The projections. Rearranging one input is cheaper than rearranging its projections.
    one_input = kind.context is None and config.context_channels is None and config.qk_norm != "match"
    one_input = one_input and grouping.key_layout is grouping.query_layout

    # The mask. The causal order alone is left to the kernel, which then skips later keys.
    causal = causal and grouping.is_global and kind.mask is None and not config.adds_bias

    # The implementation. The kernel is called directly if it is the only step; "auto" is then resolved here.
    is_direct = kind.mask is None and not config.adds_bias and kernel.attend_pattern is None
    is_direct = is_direct and not kind.autocast and config.num_heads == config.num_kv_heads
    is_cpu = kind.device.type == "cpu"
    can_chunk = kind.device.type in dispatch.CHUNKED_DEVICES and not kind.in_graph and not kind.in_transform
    attend = [kernel.attend, kernel.attend]
    if kernel.select is not None and not kind.autocast:
        rows = kind.shape[0] * grouping.groups * queries.tokens
        sizes = rows, keys.tokens, config.key_dim, config.num_heads
        select = partial(kernel.select, is_cpu, can_chunk, kind.dtype, *sizes, kind.dropout, kind.trained)
        attend = [select(trained_mask) for trained_mask in (False, True)]
    heads, trained_mask = (partial(function, scale=kind.scale, dropout=kind.dropout) for function in attend)
    return Plan(
        kernel=kernel,
        grouping=grouping,
        one_input=one_input,
        attend_heads=heads,
        attend_trained_mask=trained_mask,
        scale=kind.scale,
        dropout=kind.dropout,
        is_direct=is_direct,
        can_chunk=can_chunk,
        mask=grouping.attn_mask(kind.dtype) if is_direct and not causal else None,
        causal=causal,
        autocast=kind.device.type if kind.autocast else None,
        channels_last=kind.channels_last,
        as_matrix=not kind.in_graph and kind.shape[0] == 1 and kind.shape.numel() > 2**14,
    )


class PlanCache:
    """The plans of a block for recent kinds of calls; copies and pickles of a block have none."""

    def __init__(self, config: AttentionConfig) -> None:
        self.config = config
        self.groupings: dict[Any, Grouping] = {}
        self.recent: dict[Kind, Plan] = {}
        #: Plans that a captured CUDA graph uses. They are never removed: each replay reads the same memory.
        self.captured: dict[Kind, Plan] = {}

    def __reduce__(self) -> Any:
        return PlanCache, (self.config,)

    def keep(self, kind: Kind, plan: Plan) -> None:
        """Keep a plan that a CUDA graph uses."""
        self.captured[kind] = plan

    def make(self, kind: Kind) -> Plan | None:
        """Make a plan, and keep it unless its tensors belong to a graph; return None if the inputs are empty.

        Raises:
            ValueError: the mask or the context is invalid.
        """
        check_kind(kind, self.config)
        if kind.in_graph:
            return make_plan(kind, self.config, self.create)
        plan = self.captured.get(kind) or make_plan(kind, self.config, self.find)
        if plan is not None and can_cache(plan.grouping.axes[0].queries.positions):
            if len(self.recent) >= CACHED_PLANS:
                self.recent.clear()
            self.recent[kind] = plan
        return plan

    def find(self, *sizes: Any, **options: Any) -> Grouping:
        """Return a grouping, which the plans for a size share."""
        key = (*sizes, *options.items())
        grouping = self.groupings.get(key)
        if grouping is None:
            grouping = self.create(*sizes, **options)
            if can_cache(grouping.axes[0].queries.positions):
                if len(self.groupings) >= CACHED_SIZES:
                    self.groupings.clear()
                    self.recent.clear()
                self.groupings[key] = grouping
        return grouping

    def create(
        self, size: Any, keys_size: Any, device: torch.device, *, causal: bool = False, as_mask: bool = False
    ) -> Grouping:
        options = {"causal": causal, "pattern_as_mask": as_mask}
        make = partial(Grouping, self.config.resolved_pattern, size, keys_size, device, **options)
        with torch.inference_mode(False):  # also valid in training
            return outside_graph((*size, *keys_size), make)
