"""Files that may come from anyone, read without running any code of theirs; and files that are written whole or not.

This room knows nothing of networks.
"""

from vision_attn.networks.safe.read import CheckpointFile, read_checkpoint, read_file
from vision_attn.networks.safe.write import check_writable, write_atomically

__all__ = ["CheckpointFile", "check_writable", "read_checkpoint", "read_file", "write_atomically"]
