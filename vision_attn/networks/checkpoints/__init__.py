"""Checkpoints: read safely, compared in full, and only then loaded; written whole or not at all."""

from vision_attn.errors import CheckpointError
from vision_attn.networks.checkpoints.adapter import AdapterReport, load_adapter_, save_adapter
from vision_attn.networks.checkpoints.adapters import set_adapter
from vision_attn.networks.checkpoints.load import load_checkpoint
from vision_attn.networks.checkpoints.load_report import LoadReport
from vision_attn.networks.checkpoints.weights import save_weights
from vision_attn.networks.safe import read_checkpoint, write_atomically

__all__ = [
    "AdapterReport",
    "CheckpointError",
    "LoadReport",
    "load_adapter_",
    "load_checkpoint",
    "read_checkpoint",
    "save_adapter",
    "save_weights",
    "set_adapter",
    "write_atomically",
]
