"""Checkpoint files: which file a path means, what is in it, and where in that the weights are. No code of it is run."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from vision_attn.errors import CheckpointError
from vision_attn.networks.checkpoints.archive import LONGEST_LIST, ShortReads, read_archive
from vision_attn.networks.checkpoints.pickled import NotAllowedError
from vision_attn.networks.checkpoints.specification import Blocks, blocks_in, blocks_of
from vision_attn.text import escaped, shorten

#: Files with a network's weights in a folder of Hugging Face's form, the safer one first.
IN_FOLDERS = ("model.safetensors", "pytorch_model.bin")

#: torch.hub puts the beginning of a file's SHA-256 before its ending: resnet18-f37072fd.pth, resnet20-12fca82f.th.
NAMED_HASH = re.compile(r"-([0-9a-f]{8,64})(?:\.[A-Za-z]\w*)+$")

#: Entries under which training scripts keep a network's weights.
WEIGHTS = ("state_dict", "model", "model_state_dict", "net")
#: Entries under which they keep the moving average of the weights.
AVERAGED = ("model_ema", "state_dict_ema", "ema")


@dataclass(frozen=True)
class CheckpointFile:
    """All that is in a file."""

    path: Path
    #: tensors by name, or what a training script saved
    content: Mapping[str, object]
    #: what a ``.safetensors`` file says of its tensors
    metadata: Mapping[str, str]
    #: the beginning of the file's SHA-256 that its name holds, which was verified; "" if it holds none
    verified: str


@dataclass(frozen=True)
class Weights:
    """The weights of a checkpoint, and what was done to find them."""

    #: by the names of the network
    tensors: Mapping[str, Tensor]
    #: the entry they were found under; "" when the file is nothing but weights
    entry: str
    #: other entries that hold weights
    others: tuple[str, ...]
    #: what was taken off every name
    prefix: str
    #: names that do not begin with the prefix that was asked for
    aside: tuple[str, ...]
    #: what the file says that its blocks are, by their paths in the network
    blocks: Blocks


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


def find_weights(file: CheckpointFile, *, ema: bool = False, own: Collection[str] = (), prefix: str = "") -> Weights:
    """The weights in a file, by the names of a network that has its ``own``."""
    entry = find_entry(file, ema=ema)
    held = file.content[entry] if entry else file.content
    assert isinstance(held, Mapping)
    tensors = {key: value for key, value in held.items() if isinstance(value, Tensor)}
    wrapper, weights = without_wrappers(tensors, own, file.path)
    aside: tuple[str, ...] = ()
    if prefix:
        prefix = (prefix if prefix.endswith(".") else f"{prefix}.").removeprefix(wrapper)
        aside = tuple(key for key in weights if not key.startswith(prefix))
        if len(aside) == len(weights):
            parts = dict.fromkeys(key.partition(".")[0] for key in weights)
            raise CheckpointError(
                f"{file.path}: prefix {prefix!r} begins none of its keys, which begin {shorten(parts)}"
            )
        weights = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
    shared, weights = without_shared_prefix(weights, own)
    others = tuple(name for name, value in file.content.items() if name != entry and is_state_dict(value))
    taken = wrapper + prefix + shared
    return Weights(weights, entry, others, taken, aside, blocks_told(file, held, taken))


def blocks_told(file: CheckpointFile, held: Mapping[str, object], taken: str) -> Blocks:
    """What a file says that the blocks of a state dict in it are, by their paths without what was taken off."""
    try:
        said = blocks_of(held) or blocks_in(file.metadata)
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file.path} is damaged in what it says of its blocks ({error})") from error
    paths = {path: f"{path}.".replace("_orig_mod.", "") for path in said}
    return {
        paths[path].removeprefix(taken).removesuffix("."): told
        for path, told in said.items()
        if paths[path].startswith(taken)
    }


def find_entry(file: CheckpointFile, *, ema: bool) -> str:
    entries = AVERAGED if ema else WEIGHTS + AVERAGED
    for entry in entries:
        if is_state_dict(file.content.get(entry)):
            return entry
    if not ema and is_state_dict(file.content):
        return ""
    what = "averaged weights for ema=True" if ema else "weights"
    raise CheckpointError(
        f"{file.path} holds no {what}: expected tensors by name, under one of {', '.join(entries)} or alone; the file "
        f"has {shorten(map(str, file.content))}"
    )


def is_state_dict(value: object) -> bool:
    """Names to tensors, some of which may be counters of other types."""
    return (
        isinstance(value, Mapping)
        and any(isinstance(item, Tensor) for item in value.values())
        and all(isinstance(key, str) for key in value)
    )


def without_wrappers(weights: dict[str, Tensor], own: Collection[str], path: Path) -> tuple[str, dict[str, Tensor]]:
    """Without the names that parallel and compiled models put before those of the network."""
    named = {key: key if key in own else key.replace("_orig_mod.", "") for key in weights}
    counts = Counter(named.values())
    twice = [key for key in named if counts[named[key]] > 1]
    if twice:
        raise CheckpointError(f"{path} has several tensors for one name of the network: {shorten(twice)}: keep one")
    weights = {named[key]: value for key, value in weights.items()}
    taken = ""
    while not any(key in own for key in weights):
        # torch's AveragedModel counts its updates beside the module that it wraps.
        inner = {key: value for key, value in weights.items() if key != "n_averaged"}
        if not inner or not all(key.startswith("module.") for key in inner):
            break
        weights = {key.removeprefix("module."): value for key, value in inner.items()}
        taken += "module."
    return taken, weights


def without_shared_prefix(weights: dict[str, Tensor], own: Collection[str]) -> tuple[str, dict[str, Tensor]]:
    """Without the first components that all names share, if the model knows names only without them."""
    parts = next(iter(weights), "").split(".")
    for length in range(len(parts)):
        prefix = "".join(f"{part}." for part in parts[:length])
        inner = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
        if len(inner) == len(weights) and any(key in own for key in inner):
            return prefix, inner
    return "", weights
