"""What the block computes, written once in NumPy: the definition that every implementation is tested against.

It imports nothing of ours, works in float64, and is slow on purpose: one image, one head and every pair of positions at
a time. A pattern is a relation for each axis of the map; a pair of positions is in it if every axis says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# --- attention between tokens -----------------------------------------------------------------------------------------


def softmax(logits: np.ndarray) -> np.ndarray:
    """The softmax over the last axis; a row of nothing but ``-inf`` gives zeros.

    ``softmax(l)_j = exp(l_j - max l) / sum_j' exp(l_j' - max l)``

    Args:
        logits: ``(…, j)``.

    Returns:
        The weights, ``(…, j)``.

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


# --- patterns: for each axis, which places see each other and how far apart they are ----------------------------------


class Relation(NamedTuple):
    """Along one axis of the map.

    >>> along(3).offset.shape
    (3, 3)
    """

    allowed: np.ndarray  #: ``(query, key)``: whether they see each other
    offset: np.ndarray  #: ``(query, key)``: key less query, in steps of the pattern
    extent: int  #: how many places a group has
    zeros: tuple[int, int] = (0, 0)  #: keys of zeros before and after the axis


def along(length: int) -> Relation:
    """The relation in which every place sees every place of the axis.

    Args:
        length: of the axis, in positions.

    >>> along(3).offset[0].tolist()
    [0, 1, 2]
    """
    place = np.arange(length)
    return Relation(np.ones((length, length), bool), place[None, :] - place[:, None], length)


def alike(length: int, every: int | None = None) -> Relation:
    """The relation in which a place sees itself only or, with ``every``, the places that leave the same remainder.

    Args:
        length: of the axis, in positions.
        every: what the places are divided by.

    >>> alike(4, every=2).allowed[0].tolist()
    [True, False, True, False]
    """
    place = np.arange(length)
    kind, step = (place, place * 0) if every is None else (place % every, place // every)
    return Relation(kind[None, :] == kind[:, None], step[None, :] - step[:, None], int(step.max()) + 1)


def window(length: int, side: int, shift: int = 0) -> Relation:
    """The relation of windows of ``side`` places, the first whole one at ``shift``.

    There is no shift where one window holds the axis.

    Args:
        length: of the axis, in positions.
        side: of a window, in positions.
        shift: where the first whole window begins, in positions.

    >>> window(5, 2, shift=1).allowed[1].tolist()
    [False, True, True, False, False]
    """
    place = np.arange(length)
    number = (place - (shift if length > side else 0)) // side
    return Relation(number[None, :] == number[:, None], place[None, :] - place[:, None], side)


def grid(length: int, side: int) -> Relation:
    """The relation of places that lie apart by as many steps as make ``side`` of them fill the axis.

    Args:
        length: of the axis, in positions.
        side: of a grid, in places.

    >>> grid(6, 2).allowed[1].tolist()
    [False, True, False, False, True, False]
    """
    steps = -(-length // side)
    place = np.arange(length)
    remainder, number = place % steps, place // steps
    return Relation(remainder[None, :] == remainder[:, None], number[None, :] - number[:, None], side)


def halo(length: int, block: int, halo: int) -> Relation:
    """The relation of blocks of ``block`` places to the keys in them and in ``halo`` places around them.

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
    return Relation(allowed, key - query, block + halo, (halo, after))


def neighborhood(length: int, kernel: int, dilation: int = 1, stride: int = 1, causal: bool = False) -> Relation:
    """The relation to the ``kernel`` places around each, shifted at the ends so that they lie on the axis.

    Args:
        length: of the axis, in positions.
        kernel: how many places each one sees.
        dilation: positions from one of them to the next.
        stride: how many in a row see what the one in their middle sees; the last of them, if it is causal.
        causal: whether each sees the places before it only, and itself.

    >>> neighborhood(5, 3).allowed[0].tolist()
    [True, True, True, False, False]
    """
    allowed = np.zeros((length, length), bool)
    for query in range(length):
        keys = np.arange(query % dilation, length, dilation)
        group = query // dilation // stride * stride
        leader = min(group + (stride - 1 if causal else stride // 2), len(keys) - 1)
        if causal:
            seen = keys[max(leader - kernel + 1, 0) : query // dilation + 1]
        else:
            first = min(max(leader - kernel // 2, 0), max(len(keys) - kernel, 0))
            seen = keys[first : first + kernel]
        allowed[query, seen] = True
    place = np.arange(length) // dilation
    return Relation(allowed, place[None, :] - place[:, None], kernel)


# --- position terms ---------------------------------------------------------------------------------------------------


def stretched(table: np.ndarray, extent: int, axis: int = 0) -> np.ndarray:
    """A table by offset, for groups of another extent: its ends and its middle stay, what is between is linear.

    Args:
        table: ``2s - 1`` long along ``axis``, by offset from ``1 - s`` to ``s - 1``.
        extent: how many places a group has.
        axis: which axis.

    Returns:
        The table, ``2·extent - 1`` long along ``axis``.

    >>> stretched(np.array([0.0, 2.0, 4.0]), 3).tolist()
    [0.0, 1.0, 2.0, 3.0, 4.0]
    """
    reach = (table.shape[axis] - 1) / 2
    offsets = np.arange(1 - extent, extent) * (reach / (extent - 1) if extent > 1 else 0.0)
    return np.apply_along_axis(lambda values: np.interp(offsets, np.arange(len(values)) - reach, values), axis, table)


def turned(q: np.ndarray, places: np.ndarray, temperature: float) -> np.ndarray:
    """Rotary positions: pairs of ``(i, d)`` as complex numbers, turned by the place ``(axes, i)`` of each token."""
    pairs = q[:, 0::2] + 1j * q[:, 1::2]
    each = pairs.shape[1] // len(places)
    speed = temperature ** -(np.arange(each) / each)
    angles = np.concatenate([place[:, None] * speed for place in places], axis=1)
    pairs = pairs * np.exp(1j * angles)
    return np.stack([pairs.real, pairs.imag], axis=-1).reshape(q.shape)


def waves(channels: int, places: np.ndarray, temperature: float) -> np.ndarray:
    """Sines and cosines of every place ``(axes, i)``, ``(channels, i)``."""
    each = channels // (2 * len(places))
    speed = temperature ** -(np.arange(each) / each)
    angles = np.concatenate([speed[:, None] * place for place in places])
    return np.concatenate([np.sin(angles), np.cos(angles)])


def depthwise(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """A convolution of each channel of a map by itself, with zeros around the map."""
    reach = [side // 2 for side in weight.shape[2:]]
    padded = np.pad(x, [(0, 0), *((by, by) for by in reach)])
    y = np.zeros_like(x)
    for tap in np.ndindex(*weight.shape[2:]):
        part = padded[(slice(None), *(slice(at, at + length) for at, length in zip(tap, x.shape[1:], strict=True)))]
        y += weight[(slice(None), 0, *tap)].reshape(-1, *(1,) * len(reach)) * part
    return y + bias.reshape(-1, *(1,) * len(reach))


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
        causal: whether a position sees no later one.
        pattern: a relation for each axis; every position sees every other when None.
        position: ``"decomposed"``, ``"table"``, ``"rotary"``, ``"waves"``, ``"convolution"`` or None.
        feat_size: for each axis, how many places a table of relative positions is for, or over how many rotary
            positions are measured; as many as there are when None.
        temperature: of rotary positions and of waves.

    Returns:
        ``(b, out, h, w)`` in float64.

    >>> state = {"qkv.weight": np.ones((12, 4, 1, 1)), "proj.weight": np.ones((4, 4, 1, 1))}
    >>> attention_map(np.ones((2, 4, 3, 5)), state, num_heads=2).shape
    (2, 4, 3, 5)
    """
    x = x.astype(np.float64)
    state = {key: value.astype(np.float64) for key, value in state.items()}
    b, c, *size = x.shape
    n, m = num_heads, num_heads if num_kv_heads is None else num_kv_heads
    d, e = c // n if key_dim is None else key_dim, c // n if value_dim is None else value_dim
    scale = d**-0.5 if scale is None else scale
    places = np.indices(size).reshape(len(size), -1)
    tokens = places.shape[1]
    pattern = [along(length) for length in size] if pattern is None else pattern
    # Keys are the positions of the map and, where a pattern has them, zeros around it.
    keys = np.indices([length + sum(axis.zeros) for axis, length in zip(pattern, size, strict=True)])
    keys = keys.reshape(len(size), -1)
    before = np.array([axis.zeros[0] for axis in pattern])[:, None]
    on_map = np.all((keys >= before) & (keys < before + np.array(size)[:, None]), axis=0)
    # One entry for each pair of a query and a key, (axes, query, key) and (query, key).
    pairs = list(zip(pattern, places, keys, strict=True))
    offsets = np.stack([axis.offset[query][:, key] for axis, query, key in pairs])
    allowed = np.all([axis.allowed[query][:, key] for axis, query, key in pairs], axis=0)
    if causal:
        allowed[:, on_map] &= np.tri(tokens, dtype=bool)
    if mask is not None:
        mask = np.broadcast_to(mask, (b, n, tokens, tokens))

    def with_zeros(tokens_of_head: np.ndarray) -> np.ndarray:
        """The keys or values of a head, with the zeros around the map."""
        y = np.zeros((len(on_map), tokens_of_head.shape[1]))
        y[on_map] = tokens_of_head
        return y

    def norm(tokens_of_head: np.ndarray, name: str) -> np.ndarray:
        if f"{name}.weight" not in state:
            return tokens_of_head
        y = tokens_of_head - tokens_of_head.mean(1, keepdims=True)
        y = y / np.sqrt((y**2).mean(1, keepdims=True) + 1e-5)
        return y * state[f"{name}.weight"] + state[f"{name}.bias"]

    def bias_of(q: np.ndarray, head: int) -> np.ndarray:
        """What the term of positions adds to the logits of a head."""
        bias = np.zeros(allowed.shape)
        if position == "decomposed":
            for axis, name in enumerate(("depth", "height", "width")[-len(size) :]):
                if f"position.{name}_rel" in state:
                    extent = pattern[axis].extent
                    table = stretched(state[f"position.{name}_rel"], extent)
                    row = np.clip(offsets[axis], 1 - extent, extent - 1) + extent - 1
                    bias += np.take_along_axis(q @ table.T, row, axis=1)
        if position == "table":
            table = state["position.relative_position_bias_table"][:, head]
            extents = [axis.extent for axis in pattern]
            table = table.reshape([2 * extent - 1 for extent in (extents if feat_size is None else feat_size)])
            for axis, extent in enumerate(extents):
                table = stretched(table, extent, axis)
            row = [np.clip(-o, 1 - extent, extent - 1) + extent - 1 for o, extent in zip(offsets, extents, strict=True)]
            bias += table[tuple(row)]
        return bias

    out = []
    for image in range(b):
        one = x[image]
        if position == "waves":
            one = one + waves(c, places, temperature).reshape(one.shape)
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
                measured = places * (np.ones(len(size)) if feat_size is None else np.divide(feat_size, size))[:, None]
                q, k = turned(q, measured, temperature), turned(k, measured, temperature)
            bias = bias_of(q, head)
            if mask is not None:
                given = mask[image, head]
                masked = bias[:, on_map]
                bias[:, on_map] = np.where(given, masked, -np.inf) if given.dtype == bool else masked + given
            y = attention(q, with_zeros(k), with_zeros(values[shared]), scale, np.where(allowed, bias, -np.inf))
            heads.append(y.T)
        y = np.concatenate(heads).reshape(n * e, *size)
        if "gate.weight" in state:
            y = y / (1 + np.exp(-conv1x1(x[image], state["gate.weight"], state.get("gate.bias"))))
        out.append(conv1x1(y, state["proj.weight"], state.get("proj.bias")))
    return np.stack(out)
