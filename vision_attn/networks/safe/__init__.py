"""Read files from untrusted sources without running code, and write files atomically."""

from vision_attn.networks.safe.pickled import Placeholder
from vision_attn.networks.safe.read import SAVE_STATE_DICT, CheckpointFile, read_file
from vision_attn.networks.safe.write import check_writable, write_atomically
