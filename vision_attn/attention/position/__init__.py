"""Position encodings: absolute and relative positions of queries and keys.

An encoding is chosen by a small frozen configuration and is the block's module ``position``. Each acts in one way: on
the feature map (:class:`ConditionalPos`, :class:`SinCos`), on queries and keys (:class:`Rope2d`, :class:`AbsPos`) or on
the logits (:class:`RelPosDecomposed`, :class:`RelPosTable`).
"""

from vision_attn.attention.position.abs_pos import AbsPos
from vision_attn.attention.position.conditional_pos import ConditionalPos
from vision_attn.attention.position.encoding import AnyPosition, AttentionShape, PositionEncoding, new_encoding
from vision_attn.attention.position.rel_pos_decomposed import RelPosDecomposed
from vision_attn.attention.position.rel_pos_table import RelPosTable
from vision_attn.attention.position.rope import Rope2d
from vision_attn.attention.position.sin_cos import SinCos
