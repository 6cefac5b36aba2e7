"""Where in a checkpoint the weights are, and under which names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from vision_attn.checkpoints.read import read_checkpoint
from vision_attn.errors import CheckpointError
from vision_attn.text import shorten

__all__ = ["AVERAGED", "Weights", "find_weights", "fitting_prefix", "read_weights"]

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
    entry: str = ""
    #: other entries that hold weights
    others: tuple[str, ...] = ()
    #: what was taken off every name
    prefix: str = ""
    #: names that do not begin with the prefix that was asked for
    aside: tuple[str, ...] = ()


def read_weights(path: str | Path, *, ema: bool = False, own: Collection[str] = ()) -> tuple[str, dict[str, Tensor]]:
    """The weights of a checkpoint file, and the entry they were found under; prefixes of wrappers are taken off.

    >>> import tempfile, torch
    >>> file = Path(tempfile.mkdtemp()) / "net.pth"
    >>> torch.save({"state_dict": {"module.weight": torch.ones(3, 2)}}, file)
    >>> entry, weights = read_weights(file)
    >>> entry, list(weights)
    ('state_dict', ['weight'])
    """
    found = find_weights(read_checkpoint(path), str(path), ema=ema, own=own)
    return found.entry, dict(found.tensors)


def find_weights(
    content: Mapping[str, object], source: str, *, ema: bool = False, own: Collection[str] = (), prefix: str = ""
) -> Weights:
    """The weights in the content of a checkpoint."""
    entry = find_entry(content, source, ema=ema)
    held = content[entry] if entry else content
    assert isinstance(held, Mapping)
    weights = {key: value for key, value in held.items() if isinstance(value, Tensor)}
    others = tuple(name for name, value in content.items() if name != entry and is_state_dict(value))
    wrapper, weights = without_wrappers(weights, own)
    aside: tuple[str, ...] = ()
    if prefix:
        prefix = (prefix if prefix.endswith(".") else f"{prefix}.").removeprefix(wrapper)
        chosen = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
        if not chosen:
            parts = Counter(key.partition(".")[0] + "." for key in weights if "." in key)
            there = shorten(f"{part!r} ({number} keys)" for part, number in parts.items()) or "names without any"
            raise CheckpointError(f"{source}: prefix {prefix!r} begins none of its keys; there are {there}")
        aside = tuple(key for key in weights if not key.startswith(prefix))
        weights = chosen
    shared, weights = without_shared_prefix(weights, own)
    return Weights(weights, entry, others, wrapper + prefix + shared, aside)


def find_entry(content: Mapping[str, object], source: str, *, ema: bool) -> str:
    for entry in AVERAGED if ema else WEIGHTS + AVERAGED:
        if is_state_dict(content.get(entry)):
            return entry
    if ema:
        raise CheckpointError(
            f"{source}: ema=True asks for averaged weights under one of {', '.join(AVERAGED)}; "
            f"the file has {shorten(map(str, content))}"
        )
    if is_state_dict(content):
        return ""
    raise CheckpointError(
        f"{source} holds no weights: expected tensors by name, at the top or under one of "
        f"{', '.join(WEIGHTS + AVERAGED)}; the file has {shorten(map(str, content))}"
    )


def is_state_dict(value: object) -> bool:
    """Names to tensors, some of which may be counters of other types."""
    return (
        isinstance(value, Mapping)
        and any(isinstance(item, Tensor) for item in value.values())
        and all(isinstance(key, str) for key in value)
    )


def without_wrappers(weights: dict[str, Tensor], own: Collection[str]) -> tuple[str, dict[str, Tensor]]:
    """Without the names that parallel and compiled models put before those of the network."""
    weights = {key if key in own else key.replace("_orig_mod.", ""): value for key, value in weights.items()}
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
    taken, inner = "", weights
    while inner and not any(key in own for key in inner):
        first = {key.partition(".")[0] for key in inner if "." in key}
        if len(first) != 1 or not all("." in key for key in inner):
            return "", weights
        part = f"{first.pop()}."
        inner = {key.removeprefix(part): value for key, value in inner.items()}
        taken += part
    return taken, inner


def fitting_prefix(weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> tuple[str, int]:
    """The first component without which most tensors fit the model's, and how many do.

    >>> import torch
    >>> one = torch.ones(1)
    >>> fitting_prefix({"backbone.weight": one, "head.bias": one}, {"weight": one})
    ('backbone.', 1)
    """
    fitting: Counter[str] = Counter()
    for key, value in weights.items():
        first, dot, rest = key.partition(".")
        if dot and rest in own and own[rest].shape == value.shape:
            fitting[f"{first}."] += 1
    return fitting.most_common(1)[0] if fitting else ("", 0)
