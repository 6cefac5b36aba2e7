"""Where in a checkpoint the weights of a network are, under the names that the network has for them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from vision_attn.errors import CheckpointError
from vision_attn.networks.checkpoints.form import Saved, saved_in
from vision_attn.networks.checkpoints.specification import Arguments, arguments_in, arguments_of
from vision_attn.networks.safe import CheckpointFile
from vision_attn.text import shorten

#: Entries under which training scripts keep a network's weights.
WEIGHTS = ("state_dict", "model", "model_state_dict", "net")
#: Entries under which they keep the moving average of the weights.
AVERAGED = ("model_ema", "state_dict_ema", "ema")
#: What in the metadata of a ``.safetensors`` file said what its blocks are, before it was a part of our form.
ARGUMENTS_1 = "vision_attn_blocks"


def find_weights(
    file: CheckpointFile, *, own: Collection[str], ema: bool = False, prefix: str = ""
) -> tuple[dict[str, Tensor], Arguments, dict[str, Any]]:
    """The weights in a file by the names of a network that has its ``own``, and what the file says of its blocks.

    Returns:
        The tensors; the arguments of the blocks by their paths in the network; and where the weights were found, in the
        words of :class:`LoadReport`: ``entry``, ``others``, ``prefix`` and ``aside``.
    """
    saved = saved_in(file)
    if saved is not None and saved.base is not None:
        raise CheckpointError(f"{file.path} is an adapter: load the network's checkpoint, then load_adapter_ it")
    entry = find_entry(file, ema=ema)
    held: Any = file.content[entry] if entry else file.content
    # Compiled models put _orig_mod before their names, parallel and averaged ones module.
    names = {key: key if key in own else key.replace("_orig_mod.", "") for key in held}
    counts = Counter(names.values())
    if twice := [key for key, name in names.items() if counts[name] > 1]:
        raise CheckpointError(f"{file.path} has several tensors for one name: {shorten(twice)}: keep one")
    weights = {names[key]: value for key, value in held.items() if isinstance(value, Tensor)}
    if "n_averaged" not in own and all(key.startswith("module.") for key in weights.keys() - {"n_averaged"}):
        weights.pop("n_averaged", None)  # torch's AveragedModel counts its updates beside the module that it wraps
    asked = prefix and prefix.removesuffix(".") + "."
    if not any(key.startswith(asked) for key in weights):
        asked = f"module.{asked}"
    aside = tuple(key for key in weights if not key.startswith(asked))
    weights = {key: value for key, value in weights.items() if key.startswith(asked)}
    if not weights:
        begin = shorten(dict.fromkeys(key.partition(".")[0] for key in aside))
        raise CheckpointError(f"{file.path}: prefix {prefix!r} begins none of its keys, which begin {begin}")
    taken = shared_prefix(weights, own, asked)
    weights = {key.removeprefix(taken): value for key, value in weights.items()}
    others = tuple(name for name, value in file.content.items() if name != entry and is_state_dict(value))
    found = {"entry": entry, "others": others, "prefix": taken, "aside": aside}
    return weights, arguments_told(file, saved, held, taken), found


def arguments_told(file: CheckpointFile, saved: Saved | None, held: object, taken: str) -> Arguments:
    """What a file says that its blocks are, by their paths without what was taken off."""
    try:
        said = saved.arguments if saved else arguments_of(held)
        if ARGUMENTS_1 in file.metadata:
            said = arguments_in(json.loads(file.metadata[ARGUMENTS_1]))
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file.path} is damaged in what it says of its blocks ({error})") from error
    paths = {f"{path}.".replace("_orig_mod.", ""): told for path, told in said.items()}
    return {path.removeprefix(taken).strip("."): told for path, told in paths.items() if path.startswith(taken)}


def find_entry(file: CheckpointFile, *, ema: bool) -> str:
    entries = AVERAGED if ema else WEIGHTS + AVERAGED
    for entry in entries:
        if is_state_dict(file.content.get(entry)):
            return entry
    if not ema and is_state_dict(file.content):
        return ""
    what = "averaged weights for ema=True" if ema else "weights"
    expected = f"expected tensors by name, alone or under {', '.join(entries)}"
    raise CheckpointError(f"{file.path} holds no {what}: {expected}; the file has {shorten(map(str, file.content))}")


def is_state_dict(value: object) -> bool:
    """Names to tensors, some of which may be counters of other types."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        return False
    return any(isinstance(item, Tensor) for item in value.values())


def shared_prefix(weights: Mapping[str, Tensor], own: Collection[str], asked: str) -> str:
    """The first components of all names that the model does not have in its own; at least what was asked for."""
    rest = next(iter(weights)).removeprefix(asked).split(".")
    for length in range(len(rest)):
        prefix = asked + "".join(f"{part}." for part in rest[:length])
        if any(key.removeprefix(prefix) in own for key in weights) and all(key.startswith(prefix) for key in weights):
            return prefix
    return asked
