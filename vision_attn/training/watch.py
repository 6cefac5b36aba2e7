"""Whether a run is to go on: looked at after its steps, and said the same way by all of its processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from torch import Tensor

from vision_attn.errors import Interrupted, TrainingError
from vision_attn.training.images import refuse_lost_worker
from vision_attn.training.interruption import Interruption
from vision_attn.training.saving import Saving
from vision_attn.training.state import TrainingState
from vision_attn.training.step import TrainingStep

__all__ = ["Watch"]

#: Steps between two looks on CUDA, where each waits for the device; on the CPU every step is looked at.
EVERY = 50
#: The same on several processes, where a signal waits for the next look, too.
TOGETHER_EVERY = 10


class Watch:
    """Ends a run that was interrupted, after saving it, or that has run away."""

    def __init__(self, accelerator: Accelerator, state: TrainingState, saving: Saving, step: TrainingStep) -> None:
        self.accelerator = accelerator
        self.state = state
        self.saving = saving
        self.step = step
        self.interruption = Interruption()
        every = EVERY if accelerator.num_processes == 1 else TOGETHER_EVERY
        self.every = 1 if accelerator.device.type == "cpu" else every

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note signals inside, and say errors of torch's in words; a signal that came too late to be seen is obeyed."""
        with self.interruption:
            try:
                yield
            except torch.OutOfMemoryError as error:
                raise TrainingError(
                    f"the device has no memory for a step ({str(error).splitlines()[0]}): go through the batch in "
                    "parts by --grad-accum-steps, give --amp or a smaller --batch-size"
                ) from error
            except RuntimeError as error:
                refuse_lost_worker(error)
                raise
            if self.interruption.signal and self.accelerator.num_processes == 1:
                self.leave(self.interruption.signal)

    def training(self, total: Tensor, step: int, seconds: float) -> None:
        """Whether to go on: not with a loss that is not finite, and not where a signal asked to stop.

        What one process finds counts for all of them, and all look after the same steps.
        """
        accelerator, asked, every = self.accelerator, self.interruption.signal, self.every
        if step % every and step < self.step.steps and not (asked and accelerator.num_processes == 1):
            return
        broken, signal = self.agree(int(not total.isfinite()), asked)
        epoch = self.state.progress.epoch + 1
        if broken:
            begin = (step - 1) // every * every + 1
            steps = f"step {step}" if begin == step else f"one of the steps {begin} to {step}"
            raise self.ran_away(f"the loss of epoch {epoch} is {total.item()}, at {steps}")
        # What is saved is whole: the loss of a step is of the weights before it.
        if (signal or step == self.step.steps) and not self.whole():
            raise self.ran_away(f"weights of epoch {epoch} are not finite, at step {step}")
        if signal:
            self.state.progress.reached(step, accelerator.reduce(total, "mean").item(), seconds)
            self.leave(signal)

    def whole(self) -> bool:
        """Whether all weights are finite."""
        return all(bool(p.isfinite().all()) for p in self.state.model.parameters())

    def agree(self, *numbers: int) -> list[int]:
        """The largest of each number over all processes."""
        device = self.accelerator.device
        found: Tensor = self.accelerator.gather(torch.tensor([numbers], device=device))
        return found.amax(0).tolist()

    def evaluating(self, batch: int) -> None:
        """Leave between two batches of an evaluation where a signal asked to."""
        asked = self.interruption.signal
        if batch % self.every and not (asked and self.accelerator.num_processes == 1):
            return
        (signal,) = self.agree(asked)
        if signal:
            self.leave(signal)

    def ran_away(self, what: str) -> TrainingError:
        """The error of a training that has run away, which leaves what was saved as it is."""
        last = self.saving.last
        kept = f"The last good checkpoint is {last}" if last.exists() else "Nothing was saved yet"
        return TrainingError(
            f"{what} of {self.step.steps} and a learning rate of {self.step.rate:.3g}: lower --lr, lengthen "
            f"--warmup-epochs or set --clip-grad. {kept}"
        )

    def leave(self, signal: int) -> None:
        """Save the run as far as it has come, and end."""
        progress, message = self.state.progress, ""
        if self.accelerator.is_main_process:
            self.saving.save_last()
            message = (
                f"interrupted; saved after step {progress.step} of {self.step.steps} of epoch {progress.epoch + 1} in "
                f"{self.saving.last}: go on with the same settings and --resume {self.saving.last}"
            )
        self.accelerator.wait_for_everyone()
        raise Interrupted(signal, message)
