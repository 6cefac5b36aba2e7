"""Costs of a block at its site, and proposals of stages."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call

from vision_attn.checks import product
from vision_attn.networks.block_factories import describe_error
from vision_attn.networks.inspection.layout import FeatureMap
from vision_attn.networks.inspection.macs import Cost, run_on_meta

#: Side lengths of feature maps for which full attention is proposed. Attention has little effect on smaller feature
#: maps, and costs more than the network on larger ones.
MIN_SIDE, MAX_SIDE = 7, 32

#: Side lengths of windows, the most common first.
WINDOWS = (7, 8, 6, 9, 10, 5)


def measure_cost(block: nn.Module, x: FeatureMap, y: FeatureMap, context: Sequence[int] | None) -> Cost:
    """Return the cost of a block in all calls of its module; raise unless it returns feature maps like ``y``."""
    macs = 0
    for (_, *shape), (_, *expected) in zip(x.shapes, y.shapes, strict=True):
        try:
            output, count = run_on_meta(block, shape, context)
        except Exception as error:
            raise feature_map_error(block, x.target, shape, error) from error
        if [*output.shape[1:]] != expected:
            got = f"{type(block).__name__} returns {tuple(output.shape)} for {(1, *shape)}"
            raise ValueError(f"block must return a feature map of shape {(1, *expected)} at {x.target!r}; {got}")
        macs += count
    return Cost(sum(p.numel() for p in block.parameters()), macs)


def feature_map_error(block: nn.Module, site: str, shape: Sequence[int], error: Exception) -> ValueError:
    """Return the error for a block that does not run on the feature map at a site."""
    what = f"block must accept the feature map of shape {(1, *shape)} at {site!r}; {type(block).__name__} does not"
    return ValueError(f"{what} ({describe_error(error)})")


def propose(stages: Iterable[tuple[int, tuple[int, ...]]]) -> list[str]:
    """Propose late stages of a suitable size, and windows at a larger stage.

    Args:
        stages: index, and size of the feature map, of each stage that can be proposed.

    Returns:
        Calls of :func:`vision_attn.insert_`, each with a reason.
    """
    sizes = dict(stages)
    sides = {index: math.sqrt(product(size)) for index, size in sizes.items()}
    late = [index for index, side in sides.items() if MIN_SIDE <= side <= MAX_SIDE][-2:]
    large = [index for index, side in sides.items() if side > MAX_SIDE and len(sizes[index]) == 2][-1:]
    choices = []
    if late:
        listed = " and ".join("×".join(map(str, sizes[index])) for index in late)
        choices.append(f"va.insert_(model, stages={late}): late, with feature maps of {listed}")
    for index in large:
        # The window size divides the feature map; if none does, the most common size is used, with padding.
        window = next((side for side in WINDOWS if not any(length % side for length in sizes[index])), WINDOWS[0])
        why = f"finer detail, in windows because full attention on {product(sizes[index]):,} positions is too expensive"
        choices.append(f"va.insert_(model, stages={[index]}, pattern=va.Window({window})): {why}")
    return choices


def count_saved_bytes(
    block: nn.Module, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, context: Sequence[int] | None = None
) -> int:
    """Count the bytes that autograd saves for the backward pass of a block: its input and intermediate results.

    >>> from vision_attn.attention.blocks import AttentionBlock2d
    >>> blocks = (AttentionBlock2d(64, impl=impl, device="meta") for impl in ("bmm", "auto"))
    >>> [count_saved_bytes(block, (1, 64, 56, 56)) >> 20 for block in blocks]
    [306, 5]
    """
    saved: list[Tensor] = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        tensors = (*block.named_parameters(), *block.named_buffers())
        own = {name: torch.empty_like(x, device="cpu", requires_grad=x.requires_grad) for name, x in tensors}
        x = torch.empty(shape, dtype=dtype, requires_grad=True)
        more = {} if context is None else {"context": torch.empty(shape[0], *context, dtype=dtype, requires_grad=True)}
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor):
            functional_call(block, own, (x,), more)
        storages = {*map(Tensor.untyped_storage, saved)} - {*map(Tensor.untyped_storage, own.values())}
        return sum(storage.nbytes() for storage in storages)
