"""Find the weights of a network in a checkpoint file, and the names that the model has for them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from vision_attn.errors import CheckpointError
from vision_attn.networks.checkpoints.file_format import WRAPPERS, plain_key, read_saved
from vision_attn.networks.checkpoints.load_report import EMA_ENTRIES
from vision_attn.networks.checkpoints.specification import Arguments, get_arguments
from vision_attn.networks.safe import CheckpointFile
from vision_attn.text import shorten

#: Entries under which training scripts keep a network's weights.
WEIGHT_ENTRIES = ("state_dict", "model", "model_state_dict", "net")

Tensors = Mapping[str, Tensor]
#: Pairs of a regular expression and its replacement, or the name of a preset.
Rename = str | Mapping[str, str] | Iterable[tuple[str, str]]


def find_weights(
    file: CheckpointFile, required: Tensors, *, ema: bool = False, prefix: str = "", rename: Rename = ()
) -> tuple[dict[str, Tensor], Arguments, dict[str, Any]]:
    """Find the weights in a file for a model that requires some of them, by the names that the model has for them.

    Returns:
        The tensors; the arguments of attention blocks, by the paths of the blocks; and ``path``, ``entry``, ``others``,
        ``prefix`` and ``aside`` of :class:`LoadReport`.
    """
    entry = find_entry(file, ema=ema)
    values = read_values(file, entry, required)
    # Parallel and averaged models are in a module of that name, of which a network may have its own.
    wrappers = WRAPPERS | ({"module"} - {part for key in required for part in key.split(".")})
    plain = {key: plain_key(key, wrappers) for key in values}
    prefix = plain_key(f"{prefix.removesuffix('.')}.", wrappers) if prefix else ""
    names = rename_keys(remove_prefix(plain, prefix), rename, required)
    if not names:
        first_parts = shorten(dict.fromkeys(name.partition(".")[0] for name in plain.values()))
        raise CheckpointError(f"{file.path}: no key begins with prefix {prefix!r}; the keys begin with {first_parts}")
    found_prefix = find_prefix(file.path, select_tensors(file.path, names, values), required)
    names = remove_prefix(names, found_prefix)
    others = tuple(name for name, value in file.content.items() if name != entry and is_state_dict(value))
    aside = tuple(name for key, name in plain.items() if key not in names and not key.endswith("."))
    source = {"path": str(file.path), "entry": entry, "others": others, "prefix": prefix + found_prefix, "aside": aside}
    arguments = {name.strip("."): values[key] for key, name in names.items() if key.endswith(".")}
    return select_tensors(file.path, names, values), arguments, source


def read_values(file: CheckpointFile, entry: str, required: Tensors) -> dict[str, Any]:
    """Return the tensors in an entry of a file by their keys, and the arguments of blocks by their paths with a dot."""
    saved = read_saved(file)
    if saved is not None and saved.base is not None:
        raise CheckpointError(f"{file.path} is an adapter: load the network's checkpoint, then load_adapter_ it")
    content: Any = file.content[entry] if entry else file.content
    tensors = {key: value for key, value in content.items() if isinstance(value, Tensor)}
    if "n_averaged" not in required:  # the counter that torch's AveragedModel has beside the model
        tensors.pop("n_averaged", None)
    try:
        arguments = saved.arguments if saved else get_arguments(content)
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file.path} is damaged in the arguments of its blocks ({error})") from error
    return tensors | {f"{path}.": values for path, values in arguments.items()}


def select_tensors(path: object, names: Mapping[str, str], values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors among values by their new names, which must differ."""
    keys = [key for key in names if isinstance(values[key], Tensor)]
    counts = Counter(names[key] for key in keys)
    if duplicates := [key for key in keys if counts[names[key]] > 1]:
        raise CheckpointError(f"{path} has several tensors for one name: {shorten(duplicates)}: keep one")
    return {names[key]: values[key] for key in keys}


def find_entry(file: CheckpointFile, *, ema: bool) -> str:
    places = {**file.content, "": file.content}
    entries = EMA_ENTRIES if ema else (*WEIGHT_ENTRIES, *EMA_ENTRIES, "")
    if (entry := next((name for name in entries if is_state_dict(places.get(name))), None)) is not None:
        return entry
    what = "averaged weights for ema=True" if ema else "weights"
    expected = f"expected tensors by name, alone or under {', '.join(filter(None, entries))}"
    raise CheckpointError(f"{file.path} holds no {what}: {expected}; the file has {shorten(map(str, file.content))}")


def is_state_dict(value: object) -> bool:
    """Names to tensors, some of which may be counters of other types."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        return False
    return any(isinstance(item, Tensor) for item in value.values())


# --- names ------------------------------------------------------------------------------------------------------------


def efficientnet_pytorch(keys: Iterable[str]) -> list[tuple[str, str]]:
    """Return pairs that convert names of ``efficientnet_pytorch``, which counts all blocks, to timm's, by stage."""
    blocks = dict.fromkeys(match[0] for key in keys if (match := re.match(r"blocks\.\d+\.\d+\.", key)))
    return [
        *((rf"^_blocks\.{number}\.", block) for number, block in enumerate(blocks)),
        *((r"^_(conv_stem|conv_head)", r"\1"), (r"^_bn0", "bn1"), (r"^_bn1", "bn2"), (r"^_fc", "classifier")),
        *((r"^(blocks\.0\..*)_project_conv", r"\1conv_pw"), (r"^(blocks\.0\..*)_bn", r"\1bn")),  # no expansion
        *(("_expand_conv", "conv_pw"), ("_depthwise_conv", "conv_dw"), ("_project_conv", "conv_pwl")),
        *((r"\._bn2", ".bn3"), (r"\._bn1", ".bn2"), (r"\._bn0", ".bn1"), ("_se_(reduce|expand)", r"se.conv_\1")),
    ]


#: Name -> the pairs for a network with these keys.
PRESETS: dict[str, Callable[[Iterable[str]], list[tuple[str, str]]]] = {"efficientnet-pytorch": efficientnet_pytorch}


def rename_keys(names: Mapping[str, str], rename: Rename, keys: Iterable[str]) -> dict[str, str]:
    r"""Replace regular expressions in the values, one pair after the other, for a network with these ``keys``.

    >>> rename_keys({"a": "body.conv.weight"}, [(r"^body\.", ""), ("conv", "conv1")], keys=())
    {'a': 'conv1.weight'}
    """
    try:
        for pattern, replacement in PRESETS[rename](keys) if isinstance(rename, str) else dict(rename).items():
            names = {key: re.sub(pattern, replacement, name) for key, name in names.items()}
    except (LookupError, TypeError, ValueError, re.error) as error:
        expected = f"pairs of a regular expression and its replacement, or one of {', '.join(map(repr, PRESETS))}"
        raise ValueError(f"rename must be {expected}; got {rename!r} ({error})") from error
    return dict(names)


def remove_prefix(names: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Remove a prefix from the values, and leave out values without it."""
    return {key: name.removeprefix(prefix) for key, name in names.items() if name.startswith(prefix)}


def find_prefix(path: object, saved: Tensors, required: Tensors) -> str:
    """Find the prefix under which a checkpoint has all tensors that a model requires, or else the first ones."""
    for first in [*required][:10]:
        if prefixes := [key.removesuffix(first) for key in saved if f".{key}".endswith(f".{first}")]:
            complete = [prefix for prefix in prefixes if all(prefix + name in saved for name in required)]
            exact = [p for p in complete if all(saved[p + name].shape == required[name].shape for name in required)]
            fitting = exact or complete or prefixes
            if len(fitting) > 1 and complete and "" not in fitting:
                choices = " or ".join(f"prefix={prefix!r}" for prefix in fitting[:6])
                raise CheckpointError(f"{path} has the network under {len(fitting)} prefixes: pass {choices}")
            return fitting[0] if len(fitting) == 1 else ""
    return ""


def rename_hint(saved: Tensors, required: Tensors) -> str:
    """Suggest how to rename the tensors of a checkpoint of the same network under other names; empty for another."""
    for preset in PRESETS:
        if required.keys() <= {*rename_keys({key: key for key in saved}, preset, required).values()}:
            flag = f"--rename {preset} on the command line"
            return f'It has the network under other names: pass rename="{preset}", which is {flag}.'
    theirs = [key for key in saved if not key.endswith("num_batches_tracked")]
    if [saved[key].shape for key in theirs] != [value.shape for value in required.values()]:
        return ""
    pair = f'{theirs[0]!r} for {next(iter(required))!r}: pass rename=[(r"^pattern", "replacement"), …]'
    return f"Its tensors match the model's in order and shape under other names, such as {pair}."
