"""Insert blocks into a network, replace its modules, and restore it."""

from vision_attn.networks.insertion.insert import insert_ as insert_, remove_ as remove_, replace_ as replace_
from vision_attn.networks.insertion.record import (
    CHILD as CHILD,
    InsertedBlock as InsertedBlock,
    InsertionReport as InsertionReport,
)
from vision_attn.networks.insertion.registry import (
    attach_records_ as attach_records_,
    inserted_blocks as inserted_blocks,
    inserted_keys as inserted_keys,
    keys_by_site as keys_by_site,
    records as records,
    replaced_modules as replaced_modules,
)
from vision_attn.networks.insertion.sites import stage_names as stage_names
