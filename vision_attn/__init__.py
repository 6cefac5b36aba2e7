"""vision_attn: spatial multi-head attention for convolutional networks.

The letters, in einx strings, einsum strings and docstrings alike:

===  =====================================
b    batch
c    channels
h w  height and width of a map
n    heads (``h`` never means heads)
i    query token
j    key token
d    width of queries and keys in one head
e    width of values in one head
===  =====================================

Importing this package is light: einx, timm, matplotlib and accelerate are loaded by what needs them.
"""

import importlib
from typing import TYPE_CHECKING

from vision_attn import convert
from vision_attn.attend import IMPLS, register_impl
from vision_attn.blocks import (
    Attention1d,
    Attention2d,
    Attention3d,
    AttentionBlock1d,
    AttentionBlock2d,
    AttentionBlock3d,
    AugmentedConv2d,
    ConvBlock2d,
    LinearAttention2d,
    NormBlock2d,
    SqueezeExciteBlock2d,
    StridedAttention2d,
    TransformerBlock2d,
    set_impl,
    use_impl,
)
from vision_attn.capture import AttentionMap, capture, rollout
from vision_attn.checkpoints import AdapterReport, LoadReport, load_adapter, load_checkpoint, save_adapter, set_adapter
from vision_attn.contribution import Contribution, closed, contribution
from vision_attn.convert.swap import SwapReport, swap_, swap_back_
from vision_attn.errors import CheckpointError, SiteError, VisionAttnError
from vision_attn.insertion import (
    InsertionReport,
    check_optimizer,
    freeze_backbone_,
    freeze_gates_,
    gates,
    insert_,
    inserted,
    parameter_groups,
    print_trainable_parameters,
    remove_,
    replace_,
    set_gates_,
    stage_names,
    timm_layer,
)
from vision_attn.inspection import Inspection, inspect_model
from vision_attn.patterns import Grid, Halo, Neighborhood, Pattern, Window
from vision_attn.position import AbsPos, ConditionalPos, RelPosDecomposed, RelPosTable, Rope2d, SinCos
from vision_attn.version import __version__ as __version__

if TYPE_CHECKING:
    from vision_attn.explorer import explore
    from vision_attn.export.classifier import Classifier, load_run
    from vision_attn.models.folder import load_model, save_model

__all__ = [
    "IMPLS",
    "AbsPos",
    "AdapterReport",
    "Attention1d",
    "Attention2d",
    "Attention3d",
    "AttentionBlock1d",
    "AttentionBlock2d",
    "AttentionBlock3d",
    "AttentionMap",
    "AugmentedConv2d",
    "CheckpointError",
    "Classifier",
    "ConditionalPos",
    "Contribution",
    "ConvBlock2d",
    "Grid",
    "Halo",
    "InsertionReport",
    "Inspection",
    "LinearAttention2d",
    "LoadReport",
    "Neighborhood",
    "NormBlock2d",
    "Pattern",
    "RelPosDecomposed",
    "RelPosTable",
    "Rope2d",
    "SinCos",
    "SiteError",
    "SqueezeExciteBlock2d",
    "StridedAttention2d",
    "SwapReport",
    "TransformerBlock2d",
    "VisionAttnError",
    "Window",
    "capture",
    "check_optimizer",
    "closed",
    "contribution",
    "convert",
    "explore",
    "figures",
    "freeze_backbone_",
    "freeze_gates_",
    "gates",
    "insert_",
    "inserted",
    "inspect_model",
    "load_adapter",
    "load_checkpoint",
    "load_model",
    "load_run",
    "models",
    "parameter_groups",
    "print_trainable_parameters",
    "register_impl",
    "remove_",
    "replace_",
    "rollout",
    "save_adapter",
    "save_model",
    "set_adapter",
    "set_gates_",
    "set_impl",
    "stage_names",
    "swap_",
    "swap_back_",
    "timm_layer",
    "training",
    "use_impl",
]

#: What is in rooms with heavy dependencies, by name.
LATER = {
    "Classifier": "vision_attn.export.classifier",
    "explore": "vision_attn.explorer",
    "load_model": "vision_attn.models.folder",
    "load_run": "vision_attn.export.classifier",
    "save_model": "vision_attn.models.folder",
}


def __getattr__(name: str) -> object:
    """Rooms with heavy dependencies are imported when they are first named."""
    if name in ("figures", "models", "training"):
        return importlib.import_module(f"vision_attn.{name}")
    if name in LATER:
        return getattr(importlib.import_module(LATER[name]), name)
    raise AttributeError(f"module 'vision_attn' has no attribute {name!r}")
