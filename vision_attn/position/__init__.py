"""Position terms: where things are, told to attention, which by itself does not know.

A term is asked for by a small frozen specification and lives in the block as its ``position``. Each acts in one place:
on the map (:class:`ConditionalPos`, :class:`SinCos`), on queries and keys (:class:`Rope2d`,
:class:`RelPosDecomposed`) or on the logits (:class:`RelPosTable`).
"""

from vision_attn.position.absolute import CONVOLUTIONS, ConditionalPos, SinCos
from vision_attn.position.decomposed import RelPosDecomposed
from vision_attn.position.resample import resample
from vision_attn.position.rotary import Rope2d
from vision_attn.position.table import RelPosTable
from vision_attn.position.term import BlockShape, PositionTerm, Specification

__all__ = [
    "CONVOLUTIONS",
    "BlockShape",
    "ConditionalPos",
    "PositionTerm",
    "RelPosDecomposed",
    "RelPosTable",
    "Rope2d",
    "SinCos",
    "Specification",
    "resample",
]
