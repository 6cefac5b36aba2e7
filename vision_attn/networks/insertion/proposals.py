"""Costs of a dry run of an insertion: the memory of a block, and proposals of stages."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call

from vision_attn.networks.insertion.record import InsertedBlock

#: Side lengths of feature maps for which full attention is proposed. Attention has little effect on smaller feature
#: maps, and costs more than the network on larger ones.
MIN_SIDE, MAX_SIDE = 7, 32

#: Side lengths of windows, the most common first.
WINDOWS = (7, 8, 6, 9, 10, 5)


def propose(stages: Iterable[tuple[int, InsertedBlock]]) -> list[str]:
    """Propose late stages of a suitable size, and windows at a larger stage.

    Args:
        stages: index and record of each stage that can be proposed.

    Returns:
        Calls of :func:`vision_attn.insert_`, each with a reason.
    """
    sides = {index: (math.sqrt(x.tokens), x) for index, x in stages}
    late = [index for index, (side, _) in sides.items() if MIN_SIDE <= side <= MAX_SIDE][-2:]
    large = [(index, x) for index, (side, x) in sides.items() if side > MAX_SIDE and len(x.map_size) == 2][-1:]
    found = []
    if late:
        sizes = " and ".join(sides[index][1].size for index in late)
        found.append(f"va.insert_(model, stages={late}): late, with feature maps of {sizes}")
    for index, x in large:
        # The window size divides the feature map; if none does, the most common size is used, with padding.
        window = next((side for side in WINDOWS if not any(length % side for length in x.map_size)), WINDOWS[0])
        why = f"finer detail, in windows because full attention on {x.tokens:,} positions is too expensive"
        found.append(f"va.insert_(model, stages={[index]}, pattern=va.Window({window})): {why}")
    return found


def count_saved_bytes(block: nn.Module, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
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
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor):
            functional_call(block, own, (x,))
        sizes = {storage._cdata: storage.nbytes() for storage in map(Tensor.untyped_storage, saved)}
        held = {tensor.untyped_storage()._cdata for tensor in own.values()}
        return sum(size for storage, size in sizes.items() if storage not in held)
