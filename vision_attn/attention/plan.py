"""The plan of a forward pass: every decision that depends on the kind of its inputs, and not on their values.

A block makes a plan once for each kind of inputs and keeps it. In graphs, traces and transforms, where sizes may be
symbolic and tensors belong to the graph, it makes a plan in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vision_attn.attention import dispatch
from vision_attn.attention.dispatch import attend_chunked, repeat_kv
from vision_attn.attention.inputs import AttentionInputs, PositionBias
from vision_attn.attention.kernels import Kernel
from vision_attn.attention.masks import Mask, zero_fully_masked_rows
from vision_attn.attention.patterns.grouping import Grouping, can_cache, in_graph, is_capturing, outside_graph

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
    scale: float
    dropout: float
    #: True if nothing but the pattern restricts or changes the logits, so that the kernel is called directly.
    is_direct: bool
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
        if self.is_direct:
            return self.attend_heads(q, k, v, mask=self.mask, causal=self.causal)
        if self.autocast is not None:
            with torch.autocast(self.autocast, enabled=False):
                return self._replace(autocast=None).attend(q, k, v, bias, mask)
        if self.kernel.attend_pattern is not None:
            inputs = AttentionInputs(q, k, v, self.scale, self.grouping, bias, mask)
            return self.kernel.attend_pattern(inputs, self.dropout)
        if k.shape[1] != q.shape[1]:
            k, v = repeat_kv(q, k), repeat_kv(q, v)
        row_has_key = None
        if mask is not None:
            mask, row_has_key = self.grouping.combine(mask)
        elif not self.causal and not self.grouping.is_dense:
            mask = self.grouping.attn_mask(q)
        if bias is None:
            y = self.attend_heads(q, k, v, mask=mask, causal=self.causal)
        elif bias.is_chunkable and dispatch.can_chunk(q):
            y = attend_chunked(self.attend_heads, q, k, v, mask, bias.rel_logits(q), self.grouping.groups)
        else:
            q, k, scale = bias.fold(q, k, self.scale)
            y = self.attend_heads(q, k, v, mask=bias.attn_mask(mask), causal=False, scale=scale)
        return y if row_has_key is None else zero_fully_masked_rows(y, row_has_key)


def make_plan(block: Any, kernel: Kernel, x: Tensor, mask: Mask, context: Tensor | None, find: Any) -> Plan | None:
    """Decide how a block attends on inputs of this kind; None if they are empty. Raise for invalid inputs.

    ``find(size, keys_size, device, causal, as_mask)`` returns a grouping of the block's pattern.
    """
    keys_size = block.check_inputs(x, mask, context)
    if 0 in x.shape:  # some implementations and patterns do not support empty tensors
        return None
    find, position = partial(find, tuple(x.shape[2:]), keys_size, x.device, block.causal), block.position

    # The groups. A kernel for patterns gets the feature map as one group, unless the groups are a plain reshape.
    grouping = find(False)
    queries, keys = grouping.query_layout, grouping.key_layout
    if kernel.attend_pattern is not None and not grouping.is_global:
        is_reshape = keys is queries and queries.rearrangement is not None
        if not is_reshape or mask is not None or block.causal:
            grouping = find(True)

    # The projections. Rearranging one input is cheaper than rearranging its projections.
    one_input = context is None and block.context_channels is None and block.qk_norm != "match"
    one_input = one_input and grouping.key_layout is grouping.query_layout

    # The mask. The causal order alone is left to the kernel, which then skips later keys.
    adds_bias = position is not None and position.adds_bias
    causal = block.causal and grouping.is_global and mask is None and not adds_bias

    # The implementation. The kernel is called directly if it is the only step; "auto" is then resolved here.
    autocast = x.device.type if not x.is_meta and torch.is_autocast_enabled(x.device.type) else None
    dropout = block.attn_drop if block.training else 0.0
    is_direct = mask is None and not adds_bias and kernel.attend_pattern is None
    is_direct = is_direct and autocast is None and block.num_heads == block.num_kv_heads
    attend = kernel.attend
    if is_direct and kernel.select is not None:
        sizes = x.shape[0] * grouping.groups * queries.tokens, keys.tokens, block.key_dim
        attend = kernel.select(x, x.dtype, *sizes, dropout, torch.is_grad_enabled(), trained_mask=False)
    return Plan(
        kernel=kernel,
        grouping=grouping,
        one_input=one_input,
        attend_heads=partial(attend, scale=block.scale, dropout=dropout),
        scale=block.scale,
        dropout=dropout,
        is_direct=is_direct,
        mask=grouping.attn_mask(x) if is_direct and not causal else None,
        causal=causal,
        autocast=autocast,
        channels_last=x.shape[1] > 1 and x.stride(1) == 1 and not x.is_contiguous(),
        as_matrix=not in_graph(x) and x.shape[0] == 1 and x.numel() > 2**14,
    )


class PlanCache:
    """The plans of a block for recent kinds of inputs; copies and pickles of a block have none."""

    def __init__(self, pattern: Any) -> None:
        self.pattern = pattern
        self.groupings: dict[Any, Grouping] = {}
        self.recent: dict[Any, Plan] = {}
        #: Plans that a captured CUDA graph uses. They are never removed: each replay reads the same memory.
        self.captured: dict[Any, Plan] = {}

    def __reduce__(self) -> Any:
        return PlanCache, (self.pattern,)

    def get(self, block: Any, kernel: Kernel, x: Tensor, mask: Mask, context: Tensor | None) -> Plan | None:
        """Return the plan for inputs outside graphs; the key holds everything on which a plan depends."""
        position = block.position
        key = (
            *(kernel, x.shape, x.stride(), x.dtype, x.device, torch.is_grad_enabled(), block.scale),
            position is not None and position.adds_bias,  # not the module, which may belong to one call
            *(block.causal, block.training and block.attn_drop, x.is_meta or torch.is_autocast_enabled(x.device.type)),
            *(mask if mask is None else kind(mask), context if context is None else kind(context)),
            torch._C._functorch.is_functorch_wrapped_tensor(x),
        )
        plan = self.recent.get(key) or self.captured.get(key)
        if plan is None:
            plan = make_plan(block, kernel, x, mask, context, self.find)
            if plan is not None and can_cache(plan.grouping.axes[0].queries.positions):
                if len(self.recent) >= CACHED_PLANS:
                    self.recent.clear()
                self.recent[key] = plan
        elif is_capturing():
            self.captured[key] = plan
        return plan

    def find(self, *key: Any) -> Grouping:
        """Return a grouping, which the plans for a size share."""
        grouping = self.groupings.get(key)
        if grouping is None:
            grouping = self.create(*key)
            if can_cache(grouping.axes[0].queries.positions):
                if len(self.groupings) >= CACHED_SIZES:
                    self.groupings.clear()
                    self.recent.clear()
                self.groupings[key] = grouping
        return grouping

    def create(self, size: Any, keys_size: Any, device: torch.device, causal: bool, as_mask: bool) -> Grouping:
        with outside_graph((*size, *keys_size)), torch.inference_mode(False):  # also valid in training
            return Grouping(self.pattern, size, keys_size, device, causal=causal, pattern_as_mask=as_mask)


def kind(x: Any) -> Any:
    """Return the properties of a mask or context on which a plan depends."""
    return (x.shape, x.dtype, x.device, x.requires_grad) if isinstance(x, Tensor) else type(x)
