"""Blocks for timm's hooks: ``attn_layer``, ``self_attn_layer`` and ``se_layer`` of its networks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from vision_attn.attention.blocks import AttentionBlock2d
from vision_attn.networks.insertion.insert import check_maker

#: What timm tells a layer of the bottleneck of channels in squeeze-and-excitation: how narrow it is, its activation.
#: Attention has no such bottleneck: these are for nobody.
OF_A_BOTTLENECK = ("act_layer", "rd_channels", "rd_divisor", "rd_ratio")


@dataclass(frozen=True)
class TimmLayer:
    """What :func:`timm_layer` returns: called as timm calls its layers, it makes the block."""

    #: class or function that makes the block
    block: Callable[..., nn.Module]
    #: further arguments of it
    options: Mapping[str, Any] = field(hash=False)

    def __call__(
        self,
        channels: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **words: Any,
    ) -> nn.Module:
        """Make the block."""
        if channels == 8 and words == {"rd_ratio": 1.0}:
            # So timm's EfficientNets ask whether a layer takes rd_ratio. The answer spares a block of 8 channels, which
            # not every number of heads divides.
            raise TypeError("rd_ratio is for layers with a bottleneck of channels: attention has none")
        words = {name: value for name, value in words.items() if name not in OF_A_BOTTLENECK}
        known = inspect.signature(self.block).parameters
        if "feat_size" not in known:
            words.pop("feat_size", None)  # a block without tables is for maps of any size
        if "stride" not in known:
            stride = words.pop("stride", 1)
            if stride != 1:
                raise ValueError(
                    f"stride must be 1 for {name_of(self.block)}, which gives maps of the size it takes; got "
                    f"{stride}: where timm's layer strides use timm_layer(StridedAttention2d, …)"
                )
        return self.block(channels, device=device, dtype=dtype, **self.options, **words)

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"timm_layer({name_of(self.block)}{options})"


def timm_layer(block: Callable[..., nn.Module] | None = None, **options: Any) -> TimmLayer:
    """A block as a layer that timm's networks are made with, where they take a class of their own attention.

    ``timm.create_model("resnet50", block_args=dict(attn_layer=timm_layer(num_heads=4)))`` has the block in every
    residual block, before the addition. The default block begins as the identity: the network then computes what it
    does without such a layer. ``self_attn_layer`` of timm's BoTNets stands in for a convolution, stride and all, and
    takes ``timm_layer(StridedAttention2d)``.

    Args:
        block: class or function called as ``block(channels, device=…, dtype=…, **options)``, with ``stride`` and
            ``feat_size`` too where it has such arguments and timm gives them; :class:`vision_attn.AttentionBlock2d`
            when None.
        **options: handed to ``block``.

    Returns:
        A callable that prints as code, and can be copied and pickled where ``block`` can.

    Raises:
        ValueError: ``block`` is no class or function.

    >>> layer = timm_layer(num_heads=4)
    >>> layer
    timm_layer(AttentionBlock2d, num_heads=4)
    >>> layer(64)(torch.randn(2, 64, 7, 7)).shape
    torch.Size([2, 64, 7, 7])
    """
    check_maker(block)
    return TimmLayer(AttentionBlock2d if block is None else block, options)


def name_of(block: Callable[..., nn.Module]) -> str:
    return getattr(block, "__qualname__", repr(block))
