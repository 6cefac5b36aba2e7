"""Checkpoint files: which file a path means and what is in it, read without running any code of it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from vision_attn.errors import CheckpointError
from vision_attn.networks.safe.archive import LONGEST_LIST, ShortReads, read_archive
from vision_attn.networks.safe.pickled import NotAllowedError
from vision_attn.text import escaped

__all__ = ["CheckpointFile", "read_checkpoint", "read_file"]

#: Files with a network's weights in a folder of Hugging Face's form, the safer one first.
IN_FOLDERS = ("model.safetensors", "pytorch_model.bin")

#: torch.hub puts the beginning of a file's SHA-256 before its ending: resnet18-f37072fd.pth, resnet20-12fca82f.th.
NAMED_HASH = re.compile(r"-([0-9a-f]{8,64})(?:\.[A-Za-z]\w*)+$")


@dataclass(frozen=True)
class CheckpointFile:
    """What is in a file."""

    path: Path
    #: tensors by name, or what a training script saved
    content: Mapping[str, object]
    #: what a ``.safetensors`` file says of its tensors
    metadata: Mapping[str, str]
    #: the beginning of the file's SHA-256 that its name holds, which was verified; "" if it holds none
    verified: str


def read_checkpoint(path: str | Path) -> dict[str, object]:
    """The content of a checkpoint file, on the CPU, without running any code from it.

    Numbers of NumPy come as Python's. What a file makes the machine do is bounded by its size: it is refused if it
    claims to hold more.

    Args:
        path: the file, or a folder with ``model.safetensors`` or ``pytorch_model.bin``.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is damaged, is not the one whose hash its name holds, or is a pickle that asks for
            more than tensors and plain values.

    >>> import tempfile, torch
    >>> file = Path(tempfile.mkdtemp()) / "net.pth"
    >>> torch.save({"epoch": 3, "state_dict": {}}, file)
    >>> read_checkpoint(file)
    {'epoch': 3, 'state_dict': {}}
    """
    return dict(read_file(path).content)


def read_file(path: str | Path, *, by_name: bool = True) -> CheckpointFile:
    """All that is in a file, which is opened once; ``by_name`` verifies the hash that its name may hold."""
    path = find_file(Path(path))
    content: object
    metadata: Mapping[str, str] = {}
    with ShortReads(path) as file:
        try:
            if path.suffix == ".safetensors":
                content, metadata = read_safetensors(file, path)
            else:
                content = read_archive(file)
        except NotAllowedError as error:
            raise CheckpointError(
                f"{path} asks {error} on loading, and was not loaded: a checkpoint needs tensors and plain values "
                "only. If you trust its source, load it there and save the state dict alone, best as .safetensors"
            ) from error
        except Exception as error:  # a damaged file can make the reader fail in any way
            raise CheckpointError(
                f"{path} is truncated or no checkpoint: fetch or save it again, and compare its size and checksum with "
                "the source's"
            ) from error
        # Only now: a hash over all of what may be no checkpoint at all can take minutes.
        verified = verify_hash(file, path) if by_name else ""
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, expected a dictionary of tensors")
    return CheckpointFile(path, content, metadata, verified)


def find_file(path: Path) -> Path:
    """The checkpoint file itself, or the one in a folder as Hugging Face and timm write them."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise FileNotFoundError(f"{escaped(path)}: there is no such checkpoint file")
    for name in IN_FOLDERS:
        if (path / name).is_file():
            return path / name
    raise FileNotFoundError(
        f"{escaped(path)}: there is no checkpoint file in the folder, expected {' or '.join(IN_FOLDERS)}: name the file"
    )


def read_safetensors(file: ShortReads, path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    if int.from_bytes(file.read(8), "little") > LONGEST_LIST:
        raise NotAllowedError("for too many tensors")
    with safe_open(path, framework="pt") as mapped:
        return {key: mapped.get_tensor(key) for key in mapped.keys()}, mapped.metadata() or {}  # noqa: SIM118


def verify_hash(file: ShortReads, path: Path) -> str:
    """The beginning of the file's SHA-256 that its name holds; "" if the name holds none.

    Digits alone are a date or a number of steps.
    """
    found = NAMED_HASH.search(path.name)
    if found is None or found[1].isdecimal():
        return ""
    file.seek(0)
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    if not digest.startswith(found[1]):
        raise CheckpointError(
            f"{path}: its name says that its SHA-256 begins with {found[1]}, and it begins with "
            f"{digest[: len(found[1])]}: the file is damaged or another one. Fetch it again, or rename it if "
            f"-{found[1]} is no hash"
        )
    return found[1]
