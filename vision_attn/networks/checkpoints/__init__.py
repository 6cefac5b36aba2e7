"""Checkpoints: compared in full, and only then loaded; blocks and networks in one form of file."""

from vision_attn.networks.checkpoints.adapter import AdapterReport, load_adapter_, save_adapter
from vision_attn.networks.checkpoints.load import load_checkpoint
from vision_attn.networks.checkpoints.load_report import LoadReport

__all__ = ["AdapterReport", "LoadReport", "load_adapter_", "load_checkpoint", "save_adapter"]
