"""Einsum equations of attention for tensors of any rank, and the attention pattern for a choice of axes.

The equations are the ones that Keras generates for ``MultiHeadAttention``, with one letter of the alphabet per axis.
The letters are the letters of Keras, not the axis names of this package. Tensors have the shape ``(batch, <axes>,
channels)`` before the projection and ``(batch, <axes>, heads, width)`` after it, with any number of axes.
"""

import string
from collections.abc import Sequence
from itertools import islice

from vision_attn.attention.patterns.expression_patterns import Pattern
from vision_attn.attention.patterns.rearrangement import AXES

__all__ = ["attention_equations", "attention_pattern", "projection_equation"]


def projection_equation(free_dims: int, bound_dims: int, output_dims: int) -> tuple[str, str, int]:
    """Return the einsum equation of a projection that contracts the last axes of its input.

    ``<free> <bound>, <bound> <output> -> <free> <output>``

    Args:
        free_dims: number of input axes that are kept: batch and positions.
        bound_dims: number of contracted axes: channels, or heads and width.
        output_dims: number of new axes: heads and width, or channels.

    Returns:
        The equation, the axes of the bias, and the rank of the output.

    Source: Keras, ``keras.layers.MultiHeadAttention``, https://keras.io/api/layers/attention_layers/multi_head_attention/

    Projection from channels to heads and width:

    >>> projection_equation(free_dims=2, bound_dims=1, output_dims=2)
    ('abc,cde->abde', 'de', 4)
    """
    letters = iter(string.ascii_lowercase)
    free, bound, output = ("".join(islice(letters, count)) for count in (free_dims, bound_dims, output_dims))
    return f"{free}{bound},{bound}{output}->{free}{output}", output, free_dims + output_dims


def attention_equations(rank: int, attention_axes: Sequence[int]) -> tuple[str, str, int]:
    """Return the two einsum equations of attention along some axes.

    The equations are for ``logits = einsum(first, k, q)`` and ``y = einsum(second, weights, v)``. Queries, keys and
    values have the shape ``(batch, <axes>, heads, width)``. The weights have the shape ``(<batch axes>, <query axes>,
    <key axes>)``. All other axes, including heads, are batch axes.

    Args:
        rank: number of axes of the queries, including heads and width.
        attention_axes: axes over which attention is applied: at least one, and none of batch, heads and width. Negative
            axes count from the width. In contrast, negative axes of a Keras layer and of :func:`attention_pattern`
            refer to the input, which has one axis fewer.

    Returns:
        Both equations, and the rank of the weights.

    Raises:
        ValueError: the axes do not exist.

    Source: Keras, ``keras.layers.MultiHeadAttention``, https://keras.io/api/layers/attention_layers/multi_head_attention/

    Attention in a sequence of tokens, and in the columns of a feature map:

    >>> attention_equations(4, (1,))
    ('aecd,abcd->acbe', 'acbe,aecd->abcd', 4)
    >>> attention_equations(5, (1,))
    ('afcde,abcde->acdbf', 'acdbf,afcde->abcde', 5)
    """
    axes = tuple(axis + rank if axis < 0 else axis for axis in attention_axes)
    if not axes or len(set(axes)) != len(axes) or any(not 0 < axis < rank - 2 for axis in axes):
        expected = f"distinct axes between the batch and the heads, 1 to {rank - 3} of rank {rank}"
        raise ValueError(f"attention_axes must be {expected}; got {tuple(attention_axes)}")
    letters = string.ascii_lowercase[: rank + len(axes)]
    query = letters[:rank]
    key_letters = dict(zip(sorted(axes), letters[rank:], strict=True))
    key = "".join(key_letters.get(axis, letter) for axis, letter in enumerate(query))
    batch = "".join(letter for axis, letter in enumerate(query[:-1]) if axis not in axes)
    weights = batch + "".join(query[axis] for axis in axes) + "".join(key_letters[axis] for axis in axes)
    return f"{key},{query}->{weights}", f"{weights},{key}->{query}", len(weights)


def attention_pattern(attention_axes: Sequence[int] | None, rank: int) -> str | Pattern:
    """Return the pattern for Keras's ``attention_axes`` on an input ``(batch, <axes>, channels)``.

    Args:
        attention_axes: axes of the input over which attention is applied; all axes of positions if None.
        rank: number of axes of the input, from 3 to 5.

    Returns:
        The name of the pattern if it has one, or a :class:`Pattern`.

    Raises:
        ValueError: the axes do not exist, or the rank is not supported.

    >>> attention_pattern((1,), rank=4), attention_pattern((2,), rank=4), attention_pattern(None, rank=4)
    ('columns', 'rows', 'full')
    >>> attention_pattern((1, 3), rank=5)
    Pattern('b n d t h w -> (b h) n (t w) d')
    """
    if rank - 2 not in range(1, len(AXES) + 1):
        raise ValueError(f"rank must be 3, 4 or 5, for one to three axes of positions, got {rank!r}")
    if attention_axes is None:
        return "full"
    axes = [axis + rank if axis < 0 else axis for axis in attention_axes]
    attention_equations(rank + 1, axes)  # checks the axes; heads are inserted between positions and width
    names = AXES[-(rank - 2) :]
    chosen = frozenset(names[axis - 1] for axis in axes)
    named = {frozenset("w"): "rows", frozenset("h"): "columns", frozenset(names): "full"}
    if chosen in named:
        return named[chosen]
    tokens, groups = (" ".join(name for name in names if (name in chosen) is wanted) for wanted in (True, False))
    return Pattern(f"b n d {' '.join(names)} -> (b {groups}) n ({tokens}) d")
