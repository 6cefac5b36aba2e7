"""Implementations by name, and ``attend``, which runs one of them."""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from vision_attn.attention import masks
from vision_attn.attention.dispatch import attend_auto, repeat_kv, select_auto, without_autocast
from vision_attn.attention.flex import attend_flex, attend_pattern_flex
from vision_attn.attention.kernels import BMM, EINX, Kernel, attend_einsum, attend_sdpa, to_4d_mask
from vision_attn.checks import check_choice

IMPLEMENTATIONS: dict[str, Kernel] = {
    "einx": EINX,
    "bmm": BMM,
    "einsum": replace(BMM, attend=attend_einsum),
    "sdpa": replace(BMM, attend=attend_sdpa),
    "flex": replace(BMM, attend=attend_flex, attend_pattern=attend_pattern_flex),
    "auto": replace(BMM, attend=attend_auto, select=select_auto),
}

#: Names of the implementations in this package; ``"auto"`` selects one of them.
IMPLS = tuple(name for name in IMPLEMENTATIONS if name != "auto")


def register_impl(name: str, function: Callable[..., Tensor]) -> None:
    """Register an implementation by name, for the argument ``impl`` of blocks other than :class:`.LinearAttention2d`.

    Args:
        name: a new name.
        function: ``function(q, k, v, *, scale, mask, causal, dropout)`` with the arguments of :func:`attend`. Queries,
            keys and values have the same number of heads and may be strided views. ``mask`` is None or has four axes,
            and allows at least one key for every query.

    Raises:
        ValueError: the name exists already.

    >>> import torch
    >>> register_impl("mine", lambda q, k, v, **options: attend(q, k, v, impl="bmm", **options))
    >>> q = torch.randn(2, 4, 49, 8)
    >>> attend(q, q, q, impl="mine").shape
    torch.Size([2, 4, 49, 8])
    """
    if name in IMPLEMENTATIONS:
        raise ValueError(f"name must be new, not one of {', '.join(map(repr, IMPLEMENTATIONS))}, got {name!r}")

    def with_groups(q: Tensor, k: Tensor, v: Tensor, *, mask: masks.Mask, **options: float) -> Tensor:
        if mask is None:
            return function(q, k, v, mask=None, **options)
        *heads, mask = to_4d_mask(q, k, v, mask)
        return function(*heads, mask=mask, **options).reshape(*q.shape[:3], v.shape[3])

    IMPLEMENTATIONS[name] = replace(BMM, attend=with_groups)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    impl: str = "auto",
    scale: float | None = None,
    mask: masks.Mask = None,
    causal: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    """Compute multi-head attention, ``softmax(scale q kᵀ + mask) v``, with a named implementation.

    Args:
        q: queries, ``(b, n, i, d)``.
        k: keys, ``(b, m, j, d)``; each of the ``m`` heads is shared by ``n/m`` consecutive query heads.
        v: values, ``(b, m, j, e)``.
        impl: one of :data:`IMPLS`, ``"auto"``, or a name registered with :func:`register_impl`.
        scale: factor on the logits; ``d ** -0.5`` if None.
        mask: bool (True = may attend) or additive float, broadcastable to ``(b, n, i, j)``.
        causal: prevent queries from attending to later keys.
        dropout: dropout probability of attention weights, which also applies in evaluation.

    Returns:
        ``(b, n, i, e)`` in the dtype of ``v``; zeros for fully masked queries.

    Raises:
        ValueError: ``impl`` is unknown, ``n`` is not a multiple of ``m``, or an argument has the wrong dtype or shape.

    Source: Vaswani et al., *Attention Is All You Need*, 2017, section 3.2, https://arxiv.org/abs/1706.03762

    >>> import torch
    >>> q = k = v = torch.randn(2, 4, 49, 8)
    >>> attend(q, k, v, impl="bmm").shape
    torch.Size([2, 4, 49, 8])
    """
    check_choice("impl", impl, IMPLEMENTATIONS)
    for name, x, like, same in (("q", q, q, ()), ("k", k, q, (0, 3)), ("v", v, k, (0, 1, 2))):
        if x.dim() != 4 or not x.is_floating_point() or any(x.shape[axis] != like.shape[axis] for axis in same):
            expected = "(batch, heads, tokens, width), k with q's batch and width, v with k's heads and tokens"
            raise ValueError(f"{name} must be floating-point with shape {expected}, got {x.dtype} {tuple(x.shape)}")
    row_has_key = None
    if mask is not None:
        masks.check_mask(mask.shape, mask.dtype, q.shape[0], q.shape[1], q.shape[2:3], k.shape[2:3])
        later = masks.causal_mask(q.shape[2], k.shape[2], q.device) if causal else None
        mask, row_has_key = masks.unmask_empty_rows(masks.combine_masks(masks.broadcast_mask(mask)[:, None], later))
        causal = False
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with without_autocast(q):
        k, v = repeat_kv(q, k), repeat_kv(q, v)
        y = IMPLEMENTATIONS[impl].attend(q, k, v, scale=scale, mask=mask, causal=causal, dropout=dropout)
        return masks.zero_fully_masked_rows(y, row_has_key)
