"""The memory that training keeps of a block, found without computing anything: on tensors that have no values."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call

from vision_attn.blocks import use_impl

__all__ = ["IMPLS_COUNTED", "count_saved_bytes", "machine_memory"]

#: The implementations whose memory differs: einx and einsum keep what bmm keeps.
IMPLS_COUNTED = ("bmm", "sdpa")


def count_saved_bytes(block: nn.Module, shape: tuple[int, ...], impl: str, dtype: torch.dtype = torch.float32) -> int:
    """The bytes that autograd keeps of a block for its backward pass: the map that comes in and what is made of it.

    >>> from vision_attn.blocks import AttentionBlock2d
    >>> block = AttentionBlock2d(64, device="meta")
    >>> [count_saved_bytes(block, (1, 64, 56, 56), impl) >> 20 for impl in ("bmm", "sdpa")]
    [306, 5]
    """
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage  # held, so that its number is not given to another
        return tensor

    with FakeTensorMode(allow_non_fake_inputs=True), use_impl(block, impl):
        own = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, requires_grad=tensor.requires_grad)
            for name, tensor in (*block.named_parameters(), *block.named_buffers())
        }
        x = torch.empty(shape, dtype=dtype, requires_grad=True)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            functional_call(block, own, (x,))
        for tensor in own.values():
            kept.pop(tensor.untyped_storage()._cdata, None)
        return sum(storage.nbytes() for storage in kept.values())


def machine_memory(device: torch.device) -> int | None:
    """The bytes of the GPU that a model is on, or of the machine's memory; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if not {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= set(getattr(os, "sysconf_names", ())):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
