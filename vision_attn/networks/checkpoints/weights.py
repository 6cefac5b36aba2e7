"""Find the weights of a network in a checkpoint file, and convert their keys to the keys of the model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from vision_attn.errors import CheckpointError
from vision_attn.networks.checkpoints.file_format import WRAPPERS, read_saved, unwrap_key
from vision_attn.networks.checkpoints.load_report import EMA_ENTRIES
from vision_attn.networks.checkpoints.option_code import Arguments, get_arguments
from vision_attn.networks.safe import CheckpointFile
from vision_attn.text import shorten

#: Entries under which training scripts save the weights of a network.
WEIGHT_ENTRIES = ("state_dict", "model", "model_state_dict", "net")

Tensors = Mapping[str, Tensor]
#: Pairs of a regular expression and its replacement, or the name of a preset.
Rename = str | Mapping[str, str] | Iterable[tuple[str, str]]


def find_weights(
    file: CheckpointFile, required: Tensors, *, ema: bool = False, prefix: str = "", rename: Rename = ()
) -> tuple[dict[str, Tensor], Arguments, dict[str, Any]]:
    """Find the weights for a model in a file; ``required`` are tensors of the model that the file must contain.

    Returns:
        The tensors by keys of the model, the arguments of attention blocks by path, and the fields ``path``, ``entry``,
        ``other_entries``, ``prefix`` and ``ignored`` of :class:`LoadReport`.
    """
    entry = find_entry(file, ema=ema)
    values = read_values(file, entry, required)
    # Parallel and averaged models add a part "module", but it can also be a module of the network.
    wrappers = WRAPPERS | ({"module"} - {part for key in required for part in key.split(".")})
    plain = {key: unwrap_key(key, wrappers) for key in values}
    prefix = unwrap_key(f"{prefix.removesuffix('.')}.", wrappers) if prefix else ""
    names = rename_keys(remove_prefix(plain, prefix), rename, required)
    if not names:
        first_parts = shorten(dict.fromkeys(name.partition(".")[0] for name in plain.values()))
        raise CheckpointError(f"{file.path}: no key starts with prefix={prefix!r}; the keys start with {first_parts}")
    found_prefix = find_prefix(file.path, select_tensors(file.path, names, values), required)
    names = remove_prefix(names, found_prefix)
    other_entries = tuple(name for name, value in file.content.items() if name != entry and is_state_dict(value))
    ignored = tuple(name for key, name in plain.items() if key not in names and not key.endswith("."))
    source = {
        "path": str(file.path),
        "entry": entry,
        "other_entries": other_entries,
        "prefix": prefix + found_prefix,
        "ignored": ignored,
    }
    arguments = {name.strip("."): values[key] for key, name in names.items() if key.endswith(".")}
    return select_tensors(file.path, names, values), arguments, source


def read_values(file: CheckpointFile, entry: str, required: Tensors) -> dict[str, Any]:
    """Return the tensors in an entry of a file by key, and the arguments of blocks by path with a dot at the end."""
    saved = read_saved(file)
    if saved is not None and saved.base is not None:
        remedy = "Load the checkpoint of the network, then call va.load_adapter_"
        raise CheckpointError(f"{file.path} is an adapter. {remedy}")
    content: Any = file.content[entry] if entry else file.content
    tensors = {key: value for key, value in content.items() if isinstance(value, Tensor)}
    if "n_averaged" not in required:  # a counter of torch's AveragedModel
        tensors.pop("n_averaged", None)
    try:
        arguments = saved.arguments if saved else get_arguments(content)
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file.path} is damaged: the configuration of blocks is invalid ({error})") from error
    return tensors | {f"{path}.": values for path, values in arguments.items()}


def select_tensors(path: object, names: Mapping[str, str], values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors among values by new key; raise an error if keys are not unique."""
    keys = [key for key in names if isinstance(values[key], Tensor)]
    counts = Counter(names[key] for key in keys)
    if duplicates := [key for key in keys if counts[names[key]] > 1]:
        raise CheckpointError(f"{path} has several tensors with the same key: {shorten(duplicates)}. Keep one of them")
    return {names[key]: values[key] for key in keys}


def find_entry(file: CheckpointFile, *, ema: bool) -> str:
    candidates = {**file.content, "": file.content}
    entries = EMA_ENTRIES if ema else (*WEIGHT_ENTRIES, *EMA_ENTRIES, "")
    if (entry := next((name for name in entries if is_state_dict(candidates.get(name))), None)) is not None:
        return entry
    what = "averaged weights for ema=True" if ema else "weights"
    expected = f"expected a state dict, alone or under {', '.join(filter(None, entries))}"
    raise CheckpointError(f"{file.path} contains no {what}: {expected}, got {shorten(map(str, file.content))}")


def is_state_dict(value: object) -> bool:
    """Return True for a dictionary with string keys and at least one tensor; other values can be counters."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        return False
    return any(isinstance(item, Tensor) for item in value.values())


# --- keys -------------------------------------------------------------------------------------------------------------


def efficientnet_pytorch(keys: Iterable[str]) -> list[tuple[str, str]]:
    """Return pairs that convert keys of ``efficientnet_pytorch``, which numbers all blocks, to keys of timm."""
    blocks = dict.fromkeys(match[0] for key in keys if (match := re.match(r"blocks\.\d+\.\d+\.", key)))
    return [
        *((rf"^_blocks\.{number}\.", block) for number, block in enumerate(blocks)),
        *((r"^_(conv_stem|conv_head)", r"\1"), (r"^_bn0", "bn1"), (r"^_bn1", "bn2"), (r"^_fc", "classifier")),
        *((r"^(blocks\.0\..*)_project_conv", r"\1conv_pw"), (r"^(blocks\.0\..*)_bn", r"\1bn")),  # no expansion layer
        *(("_expand_conv", "conv_pw"), ("_depthwise_conv", "conv_dw"), ("_project_conv", "conv_pwl")),
        *((r"\._bn2", ".bn3"), (r"\._bn1", ".bn2"), (r"\._bn0", ".bn1"), ("_se_(reduce|expand)", r"se.conv_\1")),
    ]


#: Name -> function that returns the pairs for a network with given keys.
PRESETS: dict[str, Callable[[Iterable[str]], list[tuple[str, str]]]] = {"efficientnet-pytorch": efficientnet_pytorch}


def rename_keys(names: Mapping[str, str], rename: Rename, keys: Iterable[str]) -> dict[str, str]:
    r"""Replace regular expressions in the values, in order, for a network with the given ``keys``.

    >>> rename_keys({"a": "body.conv.weight"}, [(r"^body\.", ""), ("conv", "conv1")], keys=())
    {'a': 'conv1.weight'}
    """
    try:
        for pattern, replacement in PRESETS[rename](keys) if isinstance(rename, str) else dict(rename).items():
            names = {key: re.sub(pattern, replacement, name) for key, name in names.items()}
    except (LookupError, TypeError, ValueError, re.error) as error:
        expected = f"pairs of a regular expression and its replacement, or one of {', '.join(map(repr, PRESETS))}"
        raise ValueError(f"rename must be {expected}, got {rename!r} ({error})") from error
    return dict(names)


def remove_prefix(names: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Remove a prefix from the values, and drop values without the prefix."""
    return {key: name.removeprefix(prefix) for key, name in names.items() if name.startswith(prefix)}


def find_prefix(path: object, saved: Tensors, required: Tensors) -> str:
    """Return the prefix under which a checkpoint has all required tensors, or at least one of the first ten."""
    for first in [*required][:10]:
        if prefixes := [key.removesuffix(first) for key in saved if f".{key}".endswith(f".{first}")]:
            complete = [prefix for prefix in prefixes if all(prefix + name in saved for name in required)]
            exact = [p for p in complete if all(saved[p + name].shape == required[name].shape for name in required)]
            fitting = exact or complete or prefixes
            if len(fitting) > 1 and complete and "" not in fitting:
                choices = " or ".join(f"prefix={prefix!r}" for prefix in fitting[:6])
                raise CheckpointError(f"{path} has the network under {len(fitting)} prefixes. Pass {choices}")
            return fitting[0] if len(fitting) == 1 else ""
    return ""


def rename_hint(saved: Tensors, required: Tensors) -> str:
    """Return how to rename the keys of a checkpoint of the same network; empty if it is another network."""
    for preset in PRESETS:
        if required.keys() <= {*rename_keys({key: key for key in saved}, preset, required).values()}:
            flag = f"--rename {preset} on the command line"
            return f'The checkpoint has other keys for this network. Pass rename="{preset}" ({flag}).'
    theirs = [key for key in saved if not key.endswith("num_batches_tracked")]
    if [saved[key].shape for key in theirs] != [value.shape for value in required.values()]:
        return ""
    pair = f'{theirs[0]!r} for {next(iter(required))!r}. Pass rename=[(r"^pattern", "replacement"), …]'
    return f"The checkpoint has the same tensors as the model under other keys, such as {pair}."
