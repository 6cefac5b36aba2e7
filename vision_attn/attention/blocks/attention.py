"""Multi-head attention on feature maps: ``Attention1d``, ``Attention2d`` and ``Attention3d``."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.attention.blocks.matching import begin_alike_, less_mean
from vision_attn.attention.blocks.projection import POINTWISE, UnitLength, check_map, in_format_of, on_maps, qk_norms
from vision_attn.attention.blocks.specified import Specified, blocks_with_impl
from vision_attn.attention.blocks.weights import Look, check_queries, looking, weights_on_map
from vision_attn.attention.choices import how_to_add
from vision_attn.attention.implementations import IMPLEMENTATIONS, Given, Implementation, attend_groups, check_impl
from vision_attn.attention.masks import AxisBias, check_mask, mask_of, masks_of_groups, upcast
from vision_attn.attention.patterns import AnyPattern, Neighborhood, Partitioner, resolve_pattern
from vision_attn.attention.patterns.line import Cut
from vision_attn.attention.patterns.partition import Partition, Partitions
from vision_attn.attention.position import AbsPos, AnyPosition, BlockShape, RelPosDecomposed, RelPosTable, new_term
from vision_attn.attention.position.term import PositionTerm
from vision_attn.checks import check_counts, check_divides, check_flags, check_new, check_number, check_probability

#: By how many axes a map has.
AVERAGE: dict[int, Callable[..., Tensor]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


class Attention(Specified):
    """:class:`Attention1d`, :class:`Attention2d` and :class:`Attention3d`, for maps with ``rank`` axes."""

    rank: int
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
        super().__init__()
        check_new(device, dtype, channels=channels, num_heads=num_heads, groups=groups, kv_stride=kv_stride)
        check_counts(key_dim=key_dim, value_dim=value_dim, num_kv_heads=num_kv_heads)
        check_counts(out_channels=out_channels, context_channels=context_channels)
        check_flags(qkv_bias=qkv_bias, proj_bias=proj_bias, causal=causal, output_gate=output_gate)
        if qk_norm not in ("cosine", "match") and not isinstance(qk_norm, bool):
            raise ValueError(f"qk_norm must be False, True (layer norm), 'cosine' or 'match'; got {qk_norm!r}")
        self.matches: bool = qk_norm == "match"
        check_probability("attn_drop", attn_drop)
        check_probability("proj_drop", proj_drop)
        if scale is not None:
            check_number("scale", scale)
        self.attn_drop = attn_drop
        check_impl(impl)
        if key_dim is None or value_dim is None:
            check_divides("num_heads", num_heads, "channels", channels)
        self.channels = channels
        self.num_heads = n = num_heads
        self.num_kv_heads: int = num_heads if num_kv_heads is None else num_kv_heads
        self.key_dim: int = channels // num_heads if key_dim is None else key_dim
        self.value_dim: int = channels // num_heads if value_dim is None else value_dim
        m, d, e = self.num_kv_heads, self.key_dim, self.value_dim
        self.out_channels: int = channels if out_channels is None else out_channels
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
                "causal must be False with kv_stride or context_channels: such keys have no order with queries"
            )
        if self.matches and (causal or context_channels not in (None, channels)):
            raise ValueError(
                "qk_norm must be another than 'match' with causal, as a mean over the map tells of what follows, and "
                f"with context_channels other than {channels}, as queries and keys begin as one projection"
            )
        if causal and isinstance(pattern, Neighborhood):
            raise ValueError(
                "causal must be False with a Neighborhood, which is causal along axes of its own: give "
                "Neighborhood(causal=True), or one for each axis"
            )
        self.impl = impl
        self.pattern = pattern
        self.partitioner: Partitioner = resolve_pattern(pattern).partitioner(self.rank)
        if kv_stride > 1 and not self.partitioner.is_global:
            raise ValueError(f"pattern must be 'full' with kv_stride={kv_stride}; got {pattern!r}")
        self.kv_stride = kv_stride
        self.causal = causal
        self.partitions: Partitions = Partitions(self.partitioner)
        #: called with what the kernel gets, in each forward pass
        self.lookers: tuple[Look, ...] = ()

        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        conv = POINTWISE[self.rank]
        if groups > 1:  # of a map that is there three times, so that the rows stay in their order
            self.qkv: nn.modules.conv._ConvNd = conv(
                3 * channels, 3 * n * d, 1, groups=3 * groups, bias=qkv_bias, **factory
            )
        elif context_channels is None:
            self.qkv = conv(channels, n * d + m * (d + e), 1, bias=qkv_bias, **factory)
        else:
            self.q: nn.modules.conv._ConvNd = conv(channels, n * d, 1, bias=qkv_bias, **factory)
            self.kv: nn.modules.conv._ConvNd = conv(context_channels, m * (d + e), 1, bias=qkv_bias, **factory)
        self.proj: nn.modules.conv._ConvNd = conv(n * e, self.out_channels, 1, groups=groups, bias=proj_bias, **factory)
        self.q_norm, self.k_norm = qk_norms(qk_norm, d, n, **factory)
        self.scale: float = self.usual_scale if scale is None else scale
        self.gate: nn.modules.conv._ConvNd | None = conv(channels, n * e, 1, **factory) if output_gate else None
        elsewhere = kv_stride > 1 or context_channels is not None
        shape = BlockShape(channels, num_heads, d, self.partitioner, elsewhere, context_channels)
        self.position: PositionTerm | None = None if position is None else new_term(position, shape, **factory)
        self.proj_drop: nn.Dropout = nn.Dropout(proj_drop)
        self.init_matching()

    def init_matching(self) -> None:
        """Begin with equal, isometric queries and keys where they are to match."""
        if self.matches:
            heads = self.num_heads, self.num_kv_heads, self.key_dim
            if self.context_channels is None:
                begin_alike_(self.qkv, self.qkv, *heads, heads_before=self.num_heads)
            else:
                begin_alike_(self.q, self.kv, *heads, heads_before=0)

    @on_maps
    def forward(self, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        """Attend, in the same steps for every pattern, position term and implementation.

        Args:
            x: maps, ``(b, c, h, w)``, or one map, ``(c, h, w)``; with as many axes as the block is for.
            mask: bool (True = may attend) or additive float, broadcastable to ``(b, heads, tokens, key tokens)``,
                tokens row-major.
            context: the maps that keys and values are taken from, with ``context_channels`` channels if that is given,
                else with ``channels``; ``x`` when None.

        Returns:
            ``(b, out_channels, h, w)`` in the memory format of ``x``; a query that may attend to nothing gives the bias
            of ``proj``.

        Raises:
            ValueError: ``x``, ``context`` or ``mask`` is none of these; the message says what was expected.
        """
        keys_size = self.check_maps(x, mask, context)
        if 0 in x.shape:  # not every implementation and pattern can tell the sizes of nothing
            return self.proj(x.new_zeros(x.shape[0], self.proj.in_channels, *x.shape[2:]))
        impl, part = IMPLEMENTATIONS[self.impl], self.partitions.of(x, keys_size)
        in_groups = part.groups > 1 and context is None and self.projects_groups and part.keys is part.queries

        apart: list[Tensor] = []
        for cut, y, heads in self.project_groups(impl, x, part) if in_groups else self.project(x, context, part):
            apart += impl.heads_apart(cut, y, sum(heads)).split(heads, dim=1)
        q, k, v = apart  # (b·groups, n, i, d), (b·groups, m, j, d), (b·groups, m, j, e)
        if self.q_norm is not None and self.k_norm is not None:
            # Under autocast the normalisation gives float32: the values' type is the one that the kernel gets.
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        scale, bias = self.scale, None
        if self.position is not None:
            q, k, scale, bias = self.position(q, k, scale, part)
        if isinstance(bias, AxisBias):
            how = self.how_to_add(q, bias)
            if how == "mask":
                bias = mask_of(bias.along(q), part.groups)
            elif how == "folded":
                (q, k), scale, bias = bias.fold(q, k, scale), 1.0, None

        in_blocks = bias if isinstance(bias, AxisBias) else None
        given = Given(q, k, v, scale, *masks_of_groups(part, mask, bias, self.causal), in_blocks)
        for look in self.lookers:
            look(part, given)
        y = attend_groups(impl, given, dropout=self.attn_drop if self.training else 0.0)  # (b·groups, n, i, e)

        if in_groups:
            y = self.proj(impl.heads_together(part.queries.cut_of_group, y)).movedim(1, self.rank + 1)
            y = part.queries.take_back(impl.heads_together(part.queries.cut, y.flatten(1, -2)[:, None]))
        else:
            y = part.queries.take_back(impl.heads_together(part.queries.cut, y))  # (b, n·e, h, w)
            y = self.proj(y if self.gate is None else y * torch.sigmoid(self.gate(x)))
        return in_format_of(x, self.proj_drop(y))

    def how_to_add(self, q: Tensor, bias: AxisBias) -> str:
        """How positions by axis are added to the logits."""
        return how_to_add(q, bias.keys_shape, watched=bool(self.lookers))

    @property
    def projects_groups(self) -> bool:
        """Whether a group can be projected by itself: the map is copied into groups, and not the three made of it."""
        return self.key_dim == self.value_dim and self.groups == 1 and self.gate is None and not self.matches

    def project_groups(self, impl: Implementation, x: Tensor, part: Partition) -> list[tuple[Cut, Tensor, list[int]]]:
        """As :meth:`project`, of groups as small maps with their tokens along the last axis."""
        if self.position is not None:
            x = self.position.add_to_map(x)
        groups = impl.heads_apart(part.queries.cut, part.queries.lay_out(x), 1)  # (b·groups, 1, i, c)
        cut = part.queries.cut_of_group
        maps = groups.view(len(groups), *cut.shape, self.channels).movedim(self.rank + 1, 1)
        return [(cut, self.qkv(maps), [self.num_heads, self.num_kv_heads, self.num_kv_heads])]

    def project(self, x: Tensor, context: Tensor | None, part: Partition) -> list[tuple[Cut, Tensor, list[int]]]:
        """Maps of queries ``(b, n·d, h, w)``, keys ``(b, m·d, …)`` and values ``(b, m·e, …)``; or one of all of them.

        They are laid out for the pattern's line. With each come how it is cut, and its heads.
        """
        n, m, d, e = self.num_heads, self.num_kv_heads, self.key_dim, self.value_dim
        if self.position is not None:
            x = self.position.add_to_map(x)
            context = None if context is None else self.position.add_to_map(context)
        if self.groups > 1:  # queries, keys and values have groups of their own
            x = torch.cat([x] * 3, dim=1)
            context = None if context is None else torch.cat([context] * 3, dim=1)
        if self.context_channels is not None:
            q, (k, v) = self.q(x), self.kv(context).split([m * d, m * e], dim=1)
        else:
            # heads of one width, laid out alike
            if context is None and part.keys is part.queries and d == e and not self.matches:
                return [(part.queries.cut, self.qkv(part.queries.lay_out(x)), [n, m, m])]
            q, k, v = self.qkv(x).split([n * d, m * d, m * e], dim=1)
            if context is not None:
                _, k, v = self.qkv(context).split([n * d, m * d, m * e], dim=1)
        if self.matches:
            q, k = less_mean(q), less_mean(k)
        sides = ((part.queries, q, [n]), (part.keys, self.averaged(k), [m]), (part.keys, self.averaged(v), [m]))
        return [(side.cut, side.lay_out(y), heads) for side, y, heads in sides]

    def averaged(self, y: Tensor) -> Tensor:
        """A projected map averaged over squares of ``kv_stride``: as if the map had been averaged before."""
        if self.kv_stride == 1:
            return y
        squares = tuple(min(self.kv_stride, length) for length in y.shape[2:])
        # On the CPU torch has no such average of volumes in half precision.
        exact = upcast(y) if self.rank == 3 and y.device.type == "cpu" else y
        return AVERAGE[self.rank](exact, squares, ceil_mode=True).to(y.dtype)

    def check_maps(self, x: Tensor, mask: Tensor | None, context: Tensor | None) -> tuple[int, ...]:
        """Refuse what :meth:`forward` cannot take; the size of the map that keys are taken from."""
        check_map("x", x, self.channels, self.rank)
        if context is not None:
            check_map("context", context, self.context_channels or self.channels, self.rank)
            if context.shape[0] != x.shape[0]:
                raise ValueError(f"context must hold as many maps as x, {x.shape[0]}; got {context.shape[0]}")
            relative = self.position is not None and self.position.is_relative
            if context.shape[2:] != x.shape[2:] and (not self.partitioner.is_global or self.causal or relative):
                raise ValueError(
                    f"context must have the size of x, {tuple(x.shape[2:])}, with a pattern other than 'full', with a "
                    f"causal mask or with relative positions; got {tuple(context.shape[2:])}"
                )
        elif self.context_channels is not None:
            raise ValueError(f"context must be given to a block with context_channels={self.context_channels}")
        keys_size = self.keys_size(x, context)
        if mask is not None:
            check_mask(mask, x.shape[0], self.num_heads, x.shape[2:], keys_size)
        return keys_size

    def keys_size(self, x: Tensor, context: Tensor | None = None) -> tuple[int, ...]:
        """The size of the map that keys are taken from, in positions."""
        size = tuple((x if context is None else context).shape[-self.rank :])
        return size if self.kv_stride == 1 else tuple(-(-length // self.kv_stride) for length in size)

    def attention_weights(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        queries: Tensor | None = None,
        context: Tensor | None = None,
    ) -> Tensor:
        """How much every query attends to every key, for the map that :meth:`forward` would be given.

        Args:
            x: as in :meth:`forward`.
            mask: as in :meth:`forward`.
            queries: indices of tokens, ``(i,)``, row-major; all when None.
            context: as in :meth:`forward`.

        Returns:
            ``(b, heads, i, key tokens)``.

        Raises:
            ValueError: as :meth:`forward`, or ``queries`` are no such indices.

        >>> Attention2d(8, 2, pattern="rows").attention_weights(torch.randn(1, 8, 3, 4)).shape
        torch.Size([1, 2, 12, 12])
        """
        seen: list[Any] = []
        with looking(self, lambda *given: seen.extend(given)):
            self.forward(x, mask, context)
        check_queries(queries, x.shape[-self.rank :])
        if not seen:  # of maps of nothing
            tokens = x.shape[-self.rank :].numel() if queries is None else len(queries)
            return x.new_zeros(x.shape[0], self.num_heads, tokens, math.prod(self.keys_size(x, context)))
        return weights_on_map(seen[0], seen[1], queries)

    @property
    def usual_scale(self) -> float:
        """The factor on the logits that follows from the other arguments."""
        return 1.0 if isinstance(self.q_norm, UnitLength) else self.key_dim**-0.5

    def unusual(self) -> dict[str, object]:
        """The arguments that are not what follows from the others."""
        width = self.channels // self.num_heads
        usual = {
            "key_dim": width,
            "value_dim": width,
            "num_kv_heads": self.num_heads,
            "out_channels": self.channels,
            "context_channels": None,
            "groups": 1,
            "scale": self.usual_scale,
            "kv_stride": 1,
            "causal": False,
            "attn_drop": 0.0,
        }
        found = {name: getattr(self, name) for name, value in usual.items() if getattr(self, name) != value}
        return {**found, "qk_norm": "match"} if self.matches else found

    def extra_repr(self) -> str:
        shown = [f"{self.channels}, num_heads={self.num_heads}, impl={self.impl!r}, pattern={self.pattern!r}"]
        return ", ".join([*shown, *(f"{name}={value}" for name, value in self.unusual().items())])

    def specification(self) -> dict[str, object]:
        told = {"num_heads": self.num_heads, "pattern": self.pattern, **self.unusual()}
        told.pop("attn_drop", None)  # of training alone
        if self.position is not None:
            told["position"] = position = copy(self.position.specification)
            if isinstance(position, AbsPos | RelPosDecomposed | RelPosTable):
                # The size of a table is in its shape, and a table of another size is resampled.
                object.__setattr__(position, "feat_size", None)
        return told


class Attention1d(Attention):
    """:class:`Attention2d` for maps with one axis, ``(b, c, w)``, projected by ``Conv1d``.

    Arguments and errors are those of :class:`Attention2d`.

    >>> import torch
    >>> Attention1d(64, num_heads=4)(torch.randn(2, 64, 50)).shape
    torch.Size([2, 64, 50])
    """

    rank = 1


class Attention2d(Attention):
    """Multi-head attention between the positions of a feature map, projected by 1×1 convolutions.

    ::

        qkv     = Conv2d(c, 3c, 1)(x)               rows ordered (qkv, heads, head_dim)
        q, k, v : (b, heads, tokens, head_dim)      tokens row-major over (h, w)
        y       = softmax(scale q kᵀ + mask) v
        out     = Conv2d(c, c, 1)(y)

    The state dict is ``qkv.weight (3c, c, 1, 1)``, ``qkv.bias (3c)``, ``proj.weight (c, c, 1, 1)``, ``proj.bias (c)``
    whatever the implementation, which may be changed at any time with :func:`set_impl_` or :func:`use_impl`. With other
    widths the rows are ``[heads·key_dim, kv_heads·key_dim, kv_heads·value_dim]``.

    Args:
        channels: channels of the map; divisible by ``num_heads``, unless ``key_dim`` and ``value_dim`` are given.
        num_heads: number of heads.
        impl: the implementation, one of :data:`vision_attn.IMPLS`, ``"auto"`` or a registered one. They give the same
            result. ``"sdpa"`` needs memory for the tokens only where torch has a fused kernel; the others hold every
            attention weight. ``"auto"`` is the faster of ``"sdpa"`` and ``"bmm"``, by device, type, tokens, gradients,
            dropout and mask.
        pattern: which positions attend to each other: ``"full"``, ``"rows"``, ``"columns"``, a :class:`Window`,
            :class:`Grid`, :class:`Halo`, :class:`Neighborhood` or :class:`Pattern`, or a line of einx.
        position: how attention is told where things are: a :class:`RelPosDecomposed`, :class:`RelPosTable`,
            :class:`AbsPos`, :class:`Rope2d`, :class:`ConditionalPos` or :class:`SinCos`; its parameters are
            ``position.*``.
        key_dim: width of queries and keys in a head; ``channels / num_heads`` when None.
        value_dim: width of values in a head; ``channels / num_heads`` when None.
        num_kv_heads: heads of keys and values, each shared by as many heads of queries in a row: grouped attention;
            multi-query with 1. ``num_heads`` when None.
        out_channels: channels of the result; ``channels`` when None.
        context_channels: channels of a second map that keys and values are then always taken from, by projections
            ``q`` and ``kv`` in the place of ``qkv``.
        groups: groups of the projections, as of a grouped convolution: a channel of queries, keys, values or output is
            of one group's channels only, and ``qkv.weight`` is ``(3c, c / groups, 1, 1)``.
        scale: factor on the logits; ``key_dim ** -0.5`` when None, and 1 with ``qk_norm="cosine"``.
        qkv_bias: whether queries, keys and values have a bias.
        proj_bias: whether the output projection has a bias.
        qk_norm: whether queries and keys are normalised over their width by layer norm (``q_norm``, ``k_norm``);
            ``"cosine"`` divides them by their length instead, and gives each head a factor on its logits that is
            learned, ``exp(q_norm.logit_scale)``, 10 at first and at most 100, as in Swin v2. ``"match"`` is for a block
            that looks something up: it takes the mean over the map from queries and keys before that, and they begin
            as one isometric projection in each head and with a factor of 14, so that from the first step a position
            attends to what looks like it and differs from the rest of the map.
        kv_stride: keys and values are taken from the map averaged over squares of this side, in positions.
        causal: whether a position attends to no position that follows it, row by row, in any pattern but a
            :class:`Neighborhood`, which has its own.
        output_gate: whether ``y`` is multiplied by ``sigmoid(gate(x))``, a 1×1 convolution, before it is projected.
        attn_drop: probability of dropping an attention weight, in training.
        proj_drop: probability of dropping an element of the output, in training.
        device: where the parameters live.
        dtype: type of the parameters.

    Raises:
        ValueError: an argument is out of range or does not go with another; the message says which, what was expected
            and what came.

    Source: Vaswani et al., *Attention Is All You Need*, 2017, section 3.2, https://arxiv.org/abs/1706.03762;
    on feature maps: Bello et al., *Attention Augmented Convolutional Networks*, 2019, https://arxiv.org/abs/1904.09925;
    shared keys and values: Ainslie et al., *GQA*, 2023, https://arxiv.org/abs/2305.13245; queries and keys less their
    means: Yin et al., *Disentangled Non-Local Neural Networks*, 2020, https://arxiv.org/abs/2006.06668; that begin
    alike: Trockman and Kolter, *Mimetic Initialization of Self-Attention Layers*, 2023,
    https://arxiv.org/abs/2305.09828

    >>> import torch
    >>> Attention2d(64, num_heads=4)(torch.randn(2, 64, 14, 10)).shape
    torch.Size([2, 64, 14, 10])
    """

    rank = 2


class Attention3d(Attention):
    """:class:`Attention2d` for maps with three axes, ``(b, c, t, h, w)``, projected by ``Conv3d``.

    Arguments and errors are those of :class:`Attention2d`.

    >>> import torch
    >>> Attention3d(64, num_heads=4)(torch.randn(2, 64, 4, 6, 5)).shape
    torch.Size([2, 64, 4, 6, 5])
    """

    rank = 3


def attention_modules(model: nn.Module) -> dict[str, Attention]:
    """Every :class:`Attention1d`, :class:`Attention2d` and :class:`Attention3d` of a model, by its path.

    >>> list(attention_modules(nn.ModuleDict({"a": Attention2d(8), "b": nn.ReLU()})))
    ['a']
    """
    return {name: block for name, block in blocks_with_impl(model).items() if isinstance(block, Attention)}
