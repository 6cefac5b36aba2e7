"""Download files of the Hugging Face Hub that the user names."""

import re
from pathlib import Path

from vision_attn.errors import CheckpointError

#: Start of the name of a repository on the Hub.
SCHEME = "hf-hub:"
#: Repository, with the revision and the file if they are given.
NAME = re.compile(SCHEME + r"([\w.-]+/[\w.-]+)(?:@(refs/[^/]+/[^/]+|(?!refs/)[^/]+))?(?:/(.+))?")
#: Files that are downloaded if the user names a repository only.
PATTERNS = ["*.json", "*.safetensors"]


def resolve_source(source: str | Path) -> Path:
    """Return the path of a file or folder; download it if it is ``hf-hub:owner/name[@revision][/file]``.

    A revision is a branch, a tag, a commit, or a reference such as ``refs/pr/1``. The cache, ``HF_HUB_OFFLINE`` and
    other settings of ``huggingface_hub`` apply.

    Raises:
        ValueError: the name is not of this form.
        CheckpointError: the repository or file does not exist, or the Hub cannot be read.

    >>> resolve_source("net.pth").name
    'net.pth'
    """
    if not isinstance(source, str | Path):
        remedy = "For a state dict in memory, call model.load_state_dict"
        raise TypeError(f"file must be a path or {SCHEME}owner/name, got {type(source).__name__}. {remedy}")
    name = source.as_posix() if isinstance(source, Path) else source
    if not name.startswith(SCHEME):
        return Path(source)
    if (match := NAME.fullmatch(name)) is None:
        raise ValueError(f"a repository must be {SCHEME}owner/name[@revision][/file], got {name!r}")
    repository, revision, file = match.groups()
    import huggingface_hub

    try:
        if file:
            return Path(huggingface_hub.hf_hub_download(repository, file, revision=revision))
        folder = Path(huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=PATTERNS))
    except Exception as error:  # errors of the Hub, of the connection and of the disk have no common class
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{name} cannot be read from the Hugging Face Hub ({reason})") from error
    if not any(folder.rglob("*.safetensors")):
        raise CheckpointError(f"{name} contains no .safetensors file. Name a file, as in {name}/pytorch_model.bin")
    return folder
