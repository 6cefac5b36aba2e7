"""Into a backbone and out again."""

from vision_attn.insertion.dry_run import quiet_eval
from vision_attn.insertion.insert import insert_, inserted, inserted_keys, remove_
from vision_attn.insertion.report import InsertedBlock, InsertionReport
from vision_attn.insertion.sites import CHILD, SiteError

__all__ = [
    "CHILD",
    "InsertedBlock",
    "InsertionReport",
    "SiteError",
    "insert_",
    "inserted",
    "inserted_keys",
    "quiet_eval",
    "remove_",
]
