"""Attention of other libraries that no block stands for, and why, by the path of its class."""

from __future__ import annotations

__all__ = ["REFUSED"]

ROTATED = "queries and keys are rotated by an argument of its call, or all but one token's, which a block does not do"

REFUSED = {
    "timm.layers.attention.AttentionRope": ROTATED,
    "timm.layers.attention_pool2d.RotAttentionPool2d": ROTATED,
    "timm.models.eva.EvaAttention": ROTATED,
    "timm.models.levit.Attention": "its projections end in batch norms, of which a block has none",
    "timm.models.levit.AttentionDownsample": "its projections end in batch norms, of which a block has none",
    "timm.models.efficientformer_v2.Attention2d": "it mixes the heads of its logits and of its weights (talking heads)",
    "timm.models.efficientformer_v2.Attention2dDownsample": "its projections are batch norms and convolutions as well",
    "timm.models.edgenext.CrossCovarianceAttn": "it attends between channels, not between positions",
    "timm.models.xcit.XCA": "it attends between channels, not between positions",
}
