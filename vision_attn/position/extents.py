"""For which extent of tokens a term of relative positions has its tables."""

from __future__ import annotations

from vision_attn.position.term import BlockShape

__all__ = ["check_feat_size", "table_extents"]


def check_feat_size(owner: str, feat_size: object) -> None:
    """Refuse what is no size of a map.

    Args:
        owner: the specification that it is given to, for the message.
        feat_size: one length for all axes or a tuple of one for each, in positions; None for what follows from the
            pattern.

    Raises:
        ValueError: a length is neither None nor a whole number of at least 1.
    """
    lengths = feat_size if isinstance(feat_size, tuple) else (feat_size,)
    if any(n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 1) for n in lengths):
        raise ValueError(
            f"{owner}: feat_size must be a whole number of at least 1, or a tuple (…, …) of them; got {feat_size!r}"
        )


def table_extents(owner: str, feat_size: int | tuple[int, ...] | None, shape: BlockShape) -> tuple[int, ...]:
    """The tokens along each axis that a table is for: one along an axis without attention.

    Args:
        owner: the specification that asks, for messages.
        feat_size: one length for all axes or a tuple of one for each, in positions; None for what follows from the
            pattern.
        shape: of the block.

    Raises:
        ValueError: ``feat_size`` is missing where it does not follow from the pattern, is not what follows, or is for
            another number of axes.
    """
    tiling, rank = shape.tiling, shape.rank
    given = feat_size if isinstance(feat_size, tuple) else (feat_size,) * rank
    if len(given) != rank:
        raise ValueError(
            f"{owner}: feat_size must be a whole number of at least 1, or a tuple of one for each of {rank} axes; "
            f"got {feat_size!r}"
        )
    extents = []
    for length, fixed, attended in zip(given, tiling.fixed_extents, tiling.attended, strict=True):
        if not attended:
            extents.append(1)
        elif fixed is None:
            if length is None:
                raise ValueError(
                    f"{owner}: feat_size must be given with a pattern whose groups grow with the map: the size of the "
                    f"map that the tables are learned on, as in {owner}(feat_size=(14, 14))"
                )
            extents.append(length)
        else:
            if length not in (None, fixed):
                raise ValueError(
                    f"{owner}: feat_size must be that of the pattern's groups, {tiling.fixed_extents}; "
                    f"got {feat_size!r}: leave it out"
                )
            extents.append(fixed)
    return tuple(extents)
