"""A definition of the attention block in NumPy, against which every implementation is tested.

This module imports no other module of the package and computes in float64. It processes one image and one head at a
time, and every pair of query and key, which is slow, but makes every step visible. A pattern is described by one
:class:`Relation` for each axis of the feature map: a query attends to a key if it does so along every axis.

Letters: ``b`` batch, ``n`` heads, ``m`` key/value heads, ``i`` query token, ``j`` key token, ``d`` width of queries and
keys in a head, ``e`` width of values in a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# --- attention between tokens -----------------------------------------------------------------------------------------


def softmax(logits: np.ndarray) -> np.ndarray:
    """Compute the softmax over the last axis of ``(…, j)``; a row that contains only ``-inf`` becomes zero.

    ``softmax(l)_j = exp(l_j - max l) / sum_j' exp(l_j' - max l)``

    >>> softmax(np.zeros((3, 4))).shape
    (3, 4)
    """
    highest = logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits - np.where(np.isneginf(highest), 0.0, highest))
    total = weights.sum(axis=-1, keepdims=True)
    return weights / np.where(total == 0.0, 1.0, total)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, mask: np.ndarray | None = None) -> np.ndarray:
    """Compute the attention of one head: ``softmax(scale q kᵀ + mask) v``.

    Args:
        q: queries, ``(i, d)``.
        k: keys, ``(j, d)``.
        v: values, ``(j, e)``.
        scale: factor on the logits.
        mask: bool (True = may attend) or additive float, ``(i, j)``.

    Returns:
        The output, ``(i, e)``.

    >>> attention(np.ones((5, 2)), np.ones((7, 2)), np.ones((7, 3)), scale=1.0).shape
    (5, 3)
    """
    logits = scale * q @ k.T
    if mask is not None:
        logits = np.where(mask, logits, -np.inf) if mask.dtype == bool else logits + mask
    return softmax(logits) @ v


# --- patterns: the keys of each query along one axis, and their offsets -----------------------------------------------


class Relation(NamedTuple):
    """The queries and keys that attend to each other along one axis of the feature map.

    >>> full(3).offset.shape
    (3, 3)
    """

    allowed: np.ndarray  #: ``(query, key)`` bool: True if the query attends to the key.
    offset: np.ndarray  #: ``(query, key)`` int: key minus query, in steps of the pattern.
    extent: int  #: The number of positions in a group.
    zeros: tuple[int, int] = (0, 0)  #: The number of zero keys before and after the axis.


def full(length: int) -> Relation:
    """Return the relation in which every position attends to all positions of the axis.

    >>> full(3).offset[0].tolist()
    [0, 1, 2]
    """
    return window(length, length)


def window(length: int, side: int, shift: int = 0) -> Relation:
    """Return the relation of windows with ``side`` positions; the first complete window starts at ``shift``.

    An axis that fits into one window is not shifted.

    >>> window(5, 2, shift=1).allowed[1].tolist()
    [False, True, True, False, False]
    """
    position = np.arange(length)
    number = (position - (shift if length > side else 0)) // side
    return Relation(number[None, :] == number[:, None], position[None, :] - position[:, None], side)


def stripes(length: int, every: int) -> Relation:
    """Return the relation of positions whose distance is a multiple of ``every``.

    >>> stripes(4, every=2).allowed[0].tolist()
    [True, False, True, False]
    """
    remainder, step = np.arange(length) % every, np.arange(length) // every
    return Relation(remainder[None, :] == remainder[:, None], step[None, :] - step[:, None], int(step[-1]) + 1)


def grid(length: int, side: int) -> Relation:
    """Return the relation of grids: ``side`` positions, spread over the axis at equal distances.

    >>> grid(6, 2).allowed[1].tolist()
    [False, True, False, False, True, False]
    """
    return stripes(length, -(-length // side))._replace(extent=side)


def halo(length: int, block: int, halo: int) -> Relation:
    """Return the relation of blocks of queries to the keys in the block and in a halo on both sides.

    Keys outside the axis are zeros, inserted after normalization and rotation, and queries attend to them.

    Args:
        length: length of the axis, in positions.
        block: size of a block, in positions.
        halo: number of positions by which the keys extend beyond each side of the block.

    >>> halo(3, 2, 1).allowed.astype(int).tolist()
    [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]]
    """
    after = -length % block + halo
    query, key = np.arange(length)[:, None], np.arange(-halo, length + after)[None, :]
    start = query // block * block
    allowed = (key >= start - halo) & (key < start + block + halo)
    return Relation(allowed, key - query, block + halo, zeros=(halo, after))


def neighborhood(length: int, kernel: int, dilation: int = 1, stride: int = 1, causal: bool = False) -> Relation:
    """Return the relation of each position to the ``kernel`` positions around it, shifted to stay inside the axis.

    Args:
        length: length of the axis, in positions.
        kernel: number of keys of each query.
        dilation: distance between consecutive keys, in positions.
        stride: number of consecutive queries that share their keys: the keys of the query in the middle of the group,
            or of the last query if ``causal`` is True.
        causal: let each position attend only to itself and to positions before it.

    >>> neighborhood(5, 3).allowed[0].tolist()
    [True, True, True, False, False]
    """
    allowed = np.zeros((length, length), bool)
    for query in range(length):
        keys = np.arange(query % dilation, length, dilation)
        group = query // dilation // stride * stride  # the first query of the group that shares its keys
        leader = min(group + (stride - 1 if causal else stride // 2), len(keys) - 1)
        first = max(leader - kernel + 1, 0) if causal else min(max(leader - kernel // 2, 0), max(len(keys) - kernel, 0))
        allowed[query, keys[first : query // dilation + 1 if causal else first + kernel]] = True
    step = np.arange(length) // dilation
    return Relation(allowed, step[None, :] - step[:, None], kernel)


def zero_pad(x: np.ndarray, size: Sequence[int], pattern: Sequence[Relation]) -> np.ndarray:
    """Pad tokens ``(…, j)`` of a feature map with the zero keys of a pattern around the feature map."""
    padded = np.pad(x.reshape(*x.shape[:-1], *size), [(0, 0)] * (x.ndim - 1) + [axis.zeros for axis in pattern])
    return padded.reshape(*x.shape[:-1], -1)


# --- position encodings -----------------------------------------------------------------------------------------------


def resize_table(table: np.ndarray, extent: int, axis: int = 0) -> np.ndarray:
    """Interpolate a table of offsets linearly to groups of another extent; its ends and its middle are kept.

    Args:
        table: a table with ``2s - 1`` entries along ``axis``, for the offsets from ``1 - s`` to ``s - 1``.
        extent: the number of positions in a group.
        axis: the axis to interpolate.

    Returns:
        The table with ``2·extent - 1`` entries along ``axis``.

    >>> resize_table(np.array([0.0, 2.0, 4.0]), 3).tolist()
    [0.0, 1.0, 2.0, 3.0, 4.0]
    """
    largest = (table.shape[axis] - 1) / 2  # the largest offset of the given table
    offsets = np.arange(1 - extent, extent) * (largest / (extent - 1) if extent > 1 else 0.0)
    return np.apply_along_axis(lambda values: np.interp(offsets, np.arange(len(values)) - largest, values), axis, table)


def axial_angles(count: int, positions: np.ndarray, temperature: float) -> np.ndarray:
    """Return the angles ``position · temperature^(-k/count)`` of positions ``(axes, i)``, ``(axes·count, i)``."""
    frequency = temperature ** -(np.arange(count) / count)
    return np.concatenate([frequency[:, None] * position for position in positions])


def rotate(q: np.ndarray, positions: np.ndarray, temperature: float) -> np.ndarray:
    """Rotate queries or keys ``(i, d)`` by positions ``(axes, i)``: pairs of channels are complex numbers."""
    pairs = q[:, 0::2] + 1j * q[:, 1::2]
    pairs = pairs * np.exp(1j * axial_angles(pairs.shape[1] // len(positions), positions, temperature).T)
    return np.stack([pairs.real, pairs.imag], axis=-1).reshape(q.shape)


def sin_cos(channels: int, positions: np.ndarray, temperature: float) -> np.ndarray:
    """Return the sines, then the cosines of the angles of positions ``(axes, i)``, ``(channels, i)``."""
    angles = axial_angles(channels // (2 * len(positions)), positions, temperature)
    return np.concatenate([np.sin(angles), np.cos(angles)])


def depthwise(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Apply a depthwise convolution with zero padding to one feature map ``(c, h, w)``."""
    padded = np.pad(x, [(0, 0), *((side // 2,) * 2 for side in weight.shape[2:])])
    y = np.zeros_like(x) + bias.reshape(-1, *(1,) * (x.ndim - 1))
    for tap in np.ndindex(*weight.shape[2:]):
        part = padded[(slice(None), *(slice(at, at + length) for at, length in zip(tap, x.shape[1:], strict=True)))]
        y += weight[(slice(None), 0, *tap)].reshape(-1, *(1,) * len(tap)) * part
    return y


# --- the block --------------------------------------------------------------------------------------------------------


def conv1x1(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """Apply a 1×1 convolution to one feature map, which is the same linear layer at every position.

    Args:
        x: the feature map, ``(c, h, w)``; one or three axes are also supported.
        weight: the weight, ``(out, c, 1, 1)``.
        bias: the bias, ``(out,)``, or None.

    Returns:
        The output, ``(out, h, w)``.

    >>> conv1x1(np.ones((2, 4, 5)), np.ones((3, 2, 1, 1)), None).shape
    (3, 4, 5)
    """
    y = np.tensordot(weight.reshape(weight.shape[:2]), x, axes=1)
    return y if bias is None else y + bias.reshape(-1, *(1,) * (x.ndim - 1))


def attention_output(
    x: np.ndarray,
    state: dict[str, np.ndarray],
    num_heads: int,
    *,
    key_dim: int | None = None,
    value_dim: int | None = None,
    num_kv_heads: int | None = None,
    scale: float | None = None,
    mask: np.ndarray | None = None,
    causal: bool = False,
    pattern: Sequence[Relation] | None = None,
    position: str | None = None,
    feat_size: Sequence[int] | None = None,
    temperature: float = 10000.0,
) -> np.ndarray:
    """Compute the output of :class:`vision_attn.Attention2d` for a batch of feature maps, from its state dict.

    Args:
        x: feature maps, ``(b, c, h, w)``; one or three axes are also supported.
        state: the state dict as NumPy arrays: ``qkv.weight``, ``proj.weight`` and, if the block has them, ``qkv.bias``,
            ``proj.bias``, ``q_norm.*``, ``k_norm.*``, ``gate.*`` and ``position.*``.
        num_heads: number of heads.
        key_dim: width of queries and keys in a head; ``c / num_heads`` if None.
        value_dim: width of values in a head; ``c / num_heads`` if None.
        num_kv_heads: number of heads of keys and values; ``num_heads`` if None.
        scale: factor on the logits; ``key_dim ** -0.5`` if None.
        mask: bool (True = may attend) or additive float, broadcastable to ``(b, heads, tokens, tokens)``.
        causal: prevent every position from attending to later positions in row-major order.
        pattern: one relation for each axis; :func:`full` if None.
        position: ``"decomposed"`` (:class:`RelPosDecomposed`), ``"table"`` (:class:`RelPosTable`), ``"rotary"``
            (:class:`Rope`), ``"sines"`` (:class:`SinCos`), ``"convolution"`` (:class:`ConditionalPos`) or None.
        feat_size: for each axis, the size of the feature map for which a relative position table was created, or to
            which rotary positions are scaled; the size of ``x`` if None.
        temperature: base of the frequencies of rotary and sine-cosine positions.

    Returns:
        The output, ``(b, out, h, w)``, in float64.

    >>> state = {"qkv.weight": np.ones((12, 4, 1, 1)), "proj.weight": np.ones((4, 4, 1, 1))}
    >>> attention_output(np.ones((2, 4, 3, 5)), state, num_heads=2).shape
    (2, 4, 3, 5)
    """
    x, state = x.astype(np.float64), {key: value.astype(np.float64) for key, value in state.items()}
    b, c, *size = x.shape
    n, m, d, e = num_heads, num_kv_heads or num_heads, key_dim or c // num_heads, value_dim or c // num_heads
    scale = d**-0.5 if scale is None else scale
    positions = np.indices(size).reshape(len(size), -1)
    tokens = positions.shape[1]
    pattern = [full(length) for length in size] if pattern is None else pattern
    # The keys are the positions of the feature map. A pattern with a halo adds zeros around the feature map.
    key_positions = np.indices([axis.allowed.shape[1] for axis in pattern]).reshape(len(size), -1)
    # Each pair of query and key has an offset on every axis, (axes, query, key), and is allowed or not, (query, key).
    pairs = list(zip(pattern, positions, key_positions, strict=True))
    offsets = [axis.offset[query][:, key] for axis, query, key in pairs]
    allowed = np.all([axis.allowed[query][:, key] for axis, query, key in pairs], axis=0)
    mask = np.zeros(()) if mask is None else np.where(mask, 0.0, -np.inf) if mask.dtype == bool else mask
    mask = mask + np.where(np.tri(tokens, dtype=bool), 0.0, -np.inf if causal else 0.0)
    mask = zero_pad(np.broadcast_to(mask, (b, n, tokens, tokens)), size, pattern)
    # Each pair has a row in the table of each axis. Offsets outside the table belong to masked pairs and are clipped.
    extents = [axis.extent for axis in pattern]
    rows = [np.clip(by, 1 - extent, extent - 1) + extent - 1 for by, extent in zip(offsets, extents, strict=True)]

    def norm(tokens_of_head: np.ndarray, name: str) -> np.ndarray:
        if f"{name}.weight" not in state:
            return tokens_of_head
        y = tokens_of_head - tokens_of_head.mean(1, keepdims=True)
        y = y / np.sqrt((y**2).mean(1, keepdims=True) + 1e-5)
        return y * state[f"{name}.weight"] + state[f"{name}.bias"]

    def position_bias(q: np.ndarray, head: int) -> np.ndarray:
        """Compute the relative position bias of a head, ``(query, key)``."""
        bias = np.zeros(allowed.shape)
        for extent, row, name in zip(extents, rows, ("depth", "height", "width")[-len(size) :], strict=True):
            if f"position.{name}_rel" in state:
                bias += np.take_along_axis(q @ resize_table(state[f"position.{name}_rel"], extent).T, row, axis=1)
        if position == "table":  # it is indexed by query minus key, so it is flipped
            table = state["position.relative_position_bias_table"][:, head]
            table = np.flip(table.reshape([2 * length - 1 for length in feat_size or extents]))
            for axis, extent in enumerate(extents):
                table = resize_table(table, extent, axis)
            bias += table[tuple(rows)]
        return bias

    out = []
    for image in range(b):
        x_pos = x[image]  # the feature map with its position encoding
        if position == "sines":
            x_pos = x_pos + sin_cos(c, positions, temperature).reshape(x_pos.shape)
        if position == "convolution":
            x_pos = x_pos + depthwise(x_pos, state["position.conv.weight"], state["position.conv.bias"])
        # The channels of the projection are ordered (n·d, m·d, m·e), and the tokens are in row-major order.
        qkv = conv1x1(x_pos, state["qkv.weight"], state.get("qkv.bias")).reshape(-1, tokens)
        parts = zip(np.split(qkv, [n * d, (n + m) * d]), (d, d, e), strict=True)
        queries, keys, values = (part.reshape(-1, width, tokens).transpose(0, 2, 1) for part, width in parts)
        heads = []
        for head in range(n):
            kv_head = head // (n // m)  # consecutive query heads share one head of keys and values
            q, k = norm(queries[head], "q_norm"), norm(keys[kv_head], "k_norm")
            if position == "rotary":
                scaled = positions * np.divide(feat_size or size, size)[:, None]
                q, k = rotate(q, scaled, temperature), rotate(k, scaled, temperature)
            k, v = (zero_pad(part.T, size, pattern).T for part in (k, values[kv_head]))
            bias = position_bias(q, head) + mask[image, head]
            heads.append(attention(q, k, v, scale, np.where(allowed, bias, -np.inf)).T)
        y = np.concatenate(heads).reshape(n * e, *size)
        if "gate.weight" in state:
            y = y / (1 + np.exp(-conv1x1(x[image], state["gate.weight"], state.get("gate.bias"))))
        out.append(conv1x1(y, state["proj.weight"], state.get("proj.bias")))
    return np.stack(out)
