"""Multi-head attention on feature maps with one, two or three axes, which share one forward pass."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.attention import dispatch
from vision_attn.attention.blocks.attention_maps import weights_on_map
from vision_attn.attention.blocks.config import ConfigurableImpl
from vision_attn.attention.blocks.projection import POINTWISE, Conv, accepts_unbatched, to_memory_format_of
from vision_attn.attention.blocks.qk_norm import CosineNorm, center, init_qk_tied_, is_qk_tied, qk_norms
from vision_attn.attention.graphs import active_transform, has_driver, in_graph
from vision_attn.attention.implementations import IMPLEMENTATIONS
from vision_attn.attention.kernels import TO_FIRST, TO_LAST, gathered_to_map, to_groups
from vision_attn.attention.kind import AttentionConfig, Kind, check_arguments, shape_error
from vision_attn.attention.masks import upcast
from vision_attn.attention.padding import latest_pixels, mask_padding
from vision_attn.attention.patterns import AnyPattern, resolve_pattern
from vision_attn.attention.plan import AttentionInputs, Plan, PlanCache
from vision_attn.attention.position import AnyPosition, PositionEncoding, new_encoding
from vision_attn.attention.position.encoding import TableEncoding
from vision_attn.attention.recomputation import graph_task_id
from vision_attn.attention.scopes import SCOPES, in_scope, scoped_values

#: The attributes of a block that are its configuration.
OPTIONS = AttentionConfig._fields[:-1]


class Attention(ConfigurableImpl):
    """Multi-head attention on feature maps with ``rank`` axes; :class:`.Attention2d` documents the arguments."""

    rank: int
    q_norm: nn.Module | None
    k_norm: nn.Module | None

    fixed: ClassVar[Collection[str]] = (*OPTIONS, "pattern", "position", "qkv_bias", "proj_bias", "output_gate")
    live: ClassVar[Collection[str]] = ("impl", "scale", "causal")

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
        config = check_arguments(SimpleNamespace(**locals()), resolve_pattern(pattern).expand_to_rank(self.rank))
        super().__init__()
        for name in OPTIONS:
            setattr(self, name, getattr(config, name))
        n, m, d, e = num_heads, config.num_kv_heads, config.key_dim, config.value_dim
        self.qkv_bias: bool = qkv_bias
        self.proj_bias: bool = proj_bias
        self.output_gate: bool = output_gate
        self.impl = impl
        self.pattern: str | AnyPattern = pattern
        self.causal = causal

        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        conv = POINTWISE[self.rank]
        if context_channels is None:  # groups of repeated inputs keep the rows in the order (qkv, heads, head_dim)
            copies, rows = 3 if groups > 1 else 1, n * d + m * (d + e)
            self.qkv: Conv = conv(copies * channels, rows, 1, groups=copies * groups, bias=qkv_bias, **factory)
        else:
            self.q: Conv = conv(channels, n * d, 1, bias=qkv_bias, **factory)
            self.kv: Conv = conv(context_channels, m * (d + e), 1, bias=qkv_bias, **factory)
        self.attn_drop: nn.Dropout = nn.Dropout(attn_drop)
        self.proj: Conv = conv(n * e, self.out_channels, 1, groups=groups, bias=proj_bias, **factory)
        self.proj_drop: nn.Dropout = nn.Dropout(proj_drop)
        self.q_norm, self.k_norm = qk_norms(qk_norm, d, n, **factory)
        self.scale: float = self.default_scale if scale is None else scale
        self.gate: Conv | None = conv(channels, n * e, 1, **factory) if output_gate else None
        self.position: PositionEncoding | None = None if position is None else new_encoding(position, config, **factory)
        is_relative = self.position is not None and self.position.is_relative
        self.plans: PlanCache = PlanCache(config._replace(is_relative=is_relative))
        self.init_match()

    if TYPE_CHECKING:  # the options of AttentionConfig are attributes

        def __getattr__(self, name: str) -> Any: ...

    def init_match(self) -> None:
        """Initialize queries and keys as one isometric projection, for ``qk_norm="match"``."""
        if self.qk_norm == "match":
            init_qk_tied_(self)

    def qk_projections(self) -> tuple[Conv, Conv]:
        return (self.qkv, self.qkv) if self.context_channels is None else (self.q, self.kv)

    def apply(self, fn: Callable[[nn.Module], object]) -> Self:
        """Apply a function to all modules, as an initialization, and tie queries and keys again if they were tied."""
        tied = self.qk_norm == "match" and is_qk_tied(self)
        super().apply(fn)  # type: ignore[arg-type]
        if tied and not is_qk_tied(self):
            self.init_match()
        return self

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
        plan, x, mask, context = self.prepare(x, mask, context)
        if plan is None:  # there are no positions: all gradients are zero
            used = x.sum() if context is None else x.sum() + context.sum()
            used = sum((parameter.sum() for parameter in self.parameters()), used)
            return self.proj(x.new_zeros(x.shape[0], self.num_heads * self.value_dim, *x.shape[2:]) + used)
        inputs = self.encode(plan, x, mask, context)
        for hook in plan.hooks:
            hook(inputs)
        y = plan.attend(inputs)  # (b·groups, n, i, e)
        del inputs  # without gradients, their memory is now free
        layout = plan.grouping.query_layout
        bound = layout.rearrangement
        y = gathered_to_map(layout, y) if bound is None else plan.kind.kernel.reverse(y, bound)  # (b, n·e, h, w)
        y = self.proj(y if self.gate is None else y * torch.sigmoid(self.gate(x)))
        drop = self.proj_drop
        y = drop(y) if drop.training and getattr(drop, "p", True) else y
        return to_memory_format_of(x, y)

    def prepare(
        self, x: Tensor, mask: Tensor | None, context: Tensor | None
    ) -> tuple[Plan | None, Tensor, Tensor | None, Tensor | None]:
        """Return the plan for these inputs, or None if they are empty; and the inputs without the padding of images."""
        graph, impl, valid = in_graph(x), self._impl, None
        hooks: Sequence[Any] = ()
        if in_scope() if graph else SCOPES.get() or graph_task_id() != -1:
            impls, hooks, padded = scoped_values(self, "impl", "attention", "valid")
            impl = [impl, *impls][-1]
            if (pixels := latest_pixels(padded, graph)) is not None:
                x, mask, context, valid = mask_padding(self, pixels, x, mask, context)
        # Reading device.type builds a string, which takes longer than reading any other property of the inputs.
        device_type = "cuda" if x.is_cuda else "cpu" if x.is_cpu else x.device.type
        autocast = device_type != "meta" and torch.is_autocast_enabled(device_type)
        drop = self.attn_drop
        rate = getattr(drop, "p", 0.0) if drop.training else 0.0  # other code may replace it by nn.Identity
        mask_kind = None if mask is None else (mask.shape, mask.dtype)
        keys = None if context is None else context.shape
        chunked = device_type in dispatch.CHUNKED_DEVICES and not graph and active_transform() is None
        # A tuple equals the Kind with these fields, which takes longer to create.
        kind = (IMPLEMENTATIONS[impl], x.shape, x.device, mask_kind, keys, self.causal, rate, autocast, graph, chunked)
        plan = None if graph else self.plans.recent.get(kind)
        if plan is None:
            plan = self.plans.make(Kind(*kind))
        elif has_driver(capturing := torch.cuda.is_current_stream_capturing) and capturing():
            self.plans.captured.add(plan.grouping)
        if plan is not None and (hooks or valid):
            plan = plan._replace(hooks=hooks, valid=valid)
        return plan, x, mask, context

    def encode(self, plan: Plan, x: Tensor, mask: Tensor | None, context: Tensor | None) -> AttentionInputs:
        """Project, split into groups and heads, normalize, and encode positions."""
        if (position := self.position) is not None and position.adds_to_map:
            x = position.add_to_map(x, plan.grouping)
            context = None if context is None else position.add_to_map(context, plan.grouping)
        q, k, v = self.project(plan, x, context)
        if self.q_norm is not None and self.k_norm is not None:
            # Under autocast, normalization returns float32; the kernel expects the dtype of the values.
            q, k = self.q_norm(q).to(v.dtype), plan.grouping.zero_padding(self.k_norm(k).to(v.dtype))
        q, k, bias = (q, k, None) if position is None else position(q, k, plan.grouping)
        return AttentionInputs(q, k, v, self.scale, plan.grouping, bias, mask)

    def project(self, plan: Plan, x: Tensor, context: Tensor | None) -> list[Tensor]:
        """Project to queries ``(b·groups, n, i, d)``, keys ``(…, m, j, d)`` and values ``(…, m, j, e)``."""
        n, m, d, e = self.num_heads, self.num_kv_heads, self.key_dim, self.value_dim
        kernel, queries, keys = plan.kind.kernel, plan.grouping.query_layout, plan.grouping.key_layout
        if self.groups > 1:  # queries, keys and values have separate groups of channels
            x = torch.cat([x] * 3, dim=1)
            context = None if context is None else torch.cat([context] * 3, dim=1)
        # Rearranging one input is cheaper than rearranging its projections.
        if context is None and keys is queries and self.qk_norm != "match":
            x = x if queries.is_identity else to_groups(kernel, queries, x).permute(*TO_FIRST[x.dim()])
            y = self.qkv(x).permute(*TO_LAST[x.dim()])
            if d == e:
                return kernel.split_heads(y, n, m, m)
            y, v = y.split_with_sizes([(n + m) * d, m * e], dim=-1)
            return [*kernel.split_heads(y, n, m), *kernel.split_heads(v, m)]
        widths, valid = [n * d, m * d, m * e], plan.valid or (None, None)
        if self.context_channels is not None:
            q, (k, v) = self.q(x), self.kv(context).split_with_sizes(widths[1:], dim=1)
        else:
            q, k, v = self.qkv(x).split_with_sizes(widths, dim=1)
            if context is not None:
                _, k, v = self.qkv(context).split_with_sizes(widths, dim=1)
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
            With :class:`.Halo`, the sum does not include the weights of the zero padding.

        Raises:
            ValueError: as in :meth:`forward`, or ``x`` is empty.

        >>> from vision_attn.attention.blocks import Attention2d
        >>> Attention2d(8, 2, pattern="rows").attention_weights(torch.randn(1, 8, 3, 4)).shape
        torch.Size([1, 2, 12, 12])
        """
        if x.dim() == 1 + self.rank:
            return self.attention_weights(x[None], mask, queries, None if context is None else context[None])
        if x.shape[1] != self.channels:
            raise shape_error("x", tuple(x.shape), self.channels, self.rank)
        plan, x, mask, context = self.prepare(x, mask, context)
        if plan is None:
            raise ValueError(f"x must not be empty, got shape {tuple(x.shape)}")
        return weights_on_map(self.encode(plan, x, mask, context), queries)

    @property
    def default_scale(self) -> float:
        """The factor on the logits if ``scale`` is None."""
        return 1.0 if isinstance(self.q_norm, CosineNorm) else self.key_dim**-0.5

    def non_default_config(self) -> dict[str, object]:
        """Return the arguments that differ from their defaults."""
        width = self.channels // self.num_heads
        defaults: dict[str, object] = {"key_dim": width, "value_dim": width, "num_kv_heads": self.num_heads}
        defaults |= {"out_channels": self.channels, "context_channels": None, "groups": 1, "scale": self.default_scale}
        defaults |= {"kv_stride": 1, "causal": False}
        changed = {name: getattr(self, name) for name in defaults if getattr(self, name) != defaults[name]}
        return {**changed, "qk_norm": "match"} if self.qk_norm == "match" else changed

    def extra_repr(self) -> str:
        shown = [f"{self.channels}, num_heads={self.num_heads}, impl={self.impl!r}, pattern={self.pattern!r}"]
        return ", ".join([*shown, *(f"{name}={value}" for name, value in self.non_default_config().items())])

    def get_config(self) -> dict[str, object]:
        config = {"num_heads": self.num_heads, "pattern": self.pattern, **self.non_default_config()}
        if self.position is not None:
            position: Any = self.position.config
            has_tables = isinstance(self.position, TableEncoding)  # shapes state the size, and loading resizes them
            config["position"] = replace(position, feat_size=None) if has_tables else position
        return config
