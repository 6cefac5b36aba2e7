"""What a block costs, found without computing anything: it runs on tensors that have shapes and no values."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call

from vision_attn.blocks import use_impl

__all__ = ["IMPLS_COUNTED", "count_multiply_adds", "count_saved_bytes", "machine_memory"]

#: The implementations whose memory differs. FlexAttention has gradients on CUDA alone, and keeps what sdpa keeps.
IMPLS_COUNTED = ("einx", "bmm", "einsum", "sdpa")


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
        own = fake_tensors(block)
        x = torch.empty(shape, dtype=dtype, requires_grad=True)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            functional_call(block, own, (x,))
        for tensor in own.values():
            kept.pop(tensor.untyped_storage()._cdata, None)
        return sum(storage.nbytes() for storage in kept.values())


def count_multiply_adds(block: nn.Module, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
    """The multiply-adds of one forward of one image.

    >>> from vision_attn.blocks import Attention2d
    >>> count_multiply_adds(Attention2d(64, 4, device="meta"), (1, 64, 14, 14))  # 4·64²·196 + 2·64·196²
    8128512
    """
    from torch.utils.flop_counter import FlopCounterMode  # which loads Triton

    # Counted on the form whose every product is a matrix product that the counter knows.
    with FakeTensorMode(allow_non_fake_inputs=True), use_impl(block, "bmm"), torch.no_grad():
        own = fake_tensors(block)
        with FlopCounterMode(display=False) as counter:
            functional_call(block, own, (torch.empty(1, *shape[1:], dtype=dtype),))
    return counter.get_total_flops() // 2


def fake_tensors(block: nn.Module) -> dict[str, Tensor]:
    """Its parameters and buffers as fake tensors of the CPU."""
    return {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, requires_grad=tensor.requires_grad)
        for name, tensor in (*block.named_parameters(), *block.named_buffers())
    }


def machine_memory(device: torch.device) -> int | None:
    """The bytes of the GPU that a model is on, or of the machine's memory; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if not {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= set(getattr(os, "sysconf_names", ())):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
