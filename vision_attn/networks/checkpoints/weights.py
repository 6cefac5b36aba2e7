"""Find the weights of a network in a checkpoint file, and convert their keys to the keys of the model."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from itertools import chain
from typing import Any

from torch import Tensor

from vision_attn.checks import check_choice
from vision_attn.errors import CheckpointError
from vision_attn.networks.checkpoints.file_format import read_saved
from vision_attn.networks.checkpoints.load_report import EMA_ENTRIES
from vision_attn.networks.checkpoints.option_code import Arguments, get_arguments
from vision_attn.networks.inspection.wrappers import unwrap_key
from vision_attn.networks.safe import SAVE_STATE_DICT, CheckpointFile, Placeholder
from vision_attn.text import shorten

#: Entries under which training scripts save the weights of a network. They are preferred to other entries that match.
WEIGHT_ENTRIES = ("state_dict", "model", "model_state_dict", "net", "params")

#: Largest number of keys in the entries of a file, enough for five times the tensors of :data:`.read.MAX_LIST`.
MAX_KEYS = 400_000

#: Parts of the names of torch's and NumPy's placeholders that stand for tensors.
OTHER_TENSORS = ("qtensor", "sparse_tensor", "meta_tensor", "DTensor", "multiarray")
#: Remedy for these placeholders.
SAVE_TENSORS = "Save complete, dense tensors: use full_tensor(), dequantize(), to_dense() or torch.from_numpy()"

Tensors = Mapping[str, Tensor]
#: Values of the entries of a file, or their new keys, by entry and key.
Entries = Mapping[str, Mapping[str, Any]]
#: Pairs of a regular expression and its replacement, or the name of a preset.
Rename = str | Mapping[str, str] | Iterable[tuple[str, str]]


def find_weights(
    file: CheckpointFile, required: Tensors, *, ema: bool = False, prefix: str = "", rename: Rename = ()
) -> tuple[dict[str, Tensor], Arguments, dict[str, Any]]:
    """Find the weights for a model in a file; ``required`` are tensors of the model that the file must contain.

    Returns:
        The tensors by keys of the model, the arguments of attention blocks by path, and the fields ``file``, ``entry``,
        ``other_entries``, ``prefix`` and ``ignored`` of :class:`LoadReport`.
    """
    # Parallel and averaged models add a part "module", but it can also be a module of the network.
    wrappers = {"module"} - {part for key in required for part in key.split(".")}
    prefix = unwrap_key(f"{prefix.removesuffix('.')}.", wrappers) if prefix else ""
    pairs = parse_rename(rename, required)

    def prefix_in(entry: str) -> str:
        return prefix.removeprefix(unwrap_key(f"{entry}.", wrappers))

    def convert(entry: str, keys: Iterable[str]) -> dict[str, str]:
        """Convert the keys of an entry that start with the prefix, which can include the name of the entry."""
        names = {key: unwrap_key(key, wrappers) for key in keys}
        return rename_keys(remove_prefix(names, prefix_in(entry)), pairs)

    entries = {name: value for name, value in iterate_entries(file) if is_state_dict(value)}
    converted = {name: convert(name, content) for name, content in entries.items()}
    entry, found_prefix = choose_source(file, entries, converted, required, ema)
    values = read_values(file, entries[entry], required)
    if not (names := convert(entry, values)):
        first_parts = shorten(dict.fromkeys(unwrap_key(key, wrappers).partition(".")[0] for key in values))
        raise CheckpointError(f"{file.path}: no key starts with prefix={prefix!r}; the keys start with {first_parts}")
    names = remove_prefix(names, found_prefix)
    for key, name in names.items():
        if name in required and isinstance(values[key], Placeholder):
            what = f"{file.path}: {key} is the object {values[key].name} instead of a tensor"
            raise CheckpointError(f"{what}. {SAVE_TENSORS}")
    tensors = select_tensors(file.path, names, values)
    ignored = [key for key, value in values.items() if key not in names and isinstance(value, Tensor)]
    source = {
        "file": str(file.path),
        "entry": entry,
        "other_entries": tuple(name for name in entries if name not in ("", entry)),
        "prefix": prefix_in(entry) + found_prefix,
        "ignored": tuple(unwrap_key(key, wrappers) for key in ignored),
    }
    names_of_classes = saved.metadata.get("label_names") if (saved := read_saved(file)) else None
    if isinstance(names_of_classes, list) and all(isinstance(name, str) for name in names_of_classes):
        source["classes"] = tuple(names_of_classes)
    arguments = {name.strip("."): values[key] for key, name in names.items() if key.endswith(".")}
    return tensors, arguments, source


def read_values(file: CheckpointFile, content: Any, required: Tensors) -> dict[str, Any]:
    """Return the values of an entry by key, and the arguments of blocks by path with a dot at the end."""
    saved = read_saved(file)
    if saved is not None and saved.base is not None:
        remedy = "Load the checkpoint of the network, then call va.load_adapter_"
        raise CheckpointError(f"{file.path} is an adapter. {remedy}")
    values = {key: value for key, value in content.items() if isinstance(value, Tensor | Placeholder)}
    if "n_averaged" not in required:  # a counter of torch's AveragedModel
        values = {key: value for key, value in values.items() if key.rpartition(".")[2] != "n_averaged"}
    try:
        arguments = saved.arguments if saved else get_arguments(content)
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file.path} is damaged: the configuration of blocks is invalid ({error})") from error
    return values | {f"{path}.": options for path, options in arguments.items()}


def select_tensors(path: object, names: Mapping[str, str], values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors among values by new key; raise an error if keys are not unique."""
    keys = [key for key in names if isinstance(values[key], Tensor)]
    counts = Counter(names[key] for key in keys)
    if duplicates := [key for key in keys if counts[names[key]] > 1]:
        raise CheckpointError(f"{path} has several tensors with the same key: {shorten(duplicates)}. Keep one of them")
    return {names[key]: values[key] for key in keys}


# --- entries ----------------------------------------------------------------------------------------------------------


def iterate_entries(file: CheckpointFile) -> Iterator[tuple[str, Any]]:
    """Yield the content of a file, and the dictionaries in it to a depth of two, by names such as ``"ema.model"``.

    Dictionaries that contain each other could be entries of each other, so the number of keys is limited.
    """
    yield "", file.content
    outer = {f"{name}": value for name, value in file.content.items() if isinstance(value, Mapping)}
    inner = ((f"{name}.{key}", value) for name, content in outer.items() for key, value in content.items())
    keys = 0
    for name, value in chain(outer.items(), inner):
        if isinstance(value, Mapping):
            keys += len(value) + 1
            if keys > MAX_KEYS:
                raise CheckpointError(f"{file.path} has more than {MAX_KEYS:,} keys in its entries")
            yield name, value


def is_state_dict(value: Mapping[Any, Any]) -> bool:
    """Return True for a dictionary with string keys and at least one tensor; other values can be counters."""
    return all(isinstance(key, str) for key in value) and any(map(is_any_tensor, value.values()))


def is_any_tensor(value: object) -> bool:
    """Return True for a tensor, and for a placeholder that stands for a tensor."""
    name = value.name if isinstance(value, Placeholder) and value.name.startswith(("torch.", "numpy.")) else ""
    return isinstance(value, Tensor) or any(part in name for part in OTHER_TENSORS)


def choose_source(
    file: CheckpointFile, entries: Entries, converted: Entries, required: Tensors, ema: bool
) -> tuple[str, str]:
    """Return the entry and the prefix with the most keys and shapes of the model.

    Raises:
        CheckpointError: no entry contains weights, or several entries or prefixes match equally.
    """
    known = EMA_ENTRIES if ema else (*WEIGHT_ENTRIES, *EMA_ENTRIES, "")
    matches = {n: count_matches(entries[n], converted[n], required) for n in entries if not ema or n in known}
    if not matches:
        what = "averaged weights for ema=True" if ema else "weights"
        expected = f"a dictionary of tensors, alone or under {', '.join(filter(None, known))}"
        objects = {k: f"{k} (the object {v.name})" for k, v in file.content.items() if isinstance(v, Placeholder)}
        found = shorten(objects.get(name, name) for name in file.content) + f". {SAVE_STATE_DICT}" * bool(objects)
        raise CheckpointError(f"{file.path} contains no {what}: expected {expected}, got {found}")
    most = max(count for counts in matches.values() for count in counts.values())
    best = [(n, prefix) for n, counts in matches.items() for prefix in counts if counts[prefix] == most]
    names = {name for name, _ in best}
    preferred = next((name for name in known if name in names and converted[name]), None)
    if not most and preferred is None:  # the error or timm's function needs keys
        preferred = max(matches, key=lambda name: len(converted[name]))
    best = [source for source in best if preferred in (None, source[0])]
    if len(best) > 1:
        choices = " or ".join(f"prefix={f'{name}.{prefix}'.removeprefix('.')!r}" for name, prefix in best[:6])
        raise CheckpointError(f"{file.path} has weights for the model under {len(best)} prefixes. Pass {choices}")
    return best[0]


def count_matches(content: Mapping[str, Any], names: Mapping[str, str], required: Tensors) -> dict[str, int]:
    """Count the required keys, and required keys with the same shape, without a prefix and under each prefix.

    A prefix must have at least half of them, because parts of a network can have the same keys as another network, and
    more than there are without a prefix.
    """
    counts = Counter({"": 0})
    longest = max((key.count(".") for key in required), default=0) + 1
    for key, name in names.items():
        parts = name.rsplit(".", longest)
        for first in range(len(parts)):
            if (suffix := ".".join(parts[first:])) in required:
                same = getattr(content[key], "shape", None) == required[suffix].shape
                counts[name.removesuffix(suffix)] += 1 + same
    least = max(len(required), counts[""] + 1)
    return {prefix: count for prefix, count in counts.items() if not prefix or count >= least}


# --- keys -------------------------------------------------------------------------------------------------------------


def efficientnet_pytorch(keys: Iterable[str]) -> list[tuple[str, str]]:
    """Return pairs that convert keys of ``efficientnet_pytorch``, which numbers all blocks, to keys of timm."""
    blocks = dict.fromkeys(match[0] for key in keys if (match := re.match(r"blocks\.\d+\.\d+\.", key)))
    return [
        *((rf"^_blocks\.{number}\.", block) for number, block in enumerate(blocks)),
        *((r"^_(conv_stem|conv_head)", r"\1"), (r"^_bn0", "bn1"), (r"^_bn1", "bn2"), (r"^_fc", "classifier")),
        *((r"^(blocks\.0\..*)_project_conv", r"\1conv_pw"), (r"^(blocks\.0\..*)_bn", r"\1bn")),  # no expansion layer
        *((r"\._expand_conv", ".conv_pw"), (r"\._depthwise_conv", ".conv_dw"), (r"\._project_conv", ".conv_pwl")),
        *((r"\._bn2", ".bn3"), (r"\._bn1", ".bn2"), (r"\._bn0", ".bn1"), ("_se_(reduce|expand)", r"se.conv_\1")),
    ]


#: Name -> function that returns the pairs for a network with given keys.
PRESETS: dict[str, Callable[[Iterable[str]], list[tuple[str, str]]]] = {"efficientnet-pytorch": efficientnet_pytorch}


def parse_rename(rename: Rename, keys: Iterable[str]) -> list[tuple[re.Pattern[str], str]]:
    """Return pairs of a compiled expression and its replacement, for a network with the given ``keys``."""
    if isinstance(rename, str):
        check_choice("rename", rename, PRESETS, ", or pairs of a regular expression and its replacement")
        rename = PRESETS[rename](keys)
    pairs = rename.items() if isinstance(rename, Mapping) else rename
    return [(re.compile(pattern), replacement) for pattern, replacement in pairs]


def rename_keys(names: Mapping[str, str], pairs: Iterable[tuple[re.Pattern[str], str]]) -> dict[str, str]:
    r"""Replace regular expressions in the values, in order.

    >>> rename_keys({"a": "body.conv.weight"}, parse_rename([(r"^body\.", ""), ("conv", "conv1")], keys=()))
    {'a': 'conv1.weight'}
    """
    renamed = dict(names)
    for pattern, replacement in pairs:
        renamed = {key: pattern.sub(replacement, name) for key, name in renamed.items()}
    return renamed


def remove_prefix(names: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Remove a prefix from the values, and drop values without the prefix."""
    return {key: name.removeprefix(prefix) for key, name in names.items() if name.startswith(prefix)}


def rename_hint(saved: Tensors, required: Tensors) -> str:
    """Return how to rename the keys of a checkpoint of the same network; empty if it is another network."""
    if required.keys() <= saved.keys():  # keys of a block are missing
        return ""
    for preset in PRESETS:
        if required.keys() <= {*rename_keys({key: key for key in saved}, parse_rename(preset, required)).values()}:
            flag = f"--rename {preset} on the command line"
            return f'The checkpoint has other keys for this network. Pass rename="{preset}" ({flag}).'
    theirs = {key: value.shape for key, value in saved.items() if not key.endswith("num_batches_tracked")}
    if Counter(theirs.values()) != Counter(value.shape for value in required.values()):
        return ""
    ours = next((key for key in required if key not in saved), "")
    fitting = [key for key in theirs if ours and key not in required and theirs[key] == required[ours].shape]
    if not (closest := get_close_matches(ours, fitting, n=1, cutoff=0)):
        return ""
    pair = f'{closest[0]!r} for {ours!r}. Pass rename=[(r"^pattern", "replacement"), …]'
    return f"The checkpoint has the same tensors as the model under other keys, such as {pair}."
