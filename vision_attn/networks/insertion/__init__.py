"""Into a backbone and out again."""

from vision_attn.networks.insertion.attach import (
    attach_records_,
    inserted_blocks,
    inserted_keys,
    keys_of_blocks,
    records,
    replaced,
)
from vision_attn.networks.insertion.backbone import changeable, plain_network, quiet_eval
from vision_attn.networks.insertion.costs import count_multiply_adds
from vision_attn.networks.insertion.finetuning import (
    check_optimizer,
    freeze_backbone_,
    gates,
    matching,
    parameter_groups,
    unfreeze_backbone_,
)
from vision_attn.networks.insertion.insert import insert_, remove_, replace_, timm_layer
from vision_attn.networks.insertion.record import CHILD, InsertedBlock, InsertionReport
from vision_attn.networks.insertion.sites import parse_sites, stage_names

__all__ = [
    "CHILD",
    "InsertedBlock",
    "InsertionReport",
    "attach_records_",
    "changeable",
    "check_optimizer",
    "count_multiply_adds",
    "freeze_backbone_",
    "gates",
    "insert_",
    "inserted_blocks",
    "inserted_keys",
    "keys_of_blocks",
    "matching",
    "parameter_groups",
    "parse_sites",
    "plain_network",
    "quiet_eval",
    "records",
    "remove_",
    "replace_",
    "replaced",
    "stage_names",
    "timm_layer",
    "unfreeze_backbone_",
]
