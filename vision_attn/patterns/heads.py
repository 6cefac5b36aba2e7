"""Channels and heads: the projected map cut into queries, keys and values, in einx and in torch."""

from __future__ import annotations

from torch import Tensor

__all__ = ["heads_apart_bmm", "heads_apart_einx", "heads_bmm", "heads_einx", "join_bmm", "join_einx"]


def heads_einx(qkv: Tensor, n: int, m: int, d: int, e: int) -> tuple[Tensor, Tensor, Tensor]:
    """The queries, keys and values of a projected map, whose channels are ordered ``[n·d, m·d, m·e]``.

    Args:
        qkv: the projected map, ``(b, n·d + m·d + m·e, …)``.
        n: heads of the queries.
        m: heads of keys and values.
        d: width of queries and keys in a head.
        e: width of values in a head.

    Returns:
        Queries ``(b, n, d, …)``, keys ``(b, m, d, …)`` and values ``(b, m, e, …)``.

    >>> import torch
    >>> [y.shape[1:3] for y in heads_einx(torch.randn(1, 56, 7, 5), n=4, m=2, d=8, e=4)]
    [torch.Size([4, 8]), torch.Size([2, 8]), torch.Size([2, 4])]
    """
    import einx

    line = "b ((n d) + (m d) + (m e)) map... -> b n d map..., b m d map..., b m e map..."
    q, k, v = einx.id(line, qkv, n=n, m=m, d=d, e=e)
    return q, k, v


def heads_bmm(qkv: Tensor, n: int, m: int, d: int, e: int) -> tuple[Tensor, Tensor, Tensor]:
    """The twin of :func:`heads_einx` without einx; all three are views.

    Arguments and result are those of :func:`heads_einx`.

    >>> import torch
    >>> [y.shape[1:3] for y in heads_bmm(torch.randn(1, 56, 7, 5), n=4, m=2, d=8, e=4)]
    [torch.Size([4, 8]), torch.Size([2, 8]), torch.Size([2, 4])]
    """
    q, k, v = qkv.split([n * d, m * d, m * e], dim=1)
    return q.unflatten(1, (n, d)), k.unflatten(1, (m, d)), v.unflatten(1, (m, e))


def heads_apart_einx(q: Tensor, kv: Tensor, n: int, m: int, d: int, e: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same where queries ``[n·d]`` were projected from one map, and keys and values ``[m·d, m·e]`` from another.

    Args:
        q: the projected map of the queries, ``(b, n·d, …)``.
        kv: that of keys and values, ``(b, m·d + m·e, …)``, of any size.
        n: heads of the queries.
        m: heads of keys and values.
        d: width of queries and keys in a head.
        e: width of values in a head.

    Returns:
        Queries ``(b, n, d, …)``, keys ``(b, m, d, …)`` and values ``(b, m, e, …)``.

    >>> import torch
    >>> q, k, v = heads_apart_einx(torch.randn(1, 32, 7, 5), torch.randn(1, 24, 3, 3), n=4, m=2, d=8, e=4)
    >>> v.shape
    torch.Size([1, 2, 4, 3, 3])
    """
    import einx

    q = einx.id("b (n d) map... -> b n d map...", q, n=n, d=d)
    k, v = einx.id("b ((m d) + (m e)) map... -> b m d map..., b m e map...", kv, m=m, d=d, e=e)
    return q, k, v


def heads_apart_bmm(q: Tensor, kv: Tensor, n: int, m: int, d: int, e: int) -> tuple[Tensor, Tensor, Tensor]:
    """The twin of :func:`heads_apart_einx` without einx; all three are views.

    Arguments and result are those of :func:`heads_apart_einx`.

    >>> import torch
    >>> q, k, v = heads_apart_bmm(torch.randn(1, 32, 7, 5), torch.randn(1, 24, 3, 3), n=4, m=2, d=8, e=4)
    >>> v.shape
    torch.Size([1, 2, 4, 3, 3])
    """
    k, v = kv.split([m * d, m * e], dim=1)
    return q.unflatten(1, (n, d)), k.unflatten(1, (m, d)), v.unflatten(1, (m, e))


def join_einx(y: Tensor) -> Tensor:
    """The heads ``(b, n, e, …)`` side by side again, ``(b, n·e, …)``.

    Args:
        y: what each head gives, ``(b, n, e, …)``.

    >>> import torch
    >>> join_einx(torch.randn(1, 4, 8, 7, 5)).shape
    torch.Size([1, 32, 7, 5])
    """
    import einx

    return einx.id("b n e map... -> b (n e) map...", y)


def join_bmm(y: Tensor) -> Tensor:
    """Arguments and result are those of :func:`join_einx`.

    >>> import torch
    >>> join_bmm(torch.randn(1, 4, 8, 7, 5)).shape
    torch.Size([1, 32, 7, 5])
    """
    return y.flatten(1, 2)
