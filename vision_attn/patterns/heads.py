"""Channels and heads: the projected map cut into queries, keys and values, in einx and in torch."""

from __future__ import annotations

from torch import Tensor

__all__ = ["heads_apart_bmm", "heads_apart_einx", "heads_bmm", "heads_einx", "join_bmm", "join_einx"]


def heads_einx(qkv: Tensor, n: int, m: int, d: int, e: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cut channels ordered ``[n·d, m·d, m·e]`` into queries ``(b, n, d, …)``, keys ``(b, m, d, …)``, values."""
    import einx

    line = "b ((n d) + (m d) + (m e)) map... -> b n d map..., b m d map..., b m e map..."
    q, k, v = einx.id(line, qkv, n=n, m=m, d=d, e=e)
    return q, k, v


def heads_bmm(qkv: Tensor, n: int, m: int, d: int, e: int) -> tuple[Tensor, Tensor, Tensor]:
    """The twin of :func:`heads_einx` without einx; all three are views."""
    q, k, v = qkv.split([n * d, m * d, m * e], dim=1)
    return q.unflatten(1, (n, d)), k.unflatten(1, (m, d)), v.unflatten(1, (m, e))


def heads_apart_einx(q: Tensor, kv: Tensor, n: int, m: int, d: int, e: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same where queries ``[n·d]`` were projected from one map, and keys and values ``[m·d, m·e]`` from another."""
    import einx

    q = einx.id("b (n d) map... -> b n d map...", q, n=n, d=d)
    k, v = einx.id("b ((m d) + (m e)) map... -> b m d map..., b m e map...", kv, m=m, d=d, e=e)
    return q, k, v


def heads_apart_bmm(q: Tensor, kv: Tensor, n: int, m: int, d: int, e: int) -> tuple[Tensor, Tensor, Tensor]:
    """The twin of :func:`heads_apart_einx` without einx."""
    k, v = kv.split([m * d, m * e], dim=1)
    return q.unflatten(1, (n, d)), k.unflatten(1, (m, d)), v.unflatten(1, (m, e))


def join_einx(y: Tensor) -> Tensor:
    """Heads ``(b, n, e, …)`` side by side again, ``(b, n·e, …)``."""
    import einx

    return einx.id("b n e map... -> b (n e) map...", y)


def join_bmm(y: Tensor) -> Tensor:
    """The twin of :func:`join_einx` without einx."""
    return y.flatten(1, 2)
