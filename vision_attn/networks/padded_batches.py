"""Batches of images that are padded to one size."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from vision_attn.attention.blocks.config import ConfigurableImpl
from vision_attn.attention.scopes import scope
from vision_attn.networks.example import Example
from vision_attn.networks.network import running_calls, unwrap_model


def padded(
    model: nn.Module, valid: Tensor | Sequence[Sequence[int]], *, image_size: Sequence[int] | None = None
) -> AbstractContextManager[None]:
    """Mask the padding of images as keys of every attention block, inside a ``with`` block.

    Images of different sizes are padded to form a batch. Attention to the padding makes the output of an image depend
    on the other images of its batch. Inside this context, the output of a block at the positions of an image is its
    output for the image alone, for full attention, rows, columns and windows, with every implementation.

    ``docs/patterns.md`` lists the options for which this does not hold. Convolutions still read padding near its
    border. A compiled model runs in eager mode inside the ``with`` block. With activation checkpointing, the backward
    pass must run inside it as well, on a CPU.

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
        RuntimeError: the backward pass recomputes a block outside the ``with`` block.

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
        raise ValueError(
            f"valid must be bool (True = pixel of an image), got {valid.dtype}. Convert it with valid.bool()"
        )
    latest: list[Tensor] = []  # the mask for the size of the last forward pass

    def read_mask(device: torch.device) -> Tensor:
        """Return the valid pixels, bool ``(b, *image_size)``."""
        if isinstance(valid, Tensor):
            return valid.to(device)
        size = image_size or size_of_call(network)
        if size is not None and not (latest and latest[0].shape[1:] == tuple(size)):
            latest[:] = [size_mask(valid, size, device)]
        if not latest:
            raise ValueError("image_size must be given if the model does not receive a batch of padded images")
        return latest[0].to(device)

    return scope(network, "valid", dict.fromkeys(blocks, read_mask))


def padding_warning(model: nn.Module) -> str | None:
    """Return a warning for inserted blocks if a model pads its images, as detectors of torchvision and DETR do."""
    pads = any(type(module).__name__ == "GeneralizedRCNNTransform" for module in model.modules())
    if not pads and "pixel_mask" not in inspect.signature(model.forward).parameters:
        return None
    return (
        "the model pads images of different sizes, and blocks attend to the padding. Mask it with va.padded(model, …)"
    )


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
    lengths = torch.tensor(sizes, device=device)  # (b, axes)
    if (lengths > torch.tensor(image_size, device=device)).any():
        raise ValueError(
            f"valid must be sizes of at most image_size={tuple(image_size)}, got {list(map(tuple, sizes))}"
        )
    mask = torch.ones(len(sizes), dtype=torch.bool, device=device)
    for length, ends in zip(image_size, lengths.T, strict=True):
        inside = torch.arange(length, device=device) < ends[:, None]
        mask = mask[..., None] & inside.view(len(ends), *(1,) * (mask.dim() - 1), length)
    return mask
