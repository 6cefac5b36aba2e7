"""Attention between the tokens of each group, in einx, torch.bmm, einsum and torch's fused kernels.

Every implementation consists of the same four steps. Letters: ``b`` batch, ``n`` heads, ``m`` key/value heads, ``i``
query token, ``j`` key token, ``d`` width of queries and keys, ``e`` width of values.

    partition     (b, c, h, w)                                             ->  (b·groups, h', w', c)
    split heads   (b·groups, h', w', n·d + …)                              ->  (b·groups, n, i, d), …
    attend        q (b·groups, n, i, d)   k (…, n, j, d)   v (…, n, j, e)  ->  (b·groups, n, i, e)
    reverse       (b·groups, n, i, e)                                      ->  (b, n·e, h, w)

``partition`` and ``reverse`` are for patterns that are a plain reshape; ``reverse`` merges the heads as well. Any other
pattern gathers its tokens with one index.

``mask`` is None, bool (True = may attend) or an additive float, ``(b or 1, groups or 1, n or 1, i, j)``, and allows at
least one key for every query. Its rows may be padded; columns from ``j`` on are ignored. It is None if ``causal`` is
True. Logits and softmax are computed in at least float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from operator import index
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import cudnn_sdp_enabled
from torch.nn.attention import SDPBackend, sdpa_kernel

from vision_attn.attention.masks import Mask, add_mask, align_mask, split_mask, upcast
from vision_attn.attention.patterns.layout import TokenLayout
from vision_attn.attention.patterns.rearrangement import AXES, BoundRearrangement

#: Number of keys from which padding the values for flash attention is worth its cost.
FLASH_FROM_KEYS = 2048
#: Maximum batch size, and number of heads, of torch's CUDA kernels: the limit of the last two axes of a CUDA grid.
MAX_BATCH = 65_535


@dataclass(frozen=True, eq=False)
class Kernel:
    """The steps of an implementation."""

    partition: Callable[[Tensor, BoundRearrangement], Tensor]
    split_heads: Callable[..., list[Tensor]]
    attend: Callable[..., Tensor]
    reverse: Callable[[Tensor, BoundRearrangement], Tensor]
    #: If given, this function replaces ``attend``. It receives :class:`.AttentionInputs` instead of one combined mask.
    attend_pattern: Callable[..., Tensor] | None = None
    #: If given, ``select(q, k, mask, dropout)`` returns the function to run as ``attend``.
    select: Callable[..., Callable[..., Tensor]] | None = None


#: The permutations from ``(b, c, *size)`` to ``(b, *size, c)`` and back, by the number of axes.
TO_LAST = {3: (0, 2, 1), 4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}
TO_FIRST = {3: (0, 2, 1), 4: (0, 3, 1, 2), 5: (0, 4, 1, 2, 3)}


def to_groups(kernel: Kernel, layout: TokenLayout, x: Tensor) -> Tensor:
    """Partition a feature map ``(b, c, *size)`` into groups, ``(b·groups, *group_size, c)``."""
    if layout.is_identity:
        return x.permute(*TO_LAST[x.dim()])
    if layout.rearrangement is not None:
        return kernel.partition(x, layout.rearrangement)
    x = x.permute(*TO_LAST[x.dim()])
    c, x = x.shape[-1], x.flatten(1, -2)
    if layout.zero_padded:
        x = F.pad(x, (0, 0, 0, 1))
    return x.index_select(1, layout.gather_index).reshape(-1, *layout.group_size, c)


def gathered_to_map(layout: TokenLayout, y: Tensor) -> Tensor:
    """Merge the heads and gathered groups, ``(b·groups, n, i, e)``, into a feature map, ``(b, n·e, *size)``."""
    c, y = y.shape[1] * y.shape[3], y.transpose(1, 2)
    y = y.reshape(-1, layout.groups * layout.tokens, c).index_select(1, layout.inverse_index)
    return y.reshape(-1, *layout.size, c).permute(*TO_FIRST[2 + len(layout.size)])


# --- einx: axes by name -----------------------------------------------------------------------------------------------


def partition_einx(x: Tensor, bound: BoundRearrangement) -> Tensor:
    import einx

    return einx.id(bound.to_groups, x, **bound.sizes)


def split_heads_einx(x: Tensor, *heads: int) -> list[Tensor]:
    import einx

    axes, width = " ".join(AXES[2 - x.dim() :]), x.shape[-1] // sum(heads)
    parts = x.split([n * width for n in heads], dim=-1)
    return [einx.id(f"b {axes} (n d) -> b n ({axes}) d", part, n=n) for part, n in zip(parts, heads, strict=True)]


def attend_einx(q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Mask, causal: bool, dropout: float) -> Tensor:
    import einx

    logits = einx.dot("b n i d, b n j d -> b n i j", scale * upcast(q), upcast(k))
    logits = add_mask(logits, mask, causal)
    weights = einx.softmax("b n i [j]", logits)
    weights = drop(weights, dropout, v.dtype)
    return einx.dot("b n i j, b n j e -> b n i e", weights, v)


def reverse_einx(y: Tensor, bound: BoundRearrangement) -> Tensor:
    import einx

    # index() turns the symbolic sizes of torch.compile into integers, because einx hashes them: one graph per size.
    return einx.id(bound.to_map, y, **{name: index(size) for name, size in bound.sizes.items()})


# --- torch.bmm: axes by position --------------------------------------------------------------------------------------


def partition_torch(x: Tensor, bound: BoundRearrangement) -> Tensor:
    c = x.shape[1]
    x = x.reshape(-1, c, *bound.sizes.values()).permute(*bound.forward_perm)
    return x.reshape(-1, *bound.group_size, c)


def split_heads_torch(x: Tensor, *heads: int) -> list[Tensor]:
    b, n = x.shape[0], sum(heads)
    x = x.reshape(b, -1, n, x.shape[-1] // n)
    if x.requires_grad or type(b) is not int:  # in a trace, which must not depend on whether gradients are enabled
        # The heads are not yet the second axis, so that their gradients are concatenated without another copy.
        return [part.transpose(1, 2) for part in x.split_with_sizes(heads, dim=2)]
    return list(x.transpose(1, 2).split_with_sizes(heads, dim=1))


def attend_bmm(q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Mask, causal: bool, dropout: float) -> Tensor:
    b, n, i, d = q.shape
    j, e = v.shape[2:]
    q, k = upcast(q).reshape(b * n, i, d), upcast(k).reshape(b * n, j, d)
    logits = torch.bmm(scale * q, k.transpose(1, 2)).view(b, n, i, j)
    logits = add_mask(logits, mask, causal)
    weights = torch.softmax(logits, dim=-1)
    weights = drop(weights, dropout, v.dtype)
    return torch.bmm(weights.view(b * n, i, j), v.reshape(b * n, j, e)).view(b, n, i, e)


def reverse_torch(y: Tensor, bound: BoundRearrangement) -> Tensor:
    n, e = y.shape[1], y.shape[3]
    if bound.is_identity:
        y = y.transpose(1, 2)
    else:
        y = y.reshape(-1, *bound.groups, n, *bound.tokens, e).permute(*bound.inverse_perm)
    return y.reshape(-1, *bound.size, n * e).permute(*TO_FIRST[2 + len(bound.size)])


def drop(weights: Tensor, dropout: float, dtype: torch.dtype) -> Tensor:
    """Apply dropout to attention weights, and return them in the dtype of the values.

    With probability zero and equal dtypes, no operation is added to graphs.
    """
    weights = F.dropout(weights, dropout) if dropout else weights
    return weights if weights.dtype == dtype else weights.to(dtype)


EINX = Kernel(partition_einx, split_heads_einx, attend_einx, reverse_einx)
BMM = Kernel(partition_torch, split_heads_torch, attend_bmm, reverse_torch)


# --- einsum: axes by letter -------------------------------------------------------------------------------------------


def attend_einsum(q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Mask, causal: bool, dropout: float) -> Tensor:
    logits = torch.einsum("bnid,bnjd->bnij", scale * upcast(q), upcast(k))
    logits = add_mask(logits, mask, causal)
    weights = torch.softmax(logits, dim=-1)
    weights = drop(weights, dropout, v.dtype)
    return torch.einsum("bnij,bnje->bnie", weights, v)


# --- scaled_dot_product_attention: torch's fused kernels, which never store the weights -------------------------------


def attend_sdpa(q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Mask, causal: bool, dropout: float) -> Tensor:
    """Call torch's fused kernel, which has no second derivative and no derivative in forward mode."""
    shape, e, on_cpu = q.shape, v.shape[3], q.is_cpu
    if scale <= 0:  # cuDNN, flash attention and the causal CPU kernel multiply their -inf by the scale
        q, scale = scale * q, 1.0
    if not on_cpu:
        q, k, v = align_widths(q, k, v, mask)
    elif q.shape[3] != e:  # the CPU kernel requires equal widths
        width = max(q.shape[3], e)
        q, k, v = (F.pad(x, (0, width - x.shape[3])) for x in (q, k, v))
    elif k.stride(2) * k.element_size() >= 1024 and not torch.compiler.is_compiling() and k.shape[2] > 1024:
        # The kernel reads all keys for each block of queries: a contiguous copy of many strided keys saves time.
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    sdpa = F.scaled_dot_product_attention if on_cpu else sdpa_on_gpu
    if mask is not None:
        mask = mask if mask.dtype in (torch.bool, q.dtype) else cast_mask(mask, q.dtype)
        q, k, v, mask = to_4d_mask(q, k, v, mask)
    y = sdpa(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale, is_causal=causal)
    if y.requires_grad and not torch.compiler.is_dynamo_compiling() and (node := y.grad_fn) is not None:
        node.register_hook(name_missing_derivative)
    if mask is not None and y.shape[1] != shape[1]:  # groups became heads
        y = y.reshape(*shape[:3], y.shape[3])
    return y if y.shape[3] == e else y[..., :e]


def name_missing_derivative(gradients: Sequence[Tensor | None], _: Any) -> None:
    """Make second derivatives that torch does not implement raise an error that recommends ``impl="bmm"``."""
    for gradient in gradients:
        # With create_graph=True, gradients have a node.
        if gradient is not None and (node := gradient.grad_fn) is not None and "NotImplemented" in node.name():
            gradient.register_hook(refuse_second_derivative)


def refuse_second_derivative(gradient: Tensor) -> None:
    raise NotImplementedError("torch's fused attention has no second derivative. Use va.use_impl(model, 'bmm')")


def sdpa_on_gpu(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Mask, **options: Any) -> Tensor:
    """Call torch's attention in chunks that do not exceed the limits of a CUDA grid.

    With a mask, cuDNN's kernel is excluded, because its gradients can be NaN (pytorch/pytorch#196678).
    """
    if attn_mask is not None and q.is_cuda and cudnn_sdp_enabled():
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            return sdpa_on_gpu(q, k, v, attn_mask=attn_mask, **options)
    if q.shape[0] <= MAX_BATCH or torch.compiler.is_compiling():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, **options)
    masks = split_mask(attn_mask, MAX_BATCH, axis=0)
    chunks = zip(*(x.split(MAX_BATCH) for x in (q, k, v)), masks, strict=False)
    return torch.cat([F.scaled_dot_product_attention(*chunk, **options) for chunk in chunks])


def align_widths(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor, Tensor]:
    """Pad heads with zeros to widths that torch's fused GPU kernels support; the result does not change.

    Flash attention requires half precision, no mask, and one width of at most 256 for queries, keys and values. The
    memory-efficient kernel supports values of another width, but widths, strides and offsets must be multiples of 16
    bytes (``check_head_dim_size_flash``, ``check_head_dim_size_mem_efficient``, ``minimum_gemm_alignment`` in
    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). Values are padded for flash attention only if there are so
    many keys that its speed outweighs the additional bytes.
    """
    d, e = q.shape[3], v.shape[3]
    half = q.dtype in (torch.float16, torch.bfloat16)
    step = 8 if half else 4
    if mask is None and half and d == e <= 256:
        if q.stride(3) == k.stride(3) == v.stride(3) == 1:
            return q, k, v
        step = 1
    elif mask is None and half and e < d <= 256 and not torch.compiler.is_compiling() and k.shape[2] >= FLASH_FROM_KEYS:
        e = d
    return align(q, d + -d % step, step), align(k, d + -d % step, step), align(v, e + -e % step, step)


def align(x: Tensor, width: int, step: int) -> Tensor:
    """Pad heads with zeros to a width, and copy a tensor whose strides are not multiples of ``step``."""
    if x.shape[3] != width:
        return F.pad(x, (0, width - x.shape[3]))
    if torch.compiler.is_compiling():  # the compiler aligns the inputs of the kernel
        return x
    aligned = x.stride(3) == 1 and gcd(*x.stride()[:3], x.storage_offset()) % step == 0
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def to_4d_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Convert a mask with five axes to four axes, for kernels without groups, and adapt queries, keys and values.

    If groups have different masks, either the mask is repeated over the batch, or groups become heads, so that the mask
    broadcasts over the batch; the alternative that copies less is used.

    >>> for tokens, width in ((9, 8), (64, 1)):
    ...     q, mask = torch.zeros(4, 1, tokens, width), torch.zeros(1, 2, 1, tokens, tokens)
    ...     tuple(to_4d_mask(q, q, q, mask)[3].shape)
    (4, 1, 9, 9)
    (1, 2, 64, 64)
    """
    batch, groups, heads, i, _ = mask.shape
    j, aligned = k.shape[2], not q.is_cpu
    if aligned and (mask.dtype == torch.bool or mask.shape[4] % 8 or mask.stride(3) % 8):
        mask = align_mask(mask.expand(-1, -1, -1, -1, j), q.dtype)
    if batch == 1 and groups > 1:
        n, width = q.shape[1], q.shape[3]
        eager = not torch.compiler.is_compiling() and type(batch) is int
        if not eager or heads * i * j <= (i + 2 * j) * n * width or groups * n > MAX_BATCH:
            mask = mask.expand(q.shape[0] // groups, -1, -1, -1, -1)
        else:
            q, k, v = (x.reshape(-1, groups * n, *x.shape[2:]) for x in (q, k, v))
            mask = mask.expand(-1, -1, n, -1, -1).flatten(1, 2)
            return q, k, v, mask[..., :j]
    elif batch > 1:
        mask = mask.expand(-1, q.shape[0] // batch, -1, -1, -1)
    mask = mask.flatten(0, 1)
    return q, k, v, mask[..., :j] if aligned else mask


def cast_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast an additive mask; rows are reduced by their maximum first, which keeps them in the range of float16."""
    if torch.finfo(dtype).bits < torch.finfo(mask.dtype).bits:
        mask = mask - mask.detach().amax(dim=-1, keepdim=True)
    return mask.to(dtype)
