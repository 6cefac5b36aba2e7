"""Insert blocks into a network, replace its modules, and restore it."""

from vision_attn.networks.insertion.insert import insert_, remove_, replace_
from vision_attn.networks.insertion.record import InsertionReport
from vision_attn.networks.insertion.registry import inserted_blocks
from vision_attn.networks.insertion.sites import stage_names
