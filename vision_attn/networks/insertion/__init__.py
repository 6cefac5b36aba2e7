"""Insert blocks into a network, replace its modules, and restore it."""

from vision_attn.networks.insertion.insert import insert_ as insert_, remove_ as remove_, replace_ as replace_
from vision_attn.networks.insertion.record import InsertionReport as InsertionReport
from vision_attn.networks.insertion.registry import inserted_blocks as inserted_blocks
from vision_attn.networks.insertion.sites import stage_names as stage_names
