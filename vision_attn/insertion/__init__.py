"""Into a backbone and out again."""

from vision_attn.insertion.dry_run import plain_network, quiet_eval
from vision_attn.insertion.insert import insert_
from vision_attn.insertion.out import inserted, inserted_keys, records, remove_
from vision_attn.insertion.replace import replace_
from vision_attn.insertion.report import InsertedBlock, InsertionReport
from vision_attn.insertion.sites import CHILD, SiteError
from vision_attn.insertion.stages import stage_names
from vision_attn.insertion.timm_layer import timm_layer

__all__ = [
    "CHILD",
    "InsertedBlock",
    "InsertionReport",
    "SiteError",
    "insert_",
    "inserted",
    "inserted_keys",
    "plain_network",
    "quiet_eval",
    "records",
    "remove_",
    "replace_",
    "stage_names",
    "timm_layer",
]
