"""Where in a checkpoint the weights of a network are, under the names that the network has for them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from vision_attn.errors import CheckpointError
from vision_attn.networks.checkpoints.form import Saved, saved_in
from vision_attn.networks.checkpoints.specification import Arguments, arguments_in, arguments_of
from vision_attn.networks.safe import CheckpointFile
from vision_attn.text import shorten

__all__ = ["AVERAGED", "Weights", "find_weights"]

#: Entries under which training scripts keep a network's weights.
WEIGHTS = ("state_dict", "model", "model_state_dict", "net")
#: Entries under which they keep the moving average of the weights.
AVERAGED = ("model_ema", "state_dict_ema", "ema")
#: What in the metadata of a ``.safetensors`` file said what its blocks are, before it was a part of our form.
ARGUMENTS_1 = "vision_attn_blocks"


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
    arguments: Arguments


def find_weights(file: CheckpointFile, *, own: Collection[str], ema: bool = False, prefix: str = "") -> Weights:
    """The weights in a file, by the names of a network that has its ``own``."""
    saved = saved_in(file)
    if saved is not None and saved.base is not None:
        raise CheckpointError(
            f"{file.path} is an adapter, blocks without their network: load the network's own checkpoint, then "
            "load_adapter_(model, path)"
        )
    entry = find_entry(file, ema=ema)
    held = file.content[entry] if entry else file.content
    assert isinstance(held, Mapping)
    # Compiled models put _orig_mod before their names, parallel and averaged ones module.
    names = {key: key if key in own else key.replace("_orig_mod.", "") for key in held}
    counts = Counter(names.values())
    if twice := [key for key, name in names.items() if counts[name] > 1]:
        raise CheckpointError(
            f"{file.path} has several tensors for one name of the network: {shorten(twice)}: keep one"
        )
    weights = {names[key]: value for key, value in held.items() if isinstance(value, Tensor)}
    if "n_averaged" not in own and all(key.startswith("module.") for key in weights.keys() - {"n_averaged"}):
        weights.pop("n_averaged", None)  # torch's AveragedModel counts its updates beside the module that it wraps
    taken, aside = "", {}
    if prefix:
        taken = prefix.removesuffix(".") + "."
        if not any(key.startswith(taken) for key in weights):
            taken = f"module.{taken}"
        aside = {key: value for key, value in weights.items() if not key.startswith(taken)}
        if len(aside) == len(weights):
            parts = dict.fromkeys(key.partition(".")[0] for key in weights)
            raise CheckpointError(
                f"{file.path}: prefix {prefix!r} begins none of its keys, which begin {shorten(parts)}"
            )
        weights = {key.removeprefix(taken): value for key, value in weights.items() if key not in aside}
    shared = shared_prefix(weights, own)
    weights = {key.removeprefix(shared): value for key, value in weights.items()}
    taken += shared
    others = tuple(name for name, value in file.content.items() if name != entry and is_state_dict(value))
    return Weights(weights, entry, others, taken, tuple(aside), arguments_told(file, saved, held, taken))


def arguments_told(file: CheckpointFile, saved: Saved | None, held: Mapping[str, object], taken: str) -> Arguments:
    """What a file says that its blocks are, by their paths without what was taken off."""
    try:
        said = saved.arguments if saved else arguments_of(held)
        if ARGUMENTS_1 in file.metadata:
            said = arguments_in(json.loads(file.metadata[ARGUMENTS_1]))
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file.path} is damaged in what it says of its blocks ({error})") from error
    paths = {f"{path}.".replace("_orig_mod.", ""): told for path, told in said.items()}
    return {path.removeprefix(taken).removesuffix("."): told for path, told in paths.items() if path.startswith(taken)}


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


def shared_prefix(weights: Mapping[str, Tensor], own: Collection[str]) -> str:
    """The first components that all names share, if the model knows names only without them."""
    parts = next(iter(weights), "").split(".")
    for length in range(len(parts)):
        prefix = "".join(f"{part}." for part in parts[:length])
        if not all(key.startswith(prefix) for key in weights):
            break
        if any(key.removeprefix(prefix) in own for key in weights):
            return prefix
    return ""
