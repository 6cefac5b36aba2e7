"""Multi-head attention ``softmax(scale q kᵀ + mask) v`` by einx, torch.bmm, einsum and torch's fused kernels.

An implementation takes three steps, side by side here. Letters: ``b`` batch, ``n`` heads, ``m`` key heads, ``i`` query
token, ``j`` key token, ``d`` width of queries and keys, ``e`` width of values.

    heads apart      (b, n·d, h, w)                                           ->  (b·groups, n, i, d)
    attend           q (b·groups, n, i, d)   k (…, n, j, d)   v (…, n, j, e)  ->  (b·groups, n, i, e)
    heads together   (b·groups, n, i, e)                                      ->  (b, n·e, h, w)

``mask`` is None, bool (True = may attend) or an additive float, ``(b or 1, groups or 1, n or 1, i, j)``, in which each
row has a key to attend to; with ``causal`` it is None. Logits and softmax are computed in float32 at least.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from vision_attn.attention.choices import KEPT, fused_is_faster, maps_at_once, queries_at_once, runs_in_parts
from vision_attn.attention.masks import (
    AxisBias,
    Mask,
    add_mask,
    causal_mask,
    check_mask,
    combine_masks,
    mask_of,
    open_rows,
    upcast,
    with_four_axes,
    zero_rows,
)
from vision_attn.attention.patterns.line import Cut
from vision_attn.checks import check_flags, check_number, check_probability, check_type


@dataclass(frozen=True)
class Implementation:
    """The three steps of an implementation."""

    heads_apart: Callable[[Cut, Tensor, int], Tensor]
    attend: Callable[..., Tensor]
    heads_together: Callable[[Cut, Tensor], Tensor]


class Given(NamedTuple):
    """What a kernel is given: attention in the groups of a pattern."""

    q: Tensor  # (b·groups, n, i, d)
    k: Tensor  # (b·groups, m, j, d)
    v: Tensor  # (b·groups, m, j, e)
    scale: float
    mask: Mask  # (b or 1, groups or 1, n or 1, i, j), in which each row has a key to attend to
    reachable: Mask  # (b or 1, groups or 1, n or 1, i, 1): the rows that had one before; None: all
    causal: bool  # whether the kernel is to hide later keys
    bias: AxisBias | None = None  # what is added to the logits beside the mask


# --- einx: every axis by its name -------------------------------------------------------------------------------------


def heads_apart_einx(cut: Cut, x: Tensor, n: int) -> Tensor:
    import einx

    return einx.id(f"b (n d) {cut.line.map_text} -> {cut.line.group_text}", x, n=n, **cut.lengths)


def attend_einx(q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Mask, causal: bool, dropout: float) -> Tensor:
    import einx

    logits = einx.dot("b n i d, b n j d -> b n i j", scale * upcast(q), upcast(k))
    logits = add_mask(logits, mask, causal)
    weights = einx.softmax("b n i [j]", logits)
    weights = F.dropout(weights, dropout).to(v.dtype)
    return einx.dot("b n i j, b n j e -> b n i e", weights, v)


def heads_together_einx(cut: Cut, y: Tensor) -> Tensor:
    import einx

    y = einx.id(f"{cut.line.group_text} -> b {cut.line.map_text} (n d)", y, **cut.lengths)
    return y.movedim(y.dim() - 1, 1)  # channels lie beside each other, as the projection reads them


# --- torch.bmm: every axis by its place -------------------------------------------------------------------------------


def heads_apart_torch(cut: Cut, x: Tensor, n: int) -> Tensor:
    b, c = x.shape[:2]
    x = x.movedim(1, x.dim() - 1).reshape(b, *cut.lengths.values(), c)
    x = x.permute(cut.line.apart).reshape(b * cut.groups, cut.tokens, n, c // n)
    return x.transpose(1, 2)


def attend_bmm(q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Mask, causal: bool, dropout: float) -> Tensor:
    b, n, i, d = q.shape
    j, e = v.shape[2:]
    q, k = upcast(q).reshape(b * n, i, d), upcast(k).reshape(b * n, j, d)
    logits = torch.bmm(scale * q, k.transpose(1, 2)).view(b, n, i, j)
    logits = add_mask(logits, mask, causal)
    weights = torch.softmax(logits, dim=-1)
    weights = F.dropout(weights, dropout).to(v.dtype)
    return torch.bmm(weights.view(b * n, i, j), v.reshape(b * n, j, e)).view(b, n, i, e)


def heads_together_torch(cut: Cut, y: Tensor) -> Tensor:
    b, c = y.shape[0] // cut.groups, y.shape[1] * y.shape[3]
    y = y.transpose(1, 2).reshape(b, *cut.group_lengths, c)
    y = y.permute(cut.line.together).reshape(b, *cut.shape, c)
    return y.movedim(y.dim() - 1, 1)


# --- einsum: every axis by its letter ---------------------------------------------------------------------------------


def attend_einsum(q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Mask, causal: bool, dropout: float) -> Tensor:
    logits = torch.einsum("bnid,bnjd->bnij", scale * upcast(q), upcast(k))
    logits = add_mask(logits, mask, causal)
    weights = torch.softmax(logits, dim=-1)
    weights = F.dropout(weights, dropout).to(v.dtype)
    return torch.einsum("bnij,bnje->bnie", weights, v)


# --- scaled_dot_product_attention: the kernel that torch chooses, which holds no weights where it is a fused one ------


def attend_sdpa(q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Mask, causal: bool, dropout: float) -> Tensor:
    b, n, i, d = q.shape
    e = v.shape[3]
    if q.device.type == "cpu" and not torch.compiler.is_compiling() and far_apart(k):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    if d != e:  # fused kernels want one width: zeros fill up the narrower ones and change nothing
        q, k, v = (F.pad(x, (0, max(d, e) - x.shape[3])) for x in (q, k, v))
    if mask is None:
        if causal and scale <= 0:  # the kernel multiplies its -inf by the scale
            q, scale = scale * q, 1.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scale, is_causal=causal)
    else:
        q, k, v, mask = groups_as_heads(q, k, v, mask)
        if mask.dtype not in (torch.bool, q.dtype):
            mask = narrowed(mask, q.dtype)
        with kernels_for_masks(q):
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
        y = y.reshape(b, n, i, y.shape[3])
    return y if y.shape[3] == e else y[..., :e]


def groups_as_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same attention with a mask of four axes that is never repeated over the batch.

    Groups stay in the batch where they have one mask; where each has its own they become heads, and the batch
    broadcasts.
    """
    batch, groups = mask.shape[:2]
    if batch == groups == 1:
        return q, k, v, mask[0]
    if batch == 1:
        q, k, v = (x.reshape(-1, groups * x.shape[1], *x.shape[2:]) for x in (q, k, v))
        return q, k, v, mask.expand(-1, -1, q.shape[1] // groups, -1, -1).flatten(1, 2)
    return q, k, v, mask.expand(-1, q.shape[0] // batch, -1, -1, -1).flatten(0, 1)


def far_apart(k: Tensor) -> bool:
    """Whether keys are so many and so far apart in memory that the CPU's caches lose what a copy costs.

    The kernel reads all keys once for each block of queries: a tenth of its time at 56×56 and 256 channels.
    """
    return k.shape[2] > 1024 and k.stride(2) * k.element_size() >= 1024


def narrowed(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """An additive mask in the type of the queries: half precision holds a row less its largest value."""
    if torch.finfo(dtype).bits < torch.finfo(mask.dtype).bits:
        mask = mask - mask.detach().amax(dim=-1, keepdim=True)
    return mask.to(dtype)


def kernels_for_masks(q: Tensor) -> AbstractContextManager[None]:
    """On CUDA all fused kernels but cuDNN's, whose gradients with a mask can be NaN (pytorch/pytorch#196678)."""
    if not q.is_cuda:
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


# --- auto: whichever of them is fastest -------------------------------------------------------------------------------


def attend_auto(q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Mask, causal: bool, dropout: float) -> Tensor:
    """By the fused kernel or by bmm, whichever is faster; by bmm for so many maps at once as fit into the caches."""
    options: dict[str, Any] = {"scale": scale, "causal": causal, "dropout": dropout}
    if fused_is_faster(q, k.shape[2], mask, dropout):
        return attend_sdpa(q, k, v, mask=mask, **options)
    groups = 1 if mask is None else mask.shape[1]
    size = groups * maps_at_once(q, k.shape[2], groups) if runs_in_parts(q) else q.shape[0]
    if size >= q.shape[0]:
        return attend_bmm(q, k, v, mask=mask, **options)
    parts: Any = zip(
        split_mask(mask, size // groups, axis=0), q.split(size), k.split(size), v.split(size), strict=False
    )
    return torch.cat([attend_bmm(*part, mask=seen, **options) for seen, *part in parts])


# --- by name ----------------------------------------------------------------------------------------------------------

EINX = Implementation(heads_apart_einx, attend_einx, heads_together_einx)
BMM = Implementation(heads_apart_torch, attend_bmm, heads_together_torch)

IMPLEMENTATIONS: dict[str, Implementation] = {
    "einx": EINX,
    "bmm": BMM,
    "einsum": replace(BMM, attend=attend_einsum),
    "sdpa": replace(BMM, attend=attend_sdpa),
    "auto": replace(BMM, attend=attend_auto),
}

#: Names of the implementations that come with the package; ``"auto"`` chooses among them.
IMPLS = tuple(name for name in IMPLEMENTATIONS if name != "auto")


def register_impl(name: str, function: Callable[..., Tensor]) -> None:
    """Make a further implementation available to every block, under a name of its own.

    Args:
        name: the name for ``impl=``.
        function: ``function(q, k, v, *, scale, mask, causal, dropout)``, all as in :func:`attend`, on queries, keys and
            values of as many heads. They may be strided views. ``mask`` has four axes, or is None; every row of it has
            a key to attend to.

    Raises:
        ValueError: the name is taken, or the function does not take these arguments.

    >>> register_impl("mine", lambda q, k, v, **options: attend(q, k, v, impl="bmm", **options))
    >>> q = torch.randn(2, 4, 49, 8)
    >>> attend(q, q, q, impl="mine").shape
    torch.Size([2, 4, 49, 8])
    """
    if not isinstance(name, str) or not name or name in IMPLEMENTATIONS:
        raise ValueError(f"name must be a new one, none of {', '.join(map(repr, IMPLEMENTATIONS))}; got {name!r}")
    try:
        inspect.signature(function).bind(None, None, None, scale=1.0, mask=None, causal=False, dropout=0.0)
    except TypeError as error:
        raise ValueError(
            f"function must take (q, k, v, *, scale, mask, causal, dropout); got {function!r}: {error}"
        ) from None

    def with_groups(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, **options: float) -> Tensor:
        if mask is None:
            return function(q, k, v, mask=None, **options)
        *heads, mask = groups_as_heads(q, k, v, mask)
        return function(*heads, mask=mask, **options).reshape(*q.shape[:3], v.shape[3])

    IMPLEMENTATIONS[name] = replace(BMM, attend=with_groups)


def check_impl(impl: str) -> None:
    """Refuse a name that no implementation has.

    >>> check_impl("cudnn")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: impl must be one of 'einx', 'bmm', 'einsum', 'sdpa', 'auto'...; got 'cudnn'
    """
    if not isinstance(impl, str) or impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(map(repr, IMPLEMENTATIONS))}; got {impl!r}")


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    impl: str = "auto",
    scale: float | None = None,
    mask: Mask = None,
    causal: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    """Multi-head attention ``softmax(scale q kᵀ + mask) v`` by the implementation of a name.

    Args:
        q: queries, ``(b, n, i, d)``.
        k: keys, ``(b, m, j, d)``, where each of ``m`` heads serves ``n/m`` heads of the queries in a row.
        v: values, ``(b, m, j, e)``.
        impl: one of :data:`IMPLS`, ``"auto"``, or one that was registered.
        scale: factor on the logits; ``d ** -0.5`` when None.
        mask: bool (True = may attend) or additive float, broadcastable to ``(b, n, i, j)``.
        causal: whether a query attends to no later key than itself.
        dropout: probability with which an attention weight is dropped, in training or not.

    Returns:
        ``(b, n, i, e)`` in the dtype of ``v``; zeros for a query that may attend to nothing.

    Raises:
        ValueError: unknown ``impl``, heads that are no multiple, or a mask of another dtype or of a shape that does not
            broadcast.

    Source: Vaswani et al., *Attention Is All You Need*, 2017, section 3.2, https://arxiv.org/abs/1706.03762

    >>> q = k = v = torch.randn(2, 4, 49, 8)
    >>> attend(q, k, v, impl="bmm").shape
    torch.Size([2, 4, 49, 8])
    """
    check_impl(impl)
    check_flags(causal=causal)
    check_probability("dropout", dropout)
    if scale is not None:
        check_number("scale", scale)
    for name, x, like in (("q", q, q), ("k", k, q), ("v", v, k)):
        check_type(name, x, Tensor, "a tensor (batch, heads, tokens, width)")
        same = {"k": (0, 3), "v": (0, 1, 2)}.get(name, ())
        if x.dim() != 4 or not x.is_floating_point() or any(x.shape[axis] != like.shape[axis] for axis in same):
            raise ValueError(
                f"{name} must be of floating point and (batch, heads, tokens, width), with the batch of q, k of its "
                f"width and v of k's heads and tokens; got {x.dtype} {tuple(x.shape)} beside {tuple(like.shape)}"
            )
    if mask is not None:
        check_mask(mask, q.shape[0], q.shape[1], q.shape[2:3], k.shape[2:3])
    if 0 in (q.shape[0], q.shape[2], k.shape[2]):  # of which not every implementation can tell the sizes
        return (q @ repeat_kv(q, k).mT).to(v.dtype) @ repeat_kv(q, v)
    reachable = None
    if mask is not None:
        mask = with_four_axes(mask)[:, None]
        if causal:
            mask, causal = combine_masks(mask, causal_mask(q.shape[2], k.shape[2], q.device)), False
        mask, reachable = open_rows(mask)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return attend_groups(IMPLEMENTATIONS[impl], Given(q, k, v, scale, mask, reachable, causal), dropout)


def attend_groups(impl: Implementation, given: Given, dropout: float) -> Tensor:
    """Attention in the groups of a pattern, ``(b·groups, n, i, e)``; zeros for rows that may attend to nothing."""
    q, k, v, scale, mask, reachable, causal, bias = given
    if k.shape[1] != q.shape[1]:
        k, v = repeat_kv(q, k), repeat_kv(q, v)
    with without_autocast(q):
        if bias is None:
            y = impl.attend(q, k, v, scale=scale, mask=mask, causal=causal, dropout=dropout)
        else:
            y = attend_in_blocks(impl, given._replace(k=k, v=v), bias, dropout)
        return zero_rows(y, reachable)


def attend_in_blocks(impl: Implementation, given: Given, bias: AxisBias, dropout: float) -> Tensor:
    """Attention with a bias that is made for a block of queries at a time; of many, again for the gradients."""
    q, k, v, scale, mask = given[:5]
    keys, groups = k.shape[2], bias.groups
    maps, rows = maps_at_once(q, keys, groups), queries_at_once(q, keys, groups)

    def attend_block(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *along: Tensor) -> Tensor:
        mask = combine_masks(mask_of(along, groups), mask)
        return impl.attend(q, k, v, scale=scale, mask=mask, causal=False, dropout=dropout)

    run: Callable[..., Tensor] = attend_block
    if torch.is_grad_enabled() and q.shape[:3].numel() * keys > KEPT:
        run = partial(checkpoint, attend_block, use_reentrant=False, preserve_rng_state=dropout > 0)
    of_maps: Any = [x.split(maps * groups) for x in (q, k, v, *bias.along(q))]
    done = []
    for seen, queries, keys_of, values, *along in zip(split_mask(mask, maps, axis=0), *of_maps, strict=False):
        of_rows: Any = [x.split(rows, dim=2) for x in (queries, *along)]
        blocks = zip(split_mask(seen, rows, axis=3), *of_rows, strict=False)
        done.append(joined([run(block, keys_of, values, own, *logits) for own, block, *logits in blocks], dim=2))
    return joined(done, dim=0)


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def split_mask(mask: Mask, size: int, axis: int) -> Iterable[Mask]:
    """The mask of each part of that size; the same for every part where it is one along the axis."""
    return repeat(mask) if mask is None or mask.shape[axis] == 1 else mask.split(size, dim=axis)


def repeat_kv(q: Tensor, k: Tensor) -> Tensor:
    """Keys or values ``(b, m, j, d)`` repeated for the heads of the queries that share them, ``(b, n, j, d)``."""
    n, m = q.shape[1], k.shape[1]
    if n == m:
        return k
    if n % m:
        raise ValueError(f"q must have a multiple of the heads of k and v; got {n} and {m}")
    return k.unsqueeze(2).expand(-1, -1, n // m, -1, -1).flatten(1, 2)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context without autocast, which would take the logits back to half precision."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):  # there is no autocast of tensors without values
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)
