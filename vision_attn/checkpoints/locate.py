"""Which file a path means, and whether the file is the one that its name says."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from vision_attn.errors import CheckpointError
from vision_attn.text import escaped, shorten

__all__ = ["check_hash", "find_file"]

#: Files with a network's weights in a folder of Hugging Face's form, the safer one first.
IN_FOLDERS = ("model.safetensors", "pytorch_model.bin")

#: torch.hub puts the beginning of a file's SHA-256 before its ending: resnet18-f37072fd.pth, resnet20-12fca82f.th.
NAMED_HASH = re.compile(r"-([0-9a-f]{8,64})(?:\.[A-Za-z]\w*)+$")


def find_file(path: str | Path) -> Path:
    """The checkpoint file itself, or the one in a folder as Hugging Face and timm write them."""
    path = Path(path)
    if path.is_file():
        return path
    if not path.is_dir():
        raise FileNotFoundError(f"{escaped(path)}: there is no such checkpoint file")
    for name in IN_FOLDERS:
        if (path / name).is_file():
            return path / name
    found = shorten(sorted(entry.name for entry in path.iterdir())) or "nothing"
    raise FileNotFoundError(
        f"{escaped(path)}: there is no checkpoint file in the folder, expected {' or '.join(IN_FOLDERS)}; it has "
        f"{found}: name the file"
    )


def check_hash(file: Path) -> str:
    """The beginning of the file's SHA-256 that its name holds, which is verified; "" if the name holds none.

    Digits alone are a date or a number of steps.
    """
    found = NAMED_HASH.search(file.name)
    if found is None or found[1].isdecimal():
        return ""
    with open(file, "rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if not digest.startswith(found[1]):
        raise CheckpointError(
            f"{file}: its name says that its SHA-256 begins with {found[1]}, and it begins with "
            f"{digest[: len(found[1])]}: the file is damaged or another one. Fetch it again, or rename it if "
            f"-{found[1]} is no hash"
        )
    return found[1]
