"""Batches of images that are padded to one size."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from operator import contains
from typing import Any, Self

import torch
from torch import Tensor, nn

from vision_attn.attention.blocks.config import ConfigurableImpl
from vision_attn.attention.scopes import DependsOnPass, scope
from vision_attn.checks import as_list
from vision_attn.networks.insertion.second_map import blocks_with_context
from vision_attn.networks.inspection.example import Example
from vision_attn.networks.inspection.network import running_calls
from vision_attn.networks.inspection.wrappers import unwrap_model


def padded(
    model: nn.Module, valid: Tensor | Sequence[Sequence[int]], *, image_size: Sequence[int] | None = None
) -> AbstractContextManager[None]:
    """Mask the padding of images as keys of every attention block, inside a ``with`` block.

    Images of different sizes are padded to form a batch. Attention to the padding makes the output of an image depend
    on the other images of its batch. Inside this context, the output of a block at the positions of an image is its
    output for the image alone, for full attention, rows, columns and windows, with every implementation.

    ``docs/implementations.md`` lists the options for which this does not hold. Convolutions still read padding near its
    border. A compiled model runs in eager mode inside the ``with`` block. With activation checkpointing, the backward
    pass may run inside or outside of it.

    Args:
        model: a network with blocks on feature maps, or a part of it; attention that was converted by
            :func:`vision_attn.swap_` is not supported.
        valid: the size of each image in pixels, ``(height, width)``, if images are padded at the bottom and on the
            right; or a bool mask ``(b, height, width)``, True for the pixels of the images.
        image_size: size of the padded images in pixels, ``(height, width)``; by default, the size of the images with
            which ``model`` is called. It is required if the model pads a list of images itself. A mask has this size.

    Raises:
        ValueError: the model has no block on feature maps, ``valid`` does not fit the images, or ``image_size`` is
            required.

    Source: the mask of padded pixels in Carion et al., *End-to-End Object Detection with Transformers*, 2020,
    https://arxiv.org/abs/2005.12872

    >>> from vision_attn.attention.blocks import AttentionBlock2d
    >>> block, x = AttentionBlock2d(8, 2, gate_init=1.0), torch.randn(2, 8, 4, 6)
    >>> with padded(block, [(4, 6), (4, 3)]):
    ...     y = block(x)
    >>> torch.allclose(y[1:, ..., :3], block(x[1:, ..., :3]), atol=1e-6)
    True
    """
    network = unwrap_model(model)
    blocks = [module for module in network.modules() if isinstance(module, ConfigurableImpl)]
    if not blocks or any(hasattr(module, "running_block") for module in network.modules()):
        what = "blocks on feature maps, and no swapped attention. Pass the part with these blocks, such as the backbone"
        raise ValueError(f"model must have {what}")
    if isinstance(valid, Tensor) and valid.dtype != torch.bool:
        got = f"{valid.dtype}. Convert a mask with valid.bool(), and sizes with valid.tolist()"
        raise ValueError(f"valid must be bool (True = pixel of an image), got {got}")
    sizes = valid if isinstance(valid, Tensor) else [tuple(as_list("valid", size, "a list of sizes")) for size in valid]
    pixels = ValidPixels(network, sizes, image_size)
    values: dict[nn.Module, ValidPixels] = dict.fromkeys(blocks, pixels)
    for block in blocks_with_context(network):  # features from outside are not part of the images
        values |= dict.fromkeys(block.modules(), replace(pixels, in_context=False))
    return scope(network, "valid", values)


@dataclass(eq=False)
class ValidPixels(DependsOnPass):
    """The valid pixels of a batch of padded images, for the size of the images in the running forward pass."""

    model: nn.Module
    valid: Tensor | Sequence[Sequence[int]]
    image_size: Sequence[int] | None
    #: True if the context of the block consists of the images.
    in_context: bool = True
    #: the size in the forward pass that activation checkpointing computes again
    size: Sequence[int] | None = None
    #: masks by size and device, for the blocks of a forward pass
    masks: dict[Any, Tensor] = field(default_factory=dict)

    def __call__(self, device: torch.device) -> Tensor:
        """Return the valid pixels, bool ``(b, *image_size)``."""
        if isinstance(self.valid, Tensor):
            return self.valid.to(device)
        if (size := self.image_size or self.size or size_of_call(self.model)) is None:
            raise ValueError("image_size must be given if the model does not receive a batch of padded images")
        key = tuple(size), device
        if key not in self.masks:
            self.masks[key] = size_mask(self.valid, size, device)
        return self.masks[key]

    def tensors(self) -> list[Tensor]:
        return [self.valid] if isinstance(self.valid, Tensor) else []

    def fixed(self) -> Self:
        return replace(self, size=self.size or size_of_call(self.model))


def size_of_call(model: nn.Module) -> Sequence[int] | None:
    """Return the size of the images with which the model is called; None outside its forward pass."""
    for module, args, kwargs in running_calls():
        if module is model:
            example = Example(args, kwargs)
            return None if example.count else example.size
    return None  # activation checkpointing computes a part of the model again


def size_mask(sizes: Sequence[Sequence[int]], image_size: Sequence[int], device: torch.device) -> Tensor:
    """Return the mask of images of these sizes that are padded at the end of each axis, bool ``(b, *image_size)``.

    >>> size_mask([(1, 3), (2, 1)], (2, 3), torch.device("cpu")).int().tolist()
    [[[1, 1, 1], [0, 0, 0]], [[1, 0, 0], [1, 0, 0]]]
    """
    whole = [range(length + 1) for length in image_size]
    if any(len(size) != len(whole) or not all(map(contains, whole, size)) for size in sizes):
        expected = f"one size for each image, at most image_size={tuple(image_size)}"
        raise ValueError(f"valid must be {expected}, got {list(map(tuple, sizes))}")
    axes = [torch.arange(length, device=device) for length in image_size]
    positions = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)
    ends = torch.tensor(sizes, device=device).view(len(sizes), *(1,) * len(axes), -1)  # (b, 1, …, axes)
    return (positions < ends).all(dim=-1)
