"""The function of the block, written once in NumPy: the definition that every implementation is tested against.

It imports nothing else of the package, works in float64, and is slow on purpose: one image, one head and every pair of
positions at a time. A pattern is a relation for each axis of the map; a query attends to a key if it does along every
axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# --- attention between tokens -----------------------------------------------------------------------------------------


def softmax(logits: np.ndarray) -> np.ndarray:
    """The softmax over the last axis of ``(…, j)``; a row with only ``-inf`` gives zeros.

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


# --- patterns: for each axis, which positions attend to each other and how far apart they are -------------------------


class Relation(NamedTuple):
    """Along one axis of the map.

    >>> full(3).offset.shape
    (3, 3)
    """

    allowed: np.ndarray  #: ``(query, key)``: whether the query attends to the key
    offset: np.ndarray  #: ``(query, key)``: key minus query, in steps of the pattern
    extent: int  #: the positions of a group
    zeros: tuple[int, int] = (0, 0)  #: keys of zeros before and after the axis


def full(length: int) -> Relation:
    """The relation in which every position attends to every position of the axis.

    >>> full(3).offset[0].tolist()
    [0, 1, 2]
    """
    return window(length, length)


def window(length: int, side: int, shift: int = 0) -> Relation:
    """The relation of windows of ``side`` positions, the first whole one at ``shift``.

    There is no shift where one window holds the axis.

    >>> window(5, 2, shift=1).allowed[1].tolist()
    [False, True, True, False, False]
    """
    position = np.arange(length)
    number = (position - (shift if length > side else 0)) // side
    return Relation(number[None, :] == number[:, None], position[None, :] - position[:, None], side)


def stripes(length: int, every: int) -> Relation:
    """The relation of positions that are a multiple of ``every`` apart; of each with itself if that is the length.

    >>> stripes(4, every=2).allowed[0].tolist()
    [True, False, True, False]
    """
    remainder, step = np.arange(length) % every, np.arange(length) // every
    return Relation(remainder[None, :] == remainder[:, None], step[None, :] - step[:, None], int(step[-1]) + 1)


def grid(length: int, side: int) -> Relation:
    """The relation of positions that are as far apart as lets ``side`` of them fill the axis.

    >>> grid(6, 2).allowed[1].tolist()
    [False, True, False, False, True, False]
    """
    return stripes(length, -(-length // side))._replace(extent=side)


def halo(length: int, block: int, halo: int) -> Relation:
    """The relation of blocks of ``block`` positions to the keys in them and in ``halo`` positions around them.

    Keys beyond the axis are zeros after normalization and rotation, and are attended to.

    Args:
        length: of the axis, in positions.
        block: side of a block, in positions.
        halo: how far a block attends beyond each of its sides, in positions.

    >>> halo(3, 2, 1).allowed.astype(int).tolist()
    [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]]
    """
    after = -length % block + halo
    query, key = np.arange(length)[:, None], np.arange(-halo, length + after)[None, :]
    start = query // block * block
    allowed = (key >= start - halo) & (key < start + block + halo)
    return Relation(allowed, key - query, block + halo, zeros=(halo, after))


def neighborhood(length: int, kernel: int, dilation: int = 1, stride: int = 1, causal: bool = False) -> Relation:
    """The relation to the ``kernel`` positions around each, shifted at the ends so that they lie on the axis.

    Args:
        length: of the axis, in positions.
        kernel: how many positions each one attends to.
        dilation: positions from one of them to the next.
        stride: how many in a row attend to the keys of the one in their middle; of the last of them, if it is causal.
        causal: whether each attends only to the positions before it, and to itself.

    >>> neighborhood(5, 3).allowed[0].tolist()
    [True, True, True, False, False]
    """
    allowed = np.zeros((length, length), bool)
    for query in range(length):
        keys = np.arange(query % dilation, length, dilation)
        group = query // dilation // stride * stride
        leader = min(group + (stride - 1 if causal else stride // 2), len(keys) - 1)
        first = max(leader - kernel + 1, 0) if causal else min(max(leader - kernel // 2, 0), max(len(keys) - kernel, 0))
        allowed[query, keys[first : query // dilation + 1 if causal else first + kernel]] = True
    step = np.arange(length) // dilation
    return Relation(allowed, step[None, :] - step[:, None], kernel)


def with_zeros(x: np.ndarray, size: Sequence[int], pattern: Sequence[Relation]) -> np.ndarray:
    """Tokens ``(…, j)`` of a map of this size, and those of the zeros around it."""
    padded = np.pad(x.reshape(*x.shape[:-1], *size), [(0, 0)] * (x.ndim - 1) + [axis.zeros for axis in pattern])
    return padded.reshape(*x.shape[:-1], -1)


# --- position encodings -----------------------------------------------------------------------------------------------


def resize_table(table: np.ndarray, extent: int, axis: int = 0) -> np.ndarray:
    """A table by offset, for groups of another extent: its ends and its middle stay, what is between is linear.

    Args:
        table: ``2s - 1`` long along ``axis``, by offset from ``1 - s`` to ``s - 1``.
        extent: the positions of a group.
        axis: which axis.

    Returns:
        The table, ``2·extent - 1`` long along ``axis``.

    >>> resize_table(np.array([0.0, 2.0, 4.0]), 3).tolist()
    [0.0, 1.0, 2.0, 3.0, 4.0]
    """
    reach = (table.shape[axis] - 1) / 2
    offsets = np.arange(1 - extent, extent) * (reach / (extent - 1) if extent > 1 else 0.0)
    return np.apply_along_axis(lambda values: np.interp(offsets, np.arange(len(values)) - reach, values), axis, table)


def axial_angles(count: int, positions: np.ndarray, temperature: float) -> np.ndarray:
    """The angles of ``count`` waves along each axis at every position ``(axes, i)``, ``(axes·count, i)``."""
    frequency = temperature ** -(np.arange(count) / count)
    return np.concatenate([frequency[:, None] * position for position in positions])


def rotate(q: np.ndarray, positions: np.ndarray, temperature: float) -> np.ndarray:
    """Rotary positions: pairs of ``(i, d)`` as complex numbers, rotated by the position ``(axes, i)`` of each token."""
    pairs = q[:, 0::2] + 1j * q[:, 1::2]
    pairs = pairs * np.exp(1j * axial_angles(pairs.shape[1] // len(positions), positions, temperature).T)
    return np.stack([pairs.real, pairs.imag], axis=-1).reshape(q.shape)


def sin_cos(channels: int, positions: np.ndarray, temperature: float) -> np.ndarray:
    """Sines and cosines of every position ``(axes, i)``, ``(channels, i)``."""
    angles = axial_angles(channels // (2 * len(positions)), positions, temperature)
    return np.concatenate([np.sin(angles), np.cos(angles)])


def depthwise(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """A convolution of each channel of a map separately, with zeros around the map."""
    padded = np.pad(x, [(0, 0), *((side // 2,) * 2 for side in weight.shape[2:])])
    y = np.zeros_like(x) + bias.reshape(-1, *(1,) * (x.ndim - 1))
    for tap in np.ndindex(*weight.shape[2:]):
        part = padded[(slice(None), *(slice(at, at + length) for at, length in zip(tap, x.shape[1:], strict=True)))]
        y += weight[(slice(None), 0, *tap)].reshape(-1, *(1,) * len(tap)) * part
    return y


# --- the block --------------------------------------------------------------------------------------------------------


def conv1x1(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """A 1×1 convolution of one map ``(c, h, w)``: the same linear layer at every position.

    Args:
        x: the map, ``(c, h, w)``, or with another number of axes.
        weight: ``(out, c, 1, 1)``.
        bias: ``(out,)``, or None.

    Returns:
        ``(out, h, w)``.

    >>> conv1x1(np.ones((2, 4, 5)), np.ones((3, 2, 1, 1)), None).shape
    (3, 4, 5)
    """
    y = np.tensordot(weight.reshape(weight.shape[:2]), x, axes=1)
    return y if bias is None else y + bias.reshape(-1, *(1,) * (x.ndim - 1))


def attention_map(
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
    """The block of :class:`vision_attn.Attention2d` on a batch of maps, from its state dict.

    Args:
        x: maps, ``(b, c, h, w)``, or with one axis or three.
        state: ``qkv.weight, proj.weight`` and, where the block has them, ``qkv.bias, proj.bias, q_norm.*, k_norm.*,
            gate.*, position.*``.
        num_heads: number of heads.
        key_dim: width of queries and keys in a head; ``c / heads`` when None.
        value_dim: width of values in a head; ``c / heads`` when None.
        num_kv_heads: number of heads of keys and values; ``num_heads`` when None.
        scale: factor on the logits; ``key_dim ** -0.5`` when None.
        mask: broadcastable to ``(b, heads, tokens, tokens)``; bool (True = may attend) or additive.
        causal: whether a position attends to no later one.
        pattern: a relation for each axis; :func:`full` when None.
        position: ``"decomposed"``, ``"table"``, ``"rotary"``, ``"sines"``, ``"convolution"`` or None.
        feat_size: for each axis, the size that a table of relative positions is for, or that rotary positions are
            scaled to; that of the map when None.
        temperature: of rotary positions and of sines.

    Returns:
        ``(b, out, h, w)`` in float64.

    >>> state = {"qkv.weight": np.ones((12, 4, 1, 1)), "proj.weight": np.ones((4, 4, 1, 1))}
    >>> attention_map(np.ones((2, 4, 3, 5)), state, num_heads=2).shape
    (2, 4, 3, 5)
    """
    x = x.astype(np.float64)
    state = {key: value.astype(np.float64) for key, value in state.items()}
    b, c, *size = x.shape
    n, m, d, e = num_heads, num_kv_heads or num_heads, key_dim or c // num_heads, value_dim or c // num_heads
    scale = d**-0.5 if scale is None else scale
    positions = np.indices(size).reshape(len(size), -1)
    tokens = positions.shape[1]
    pattern = [full(length) for length in size] if pattern is None else pattern
    # Keys are the positions of the map and, where a pattern has them, zeros around it.
    key_positions = np.indices([axis.allowed.shape[1] for axis in pattern]).reshape(len(size), -1)
    # One entry for each pair of a query and a key, (axes, query, key) and (query, key).
    pairs = list(zip(pattern, positions, key_positions, strict=True))
    offsets = [axis.offset[query][:, key] for axis, query, key in pairs]
    allowed = np.all([axis.allowed[query][:, key] for axis, query, key in pairs], axis=0)
    mask = np.zeros(()) if mask is None else np.where(mask, 0.0, -np.inf) if mask.dtype == bool else mask
    mask = mask + np.where(np.tri(tokens, dtype=bool), 0.0, -np.inf if causal else 0.0)
    mask = with_zeros(np.broadcast_to(mask, (b, n, tokens, tokens)), size, pattern)
    # The row of a table for each pair: keys of a tile that are farther away than any in a group are masked.
    extents = [axis.extent for axis in pattern]
    rows = [np.clip(by, 1 - extent, extent - 1) + extent - 1 for by, extent in zip(offsets, extents, strict=True)]

    def norm(tokens_of_head: np.ndarray, name: str) -> np.ndarray:
        if f"{name}.weight" not in state:
            return tokens_of_head
        y = tokens_of_head - tokens_of_head.mean(1, keepdims=True)
        y = y / np.sqrt((y**2).mean(1, keepdims=True) + 1e-5)
        return y * state[f"{name}.weight"] + state[f"{name}.bias"]

    def position_bias(q: np.ndarray, head: int) -> np.ndarray:
        """The relative position bias that is added to the logits of a head."""
        bias = np.zeros(allowed.shape)
        for extent, row, name in zip(extents, rows, ("depth", "height", "width")[-len(size) :], strict=True):
            if f"position.{name}_rel" in state:
                bias += np.take_along_axis(q @ resize_table(state[f"position.{name}_rel"], extent).T, row, axis=1)
        if position == "table":  # by query minus key
            table = state["position.relative_position_bias_table"][:, head]
            table = np.flip(table.reshape([2 * length - 1 for length in feat_size or extents]))
            for axis, extent in enumerate(extents):
                table = resize_table(table, extent, axis)
            bias += table[tuple(rows)]
        return bias

    out = []
    for image in range(b):
        one = x[image]
        if position == "sines":
            one = one + sin_cos(c, positions, temperature).reshape(one.shape)
        if position == "convolution":
            one = one + depthwise(one, state["position.conv.weight"], state["position.conv.bias"])
        # The channels of the projection are ordered [heads·d, kv_heads·d, kv_heads·e], the tokens row by row.
        qkv = conv1x1(one, state["qkv.weight"], state.get("qkv.bias")).reshape(-1, tokens)
        queries, keys, values = (
            part.reshape(-1, width, tokens).transpose(0, 2, 1)
            for part, width in zip(np.split(qkv, [n * d, (n + m) * d]), (d, d, e), strict=True)
        )
        heads = []
        for head in range(n):
            shared = head // (n // m)
            q, k = norm(queries[head], "q_norm"), norm(keys[shared], "k_norm")
            if position == "rotary":
                scaled = positions * np.divide(feat_size or size, size)[:, None]
                q, k = rotate(q, scaled, temperature), rotate(k, scaled, temperature)
            k, v = (with_zeros(part.T, size, pattern).T for part in (k, values[shared]))
            bias = position_bias(q, head) + mask[image, head]
            heads.append(attention(q, k, v, scale, np.where(allowed, bias, -np.inf)).T)
        y = np.concatenate(heads).reshape(n * e, *size)
        if "gate.weight" in state:
            y = y / (1 + np.exp(-conv1x1(x[image], state["gate.weight"], state.get("gate.bias"))))
        out.append(conv1x1(y, state["proj.weight"], state.get("proj.bias")))
    return np.stack(out)
