"""The checkpoints of a run: all that its next step depends on, written whole and read to go on with the same bits.

Everything random follows from the seed, the epoch and the step, and the rates from the number of the step: neither has
a state of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list, send_to_device
from torch import Tensor, nn

from vision_attn.errors import CheckpointError
from vision_attn.networks.checkpoints import save_adapter
from vision_attn.networks.safe import CheckpointFile
from vision_attn.networks.insertion import plain_network
from vision_attn.tools.training.evaluation import Evaluation
from vision_attn.tools.training.network import Network
from vision_attn.tools.training.run_folder import RunFolder
from vision_attn.tools.training.settings import Settings, concerning
from vision_attn.tools.training.step import TrainingStep
from vision_attn.tools.training.trained import nothing_to_resume

__all__ = ["Checkpoints", "Progress", "checkpoint_to_resume", "progress_in"]


@dataclass
class Progress:
    """How far a run has come."""

    #: epochs that are over
    epoch: int = 0
    #: steps of the optimiser in the epoch under way
    step: int = 0
    #: sum of the losses of these steps
    loss: float = 0.0
    #: that they took
    epoch_seconds: float = 0.0
    #: of training in the epochs that are over
    seconds: float = 0.0
    #: of ``metrics.csv``, one for each epoch that is over
    rows: list[dict[str, object]] = field(default_factory=list)
    #: of the epoch with the highest accuracy
    best: Evaluation | None = None

    def reached(self, step: int, loss: float, seconds: float) -> None:
        """Note how far the epoch has come."""
        self.step, self.loss, self.epoch_seconds = step, loss, seconds


def checkpoint_to_resume(settings: Settings) -> Path | None:
    """The checkpoint to go on from, as the main process sees it; None to begin."""
    if settings.resume is None:
        return None
    path = settings.folder / "last.pth"
    path = path if settings.resume == "auto" else Path(settings.resume)
    # One answer for all processes, also where the folder reaches them at different times.
    found: bool = broadcast_object_list([path.is_file()])[0]
    if not found and settings.resume != "auto":
        raise nothing_to_resume(path)
    return path if found else None


class Checkpoints:
    """Saves a run, and restores it.

    Args:
        settings: of the run.
        folder: of the run.
        step: has what a run changes: network, moving average, optimiser and scale of the loss.
        network: is saved with what was inserted.
        about: what each checkpoint says of its data: ``classes``, ``train_images``, ``input_size``, ``mean``, ``std``.
    """

    def __init__(
        self, settings: Settings, folder: RunFolder, step: TrainingStep, network: Network, about: dict[str, Any]
    ) -> None:
        self.settings = settings
        self.folder = folder
        self.step = step
        self.network = network
        self.about = {"settings": settings.as_dict(), **about}
        self.progress = Progress()
        self.last = folder.path / "last.pth"

    def content(self) -> dict[str, Any]:
        """The state as tensors on the CPU and plain values."""
        step = self.step
        optimizer = send_to_device(step.optimizer.state_dict(), "cpu")
        content = {"model": weights(step.model), "optimizer": optimizer, **asdict(self.progress), **self.about}
        if step.ema is not None:
            content["model_ema"] = weights(step.ema.module)
        if step.accelerator.scaler is not None:
            content["scaler"] = step.accelerator.scaler.state_dict()
        return content

    def save_last(self) -> None:
        """Write all that is needed to go on from here."""
        self.folder.save("last.pth", self.content())

    def save_best(self) -> None:
        """Write the weights that count, and the blocks by themselves where all else is as it came."""
        model = self.step.evaluated
        self.folder.save("best.pth", {"model": weights(model), **self.about, "epoch": self.progress.epoch})
        if self.settings.freeze_backbone and self.network.inserted is not None:
            settings = self.settings.as_dict()
            # Without those of this run alone, so that the file is the same wherever the run lies.
            about = {**self.about, "settings": {name: settings[name] for name in concerning("result", "machine")}}
            save_adapter(model, self.folder.path / "adapter.safetensors", also=self.network.new_head, about=about)

    def restore(self, file: CheckpointFile) -> None:
        """Become what a checkpoint holds, if it is one of the same run, or of one with fewer epochs."""
        path, content = file.path, dict[str, Any](file.content)
        lacking = sorted(self.content().keys() - content.keys())
        if lacking:
            raise CheckpointError(
                f"{path} is not the last.pth of such a run (it lacks {', '.join(lacking)}): "
                "to begin a new run from its weights, give it to --weights"
            )
        try:
            differing = self.settings.differences(content["settings"])
        except ValueError as error:
            raise CheckpointError(f"{path} is damaged, or of another version of vision_attn: {error}") from error
        if "epochs" in differing and self.settings.epochs > content["settings"].get("epochs", Settings.epochs):
            differing.remove("epochs")  # more extend a run; its rates so far were not those of a shorter one
        words = {"classes": "the classes of the data", "train_images": "the number of training images"}
        differing += [word for key, word in words.items() if repr(content[key]) != repr(self.about[key])]
        if differing:
            raise ValueError(
                f"resume goes on with the same run, but {', '.join(differing)} differ from {path}: give the same, or "
                "begin a new run from its weights with --weights"
            )
        step = self.step
        try:
            self.progress = progress_in(content, self.settings.epochs, step.steps)
            step.model.load_state_dict(content["model"])
            step.optimizer.load_state_dict(content["optimizer"])
            if step.ema is not None:
                step.ema.module.load_state_dict(content["model_ema"])
            if step.accelerator.scaler is not None:
                step.accelerator.scaler.load_state_dict(content["scaler"])
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged, and nothing can go on from it: {error}") from error


def progress_in(content: Mapping[str, Any], epochs: int, steps: int) -> Progress:
    """What a checkpoint says of how far a run of so many epochs of so many steps has come."""
    found = Progress(**{part.name: content[part.name] for part in fields(Progress)})
    found.best = Evaluation(**content["best"]) if content["best"] else None
    numbers = [found.loss, found.epoch_seconds, found.seconds, *(float(str(row["eval_top1"])) for row in found.rows)]
    numbers += [found.best.top1, found.best.loss] if found.best else []
    if not (
        type(found.epoch) is type(found.step) is int
        and 0 <= found.epoch == len(found.rows) <= epochs
        and 0 <= found.step <= steps
        and (found.best is None) == (found.epoch == 0)
        and all(isinstance(number, float | int) and math.isfinite(number) for number in numbers)
    ):
        raise ValueError(f"it says that {found.epoch} epochs and {found.step} steps are over")
    return found


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A state dict on the CPU, of plain names; it says what its blocks are."""
    state: dict[str, Tensor] = plain_network(model).state_dict()
    for key, value in state.items():
        state[key] = value.detach().cpu().clone()
    return state
