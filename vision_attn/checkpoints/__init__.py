"""Checkpoints: read safely, compared in full, and only then loaded; written whole or not at all."""

from vision_attn.checkpoints.load import LoadReport, load_checkpoint
from vision_attn.checkpoints.read import CheckpointError, read_checkpoint, read_weights
from vision_attn.checkpoints.write import save_weights, unwrap, write_atomically

__all__ = [
    "CheckpointError",
    "LoadReport",
    "load_checkpoint",
    "read_checkpoint",
    "read_weights",
    "save_weights",
    "unwrap",
    "write_atomically",
]
