"""A second feature map from outside a network, from which inserted blocks compute keys and values."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from vision_attn.attention.scopes import scope
from vision_attn.networks.insertion.attributes import get_record
from vision_attn.networks.insertion.build import like_parameters
from vision_attn.networks.insertion.registry import inserted_blocks
from vision_attn.networks.inspection.wrappers import unwrap_model


def context(model: nn.Module, features: Tensor) -> AbstractContextManager[None]:
    """Give the blocks of a model a second feature map, inside a ``with`` block, in this thread or task only.

    Blocks that were inserted with the option ``context_channels`` compute keys and values from it: features of a second
    image, of a reference frame, or of words as ``(b, c, n, 1)``. Nothing is stored on the model. A compiled model runs
    in eager mode inside the ``with`` block. With activation checkpointing, the backward pass may run inside or outside
    of it. To export or trace a model, enter the ``with`` block in the ``forward`` method of a module that receives the
    features. Otherwise, ``torch.export`` and torch.fx raise an error, and other traces contain them as a constant.

    Args:
        model: a network with blocks that require a context from outside.
        features: feature maps with ``context_channels`` channels and any size, ``(b, c, h, w)``.

    Raises:
        ValueError: no block requires a context from outside.
        TypeError: the features are no tensor.

    >>> import torch
    >>> from vision_attn.networks.insertion import insert_
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    >>> report = insert_(model, names="0", context_channels=4, num_heads=2, example_input=(1, 3, 16, 16))
    >>> with context(model, torch.randn(1, 4, 5, 5)):
    ...     model(torch.randn(1, 3, 16, 16)).shape
    torch.Size([1, 8, 14, 14])
    """
    if not isinstance(features, Tensor):
        raise TypeError(f"features must be a tensor (b, c, h, w), got {type(features).__name__}")
    if not (blocks := blocks_with_context(model)):
        remedy = "Insert one with va.insert_(…, context_channels=…)"
        raise ValueError(f"model has no block that requires a context. {remedy}")
    return scope(unwrap_model(model), "context", dict.fromkeys(blocks, features))


def blocks_with_context(model: nn.Module) -> list[nn.Module]:
    """Return the inserted blocks whose second feature map comes from outside the model."""
    return [*filter(needs_context, inserted_blocks(model).values())]


def needs_context(block: nn.Module) -> bool:
    """Return True if the second feature map of an inserted block comes from outside the model."""
    record = get_record(block)
    return record.context_shape is not None and record.second is None


def random_contexts(network: nn.Module, blocks: Iterable[nn.Module], batch: int) -> AbstractContextManager[None]:
    """Return a ``with`` block in which blocks that need a context have random features, the same in each call."""
    generator, maps = torch.Generator().manual_seed(0), {}
    for block in filter(needs_context, blocks):
        features = torch.rand(batch, *(get_record(block).context_shape or ()), generator=generator)
        maps[block] = features.to(like_parameters(block, network))
    return scope(network, "context", maps) if maps else nullcontext()
