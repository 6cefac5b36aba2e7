"""Einsum equations of attention for tensors of any rank, and the pattern that attention along some axes is.

Keras writes its ``MultiHeadAttention`` so, one letter of the alphabet an axis: these are Keras's letters, letter for
letter, and not those of this package. Tensors are ``(batch, <axes>, channels)`` before the projection and ``(batch,
<axes>, heads, width)`` after it, whatever the number of axes.
"""

from __future__ import annotations

import string
from collections.abc import Sequence

from vision_attn.attention.patterns.line import AXES
from vision_attn.attention.patterns.lines import Pattern

__all__ = ["attention_equations", "attention_pattern", "projection_equation"]


def projection_equation(free_dims: int, bound_dims: int, output_dims: int) -> tuple[str, str, int]:
    """The equation of a projection that contracts the last axes of its input.

    ``<free> <bound>, <bound> <output> -> <free> <output>``

    Args:
        free_dims: axes of the input that stay: batch and positions.
        bound_dims: axes that are contracted: channels, or heads and width.
        output_dims: axes that take their place: heads and width, or channels.

    Returns:
        The equation, the axes of its bias, and the rank of its output.

    Raises:
        ValueError: more axes than letters.

    Source: Keras, ``keras.layers.MultiHeadAttention``, https://keras.io/api/layers/attention_layers/multi_head_attention/

    From channels to heads and width:

    >>> projection_equation(free_dims=2, bound_dims=1, output_dims=2)
    ('abc,cde->abde', 'de', 4)
    """
    letters = letters_for(free_dims + bound_dims + output_dims)
    free, bound = letters[:free_dims], letters[free_dims : free_dims + bound_dims]
    output = letters[free_dims + bound_dims :]
    return f"{free}{bound},{bound}{output}->{free}{output}", output, free_dims + output_dims


def attention_equations(rank: int, attention_axes: Sequence[int]) -> tuple[str, str, int]:
    """The two equations of attention along some axes; all other axes but the last are batch axes.

    ``logits = einsum(first, k, q)`` and ``y = einsum(second, weights, v)`` with queries, keys and values ``(batch,
    <axes>, heads, width)``, and weights ``(<batch axes>, <query axes>, <key axes>)``, where heads are a batch axis.

    Args:
        rank: number of axes of the queries, heads and width among them.
        attention_axes: axes along which is attended, at least one, none of them batch, heads or width; negative ones
            count from the width, whereas those of a layer of Keras, and of :func:`attention_pattern`, count on the
            input, which has one axis less.

    Returns:
        Both equations, and the rank of the weights.

    Raises:
        ValueError: no such axes, or more axes than letters.

    Source: Keras, ``keras.layers.MultiHeadAttention``, https://keras.io/api/layers/attention_layers/multi_head_attention/

    A sequence of tokens, and then the columns of a map:

    >>> attention_equations(4, (1,))
    ('aecd,abcd->acbe', 'acbe,aecd->abcd', 4)
    >>> attention_equations(5, (1,))
    ('afcde,abcde->acdbf', 'acdbf,afcde->abcde', 5)
    """
    axes = tuple(axis + rank if axis < 0 else axis for axis in attention_axes)
    if not axes or len(set(axes)) != len(axes) or any(not 0 < axis < rank - 2 for axis in axes):
        raise ValueError(
            f"attention_axes must be different axes between the batch and the heads, 1 to {rank - 3} of rank {rank}; "
            f"got {tuple(attention_axes)}"
        )
    letters = letters_for(rank + len(axes))
    query = letters[:rank]
    key_letters = dict(zip(sorted(axes), letters[rank:], strict=True))
    key = "".join(key_letters.get(axis, letter) for axis, letter in enumerate(query))
    batch = "".join(letter for axis, letter in enumerate(query[:-1]) if axis not in axes)
    weights = batch + "".join(query[axis] for axis in axes) + "".join(key_letters[axis] for axis in axes)
    return f"{key},{query}->{weights}", f"{weights},{key}->{query}", len(weights)


def attention_pattern(attention_axes: Sequence[int] | None, rank: int) -> str | Pattern:
    """The pattern of Keras's ``attention_axes`` on an input ``(batch, <axes>, channels)``.

    Args:
        attention_axes: axes of the input along which is attended; all when None.
        rank: number of axes of the input, three to five: that of a map here, which has its channels second.

    Returns:
        The pattern's name where it has one, else its line.

    Raises:
        ValueError: no such axes, or a rank that no map has.

    >>> attention_pattern((1,), rank=4), attention_pattern((2,), rank=4), attention_pattern(None, rank=4)
    ('columns', 'rows', 'full')
    >>> attention_pattern((1, 3), rank=5)
    Pattern('b n d t h w -> (b h) n (t w) d')
    """
    if rank - 2 not in range(1, len(AXES) + 1):
        raise ValueError(f"rank must be 3, 4 or 5, for maps with one to three axes; got {rank!r}")
    if attention_axes is None:
        return "full"
    axes = [axis + rank if axis < 0 else axis for axis in attention_axes]
    attention_equations(rank + 1, axes)  # checks them: heads come between positions and width
    names = AXES[-(rank - 2) :]
    chosen = frozenset(names[axis - 1] for axis in axes)
    named = {frozenset("w"): "rows", frozenset("h"): "columns", frozenset(names): "full"}
    if chosen in named:
        return named[chosen]
    tokens, groups = (" ".join(name for name in names if (name in chosen) is wanted) for wanted in (True, False))
    return Pattern(f"b n d {' '.join(names)} -> (b {groups}) n ({tokens}) d")


def letters_for(count: int) -> str:
    if count > len(string.ascii_lowercase):
        raise ValueError(f"an equation has at most {len(string.ascii_lowercase)} axes; got {count}")
    return string.ascii_lowercase[:count]
