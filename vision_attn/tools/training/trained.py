"""What a run trained, made again from its checkpoint or its adapter: what these say is checked, and fetches nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vision_attn.errors import CheckpointError
from vision_attn.networks.checkpoints import load_adapter_, load_checkpoint
from vision_attn.networks.checkpoints.adapter_file import ENTRY, read_adapter
from vision_attn.networks.checkpoints.placements import LARGEST_IMAGES
from vision_attn.networks.safe import CheckpointFile, read_file
from vision_attn.networks.models.registry import create_model
from vision_attn.tools.training.data import Source
from vision_attn.tools.training.network import BLOCKS, NOTES, Network, build_network
from vision_attn.tools.training.settings import FIELDS, Settings, concerning
from vision_attn.version import __version__

__all__ = ["Trained", "nothing_to_resume", "open_trained", "settings_to_evaluate", "settings_to_resume"]

#: The settings that say what a network is.
OF_NETWORK = ("model", "img_size", "drop_path", "insert", "at", "block", "num_heads", "impl", "block_options")


@dataclass(frozen=True)
class Trained:
    """What a run trained."""

    #: of the run
    settings: Settings
    #: with its blocks and weights
    network: Network
    #: name of each class
    classes: tuple[str, ...]


def open_trained(path: str | Path, *, weights: str | None = None) -> Trained:
    """What a run of ``vision-attn train`` trained: of its folder the best epoch, of a ``.pth`` what that holds.

    A checkpoint with a moving average of the weights, ``last.pth`` of a run with ``--model-ema``, gives the average,
    as that is what the run evaluated. An adapter goes into the network that it was trained on, whose ``weights`` are,
    where none are given, the file that the run began from; ``"pretrained"`` are those that come with its name.
    """
    path = Path(path)
    file = read_file(path / "best.pth" if path.is_dir() else path)
    if ENTRY in file.metadata:
        return with_adapter(file.path, weights)
    if weights is not None:
        raise ValueError(f"weights apply to adapters, and {file.path} has all weights: leave them out")
    about: Mapping[str, Any] = file.content
    settings, source = settings_in(file.path, about), source_of(file.path, about)
    again = Settings(data="", **{name: getattr(settings, name) for name in OF_NETWORK})
    refuse_larger(again, source, file)
    again = replace(again, weights=str(file.path), weights_ema="model_ema" in about)
    return Trained(settings, build_network(again, source, lambda line: None, file), source.classes)


def settings_in(path: Path, about: Mapping[str, Any]) -> Settings:
    """The settings of the run that a checkpoint or adapter is of."""
    missing = set(NOTES) - about.keys()
    if missing:
        raise CheckpointError(
            f"{path} is no checkpoint of a run of vision-attn train (it lacks {', '.join(sorted(missing))}): give its "
            "best.pth or last.pth, or a folder that save_model wrote. Of other files make the network, then "
            "load_checkpoint or load_adapter_; save_model and export_classifier take any network"
        )
    try:
        return Settings(**{**Settings.values_in(about["settings"]), "resume": None, "overwrite": False})
    except ValueError as error:
        raise CheckpointError(
            f"{path} is damaged, or was written by another version of vision_attn than this one, {__version__}, and is "
            f"to be opened with that: {error}"
        ) from error


def source_of(path: Path, about: Mapping[str, Any]) -> Source:
    """The images that a run was trained for, as far as its network depends on them."""
    try:
        channels, height, width = (int(side) for side in about["input_size"])
        classes = tuple(map(str, about["classes"]))
        if len(classes) < 2 or not 0 < channels * height * width <= LARGEST_IMAGES:
            raise ValueError(f"{len(classes)} classes, images of {channels}×{height}×{width}")
        if any(len([float(value) for value in about[name]]) != channels for name in ("mean", "std")):
            raise ValueError(f"mean and std are not for {channels} channels")
    except (ValueError, TypeError, OverflowError) as error:
        raise CheckpointError(f"{path} is damaged in what it says of its images: {error}") from error
    return Source(str(path), classes, channels, (height, width), count=0)


def with_adapter(path: Path, weights: str | None) -> Trained:
    """The network of a run whose adapter a file is."""
    adapter = read_adapter(path)
    about = adapter.about
    settings, source = settings_in(path, about), source_of(path, about)
    pretrained, base = weights == "pretrained", weights or settings.weights
    if base is None:
        raise ValueError(
            f"weights: {path} is an adapter, blocks without their network: name the checkpoint of {settings.model} "
            "that it was trained on. The run took the weights that come with the name: weights='pretrained' (--weights "
            "pretrained) fetches them"
        )
    model = create_model(
        settings.model, num_classes=len(source.classes), in_chans=source.channels, pretrained=pretrained
    )
    if not pretrained:
        load_checkpoint(model, base, ema=settings.weights_ema and weights is None, fresh=adapter.also)
    foreign = settings.block == "excite" or ":" in settings.block  # no blocks of this library's own
    report = load_adapter_(model, path, block=BLOCKS[settings.block] if foreign else None)
    size = source.size or (0, 0)
    network = Network(model.eval(), size, tuple(about["mean"]), tuple(about["std"]), report.insertion)
    return Trained(settings, network, source.classes)


def refuse_larger(settings: Settings, source: Source, file: CheckpointFile) -> None:
    """Refuse a file whose settings ask for more than its tensors: the network is made without memory first."""
    with torch.device("meta"):
        named = build_network(settings, source, lambda line: None)
    held_in = file.content.get("model")
    asked, held = (
        sum(value.numel() for value in state.values() if isinstance(value, Tensor))
        for state in (named.model.state_dict(), held_in if isinstance(held_in, Mapping) else {})
    )
    if asked > 2 * held or math.prod((source.channels, *named.size)) > LARGEST_IMAGES:
        raise CheckpointError(
            f"{file.path} names a network of {asked:,} numbers on images of {named.size}, and holds {held:,}: it is "
            "damaged"
        )


def settings_to_resume(path: str | Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with which a run goes on from its ``last.pth``: its own, and those that are given."""
    if not Path(path).is_file():
        raise nothing_to_resume(path)
    file = read_file(path)
    settings = settings_in(file.path, file.content)
    own = {name: getattr(settings, name) for name in concerning("result", "machine")}
    return {**refuse_fetching(own, given, path), **given}


def nothing_to_resume(path: str | Path) -> Exception:
    if Path(path).is_dir():
        return ValueError(f"resume: {path} is a folder: give the last.pth in it, or --resume auto --output {path}")
    return FileNotFoundError(
        f"resume: there is no {path} yet: to go on where there is one and begin where there is none, give "
        "--resume auto and the folder as --output"
    )


def settings_to_evaluate(trained: Trained, given: Mapping[str, Any], path: str | Path) -> Settings:
    """The settings with which a run's network is evaluated: the run's as to its data, and those that are given."""
    of_data_and_model = [*FIELDS][: [*FIELDS].index("pretrained")]
    names = (*of_data_and_model, "batch_size", "seed", *concerning("machine"))
    own = {name: getattr(trained.settings, name) for name in names}
    given = {name: value for name, value in given.items() if name != "weights"}
    return Settings(**{**refuse_fetching(own, given, path), **given})


def refuse_fetching(own: dict[str, Any], given: Mapping[str, Any], path: str | Path) -> dict[str, Any]:
    """Nothing is fetched because a file says so."""
    if own["dataset"].startswith(("hfds/", "hfids/", "tfds/")) and "dataset" not in given:
        raise ValueError(f"dataset: {path} names {own['dataset']}, which may be fetched: give --dataset as well")
    return {**own, "dataset_download": False}
