"""Attention blocks for a backbone: a gated residual branch, which is an identity at initialization."""

from collections.abc import Callable, Collection
from numbers import Integral
from typing import Any, ClassVar, Self
from weakref import WeakSet

import torch
from torch import Tensor, nn

from vision_attn.attention.blocks.attention import Attention1d, Attention2d, Attention3d
from vision_attn.attention.blocks.attention_nd import Attention
from vision_attn.attention.blocks.projection import ChannelNorm, accepts_unbatched
from vision_attn.attention.fixed_options import FixedOptions
from vision_attn.attention.graphs import in_graph
from vision_attn.attention.recomputation import graph_task_id
from vision_attn.attention.scopes import SCOPES, scoped_output
from vision_attn.checks import check_above

#: Layers whose normalized weight has been found to be finite.
FINITE: WeakSet[nn.Module] = WeakSet()


def check_same_channels(channels: int, out_channels: int | None = None, **attention: Any) -> None:
    """Raise if ``out_channels`` differs from the channels of the feature map to which a residual block adds."""
    check_above(0, Integral, channels=channels)
    if out_channels not in (None, channels):
        raise ValueError(f"out_channels must equal channels={channels} in a residual block, got {out_channels!r}")


def refuse_normalized_zeros(owner: nn.Module, layer: nn.Module) -> None:
    """Raise if spectral or weight normalization has divided a weight of zeros by its norm."""
    # A normalized weight is a property of the class of its layer, or an attribute that is not a parameter.
    computed = hasattr(type(layer), "weight") or "weight" in vars(layer)
    if not computed or torch.compiler.is_compiling() or layer in FINITE:
        return
    if isinstance(weight := getattr(layer, "weight", None), Tensor) and not weight.isfinite().all():
        name = next(name for name, module in owner.named_modules() if module is layer)
        cause = f"{name!r} of {type(owner).__name__} is NaN: spectral_norm or weight_norm divided a zero weight by zero"
        raise ValueError(f"{cause}. Create the block with gate_init=0, or insert another block with exact=False")
    FINITE.add(layer)


class GatedResidual(FixedOptions):
    """``x + gate · branch(norm(x))`` with one gate per channel, for feature maps with ``rank`` axes.

    The output is bitwise identical to ``x`` while the branch or the gate is zero. With a zero gate, the parameters of
    the branch receive no gradient until the gate has changed, so the block learns more slowly than the network. With a
    gate of one, the zero-initialized output projection learns as fast as any other layer.
    """

    rank = 2
    fixed: ClassVar[Collection[str]] = ("channels", "gate_init", "zero_init")
    #: True if the output is the sum above; False for a subclass of a block with another forward method.
    adds_to_input: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "forward" in vars(cls):
            cls.adds_to_input = GatedResidual in cls.__bases__

    def __init__(self, channels: int, gate_init: float | None, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.gate_init: float = 1.0 if gate_init is None else float(gate_init)  # torch.full(1) would be an integer
        self.zero_init: bool = gate_init is None
        self.norm: nn.Module = ChannelNorm(channels, device=device, dtype=dtype)
        self.gate: nn.Parameter = nn.Parameter(torch.full((channels,), self.gate_init, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Initialize the gate and the output projection again, as after ``to_empty``."""
        nn.init.constant_(self.gate, self.gate_init)
        self.zero_init_last()

    def last_projection(self) -> nn.Module:
        """Return the last layer of the branch."""
        raise NotImplementedError

    def zero_init_last(self) -> None:
        """Initialize the output projection with zeros if ``gate_init`` is None.

        timm reinitializes every convolution of a new network and then calls this method, or ``init_weights`` in some
        families.
        """
        if self.zero_init:
            last: Any = self.last_projection()
            last.zero_init = True  # other code may call its reset_parameters() after that of the block
            for parameter in last.parameters():
                nn.init.zeros_(parameter)

    def init_weights(self, zero_init_last: bool = True) -> None:
        """Call :meth:`zero_init_last`, for the timm families that use this method; do nothing if False is passed."""
        if zero_init_last:
            self.zero_init_last()

    def apply(self, fn: Callable[[nn.Module], object]) -> Self:
        """Apply a function to all modules, as an initialization; an output projection of zeros keeps its zeros."""
        zeros = self.zero_init and not any(p.is_meta or p.any() for p in self.last_projection().parameters())
        super().apply(fn)  # type: ignore[arg-type]
        if zeros:
            GatedResidual.zero_init_last(self)  # not the other initializations of a subclass
        return self

    def add(self, x: Tensor, branch: Tensor) -> Tensor:
        """Return ``x + gate · branch``, ``(b, c, h, w)``, in the dtype of ``x``."""
        if self.zero_init and torch.is_grad_enabled():
            refuse_normalized_zeros(self, self.last_projection())
        gate, graph = self.gate.view(-1, *(1,) * self.rank), in_graph(x)
        if x.dtype == branch.dtype == gate.dtype and not graph:
            y = torch.addcmul(x, gate, branch)  # not every runtime of exported graphs supports addcmul
        else:  # under autocast, normalization returns float32; the feature map keeps the dtype of the backbone
            y = x + (gate * branch).to(x.dtype)
        in_scopes = graph or SCOPES.get() or graph_task_id() != -1
        return scoped_output(self, x, y) if in_scopes and self.adds_to_input else y


def is_residual(module: nn.Module) -> bool:
    """Return True for a block that adds a gated branch to its input."""
    return isinstance(module, GatedResidual) and module.adds_to_input


#: The attention layer for feature maps with one, two and three axes.
ATTENTION: dict[int, type[Attention]] = {1: Attention1d, 2: Attention2d, 3: Attention3d}


class AttentionBlock(GatedResidual):
    """Attention in a gated residual branch; :class:`AttentionBlock2d` documents the arguments."""

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
        check_same_channels(channels, **attention)
        super().__init__(channels, gate_init, device, dtype)
        self.channels = channels
        self.attn: Attention = ATTENTION[self.rank](channels, num_heads, device=device, dtype=dtype, **attention)
        self.zero_init_last()

    def last_projection(self) -> nn.Module:
        return self.attn.proj

    def zero_init_last(self) -> None:
        super().zero_init_last()
        self.attn.init_match()

    @accepts_unbatched
    def forward(self, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        """Normalize, attend, and add to the input.

        Args:
            x: feature maps, ``(b, c, h, w)``, or a single feature map, ``(c, h, w)``.
            mask: as in :meth:`Attention2d.forward`.
            context: as in :meth:`Attention2d.forward`.

        Returns:
            ``(b, c, h, w)`` in the dtype of ``x``.

        Raises:
            ValueError: as in :meth:`Attention2d.forward`.
        """
        return self.add(x, self.attn(self.norm(x), mask, context))


class AttentionBlock1d(AttentionBlock):
    """:class:`AttentionBlock2d` for feature maps with one axis, ``(b, c, w)``, such as audio.

    Arguments and errors are those of :class:`AttentionBlock2d`.

    >>> AttentionBlock1d(64)(torch.randn(2, 64, 50)).shape
    torch.Size([2, 64, 50])
    """

    rank = 1


class AttentionBlock2d(AttentionBlock):
    """Residual attention block: ``x + gate · attention(norm(x))``, with a norm over channels and a gate per channel.

    The output projection is zero at initialization, so the block returns its input bitwise unchanged: inserting it does
    not change the output of a pretrained network. At first, only the projection receives a gradient; the layers before
    it receive gradients after its first update.

    Args:
        channels: input and output channels; divisible by ``num_heads``, unless ``key_dim`` and ``value_dim`` are given.
        num_heads: number of heads.
        gate_init: initial gate of every channel. If None, the gate is one and the output projection is initialized with
            zeros; otherwise the output projection is initialized as in :class:`Attention2d`.
        device: device of the parameters.
        dtype: dtype of the parameters.
        **attention: further arguments of :class:`Attention2d`.

    Raises:
        ValueError: an argument is out of range; the message names it and states the expected and the given value.

    Source: the gate is LayerScale, Touvron et al., *Going Deeper with Image Transformers*, 2021,
    https://arxiv.org/abs/2103.17239; zero-initialized projections of new branches: Zhang et al., *Adding Conditional
    Control to Text-to-Image Diffusion Models* (zero convolutions), 2023, https://arxiv.org/abs/2302.05543

    >>> x = torch.randn(2, 64, 7, 7)
    >>> torch.equal(AttentionBlock2d(64)(x), x)
    True
    """

    rank = 2


class AttentionBlock3d(AttentionBlock):
    """:class:`AttentionBlock2d` for feature maps with three axes, ``(b, c, t, h, w)``, such as video.

    Arguments and errors are those of :class:`AttentionBlock2d`.

    >>> AttentionBlock3d(64)(torch.randn(2, 64, 4, 6, 5)).shape
    torch.Size([2, 64, 4, 6, 5])
    """

    rank = 3
