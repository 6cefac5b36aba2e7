"""Into a backbone and out again."""

from vision_attn.errors import SiteError
from vision_attn.insertion.freezing import freeze_backbone_
from vision_attn.insertion.gates import freeze_gates_, gates, set_gates_
from vision_attn.insertion.insert import insert_
from vision_attn.insertion.out import inserted, inserted_keys, keys_of_blocks, records, remove_, replaced
from vision_attn.insertion.parameter_groups import check_optimizer, parameter_groups
from vision_attn.insertion.replace import replace_
from vision_attn.insertion.report import InsertedBlock, InsertionReport
from vision_attn.insertion.running import changeable, example_images, plain_network, quiet_eval
from vision_attn.insertion.sites import CHILD, parse_sites
from vision_attn.insertion.stages import stage_names
from vision_attn.insertion.timm_layer import timm_layer

__all__ = [
    "CHILD",
    "InsertedBlock",
    "InsertionReport",
    "SiteError",
    "changeable",
    "check_optimizer",
    "example_images",
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
    "quiet_eval",
    "records",
    "remove_",
    "replace_",
    "replaced",
    "set_gates_",
    "stage_names",
    "timm_layer",
]
