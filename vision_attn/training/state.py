"""All that the next step of training depends on, as ``last.pth`` holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from timm.utils import ModelEmaV3
from torch import nn

from vision_attn.errors import CheckpointError
from vision_attn.insertion import plain_network
from vision_attn.training.evaluation import Evaluation

__all__ = ["Progress", "TrainingState", "weights"]


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


class TrainingState:
    """What a run changes as it goes.

    Everything random follows from the seed, the epoch and the step, and the rates from the number of the step: neither
    has a state of its own.
    """

    def __init__(
        self,
        model: nn.Module,
        ema: ModelEmaV3 | None,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self.model = model
        self.ema = ema
        self.optimizer = optimizer
        self.scaler = scaler
        self.progress = Progress()

    @property
    def evaluated(self) -> nn.Module:
        """The weights that count: the moving average where there is one."""
        return self.model if self.ema is None else self.ema.module

    def content(self) -> dict[str, object]:
        """The state as tensors on the CPU and plain values, for :meth:`load`."""
        optimizer = send_to_device(self.optimizer.state_dict(), "cpu")
        content = {"model": weights(self.model), "optimizer": optimizer, **asdict(self.progress)}
        if self.ema is not None:
            content["model_ema"] = weights(self.ema.module)
        if self.scaler is not None:
            content["scaler"] = self.scaler.state_dict()
        return content

    def refuse_other_content(self, content: Mapping[str, object], path: Path) -> None:
        """Refuse a checkpoint that is not one to go on from."""
        needed = {
            "model",
            "optimizer",
            "settings",
            "classes",
            "train_images",
            *(part.name for part in fields(Progress)),
        }
        needed |= {"model_ema"} if self.ema is not None else set()
        needed |= {"scaler"} if self.scaler is not None else set()
        lacking = sorted(needed - content.keys())
        if lacking:
            raise CheckpointError(
                f"{path} is not the last.pth of such a run (it lacks {', '.join(lacking)}): "
                "to begin a new run from its weights, give it to --weights"
            )

    def load(self, content: Mapping[str, Any]) -> None:
        """Become what was saved."""
        self.model.load_state_dict(content["model"])
        if self.ema is not None:
            self.ema.module.load_state_dict(content["model_ema"])
        if self.scaler is not None:
            self.scaler.load_state_dict(content["scaler"])
        self.optimizer.load_state_dict(content["optimizer"])
        best = Evaluation(**content["best"]) if content["best"] else None
        # In place: the run holds on to it.
        vars(self.progress).update({part.name: content[part.name] for part in fields(Progress)}, best=best)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """A state dict on the CPU, of plain names."""
    return {key: value.detach().cpu().clone() for key, value in plain_network(model).state_dict().items()}
