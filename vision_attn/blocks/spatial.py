"""What attention is on maps with any number of axes: projections around a pattern, a position and an implementation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attend import attend, attention_weights, check_impl, without_later_keys
from vision_attn.blocks.grouping import weights_on_map
from vision_attn.blocks.maps import (
    check_counts,
    check_divides,
    check_flags,
    check_number,
    check_probability,
    check_queries,
    in_format_of,
)
from vision_attn.blocks.tokens import check_inputs, tokens_of
from vision_attn.patterns import Specification, join_bmm, join_einx, resolve_pattern
from vision_attn.patterns.line import product
from vision_attn.position import CONVOLUTIONS, BlockShape
from vision_attn.position import Specification as Position

__all__ = ["Attention"]

# torch.fx traces these as one node each: what they do inside depends on the size and the format of the map.
torch.fx.wrap("attend_map")
torch.fx.wrap("in_format_of")


class Attention(nn.Module):
    """What :class:`Attention1d`, :class:`Attention2d` and :class:`Attention3d` are, for maps with ``rank`` axes.

    Arguments and errors are those of :class:`vision_attn.Attention2d`.

    >>> from vision_attn.blocks import Attention1d, Attention2d, Attention3d
    >>> [kind.rank for kind in (Attention1d, Attention2d, Attention3d) if issubclass(kind, Attention)]
    [1, 2, 3]
    """

    rank: int

    def __init__(
        self,
        channels: int,
        num_heads: int = 8,
        *,
        impl: str = "sdpa",
        pattern: str | Specification = "full",
        position: Position | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        num_kv_heads: int | None = None,
        out_channels: int | None = None,
        context_channels: int | None = None,
        groups: int = 1,
        scale: float | None = None,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        qk_norm: bool = False,
        kv_stride: int = 1,
        causal: bool = False,
        output_gate: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_counts(channels=channels, num_heads=num_heads, groups=groups, kv_stride=kv_stride)
        optional = {
            "key_dim": key_dim,
            "value_dim": value_dim,
            "num_kv_heads": num_kv_heads,
            "out_channels": out_channels,
            "context_channels": context_channels,
        }
        check_counts(**{name: count for name, count in optional.items() if count is not None})
        check_flags(qkv_bias=qkv_bias, proj_bias=proj_bias, qk_norm=qk_norm, causal=causal, output_gate=output_gate)
        check_probability("attn_drop", attn_drop)
        check_probability("proj_drop", proj_drop)
        if scale is not None:
            check_number("scale", scale)
        self.attn_drop = attn_drop
        self.check_impl(impl)
        if key_dim is None or value_dim is None:
            check_divides("num_heads", num_heads, "channels", channels)
        self.channels = channels
        self.num_heads = n = num_heads
        self.num_kv_heads = m = num_heads if num_kv_heads is None else num_kv_heads
        self.key_dim = d = channels // num_heads if key_dim is None else key_dim
        self.value_dim = e = channels // num_heads if value_dim is None else value_dim
        self.out_channels = channels if out_channels is None else out_channels
        self.context_channels = context_channels
        self.groups = groups
        check_divides("num_kv_heads", m, "num_heads", n)
        if groups > 1:
            check_divides("groups", groups, "channels", channels)
            check_divides("groups", groups, "num_heads · key_dim", n * d)
            check_divides("groups", groups, "out_channels", self.out_channels)
            if (m, e) != (n, d) or context_channels is not None:
                raise ValueError(
                    "groups must be 1 with num_kv_heads, value_dim or context_channels of their own: queries, keys and "
                    f"values are grouped alike; got groups={groups}"
                )
        if causal and (kv_stride > 1 or context_channels is not None):
            raise ValueError(
                "causal must be False where keys are not of the queries' map (kv_stride, context_channels): they have "
                "no order with them"
            )

        self.impl = impl
        self.pattern = pattern
        self.tiling = resolve_pattern(pattern).tiling(self.rank)
        if kv_stride > 1 and not self.tiling.whole:
            raise ValueError(f"pattern must be 'full' with kv_stride={kv_stride}; got {pattern!r}")
        self.scale = d**-0.5 if scale is None else scale
        self.kv_stride = kv_stride
        self.causal = causal

        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        conv = CONVOLUTIONS[self.rank]
        if groups > 1:  # of a map that is there three times, so that the rows stay in their order
            self.qkv = conv(3 * channels, 3 * n * d, 1, groups=3 * groups, bias=qkv_bias, **factory)
        elif context_channels is None:
            self.qkv = conv(channels, n * d + m * (d + e), 1, bias=qkv_bias, **factory)
        else:
            self.q = conv(channels, n * d, 1, bias=qkv_bias, **factory)
            self.kv = conv(context_channels, m * (d + e), 1, bias=qkv_bias, **factory)
        self.proj = conv(n * e, self.out_channels, 1, groups=groups, bias=proj_bias, **factory)
        self.q_norm = nn.LayerNorm(d, **factory) if qk_norm else None
        self.k_norm = nn.LayerNorm(d, **factory) if qk_norm else None
        self.gate = conv(channels, n * e, 1, **factory) if output_gate else None
        self.position = None
        if position is not None:
            if isinstance(position, type) or not hasattr(position, "build"):
                raise ValueError(
                    "position must be None or a RelPosDecomposed(…), RelPosTable(…), Rope2d(), ConditionalPos() or "
                    f"SinCos(); got {position!r}"
                )
            self.position = position.build(BlockShape(channels, n, d, self.tiling), **factory)
            if self.position.compares_places and (kv_stride > 1 or context_channels is not None):
                raise ValueError(
                    f"position must not be {position!r} where keys are not of the queries' map (kv_stride, "
                    "context_channels): use Rope2d()"
                )
            if self.position.needs_channels and context_channels not in (None, channels):
                raise ValueError(
                    f"position must not be {position!r}, which is added to maps of {channels} channels, with "
                    f"context_channels={context_channels}: use Rope2d()"
                )
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        """Attend.

        Args:
            x: maps, ``(b, c, h, w)``.
            mask: bool (True = may attend) or additive float, broadcastable to ``(b, heads, tokens, keys)``, for the
                tokens of the whole map, row-major, whatever the pattern.
            context: maps to take keys and values from, ``(b, context_channels, …)``, or ``(b, c, …)`` where the block
                has no ``context_channels``; of another size only with ``pattern="full"``. None: from ``x``.

        Returns:
            ``(b, out_channels, h, w)`` in the memory format of ``x``. A position that may attend to nothing gets
            ``proj(0)``.

        Raises:
            ValueError: ``x`` or ``context`` is no batch of such maps, or ``mask`` does not fit.
        """
        y = attend_map(self, x, mask, context)
        return in_format_of(x, self.proj_drop(self.proj(y)))

    def attention_weights(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        queries: Tensor | None = None,
        context: Tensor | None = None,
    ) -> Tensor:
        """How much every query attends to every key, for the map that :meth:`forward` would be given.

        Args:
            x: maps, ``(b, c, h, w)``.
            mask: as in :meth:`forward`.
            queries: indices of the tokens to look from, row-major, ``(i,)``; all when None.
            context: as in :meth:`forward`.

        Returns:
            ``(b, heads, i, keys)``, float32 or float64, without dropout; zero outside of a query's group.

        Raises:
            ValueError: as :meth:`forward`, or ``queries`` are no indices of tokens.

        >>> from vision_attn.blocks import Attention2d
        >>> Attention2d(8, 2, pattern="rows").attention_weights(torch.randn(1, 8, 3, 4)).shape
        torch.Size([1, 2, 12, 12])
        """
        check_queries(queries, product(x.shape[2:]))
        q, k, _, scale, mask = tokens_of(self, x, mask, context)
        if self.tiling.whole:
            if self.causal:
                mask = without_later_keys(mask, q.shape[2], k.shape[2], q.device)
            if queries is not None:
                q = q[:, :, queries]
                if mask is not None and mask.shape[-2] > 1:
                    mask = mask[..., queries, :]
            return attention_weights(q, k, scale=scale, mask=mask)
        causal = self.causal and self.tiling.ordered
        weights = attention_weights(q, k, scale=scale, mask=mask, causal=causal)
        return weights_on_map(weights, self.tiling, x.shape[2:], queries)

    def check_impl(self, impl: str) -> None:
        """Refuse an implementation that there is not, or that cannot do what this block asks of it.

        Args:
            impl: a name.

        Raises:
            ValueError: it is unknown, or drops nothing where the block has ``attn_drop``.
        """
        check_impl(impl)
        if impl == "flex" and self.attn_drop:
            raise ValueError(f"attn_drop must be 0 with impl='flex', whose kernels drop nothing; got {self.attn_drop}")

    def keys_size(self, x: Tensor, context: Tensor | None = None) -> tuple[int, ...]:
        """The size of the map that keys are taken from, in positions.

        Args:
            x: maps, ``(b, c, h, w)``.
            context: as in :meth:`forward`.
        """
        source = x if context is None else context
        return tuple(-(-length // self.kv_stride) for length in source.shape[2:])

    def extra_repr(self) -> str:
        shown = [f"{self.channels}, num_heads={self.num_heads}, impl={self.impl!r}, pattern={self.pattern!r}"]
        width = self.channels // self.num_heads
        usual = {
            "key_dim": width,
            "value_dim": width,
            "num_kv_heads": self.num_heads,
            "out_channels": self.channels,
            "context_channels": None,
            "groups": 1,
            "scale": self.key_dim**-0.5,
            "kv_stride": 1,
            "causal": False,
            "attn_drop": 0.0,
        }
        shown += [f"{name}={getattr(self, name)}" for name, value in usual.items() if getattr(self, name) != value]
        return ", ".join(shown)


def attend_map(block: Attention, x: Tensor, mask: Tensor | None, context: Tensor | None) -> Tensor:
    """What is attended to, before it is projected, ``(b, heads·value_dim, h, w)``."""
    if x.shape[0] == 0:  # of which not every implementation can tell the sizes
        check_inputs(block, x, context)
        return x.new_zeros(0, block.num_heads * block.value_dim, *x.shape[2:])
    q, k, v, scale, mask = tokens_of(block, x, mask, context)
    y = attend(
        q,
        k,
        v,
        impl=block.impl,
        scale=scale,
        mask=mask,
        causal=block.causal and block.tiling.ordered,
        dropout=block.attn_drop if block.training else 0.0,
    )
    einx = block.impl == "einx"
    y = block.tiling.merge(y, x.shape[2:], einx=einx)
    y = join_einx(y) if einx else join_bmm(y)
    if block.gate is not None:
        y = y * torch.sigmoid(block.gate(x))
    return y
