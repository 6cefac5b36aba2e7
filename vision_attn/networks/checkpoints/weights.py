"""Where in a checkpoint the weights of a network are, under the names that the network has for them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from vision_attn.errors import CheckpointError
from vision_attn.networks.checkpoints.form import WRAPPERS, Saved, plain_key, saved_in
from vision_attn.networks.checkpoints.load_report import AVERAGED
from vision_attn.networks.checkpoints.specification import Arguments, arguments_of
from vision_attn.networks.safe import CheckpointFile
from vision_attn.text import shorten

#: Entries under which training scripts keep a network's weights.
WEIGHTS = ("state_dict", "model", "model_state_dict", "net")

Tensors = Mapping[str, Tensor]
#: Pairs of a regular expression and its replacement, or the name of a preset.
Rename = str | Mapping[str, str] | Iterable[tuple[str, str]]


def find_weights(
    file: CheckpointFile, needed: Tensors, *, ema: bool = False, prefix: str = "", rename: Rename = ()
) -> tuple[dict[str, Tensor], Arguments, dict[str, Any]]:
    """The weights in a file by the names of a model, which needs some of them, and what the file says of its blocks.

    Returns:
        The tensors; the arguments of the blocks by their paths in the network; and where the weights were found, in the
        words of :class:`LoadReport`: ``entry``, ``others``, ``prefix`` and ``aside``.
    """
    saved = saved_in(file)
    if saved is not None and saved.base is not None:
        raise CheckpointError(f"{file.path} is an adapter: load the network's checkpoint, then load_adapter_ it")
    entry = find_entry(file, ema=ema)
    held: Any = file.content[entry] if entry else file.content
    # n_averaged is the counter that torch's AveragedModel has beside the model.
    keys = [key for key, value in held.items() if isinstance(value, Tensor) and (key != "n_averaged" or key in needed)]
    tensors = {key: held[key] for key in keys}
    told = {f"{path}.": arguments for path, arguments in arguments_told(file, saved, held).items()}
    # Parallel and averaged models are in a module of that name, of which a network may have its own.
    wrappers = WRAPPERS | ({"module"} - {part for key in needed for part in key.split(".")})
    plain = {key: plain_key(key, wrappers) for key in (*tensors, *told)}
    asked = plain_key(f"{prefix.removesuffix('.')}.", wrappers) if prefix else ""
    names = {key: name.removeprefix(asked) for key, name in plain.items() if name.startswith(asked)}
    if not names:
        begin = shorten(dict.fromkeys(name.partition(".")[0] for name in plain.values()))
        raise CheckpointError(f"{file.path}: prefix {prefix!r} begins none of its keys, which begin {begin}")
    names = renamed(names, rename, needed)
    counts = Counter(name for key, name in names.items() if key in tensors)
    if twice := [key for key, name in names.items() if counts[name] > 1]:
        raise CheckpointError(f"{file.path} has several tensors for one name: {shorten(twice)}: keep one")
    taken = find_prefix(file.path, {name: tensors[key] for key, name in names.items() if key in tensors}, needed)
    names = {key: name.removeprefix(taken) for key, name in names.items() if name.startswith(taken)}
    others = tuple(name for name, value in file.content.items() if name != entry and is_state_dict(value))
    aside = tuple(plain[key] for key in tensors if key not in names)
    found = {"entry": entry, "others": others, "prefix": asked + taken, "aside": aside}
    weights = {name: tensors[key] for key, name in names.items() if key in tensors}
    return weights, {name.strip("."): told[path] for path, name in names.items() if path in told}, found


def arguments_told(file: CheckpointFile, saved: Saved | None, held: object) -> Arguments:
    """What a file says that its blocks are, by their paths in the file."""
    try:
        return saved.arguments if saved else arguments_of(held)
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file.path} is damaged in what it says of its blocks ({error})") from error


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


# --- names ------------------------------------------------------------------------------------------------------------


def efficientnet_pytorch(own: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs from the names of ``efficientnet_pytorch``, which counts all blocks, to timm's, which counts by stage."""
    blocks = dict.fromkeys(found[0] for key in own if (found := re.match(r"blocks\.\d+\.\d+\.", key)))
    return [
        *((rf"^_blocks\.{number}\.", block) for number, block in enumerate(blocks)),
        *((r"^_(conv_stem|conv_head)", r"\1"), (r"^_bn0", "bn1"), (r"^_bn1", "bn2"), (r"^_fc", "classifier")),
        *((r"^(blocks\.0\..*)_project_conv", r"\1conv_pw"), (r"^(blocks\.0\..*)_bn", r"\1bn")),  # no expansion
        *(("_expand_conv", "conv_pw"), ("_depthwise_conv", "conv_dw"), ("_project_conv", "conv_pwl")),
        *((r"\._bn2", ".bn3"), (r"\._bn1", ".bn2"), (r"\._bn0", ".bn1"), ("_se_(reduce|expand)", r"se.conv_\1")),
    ]


#: Name -> the pairs for a network with these keys.
PRESETS: dict[str, Callable[[Iterable[str]], list[tuple[str, str]]]] = {"efficientnet-pytorch": efficientnet_pytorch}


def renamed(names: Mapping[str, str], rename: Rename, own: Iterable[str]) -> dict[str, str]:
    r"""Replace regular expressions in the values, one pair after the other, for a network with its ``own`` keys.

    >>> renamed({"a": "body.conv.weight"}, [(r"^body\.", ""), ("conv", "conv1")], own=())
    {'a': 'conv1.weight'}
    """
    try:
        for pattern, replacement in PRESETS[rename](own) if isinstance(rename, str) else dict(rename).items():
            names = {key: re.sub(pattern, replacement, name) for key, name in names.items()}
    except (LookupError, TypeError, ValueError, re.error) as error:
        expected = f"pairs of a regular expression and its replacement, or one of {', '.join(map(repr, PRESETS))}"
        raise ValueError(f"rename must be {expected}; got {rename!r} ({error})") from error
    return dict(names)


def find_prefix(path: object, saved: Tensors, needed: Tensors) -> str:
    """Find the prefix under which a checkpoint has all tensors that a model needs, or else the first ones."""
    for first in [*needed][:10]:
        if under := [key.removesuffix(first) for key in saved if f".{key}".endswith(f".{first}")]:
            complete = [prefix for prefix in under if all(prefix + name in saved for name in needed)]
            exact = [p for p in complete if all(saved[p + name].shape == needed[name].shape for name in needed)]
            fitting = exact or complete or under
            if len(fitting) > 1 and complete and "" not in fitting:
                choices = " or ".join(f"prefix={prefix!r}" for prefix in fitting[:6])
                raise CheckpointError(f"{path} has the network under {len(fitting)} prefixes: pass {choices}")
            return fitting[0] if len(fitting) == 1 else ""
    return ""


def rename_hint(saved: Tensors, needed: Tensors) -> str:
    """Suggest how to rename the tensors of a checkpoint of the same network under other names; empty for another."""
    for preset in PRESETS:
        if needed.keys() <= {*renamed({key: key for key in saved}, preset, needed).values()}:
            return f'It has the network under other names: pass rename="{preset}".'
    theirs = [key for key in saved if not key.endswith("num_batches_tracked")]
    if [saved[key].shape for key in theirs] != [value.shape for value in needed.values()]:
        return ""
    pair = f'{theirs[0]!r} for {next(iter(needed))!r}: pass rename=[(r"^pattern", "replacement"), …]'
    return f"Its tensors match the model's in order and shape under other names, such as {pair}."
