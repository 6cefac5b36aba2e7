"""Load checkpoints after a complete comparison with the model, and save blocks as adapters."""

from vision_attn.networks.checkpoints.adapter import AdapterReport, load_adapter_, save_adapter
from vision_attn.networks.checkpoints.load import load_checkpoint_
from vision_attn.networks.checkpoints.load_report import LoadReport
