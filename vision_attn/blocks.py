"""Attention as modules: the projections around an implementation, and the residual block that goes into a backbone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.attend import attend, attention_weights, check_impl
from vision_attn.patterns import resolve_pattern

__all__ = ["Attention2d", "AttentionBlock2d", "ConvBlock2d", "set_impl", "use_impl"]


class Attention2d(nn.Module):
    """Multi-head attention between the positions of a feature map, projected by 1×1 convolutions.

    ::

        qkv     = Conv2d(c, 3c, 1)(x)               rows ordered (qkv, heads, head_dim)
        q, k, v : (b, heads, tokens, head_dim)      tokens row-major over (h, w)
        y       = softmax(scale q kᵀ + mask) v
        out     = Conv2d(c, c, 1)(y)

    The state dict is ``qkv.weight (3c, c, 1, 1)``, ``qkv.bias (3c)``, ``proj.weight (c, c, 1, 1)``, ``proj.bias (c)``
    whatever the implementation, which may be changed at any time with :func:`set_impl` or :func:`use_impl`.

    Args:
        channels: channels of the map, in and out; divisible by ``num_heads``.
        num_heads: number of heads.
        impl: the implementation, one of :data:`vision_attn.IMPLS`. They give the same result; ``"sdpa"`` is the fastest
            and needs memory for the tokens only, the others hold every attention weight.
        pattern: which positions attend to each other; ``"full"`` is all of them.
        scale: factor on the logits; ``head_dim ** -0.5`` when None.
        qkv_bias: whether queries, keys and values have a bias.
        attn_drop: probability of dropping an attention weight, in training.
        proj_drop: probability of dropping an element of the output, in training.
        device: where the parameters live.
        dtype: type of the parameters.

    Raises:
        ValueError: an argument is out of range; the message says which, what was expected and what came.

    Source: Vaswani et al., *Attention Is All You Need*, 2017, section 3.2, https://arxiv.org/abs/1706.03762;
    on feature maps: Bello et al., *Attention Augmented Convolutional Networks*, 2019, https://arxiv.org/abs/1904.09925

    >>> Attention2d(64, num_heads=4)(torch.randn(2, 64, 14, 10)).shape
    torch.Size([2, 64, 14, 10])
    """

    def __init__(
        self,
        channels: int,
        num_heads: int = 8,
        *,
        impl: str = "sdpa",
        pattern: str = "full",
        scale: float | None = None,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_count("channels", channels)
        check_count("num_heads", num_heads)
        if channels % num_heads:
            divisors = [n for n in range(1, channels + 1) if channels % n == 0]
            raise ValueError(
                f"num_heads must divide channels; got channels={channels} and num_heads={num_heads}: "
                f"choose num_heads from {', '.join(map(str, divisors))}"
            )
        check_impl(impl)
        for name, probability in (("attn_drop", attn_drop), ("proj_drop", proj_drop)):
            if not 0.0 <= probability <= 1.0:
                raise ValueError(f"{name} must be a probability between 0 and 1; got {probability!r}")
        self.channels = channels
        self.num_heads = num_heads
        self.impl = impl
        self.pattern = pattern
        self.scale = (channels // num_heads) ** -0.5 if scale is None else scale
        self.attn_drop = attn_drop
        self.tokens = resolve_pattern(pattern)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1, bias=qkv_bias, device=device, dtype=dtype)
        self.proj = nn.Conv2d(channels, channels, 1, device=device, dtype=dtype)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend.

        Args:
            x: maps, ``(b, c, h, w)``.
            mask: bool (True = may attend) or additive float, broadcastable to ``(b, heads, h·w, h·w)``: its last two
                axes are the query and the key token.

        Returns:
            ``(b, c, h, w)`` in the memory format of ``x``. A position that may attend to nothing gets ``proj(0)``.

        Raises:
            ValueError: ``x`` is no batch of maps of ``channels`` channels, or ``mask`` does not fit.
        """
        self._check_map(x)
        size = (x.shape[2], x.shape[3])
        dropout = self.attn_drop if self.training else 0.0

        if self.impl == "einx":
            q, k, v = self.tokens.split_einx(self.qkv(x), self.num_heads)
            y = attend(q, k, v, impl=self.impl, scale=self.scale, mask=mask, dropout=dropout)
            y = self.tokens.merge_einx(y, size)
        else:
            # In channels-last a 1×1 convolution is a linear layer on tokens, and q, k and v are views of what it
            # writes: the fused kernel then reads contiguous heads, which makes it several times faster.
            tokens_last = x.contiguous(memory_format=torch.channels_last) if self.impl == "sdpa" else x
            q, k, v = self.tokens.split_bmm(self.qkv(tokens_last), self.num_heads)
            y = attend(q, k, v, impl=self.impl, scale=self.scale, mask=mask, dropout=dropout)
            y = self.tokens.merge_bmm(y, size)
        return self.proj_drop(self.proj(y)).contiguous(memory_format=memory_format(x))

    def attention_weights(self, x: Tensor, mask: Tensor | None = None, queries: Tensor | None = None) -> Tensor:
        """How much every query attends to every key, for the map that :meth:`forward` would be given.

        Args:
            x: maps, ``(b, c, h, w)``.
            mask: as in :meth:`forward`.
            queries: indices of the tokens to look from, ``(i,)``; all when None.

        Returns:
            ``(b, heads, i, h·w)``, float32 or float64, without dropout.

        >>> Attention2d(8, 2).attention_weights(torch.randn(1, 8, 3, 4)).shape
        torch.Size([1, 2, 12, 12])
        """
        self._check_map(x)
        q, k, _ = self.tokens.split_bmm(self.qkv(x), self.num_heads)
        if queries is not None:
            q = q[:, :, queries]
            if mask is not None and mask.dim() > 1 and mask.shape[-2] > 1:
                mask = mask[..., queries, :]
        return attention_weights(q, k, scale=self.scale, mask=mask)

    def _check_map(self, x: Tensor) -> None:
        if x.dim() != 4 or x.shape[1] != self.channels:
            raise ValueError(f"x must be maps of shape (batch, {self.channels}, height, width); got {tuple(x.shape)}")

    def extra_repr(self) -> str:
        return f"{self.channels}, num_heads={self.num_heads}, impl={self.impl!r}, pattern={self.pattern!r}"


class LayerNorm2d(nn.LayerNorm):
    """Layer normalisation over the channels of ``(b, c, h, w)``, at each position apart."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class GatedResidual2d(nn.Module):
    """``x + gate · branch(norm(x))``, with one gate a channel. A gate of zero leaves ``x`` as it is, bit for bit."""

    def __init__(
        self,
        channels: int,
        gate_init: float,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.norm = LayerNorm2d(channels, device=device, dtype=dtype)
        self.gate = nn.Parameter(torch.full((channels,), gate_init, device=device, dtype=dtype))

    def branch(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        y = self.gate.view(-1, 1, 1) * self.branch(self.norm(x))
        # Under autocast the normalisation gives float32: the map keeps the type that the backbone gave it.
        return x + y.to(x.dtype)


class AttentionBlock2d(GatedResidual2d):
    """Attention ready for a backbone: ``x + gate · attention(norm(x))``, normalised over channels, gated by channel.

    With the gate at its initial zero the block is the identity, bit for bit, so that a pretrained network with the
    block inserted computes what it computed before. The gate learns first; the attention behind it follows.

    Args:
        channels: channels of the map; divisible by ``num_heads``.
        num_heads: number of heads.
        gate_init: initial gate of every channel.
        device: where the parameters live.
        dtype: type of the parameters.
        **attention: further arguments of :class:`Attention2d`.

    Source: the gate by channel is LayerScale, Touvron et al., *Going Deeper with Image Transformers*, 2021,
    https://arxiv.org/abs/2103.17239, begun at zero as in Bachlechner et al., *ReZero*, 2020,
    https://arxiv.org/abs/2003.04887

    >>> x = torch.randn(2, 64, 7, 7)
    >>> torch.equal(AttentionBlock2d(64)(x), x)
    True
    """

    def __init__(
        self,
        channels: int,
        num_heads: int = 8,
        *,
        gate_init: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **attention: object,
    ) -> None:
        super().__init__(channels, gate_init, device, dtype)
        self.attn = Attention2d(channels, num_heads, device=device, dtype=dtype, **attention)  # type: ignore[arg-type]

    def branch(self, x: Tensor) -> Tensor:
        return self.attn(x)


class ConvBlock2d(GatedResidual2d):
    """A convolution in the place of attention: the control that tells what attention adds beyond its parameters.

    ``x + gate · W₂ gelu(depthwise3×3(W₁ norm(x)))``, where the hidden width makes the number of parameters that of
    :class:`AttentionBlock2d`, to the nearest width.

    Args:
        channels: channels of the map.
        gate_init: initial gate of every channel.
        device: where the parameters live.
        dtype: type of the parameters.

    >>> count = lambda block: sum(p.numel() for p in block.parameters())
    >>> count(ConvBlock2d(64)), count(AttentionBlock2d(64))
    (16751, 16832)
    """

    def __init__(
        self,
        channels: int,
        *,
        gate_init: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_count("channels", channels)
        super().__init__(channels, gate_init, device, dtype)
        # Attention has 4c² + 4c parameters, this branch c(2·hidden + 1) + 11·hidden.
        hidden = max(1, round((4 * channels**2 + 3 * channels) / (2 * channels + 11)))
        self.expand = nn.Conv2d(channels, hidden, 1, device=device, dtype=dtype)
        self.depthwise = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, device=device, dtype=dtype)
        self.project = nn.Conv2d(hidden, channels, 1, device=device, dtype=dtype)

    def branch(self, x: Tensor) -> Tensor:
        return self.project(F.gelu(self.depthwise(self.expand(x))))


def set_impl(model: nn.Module, impl: str) -> int:
    """Let every :class:`Attention2d` in a model run another implementation; the weights stay as they are.

    Args:
        model: any module.
        impl: one of :data:`vision_attn.IMPLS`.

    Returns:
        How many modules run another implementation than before.

    Raises:
        ValueError: unknown ``impl``.

    >>> set_impl(nn.Sequential(Attention2d(8, 2), Attention2d(8, 2, impl="bmm")), "bmm")
    1
    """
    check_impl(impl)
    changed = [block for block in attention_modules(model).values() if block.impl != impl]
    for block in changed:
        block.impl = impl
    return len(changed)


@contextmanager
def use_impl(model: nn.Module, impl: str) -> Iterator[nn.Module]:
    """Run another implementation inside a ``with`` block; afterwards every module runs its own again.

    >>> block = Attention2d(8, 2)
    >>> with use_impl(block, "einx"):
    ...     block(torch.randn(1, 8, 3, 4)).shape
    torch.Size([1, 8, 3, 4])
    >>> block.impl
    'sdpa'
    """
    before = {block: block.impl for block in attention_modules(model).values()}
    set_impl(model, impl)
    try:
        yield model
    finally:
        for block, name in before.items():
            block.impl = name


def attention_modules(model: nn.Module) -> dict[str, Attention2d]:
    """Every :class:`Attention2d` of a model by its path.

    >>> list(attention_modules(nn.ModuleDict({"a": AttentionBlock2d(8), "b": nn.ReLU()})))
    ['a.attn']
    """
    return {name: module for name, module in model.named_modules() if isinstance(module, Attention2d)}


def check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1; got {value!r}")


def memory_format(x: Tensor) -> torch.memory_format:
    """The format of ``x``; where a map is both, as with a single channel, the default one."""
    channels_last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if channels_last else torch.contiguous_format
