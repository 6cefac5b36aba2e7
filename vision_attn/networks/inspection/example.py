"""Inputs of a dry run: the arguments of a forward pass, and random images of a network's default size."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves as tree_leaves, tree_map_only as tree_map_only

from vision_attn.networks.inspection.network import CONVS

#: Default sizes of audio (one second at 16 kHz), images, and video (16 frames), by number of axes.
DEFAULT_SIZES = {1: (16_000,), 2: (224, 224), 3: (16, 112, 112)}


@dataclass(frozen=True)
class Example:
    """Arguments of a forward pass; the tensors with the most axes are the images."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    #: number of axes of an image: one for audio, two for images, three for videos and volumes
    axes: int = 2

    @cached_property
    def image(self) -> Tensor:
        """The first image tensor: images, volumes, audio, or the input of a generator."""
        if not (tensors := [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]):
            raise ValueError(f"model must be called with images as tensors, got {self}")
        image = max(tensors, key=lambda x: (x.dim(), x.is_floating_point()))  # images may be integers
        if not image.numel():
            raise ValueError(f"model must be called with at least one image, got images {self}")
        return image

    @cached_property
    def count(self) -> int:
        """Number of images in a list of ``(c, h, w)`` tensors, as in detection models; 0 for a batch."""
        if self.image.dim() > 1 + self.axes:  # This is a list of batches, such as the two pathways of SlowFast.
            return 0
        lists = [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, (list, tuple))]
        return next((len(value) for value in lists if any(item is self.image for item in value)), 0)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the images: batch, channels and size."""
        return (self.count, *self.image.shape) if self.count else tuple(self.image.shape)

    @property
    def size(self) -> tuple[int, ...]:
        """Size of the images along one to three axes."""
        return self.shape[2:] or self.shape[1:]  # A batch (b, w) is audio without a channel axis.

    def __str__(self) -> str:
        keywords = (f"{name}={format_value(value)}" for name, value in self.kwargs.items())
        inputs = [*map(format_value, self.args), *keywords]
        return f"of shape {inputs[0]}" if len(inputs) == 1 and not self.kwargs else f"({', '.join(inputs)})"


def float_tensors(value: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def format_value(value: object) -> str:
    """Format an argument for a message, with tensors replaced by their shapes."""
    return repr(tree_map_only(Tensor, lambda tensor: tuple(tensor.shape), value))


def make_example(model: nn.Module, example_input: Any = None) -> Example:
    """Return the arguments of a dry run: the given input, or random images of the given or default shape.

    >>> make_example(nn.Conv2d(1, 8, 3)).shape
    (1, 1, 224, 224)
    >>> make_example(nn.Conv3d(1, 8, 3), [torch.rand(1, 8, 6, 6)] * 2).shape  # a list of volumes
    (2, 1, 8, 6, 6)
    """
    convolutions = [module for module in model.modules() if isinstance(module, CONVS)]
    images_2d = [module for module in convolutions if len(module.kernel_size) == 2]  # A Conv1d may process vectors.
    first = next(iter(images_2d or convolutions), None)
    axes = 2 if first is None else len(first.kernel_size)
    if example_input is None:
        example_input = default_shape(model, first, axes)
    if isinstance(example_input, Mapping) and float_tensors(dict(example_input)):
        return Example((), dict(example_input), axes)
    if isinstance(example_input, Tensor) or (isinstance(example_input, (tuple, list)) and float_tensors(example_input)):
        return Example(example_input if isinstance(example_input, tuple) else (example_input,), axes=axes)
    shape = tuple(example_input) if isinstance(example_input, Sequence) else ()
    counts = [isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in shape]
    if not all(counts) or len(shape) not in range(2, 6) or len(shape) == 1 + axes > 2:
        what = "images, their shape, or a tuple or dictionary of arguments that contains images"
        raise ValueError(f"example_input must be {what}, got {format_value(example_input)}")
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    # The images are random, because a network without biases maps zeros to zeros.
    images = torch.rand(shape, generator=torch.Generator().manual_seed(0), device="cpu")
    return Example((images.to(device=like.device, dtype=like.dtype),))


def default_shape(model: nn.Module, first: nn.Module | None, axes: int) -> tuple[int, ...]:
    """Return the shape of one image, read from the first convolution, the patch embedding or timm's configuration."""
    config = getattr(model, "pretrained_cfg", None) or {}
    channels, *size = config.get("input_size", (3, *DEFAULT_SIZES[axes]))
    # timm's configuration describes the published weights. The model may have other channels or another image size.
    img_size = getattr(getattr(model, "patch_embed", None), "img_size", None) or getattr(model, "image_size", None)
    if axes == 2 and img_size is not None:
        size = [img_size] * 2 if isinstance(img_size, int) else list(img_size)
    return (1, getattr(first, "in_channels", 0) or channels, *size)
