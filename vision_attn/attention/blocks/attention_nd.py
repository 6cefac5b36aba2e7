"""Multi-head attention on feature maps with one, two or three axes, which share one forward pass."""

from __future__ import annotations

from copy import copy
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.attention.blocks.attention_maps import weights_on_map
from vision_attn.attention.blocks.config import ConfigurableImpl
from vision_attn.attention.blocks.projection import POINTWISE, Conv, accepts_unbatched, shape_error, to_memory_format
from vision_attn.attention.blocks.qk_norm import CosineNorm, center, init_qk_tied_, qk_norms
from vision_attn.attention.blocks.rules import check_arguments
from vision_attn.attention.implementations import IMPLEMENTATIONS
from vision_attn.attention.inputs import AttentionInputs, PositionBias
from vision_attn.attention.kernels import from_groups, to_groups
from vision_attn.attention.masks import broadcast_mask, check_mask, combine_masks, upcast
from vision_attn.attention.padding import valid_positions
from vision_attn.attention.patterns import AnyPattern, resolve_pattern
from vision_attn.attention.patterns.grouping import in_graph
from vision_attn.attention.plan import Plan, PlanCache, make_plan
from vision_attn.attention.position import AnyPosition, AttentionShape, PositionEncoding, new_encoding
from vision_attn.attention.recomputation import graph_task_id
from vision_attn.attention.scopes import SCOPES, in_scope, scoped_values
from vision_attn.checks import product


class Attention(ConfigurableImpl):
    """Multi-head attention on feature maps with ``rank`` axes; :class:`.Attention2d` documents the arguments."""

    rank: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    out_channels: int
    q_norm: nn.Module | None
    k_norm: nn.Module | None

    def __init__(
        self,
        channels: int,
        num_heads: int = 8,
        *,
        impl: str = "auto",
        pattern: str | AnyPattern = "full",
        position: AnyPosition | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        num_kv_heads: int | None = None,
        out_channels: int | None = None,
        context_channels: int | None = None,
        groups: int = 1,
        scale: float | None = None,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        qk_norm: bool | str = False,
        kv_stride: int = 1,
        causal: bool = False,
        output_gate: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        given = SimpleNamespace(**locals())
        super().__init__()
        self.resolved_pattern: AnyPattern = resolve_pattern(pattern).expand_to_rank(self.rank)
        self.check_impl(impl)
        m, d, e, self.out_channels = check_arguments(given, self.resolved_pattern)
        self.num_kv_heads, self.key_dim, self.value_dim = m, d, e
        self.channels = channels
        self.num_heads = n = num_heads
        self.impl = impl
        self._pattern = pattern
        self.context_channels = context_channels
        self.groups = groups
        self.qk_norm = qk_norm
        self.kv_stride = kv_stride
        self.causal = causal
        self.attn_drop = attn_drop
        self.proj_drop = proj_drop
        self.plans: PlanCache = PlanCache(self.resolved_pattern)

        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        conv = POINTWISE[self.rank]
        if groups > 1:  # the input is repeated three times, which keeps the rows in the order (qkv, heads, head_dim)
            self.qkv: Conv = conv(3 * channels, 3 * n * d, 1, groups=3 * groups, bias=qkv_bias, **factory)
        elif context_channels is None:
            self.qkv = conv(channels, n * d + m * (d + e), 1, bias=qkv_bias, **factory)
        else:
            self.q: Conv = conv(channels, n * d, 1, bias=qkv_bias, **factory)
            self.kv: Conv = conv(context_channels, m * (d + e), 1, bias=qkv_bias, **factory)
        self.proj: Conv = conv(n * e, self.out_channels, 1, groups=groups, bias=proj_bias, **factory)
        self.q_norm, self.k_norm = qk_norms(qk_norm, d, n, **factory)
        self.scale: float = self.default_scale if scale is None else scale
        self.gate: Conv | None = conv(channels, n * e, 1, **factory) if output_gate else None
        is_cross = kv_stride > 1 or context_channels is not None
        shape = AttentionShape(channels, n, d, self.resolved_pattern, is_cross, context_channels)
        self.position: PositionEncoding | None = None if position is None else new_encoding(position, shape, **factory)
        self.init_match()

    def init_match(self) -> None:
        """Initialize queries and keys as one isometric projection, for ``qk_norm="match"``."""
        if self.qk_norm == "match":
            tied = (self.qkv, self.qkv) if self.context_channels is None else (self.q, self.kv)
            init_qk_tied_(*tied, self.num_heads, self.num_kv_heads, self.key_dim)

    @accepts_unbatched
    def forward(self, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        """Compute attention; the steps are the same for every pattern, position encoding and implementation.

        Args:
            x: feature maps, ``(b, c, h, w)``, or a single feature map, ``(c, h, w)``; :class:`Attention1d` expects
                ``w`` and :class:`Attention3d` expects ``t, h, w`` instead of ``h, w``.
            mask: bool (True = may attend) or additive float, broadcastable to ``(b, heads, tokens, key tokens)``, with
                tokens in row-major order.
            context: feature maps from which keys and values are projected, with ``context_channels`` channels, or
                ``channels`` if ``context_channels`` is None. Keys and values come from ``x`` if ``context`` is None.

        Returns:
            ``(b, out_channels, h, w)`` in the memory format of ``x``. The output for a query without any allowed key is
            the bias of ``proj``.

        Raises:
            ValueError: the shape or type of ``x``, ``context`` or ``mask`` is wrong.
        """
        plan, mask = self.plan(x, mask, context)
        if plan is None:  # there are no positions
            return self.proj(x.new_zeros(x.shape[0], self.proj.in_channels, *x.shape[2:]))
        q, k, v, bias = self.encode(plan, x, context)
        for hook in plan.hooks:
            hook(AttentionInputs(q, k, v, self.scale, plan.grouping, bias, mask))
        y = plan.attend(q, k, v, bias, mask)  # (b·groups, n, i, e)
        del q, k, v, bias  # without gradients, their memory is now free
        layout = plan.grouping.query_layout
        y = plan.kernel.merge_heads(y, layout.group_size)  # (b·groups, n·e, h', w')
        y = y if layout.is_identity else from_groups(plan.kernel, layout, y)  # (b, n·e, h, w)
        y = self.proj(y if self.gate is None else y * torch.sigmoid(self.gate(x)))
        y = F.dropout(y, self.proj_drop) if self.proj_drop and self.training else y
        return to_memory_format(y, plan.channels_last, plan.as_matrix)

    def plan(self, x: Tensor, mask: Tensor | None, context: Tensor | None) -> tuple[Plan | None, Tensor | None]:
        """Return the plan for inputs of this kind (None if they are empty), and the mask, with that of the padding."""
        graph = in_graph(x)
        scoped = in_scope() if graph else SCOPES.get() or graph_task_id() != -1
        valid = valid_positions(self, x, x if context is None else context) if scoped else None
        if valid is not None:
            keys = self.pool_kv(valid[1].to(x.dtype)).flatten(1)[:, None, None] > 0
            mask = keys if mask is None else combine_masks(broadcast_mask(mask), keys)
        if graph:
            plan = make_plan(self, IMPLEMENTATIONS[self.impl], x, mask, context, self.plans.create)
        else:
            kernel = IMPLEMENTATIONS[self.impl if scoped else self._impl]
            plan = self.plans.get(self, kernel, x, mask, context)
        if scoped and plan is not None:
            plan = plan._replace(hooks=scoped_values("attention", self), valid=valid)
        return plan, mask

    def encode(
        self, plan: Plan, x: Tensor, context: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, PositionBias | None]:
        """Project, split into groups and heads, normalize, and encode positions.

        Returns:
            Queries ``(b·groups, n, i, d)``, keys ``(b·groups, m, j, d)``, values ``(b·groups, m, j, e)`` and a bias.
        """
        if (position := self.position) is not None and position.adds_to_map:
            if plan.valid is not None:  # a convolution reads the padding
                x = x * plan.valid[0]
                context = None if context is None else context * plan.valid[1]
            x = position.add_to_map(x, plan.grouping)
            context = None if context is None else position.add_to_map(context, plan.grouping)
        q, k, v = self.project(plan, x, context)
        if self.q_norm is not None and self.k_norm is not None:
            # Under autocast, normalization returns float32; the kernel expects the dtype of the values.
            q, k = self.q_norm(q).to(v.dtype), plan.grouping.zero_padding(self.k_norm(k).to(v.dtype))
        q, k, bias = (q, k, None) if position is None else position(q, k, plan.grouping)
        return q, k, v, bias

    def project(self, plan: Plan, x: Tensor, context: Tensor | None) -> list[Tensor]:
        """Project to queries ``(b·groups, n, i, d)``, keys ``(…, m, j, d)`` and values ``(…, m, j, e)``."""
        n, m, d, e = self.num_heads, self.num_kv_heads, self.key_dim, self.value_dim
        kernel, queries, keys = plan.kernel, plan.grouping.query_layout, plan.grouping.key_layout
        if self.groups > 1:  # queries, keys and values have separate groups of channels
            x = torch.cat([x] * 3, dim=1)
            context = None if context is None else torch.cat([context] * 3, dim=1)
        if plan.one_input:
            y = self.qkv(x if queries.is_identity else to_groups(kernel, queries, x))
            if d == e:
                return kernel.split_heads(y, n, m, m)
            y, v = y.split_with_sizes([(n + m) * d, m * e], dim=1)
            return [*kernel.split_heads(y, n, m), *kernel.split_heads(v, m)]
        widths, valid = [n * d, m * d, m * e], plan.valid or (None, None)
        if self.context_channels is None:
            q, k, v = self.qkv(x).split_with_sizes(widths, dim=1)
            if context is not None:
                _, k, v = self.qkv(context).split_with_sizes(widths, dim=1)
        else:
            q, (k, v) = self.q(x), self.kv(context).split_with_sizes(widths[1:], dim=1)
        if self.qk_norm == "match":
            q, k = (center(y, ok) for y, ok in zip((q, k), valid, strict=True))
        q = to_groups(kernel, queries, q)
        k, v = (to_groups(kernel, keys, self.pool_kv(y, valid[1])) for y in (k, v))
        return [*kernel.split_heads(q, n), *kernel.split_heads(k, m), *kernel.split_heads(v, m)]

    def pool_kv(self, y: Tensor, valid: Tensor | None = None) -> Tensor:
        """Average projected keys or values over squares of side ``kv_stride``; averaging and projecting commute.

        Only the valid positions ``(b, 1, *size)`` of a square are averaged.
        """
        if self.kv_stride == 1:
            return y
        if valid is not None:
            weight = valid.to(y.dtype)
            return self.pool_kv(y * weight) / self.pool_kv(weight).clamp(min=self.kv_stride**-self.rank)
        squares = tuple(min(self.kv_stride, length) for length in y.shape[2:])
        # torch does not implement avg_pool3d in half precision on CPUs.
        exact = upcast(y) if self.rank == 3 and y.device.type == "cpu" else y
        return getattr(F, f"avg_pool{self.rank}d")(exact, squares, ceil_mode=True).to(y.dtype)

    def check_inputs(self, x: Tensor, mask: Tensor | None, context: Tensor | None) -> tuple[int, ...]:
        """Raise for an invalid mask or context; return the size of the keys' feature map."""
        if context is None and self.context_channels is not None:
            expected = f"feature maps, because the block was created with context_channels={self.context_channels}"
            raise ValueError(f"context must be {expected}, got None")
        if context is not None:
            channels = self.context_channels or self.channels
            if context.dim() != x.dim() or context.shape[1] != channels:
                raise shape_error("context", context, channels, self.rank)
            if context.shape[0] != x.shape[0]:
                raise ValueError(f"context must have the batch size of x, {x.shape[0]}, got {context.shape[0]}")
            is_relative = self.position is not None and self.position.is_relative
            needs_size = not self.resolved_pattern.is_global or self.causal or is_relative
            if needs_size and context.shape[2:] != x.shape[2:]:
                cause = "with a pattern other than 'full', causal=True or relative positions"
                raise ValueError(f"context must have the size of x {cause}, got {context.shape[2:]} and {x.shape[2:]}")
        keys_size = self.keys_size(x, context)
        if mask is not None:
            check_mask(mask, x.shape[0], self.num_heads, x.shape[2:], keys_size)
        return keys_size

    def keys_size(self, x: Tensor, context: Tensor | None = None) -> tuple[int, ...]:
        """Return the size of the keys' feature map, in positions."""
        size, stride = (x if context is None else context).shape[-self.rank :], self.kv_stride
        return tuple(size if stride == 1 else [(length + stride - 1) // stride for length in size])

    def attention_weights(
        self, x: Tensor, mask: Tensor | None = None, queries: Tensor | None = None, context: Tensor | None = None
    ) -> Tensor:
        """Return the attention weights for the inputs of :meth:`forward`.

        Args:
            x: as in :meth:`forward`.
            mask: as in :meth:`forward`.
            queries: token indices in row-major order, ``(i,)``; all tokens if None.
            context: as in :meth:`forward`.

        Returns:
            Weights ``(b, heads, i, key tokens)``. Each row sums to one, or is zero for a query without any allowed key.

        Raises:
            ValueError: as in :meth:`forward`.

        >>> from vision_attn.attention.blocks import Attention2d
        >>> Attention2d(8, 2, pattern="rows").attention_weights(torch.randn(1, 8, 3, 4)).shape
        torch.Size([1, 2, 12, 12])
        """
        if x.dim() == 1 + self.rank:
            return self.attention_weights(x[None], mask, queries, None if context is None else context[None])
        if x.shape[1] != self.channels:
            raise shape_error("x", x, self.channels, self.rank)
        plan, mask = self.plan(x, mask, context)
        if plan is None:
            tokens = x.shape[2:].numel() if queries is None else len(queries)
            return x.new_zeros(x.shape[0], self.num_heads, tokens, product(self.keys_size(x, context)))
        q, k, v, bias = self.encode(plan, x, context)
        return weights_on_map(AttentionInputs(q, k, v, self.scale, plan.grouping, bias, mask), queries)

    @property
    def pattern(self) -> str | AnyPattern:
        """The pattern; another pattern requires a new block."""
        return self._pattern

    @property
    def default_scale(self) -> float:
        """The factor on the logits if ``scale`` is None."""
        return 1.0 if isinstance(self.q_norm, CosineNorm) else self.key_dim**-0.5

    def non_default_config(self) -> dict[str, object]:
        """Return the arguments that differ from their defaults."""
        width = self.channels // self.num_heads
        defaults: dict[str, object] = {"key_dim": width, "value_dim": width, "num_kv_heads": self.num_heads}
        defaults |= {"out_channels": self.channels, "context_channels": None, "groups": 1, "scale": self.default_scale}
        defaults |= {"kv_stride": 1, "causal": False, "attn_drop": 0.0}
        found = {name: getattr(self, name) for name, value in defaults.items() if getattr(self, name) != value}
        return {**found, "qk_norm": "match"} if self.qk_norm == "match" else found

    def extra_repr(self) -> str:
        shown = [f"{self.channels}, num_heads={self.num_heads}, impl={self.impl!r}, pattern={self.pattern!r}"]
        return ", ".join([*shown, *(f"{name}={value}" for name, value in self.non_default_config().items())])

    def get_config(self) -> dict[str, object]:
        config = {"num_heads": self.num_heads, "pattern": self.pattern, **self.non_default_config()}
        config.pop("attn_drop", None)  # affects training only
        if self.position is not None:
            config["position"] = position = copy(self.position.config)
            if self.position.has_tables:  # their shapes state the size, and loading resizes them
                object.__setattr__(position, "feat_size", None)
        return config
