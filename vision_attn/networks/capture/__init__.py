"""What a network attends to: the attention maps of a forward pass, and measures of them."""

from vision_attn.networks.capture.attention_map import AttentionMap
from vision_attn.networks.capture.record import Maps, capture
from vision_attn.networks.capture.rollout import rollout

__all__ = ["AttentionMap", "Maps", "capture", "rollout"]
