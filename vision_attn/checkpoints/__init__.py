"""Checkpoints: read safely, compared in full, and only then loaded; written whole or not at all."""

from vision_attn.checkpoints.adapter import AdapterReport, load_adapter, save_adapter
from vision_attn.checkpoints.adapters import set_adapter
from vision_attn.checkpoints.load import load_checkpoint
from vision_attn.checkpoints.load_report import LoadReport
from vision_attn.checkpoints.read import read_checkpoint
from vision_attn.checkpoints.write import save_weights, write_atomically
from vision_attn.errors import CheckpointError

__all__ = [
    "AdapterReport",
    "CheckpointError",
    "LoadReport",
    "load_adapter",
    "load_checkpoint",
    "read_checkpoint",
    "save_adapter",
    "save_weights",
    "set_adapter",
    "write_atomically",
]
