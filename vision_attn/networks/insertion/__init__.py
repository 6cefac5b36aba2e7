"""Into a backbone and out again."""

from vision_attn.errors import SiteError
from vision_attn.networks.insertion.attach import (
    REPLACED,
    attach_records_,
    inserted,
    inserted_keys,
    keys_of_blocks,
    records,
    replaced,
)
from vision_attn.networks.insertion.backbone import changeable, plain_network, quiet_eval
from vision_attn.networks.insertion.freezing import (
    freeze_backbone_,
    freeze_gates_,
    gates,
    print_trainable_parameters,
    set_gates_,
)
from vision_attn.networks.insertion.insert import insert_, remove_, replace_
from vision_attn.networks.insertion.maps import CHILD
from vision_attn.networks.insertion.parameter_groups import check_optimizer, parameter_groups
from vision_attn.networks.insertion.report import InsertedBlock, InsertionReport, count_multiply_adds
from vision_attn.networks.insertion.sites import parse_sites
from vision_attn.networks.insertion.stages import stage_names
from vision_attn.networks.insertion.timm_layer import timm_layer

__all__ = [
    "CHILD",
    "REPLACED",
    "InsertedBlock",
    "InsertionReport",
    "SiteError",
    "attach_records_",
    "changeable",
    "check_optimizer",
    "count_multiply_adds",
    "freeze_backbone_",
    "freeze_gates_",
    "gates",
    "insert_",
    "inserted",
    "inserted_keys",
    "keys_of_blocks",
    "parameter_groups",
    "parse_sites",
    "plain_network",
    "print_trainable_parameters",
    "quiet_eval",
    "records",
    "remove_",
    "replace_",
    "replaced",
    "set_gates_",
    "stage_names",
    "timm_layer",
]
