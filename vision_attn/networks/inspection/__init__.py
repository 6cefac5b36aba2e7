"""A network looked at before anything is inserted: what a block would cost at each stage, and where to put one."""

from vision_attn.networks.inspection.inspect import inspect_model
from vision_attn.networks.inspection.report import Inspection, Site

__all__ = ["Inspection", "Site", "inspect_model"]
