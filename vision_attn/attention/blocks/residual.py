"""Blocks that add to the map that came in: gated attention for a backbone, and the transformer's encoder layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.attention.blocks.attention import Attention, Attention1d, Attention2d, Attention3d
from vision_attn.attention.blocks.projection import Pointwise2d, check_map, in_format_of, on_maps
from vision_attn.attention.blocks.specified import Specified
from vision_attn.checks import check_count, check_flags, check_new, check_number, check_probability


class LayerNorm2d(nn.LayerNorm):
    """Layer normalisation over the channels of ``(b, c, h, w)`` or ``(c, h, w)``, at each position apart."""

    rank = 2

    def forward(self, x: Tensor) -> Tensor:
        last = x.dim() - 1
        channels = last - self.rank
        return super().forward(x.movedim(channels, last)).movedim(last, channels)


class LayerNorm1d(LayerNorm2d):
    """The same for maps with one axis."""

    rank = 1


class LayerNorm3d(LayerNorm2d):
    """The same for maps with three axes."""

    rank = 3


#: By how many axes a map has.
LAYER_NORMS: dict[int, type[LayerNorm2d]] = {1: LayerNorm1d, 2: LayerNorm2d, 3: LayerNorm3d}


def refuse_other_channels(owner: str, channels: int, attention: dict[str, Any]) -> None:
    """A residual block gives back the channels that it takes."""
    if attention.get("out_channels") not in (None, channels):
        raise ValueError(
            f"out_channels must be left out of {owner}, which adds to a map of {channels} channels; "
            f"got {attention['out_channels']!r}"
        )


class GatedResidual(nn.Module):
    """``x + gate · branch(norm(x))``, with one gate a channel, for maps with ``rank`` axes.

    A branch of zeros or a gate of zero leaves ``x`` as it is, bit for bit. Begun at a gate of zero, a block learns far
    behind its network: what is behind the gate gets no gradient until it opens, and it opens by one number a channel.
    Behind an open gate, an output projection of zeros is trained as fast as any other matrix of the network.
    """

    rank = 2

    def __init__(
        self,
        channels: int,
        gate_init: float | None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_new(device, dtype, channels=channels)
        gate = 1.0 if gate_init is None else gate_init
        check_number("gate_init", gate)
        self.begins_open: bool = gate_init is None
        self.norm: nn.Module = LAYER_NORMS[self.rank](channels, device=device, dtype=dtype)
        self.gate: nn.Parameter = nn.Parameter(torch.full((channels,), float(gate), device=device, dtype=dtype))

    def last_projection(self) -> nn.Module:
        """What the branch ends in."""
        raise NotImplementedError

    def zero_init_last(self) -> None:
        """Begin with a branch of zeros, if the gate is open.

        timm gives every convolution of a new network its first weights, and then calls a method of this name, in some
        families ``init_weights``.
        """
        if self.begins_open:
            for parameter in self.last_projection().parameters():
                nn.init.zeros_(parameter)

    def init_weights(self, zero_init_last: bool = True) -> None:
        """As :meth:`zero_init_last`, for timm's families that call this one; with False the branch is left as it is."""
        if zero_init_last:
            self.zero_init_last()

    def add(self, x: Tensor, branch: Tensor) -> Tensor:
        """The map ``x + gate · branch``, ``(b, c, h, w)``, in the type of ``x``."""
        # Under autocast the normalisation gives float32: the map keeps the type that the backbone gave it.
        return x + (self.gate.view(-1, *(1,) * self.rank) * branch).to(x.dtype)


#: By how many axes a map has.
ATTENTION: dict[int, type[Attention]] = {1: Attention1d, 2: Attention2d, 3: Attention3d}


class AttentionBlock(GatedResidual):
    """What :class:`AttentionBlock1d`, :class:`AttentionBlock2d` and :class:`AttentionBlock3d` are."""

    def __init__(
        self,
        channels: int,
        num_heads: int = 8,
        *,
        gate_init: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **attention: Any,
    ) -> None:
        check_count("channels", channels)
        refuse_other_channels(type(self).__name__, channels, attention)
        super().__init__(channels, gate_init, device, dtype)
        self.attn: Attention = ATTENTION[self.rank](channels, num_heads, device=device, dtype=dtype, **attention)
        self.zero_init_last()

    def last_projection(self) -> nn.Module:
        return self.attn.proj

    def zero_init_last(self) -> None:
        super().zero_init_last()
        self.attn.init_matching()

    def forward(self, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        """Attend and add.

        Args:
            x: maps, ``(b, c, h, w)``.
            mask: as in :meth:`Attention2d.forward`.
            context: as in :meth:`Attention2d.forward`.

        Returns:
            ``(b, c, h, w)`` in the type of ``x``.

        Raises:
            ValueError: as :meth:`Attention2d.forward`.
        """
        return self.add(x, self.attn(self.norm(x), mask, context))


class AttentionBlock1d(AttentionBlock):
    """:class:`AttentionBlock2d` for maps with one axis, ``(b, c, w)``, such as sound.

    Arguments and errors are those of :class:`AttentionBlock2d`.

    >>> AttentionBlock1d(64)(torch.randn(2, 64, 50)).shape
    torch.Size([2, 64, 50])
    """

    rank = 1


class AttentionBlock2d(AttentionBlock):
    """Attention ready for a backbone: ``x + gate · attention(norm(x))``, normalised over channels, gated by channel.

    At first the output projection is zero and the block is the identity, bit for bit, so that a pretrained network with
    the block inserted computes what it computed before. The projection learns first; the attention before it follows.

    Args:
        channels: channels of the map; divisible by ``num_heads``.
        num_heads: number of heads.
        gate_init: None for a gate of one and an output projection of zeros; a number for that gate in every channel and
            the output projection of :class:`Attention2d`.
        device: where the parameters live.
        dtype: type of the parameters.
        **attention: further arguments of :class:`Attention2d`.

    Raises:
        ValueError: an argument is out of range; the message says which, what was expected and what came.

    Source: the gate by channel is LayerScale, Touvron et al., *Going Deeper with Image Transformers*, 2021,
    https://arxiv.org/abs/2103.17239; a projection of zeros ends a new branch in Zhang et al., *Adding Conditional
    Control to Text-to-Image Diffusion Models* (zero convolutions), 2023, https://arxiv.org/abs/2302.05543

    >>> x = torch.randn(2, 64, 7, 7)
    >>> torch.equal(AttentionBlock2d(64)(x), x)
    True
    """

    rank = 2


class AttentionBlock3d(AttentionBlock):
    """:class:`AttentionBlock2d` for maps with three axes, ``(b, c, t, h, w)``, such as video.

    Arguments and errors are those of :class:`AttentionBlock2d`.

    >>> AttentionBlock3d(64)(torch.randn(2, 64, 4, 6, 5)).shape
    torch.Size([2, 64, 4, 6, 5])
    """

    rank = 3


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu}


class TransformerBlock2d(Specified):
    """``x + attn(norm1(x))``, then ``x + fc2(act(fc1(norm2(x))))``; or with the norms after the sums.

    On the positions of a map in the place of the tokens of a sequence it is ``torch.nn.TransformerEncoderLayer``.

    Args:
        channels: channels of the map.
        num_heads: number of heads.
        mlp_ratio: hidden channels of the 1×1 convolutions, in units of ``channels``.
        norm_first: whether each branch is normalised (pre-norm), or each sum (post-norm, as in the original).
        activation: ``"gelu"`` (by the error function) or ``"relu"``.
        mlp_drop: probability of dropping a hidden element and one of the second convolution's output, in training.
        bias: whether norms, convolutions and projections have a bias.
        eps: added to the variance by the norms.
        device: where the parameters live.
        dtype: type of the parameters.
        **attention: further arguments of :class:`Attention2d`; ``attn_drop`` and ``proj_drop`` among them.

    Raises:
        ValueError: an argument is out of range; the message says which, what was expected and what came.

    Source: Vaswani et al., *Attention Is All You Need*, 2017, section 3, https://arxiv.org/abs/1706.03762; norms first:
    Xiong et al., *On Layer Normalization in the Transformer Architecture*, 2020, https://arxiv.org/abs/2002.04745

    >>> TransformerBlock2d(64, num_heads=4, activation="relu")(torch.randn(2, 64, 7, 5)).shape
    torch.Size([2, 64, 7, 5])
    """

    rank = 2

    def __init__(
        self,
        channels: int,
        num_heads: int = 8,
        *,
        mlp_ratio: float = 4.0,
        norm_first: bool = True,
        activation: str = "gelu",
        mlp_drop: float = 0.0,
        bias: bool = True,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **attention: Any,
    ) -> None:
        super().__init__()
        check_new(device, dtype, channels=channels)
        check_number("mlp_ratio", mlp_ratio, above=0)
        check_number("eps", eps, above=0)
        check_flags(norm_first=norm_first, bias=bias)
        if not isinstance(activation, str) or activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(map(repr, ACTIVATIONS))}; got {activation!r}")
        check_probability("mlp_drop", mlp_drop)
        refuse_other_channels("TransformerBlock2d", channels, attention)
        hidden = max(1, round(channels * mlp_ratio))
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        attention = {"qkv_bias": bias, "proj_bias": bias, **attention}
        self.norm_first = norm_first
        self.activation = activation
        self.norm1: LayerNorm2d = LayerNorm2d(channels, eps=eps, bias=bias, **factory)
        self.attn: Attention2d = Attention2d(channels, num_heads, **factory, **attention)
        self.norm2: LayerNorm2d = LayerNorm2d(channels, eps=eps, bias=bias, **factory)
        self.fc1: Pointwise2d = Pointwise2d(channels, hidden, 1, bias=bias, **factory)
        self.fc2: Pointwise2d = Pointwise2d(hidden, channels, 1, bias=bias, **factory)
        self.mlp_drop: nn.Dropout = nn.Dropout(mlp_drop)

    @on_maps
    def forward(self, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        """Attend and transform.

        Args:
            x: maps, ``(b, c, h, w)``, or one map, ``(c, h, w)``.
            mask: as in :meth:`Attention2d.forward`.
            context: as in :meth:`Attention2d.forward`.

        Returns:
            ``(b, c, h, w)`` in the type and memory format of ``x``.

        Raises:
            ValueError: as :meth:`Attention2d.forward`.
        """
        check_map("x", x, self.attn.channels, self.rank)
        if self.norm_first:
            y = x + self.attn(self.norm1(x), mask, context).to(x.dtype)
            y = y + self.mlp(self.norm2(y)).to(x.dtype)
        else:
            y = self.norm1(x + self.attn(x, mask, context)).to(x.dtype)
            y = self.norm2(y + self.mlp(y)).to(x.dtype)
        return in_format_of(x, y)

    def mlp(self, x: Tensor) -> Tensor:
        """What the two 1×1 convolutions make of a map, ``(b, c, h, w)``.

        Args:
            x: maps, ``(b, c, h, w)``.
        """
        return self.mlp_drop(self.fc2(self.mlp_drop(ACTIVATIONS[self.activation](self.fc1(x)))))

    def specification(self) -> dict[str, object]:
        return {"norm_first": self.norm_first, "activation": self.activation}
