"""Count kernel launches and bytes moved on a GPU, and predict torch's attention kernel, without a GPU.

A pass on meta tensors is recorded operation by operation. ``scaled_dot_product_attention`` is replaced by a fake that
counts one fused kernel, because torch always decomposes it into matrix products on meta tensors.
"""

from collections import namedtuple
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HALF = (torch.float16, torch.bfloat16)
#: Operations that read as many elements as they write, independently of the size of their input.
GATHERS = ("index_select", "index")
#: Largest y and z dimensions of a CUDA grid.
MAX_GRID = 65_535


class Operation(NamedTuple):
    """An operation that launches kernels."""

    name: str
    launches: int
    bytes: int
    largest: int  # elements of the largest output


#: Arguments of one call of ``scaled_dot_product_attention``.
AttentionCall = namedtuple("AttentionCall", "query key value mask dropout_p is_causal enable_gqa")


@dataclass
class Record:
    """Operations and attention calls of a pass."""

    operations: list[Operation] = field(default_factory=list)
    calls: list[AttentionCall] = field(default_factory=list)

    launches = property(lambda self: sum(operation.launches for operation in self.operations))
    megabytes = property(lambda self: sum(operation.bytes for operation in self.operations) / 1e6)


def measure(function, backward: bool = False) -> Record:
    """Record a forward pass on meta tensors after a first call, which fills the caches, or only its backward pass."""
    with fake_attention(Record()):
        function()
    record = Record()
    with fake_attention(record), Operations(partial(add_operation, record)):
        output = function()
        if backward:
            record.operations.clear()
            output.backward(torch.empty_like(output))
    return record


class Operations(TorchDispatchMode):
    """Call a function with each operation, its input tensors and its output tensors."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs, outputs = ([x for x in tree_leaves(tree) if isinstance(x, Tensor)] for tree in ((args, kwargs), result))
        self.function(func, inputs, outputs)
        return result


def add_operation(record: Record, func, inputs: list[Tensor], outputs: list[Tensor]) -> None:
    """Add an operation to a record, unless it launches no kernel: views and uninitialized tensors."""
    name = func._schema.name.split("::")[-1]
    storages = {storage_id(x) for x in inputs}
    is_view = not func._schema.is_mutable and all(storage_id(x) in storages for x in outputs)
    if is_view or name.startswith(("empty", "new_empty")):
        return
    moved = sum(map(count_bytes, inputs + outputs))
    if name in GATHERS:
        moved = 2 * sum(map(count_bytes, outputs)) + sum(map(count_bytes, inputs[1:]))
    launches = 2 if name == "constant_pad_nd" else 1
    record.operations.append(Operation(name, launches, moved, max(x.numel() for x in outputs)))


def storage_id(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def count_bytes(x: Tensor | None) -> int:
    """Return the bytes of a tensor in memory. An expanded axis counts once."""
    if x is None:
        return 0
    size = x.element_size()
    for length, stride in zip(x.shape, x.stride(), strict=True):
        size *= length if stride else 1
    return size


# --- scaled_dot_product_attention as one kernel -----------------------------------------------------------------------


@contextmanager
def fake_attention(record: Record):
    """Replace ``scaled_dot_product_attention`` by a function that records its calls and counts one fused kernel."""

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        call = AttentionCall(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        record.calls.append(call)
        kernel, width = selected_kernel(call), value.shape[3]
        if kernel == "flash" and width % 8:  # pad_last_dim in aten/src/ATen/native/transformers/attention.cpp
            query, key, value = (F.pad(x, (0, -width % 8)) for x in (query, key, value))
        if attn_mask is not None:
            attn_mask = prepare_mask(attn_mask, query.dtype).expand(*query.shape[:3], key.shape[2])
        return FakeKernel.apply(record, kernel, query, key, value, attn_mask)[..., :width]

    with mock.patch.object(F, "scaled_dot_product_attention", attention):
        yield record


def prepare_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a bool mask and align strides (``convert_boolean_attn_mask`` and ``preprocess_mask`` in attention.cpp).

    torch 2.14 does not launch the inversion of a bool mask, which is counted here.
    """
    if mask.dtype == torch.bool:
        mask = torch.where(mask.logical_not(), -torch.inf, torch.zeros((), dtype=dtype, device=mask.device))
    if mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]):
        keys = mask.shape[-1]
        mask = F.pad(mask, (0, 8 - keys % 8))[..., :keys]
    return mask


class FakeKernel(torch.autograd.Function):
    """One fused kernel; its backward pass is not recorded."""

    @staticmethod
    def forward(ctx, record, kernel, query, key, value, mask):
        ctx.save_for_backward(query, key, value, mask)
        batch, heads, queries = query.shape[:3]
        output = query.new_empty(batch, queries, heads, value.shape[3]).transpose(1, 2)
        moved = sum(map(count_bytes, (query, key, value, mask, output)))
        record.operations.append(Operation(f"attention_{kernel}", 1, moved, query.numel()))
        return output

    @staticmethod
    def backward(ctx, gradient):
        return None, None, *(None if x is None else torch.empty_like(x) for x in ctx.saved_tensors)


# --- Which kernel torch selects on a GPU of compute capability 8.0 or later -------------------------------------------
#
# select_sdp_backend in pytorch/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp tries flash attention, then
# memory-efficient attention, and falls back to the math kernel. The checks named below are in that file and in
# ../sdp_utils_cpp.h; they were read at commit 001f694aef6f and compared with the headers of torch 2.14.1.
#
# cuDNN is not included: vision_attn excludes it if there is a mask, and only capabilities 9.0 and 10.x prefer it. In
# training, flash attention does not support widths from 193 to 224 (256 with dropout) on capabilities 8.6 to 8.9, 12.x.


def selected_kernel(call: AttentionCall) -> str:
    """Return the kernel that torch selects: ``"flash"``, ``"efficient"`` or ``"math"``."""
    return next((kernel for kernel, reasons in refusals(call).items() if not reasons), "math")


def refusals(call: AttentionCall) -> dict[str, list[str]]:
    """Return the reasons against each fused kernel, in the order in which torch tries them."""
    query, key, value, mask = call[:4]
    if {query.dim(), key.dim(), value.dim()} != {4}:  # check_tensor_shapes
        return {kernel: ["query, key and value do not have four axes"] for kernel in ("flash", "efficient")}
    widths, multiple = (query.shape[3], key.shape[3], value.shape[3]), alignment(query)
    same_dtype = len({query.dtype, key.dtype, value.dtype}) == 1
    heads = [x.shape[1] for x in (query, key, value)]
    strided = any(x.stride(-1) != 1 for x in (query, key, value))
    grouped = call.enable_gqa and heads[1] == heads[2] and heads[0] % heads[1] == 0  # check_grouped_query_attention
    multiples = widths[0] == widths[1] and not widths[0] % multiple and not widths[2] % multiple and 0 not in widths
    # check_batch_size_and_num_heads_dense, check_nonzero_sequence_lengths_dense, check_last_dim_stride_equals_1_dense
    shared = {
        "batch sizes differ": len({x.shape[0] for x in (query, key, value)}) > 1,
        "there are no tokens": 0 in (query.shape[2], key.shape[2]),
        "the mask has a stride other than 1 along keys": mask is not None and mask.stride(-1) != 1,
    }
    # check_dtypes_low_precision, check_for_attn_mask, check_head_dim_size_flash, check_flash_causal_non_square_seqlens,
    # check_last_dim_stride_equals_1_dense<ignore_singleton_dim=true>
    flash = shared | {
        f"numbers of heads {heads} differ": len(set(heads)) > 1 and not grouped,
        f"{query.dtype} is not a half-precision type": not same_dtype or query.dtype not in HALF,
        "there is a mask": mask is not None,
        f"widths {widths} are not equal and at most 256": len(set(widths)) > 1 or widths[0] > 256,
        "is_causal with other numbers of queries and keys": call.is_causal and query.shape[2] != key.shape[2],
        "query, key or value has a stride other than 1 along its width": strided and widths[0] != 1,
    }
    # Stricter than torch 2.14, which supports grouped heads here and broadcasts a single head; then
    # can_use_mem_efficient_attention, check_head_dim_size_mem_efficient and check_data_ptr_alignment_mem_efficient.
    unaligned = any(x.storage_offset() % multiple for x in (query, key, value) if x.numel())
    efficient = shared | {
        f"numbers of heads {heads} differ": len(set(heads)) > 1,
        f"{query.dtype} is not half precision or float32": not same_dtype or query.dtype not in (*HALF, torch.float32),
        f"widths {widths} are not multiples of {multiple}": not multiples,
        f"a storage offset is not a multiple of {multiple}": unaligned,
        "query, key or value has a stride other than 1 along its width": strided,
    }
    conditions = {"flash": flash, "efficient": efficient}
    return {kernel: [text for text, holds in found.items() if holds] for kernel, found in conditions.items()}


def alignment(x: Tensor) -> int:
    """Return the number of elements in 16 bytes (``minimum_gemm_alignment`` in sdp_utils.cpp)."""
    return 8 if x.dtype in HALF else 4


def launch_errors(call: AttentionCall) -> list[str]:
    """Return the errors of the selected kernel that torch does not check before it selects a kernel."""
    kernel, query, mask = selected_kernel(call), call.query, call.mask
    batch, heads = query.shape[:2]
    # The grid is (query blocks, batch, heads) in flash_fwd_launch_template.h (run_flash_fwd) and (query blocks, heads,
    # batch) in mem_eff_attention/kernel_forward.h (getBlocksGrid); see pytorch/pytorch#142228 and #146704.
    errors = {
        f"{heads} heads exceed {MAX_GRID}: invalid configuration argument": kernel != "math" and heads > MAX_GRID,
        f"a batch of {batch} exceeds {MAX_GRID}: invalid configuration": kernel == "flash" and batch > MAX_GRID,
    }
    if kernel == "efficient":
        # _scaled_dot_product_efficient_attention_cuda in cuda/attention.cu runs a large batch in chunks, but raises
        # with dropout, as its backward in attention_backward.cu does; check_supported in kernel_forward.h.
        errors[f"a batch of {batch} exceeds {MAX_GRID} with dropout"] = batch > MAX_GRID and call.dropout_p > 0
        for name, x in (("query", query), ("key", call.key), ("value", call.value)):
            unaligned = x.stride(2) % alignment(x) or (heads > 1 and x.stride(1) % alignment(x))
            errors[f"{name} has strides {x.stride()}: no kernel found to launch"] = unaligned
        if mask is not None:
            errors[f"invalid dtype for bias: {mask.dtype}"] = mask.dtype not in (torch.bool, query.dtype)
            offset = mask.dtype != torch.bool and mask.storage_offset() % alignment(query)
            errors["the storage offset of the mask is not aligned"] = offset
    return [text for text in errors if errors[text]]
