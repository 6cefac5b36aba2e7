"""Position terms: where things are, told to attention, which by itself does not know.

A term is asked for by a small frozen specification and lives in the block as its ``position``. Each acts in one way: on
the map (:class:`ConditionalPos`, :class:`SinCos`), on queries and keys (:class:`Rope2d`, :class:`AbsPos`,
:class:`RelPosDecomposed`) or on the logits (:class:`RelPosTable`).
"""

from vision_attn.attention.position.absolute import AbsPos, ConditionalPos, Rope2d, SinCos
from vision_attn.attention.position.relative import RelPosDecomposed, RelPosTable
from vision_attn.attention.position.term import AnyPosition, BlockShape, PositionTerm, new_term

__all__ = [
    "AbsPos",
    "AnyPosition",
    "BlockShape",
    "ConditionalPos",
    "PositionTerm",
    "RelPosDecomposed",
    "RelPosTable",
    "Rope2d",
    "SinCos",
    "new_term",
]
