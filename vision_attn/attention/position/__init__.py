"""Position encodings: absolute and relative positions of queries and keys.

An encoding is selected by a small frozen configuration, such as :class:`Rope`, which builds the module ``position``
of the block. Each encoding changes the feature map (:class:`ConditionalPos`, :class:`SinCos`), the queries and keys
(:class:`Rope`, :class:`AbsPos`) or the logits (:class:`RelPosDecomposed`, :class:`RelPosTable`).
"""

from vision_attn.attention.position.abs_pos import AbsPos
from vision_attn.attention.position.conditional_pos import ConditionalPos
from vision_attn.attention.position.encoding import AnyPosition, PositionBias, PositionEncoding, new_encoding
from vision_attn.attention.position.rel_pos_decomposed import RelPosDecomposed
from vision_attn.attention.position.rel_pos_table import RelPosTable
from vision_attn.attention.position.rope import Rope
from vision_attn.attention.position.sin_cos import SinCos
