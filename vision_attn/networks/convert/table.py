"""The table: a row for each attention layer of another library, by the path of its class.

No library is imported to be asked. To add a layer, add its row: what its weights are in our order, and what else the
block has to know. ``from_layer``, ``swap_`` and the table in the docs read it, and each proves the row on every layer.
"""

from __future__ import annotations

from typing import Any

from vision_attn.networks.convert import other_layers, timm_layers
from vision_attn.networks.convert.proof import path_of
from vision_attn.networks.convert.row import Row

#: Rows by the path of the class.
TABLE: dict[str, Row] = {**timm_layers.ROWS, **other_layers.ROWS}

#: Why no row is for layers that attend, by the names of their classes.
LEFT = {
    "XCA ChannelAttention ChannelAttentionV2 CrossCovarianceAttn": "it attends between channels, not positions",
    "LiteMLA FactorAttnConvRelPosEnc LinearSelfAttention EfficientAdditiveAttention": "it has no softmax",
    "ClassAttn": "only its class token attends",
    "GPSA": "it adds two softmaxes, of contents and of places",
    "TalkingHeadAttn": "it mixes its heads before and after the softmax",
    "CascadedGroupAttention": "each head is given what the one before it found",
    "OutlookAttention": "a position says where it looks without keys",
    "EvaAttention AttentionRope": "its network hands it the rotation of queries and keys",
    "MaskFormerDetrSelfAttention MaskFormerDetrCrossAttention": "its keys have positions that its values have not",
    "MultiScaleAttention": "its queries are pooled after their projection",
    "MaskUnitAttention": "its tokens are in the order of its units",
}


def known_class(module: object) -> type | None:
    """The class that a layer is known by; None if it is not known."""
    return next((kind for kind in type(module).__mro__ if path_of(kind) in TABLE), None)


def row_of(module: object) -> tuple[str, Any, Row]:
    """The path of the class that a layer is known by, the class, and its row; refused with a reason."""
    path = path_of(kind := known_class(module) or type(module))
    if path not in TABLE:
        why = next((f": {reason}" for names, reason in LEFT.items() if kind.__name__ in names.split()), "")
        raise ValueError(f"no row of the table is for {path}{why}")
    return path, kind, TABLE[path]
