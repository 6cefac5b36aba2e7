"""Files that may come from anyone, read without running any code of theirs; and files that are written whole or not.

This room knows nothing of networks.
"""

from vision_attn.networks.safe.read import CheckpointFile, read_checkpoint, read_file
from vision_attn.networks.safe.write import copy_to_write, finished_folder, write_atomically, written_folder

__all__ = [
    "CheckpointFile",
    "copy_to_write",
    "finished_folder",
    "read_checkpoint",
    "read_file",
    "write_atomically",
    "written_folder",
]
