"""What the block computes, written once in NumPy: the definition that every implementation is tested against.

It imports nothing of ours, works in float64, and is slow on purpose: one image and one head at a time.
"""

from __future__ import annotations

import numpy as np

__all__ = ["attention", "attention2d", "conv1x1", "softmax"]


def softmax(logits: np.ndarray) -> np.ndarray:
    """Softmax over the last axis; a row of nothing but ``-inf`` gives zeros.

    ``softmax(l)_j = exp(l_j - max l) / sum_j' exp(l_j' - max l)``

    >>> softmax(np.zeros((3, 4))).shape
    (3, 4)
    """
    highest = logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits - np.where(np.isneginf(highest), 0.0, highest))
    total = weights.sum(axis=-1, keepdims=True)
    return weights / np.where(total == 0.0, 1.0, total)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, mask: np.ndarray | None = None) -> np.ndarray:
    """Attention of one head: ``softmax(scale q kᵀ + mask) v``.

    Args:
        q: queries, ``(i, d)``.
        k: keys, ``(j, d)``.
        v: values, ``(j, e)``.
        scale: factor on the logits.
        mask: ``(i, j)``; bool (True = may attend) or additive.

    Returns:
        ``(i, e)``.

    >>> attention(np.ones((5, 2)), np.ones((7, 2)), np.ones((7, 3)), scale=1.0).shape
    (5, 3)
    """
    logits = scale * q @ k.T
    if mask is not None:
        logits = np.where(mask, logits, -np.inf) if mask.dtype == bool else logits + mask
    return softmax(logits) @ v


def conv1x1(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """A 1×1 convolution of one map ``(c, h, w)``: the same linear layer at every position.

    >>> conv1x1(np.ones((2, 4, 5)), np.ones((3, 2, 1, 1)), None).shape
    (3, 4, 5)
    """
    y = np.tensordot(weight[:, :, 0, 0], x, axes=1)
    return y if bias is None else y + bias[:, None, None]


def attention2d(
    x: np.ndarray,
    state: dict[str, np.ndarray],
    num_heads: int,
    mask: np.ndarray | None = None,
    scale: float | None = None,
) -> np.ndarray:
    """The block of :class:`vision_attn.Attention2d` on a batch of maps, from its state dict.

    Args:
        x: maps, ``(b, c, h, w)``.
        state: ``qkv.weight, qkv.bias, proj.weight, proj.bias`` (biases optional).
        num_heads: number of heads.
        mask: broadcastable to ``(b, heads, tokens, tokens)``; bool (True = may attend) or additive.
        scale: factor on the logits; ``head_dim ** -0.5`` when None.

    Returns:
        ``(b, c, h, w)`` in float64.

    >>> state = {"qkv.weight": np.ones((12, 4, 1, 1)), "proj.weight": np.ones((4, 4, 1, 1))}
    >>> attention2d(np.ones((2, 4, 3, 5)), state, num_heads=2).shape
    (2, 4, 3, 5)
    """
    x = x.astype(np.float64)
    state = {key: value.astype(np.float64) for key, value in state.items()}
    b, c, h, w = x.shape
    d = c // num_heads
    scale = d**-0.5 if scale is None else scale
    if mask is not None:
        mask = np.broadcast_to(mask, (b, num_heads, h * w, h * w))

    out = []
    for image in range(b):
        qkv = conv1x1(x[image], state["qkv.weight"], state.get("qkv.bias"))
        heads = []
        for head in range(num_heads):
            # The channels of the projection are ordered (qkv, heads, head_dim), the tokens row by row.
            q, k, v = (qkv[part * c + head * d : part * c + (head + 1) * d].reshape(d, h * w).T for part in range(3))
            y = attention(q, k, v, scale, None if mask is None else mask[image, head])
            heads.append(y.T.reshape(d, h, w))
        out.append(conv1x1(np.concatenate(heads), state["proj.weight"], state.get("proj.bias")))
    return np.stack(out)
