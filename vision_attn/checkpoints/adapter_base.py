"""Whether a network is the one that an adapter was trained on, and if not, in what it differs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from torch import Tensor, nn

from vision_attn.checkpoints.adapter_file import Adapter
from vision_attn.checkpoints.fingerprint import Fingerprint, fingerprint
from vision_attn.errors import CheckpointError
from vision_attn.text import shorten

__all__ = ["network_of", "verify_network"]


def network_of(state: Mapping[str, object], without: Collection[str]) -> dict[str, Tensor]:
    """The tensors by name that make a network what it is: counters of batches do not."""
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor) and key not in without and not key.endswith("num_batches_tracked")
    }


def verify_network(model: nn.Module, adapter: Adapter, path: str | Path, *, strict: bool) -> tuple[str, ...]:
    """The names of the network's tensors that are not those the adapter was trained on."""
    state = model.state_dict()
    replaced = tuple(f"{placement.site}." for placement in adapter.placements if placement.at == "instead")
    gone = {key for key in state if key.startswith(replaced)}
    ours, theirs = fingerprint(network_of(state, without={*adapter.also, *gone})), adapter.base

    if ours.keys() != theirs.keys():
        raise CheckpointError(
            f"{path} is for another network: of what it was trained on the model lacks "
            f"{some(theirs.keys() - ours.keys(), theirs)}; the model has "
            f"{some(ours.keys() - theirs.keys(), ours)} beyond it. Make the network that it was trained on"
        )
    other = [name for name in theirs if ours[name][0] != theirs[name][0]]
    if other:
        shapes = shorten(f"{name} (model {ours[name][0]}, adapter {theirs[name][0]})" for name in other)
        raise CheckpointError(
            f"{path} is for a network with the same names and other shapes: {shapes}. Make the network that it was "
            "trained on"
        )
    verify_further(state, adapter, path)
    retyped = [name for name in theirs if ours[name][1] != theirs[name][1]]
    changed = [name for name in theirs if ours[name] != theirs[name]]
    if strict and retyped:
        here, there = (sorted({side[name][1] for name in retyped}) for side in (ours, theirs))
        raise CheckpointError(
            f"{path}: the model is in {', '.join(here)} and was in {', '.join(there)} when the adapter was saved "
            f"({len(retyped)} of {len(theirs)} tensors), so their values cannot be compared: load the adapter first, "
            "then convert the model, or pass strict=False"
        )
    if strict and changed:
        raise CheckpointError(
            f"{path} is for other weights of this network: {len(changed)} of {len(theirs)} tensors have other values, "
            f"{shorten(changed)}. Load the checkpoint that it was trained on first. If the network was trained along "
            "with the blocks, in its running statistics too, no checkpoint fits: freeze_backbone_ it in training, save "
            "what changed with also=, or save the whole model. strict=False loads the adapter all the same"
        )
    return tuple(changed)


def verify_further(state: Mapping[str, object], adapter: Adapter, path: str | Path) -> None:
    """What the adapter puts in the place of the network's own tensors must fit there."""
    for key in adapter.also:
        here, saved = state.get(key), adapter.tensors[key]
        if not isinstance(here, Tensor):
            raise CheckpointError(f"{path} also holds {key}, which the model has not: make the network that it is for")
        if here.shape != saved.shape:
            raise CheckpointError(
                f"{path} also holds {key} of shape {tuple(saved.shape)}, and the model's is {tuple(here.shape)}: make "
                "the network with as many as in the adapter"
            )


def some(names: Collection[str], order: Fingerprint) -> str:
    """The first of the names, in the order of the network."""
    return shorten(name for name in order if name in names) or "nothing"
