"""Where in a checkpoint the weights of a network are, under the names that the network has for them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from vision_attn.errors import CheckpointError
from vision_attn.networks.checkpoints.specification import BLOCKS, Blocks, blocks_in, blocks_of
from vision_attn.networks.insertion import plain_network
from vision_attn.networks.safe import CheckpointFile
from vision_attn.networks.safe.write import write_tensors
from vision_attn.text import shorten

#: Entries under which training scripts keep a network's weights.
WEIGHTS = ("state_dict", "model", "model_state_dict", "net")
#: Entries under which they keep the moving average of the weights.
AVERAGED = ("model_ema", "state_dict_ema", "ema")


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


def save_weights(model: nn.Module, path: str | Path, about: Mapping[str, str] | None = None) -> None:
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"path must end in .safetensors; got {path.name!r}")
    state = plain_network(model).state_dict()
    if others := [key for key, value in state.items() if not isinstance(value, Tensor)]:
        raise ValueError(
            "model must have nothing but tensors in its state dict, as .safetensors holds nothing else; got "
            f"{shorten(others)}: torch.save the state dict"
        )
    write_tensors(path, state, {**({BLOCKS: json.dumps(blocks)} if (blocks := blocks_of(state)) else {}), **(about or {})})
