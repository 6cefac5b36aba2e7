"""The training loop: from a network and its images to a folder of results, on one process or many."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor, nn

from vision_attn.errors import DataError, Interrupted, TrainingError
from vision_attn.networks.safe import CheckpointFile
from vision_attn.tools.training.augmentation import Augmentation, share
from vision_attn.tools.training.checkpoint import Checkpoints
from vision_attn.tools.training.evaluation import (
    Closed,
    Evaluation,
    Normalize,
    evaluate,
    evaluate_closed,
    report_classes,
)
from vision_attn.tools.training.images import Bar, Images, lost_worker_named
from vision_attn.tools.training.network import Network, lines_of
from vision_attn.tools.training.run_folder import RunFolder, numbered_folder
from vision_attn.tools.training.settings import Settings
from vision_attn.tools.training.step import TrainingStep

__all__ = ["Result", "Trainer"]

#: Steps between two looks at the loss and at signals on CUDA, where each waits for the device.
LOOK_EVERY = 10


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    #: what was trained
    network: Network
    #: the network with the weights that were evaluated last: its own, or their moving average
    model: nn.Module
    #: pixels to network input
    normalize: Normalize
    #: after the last epoch, or of the weights as they were where nothing was trained
    final: Evaluation
    #: of the best epoch
    best: Evaluation
    #: with all blocks closed, where there are some
    closed: Closed | None
    #: wall-clock of training, without evaluation
    seconds: float


@dataclass(repr=False, eq=False)  # signal.signal asks for the representation of a handler, which is a method here
class Trainer:
    """One run of training, from its first or a later step to its last."""

    settings: Settings
    accelerator: Accelerator
    #: told each line of the log
    log: Callable[[str], None]
    network: Network
    normalize: Normalize
    classes: tuple[str, ...]
    train_data: Images
    eval_data: Images

    def __post_init__(self) -> None:
        settings, network, normalize = self.settings, self.network, self.normalize
        self.augmentation = Augmentation(settings, network.size)
        self.steps = len(self.train_data) // settings.batch_size
        self.step = TrainingStep(settings, self.accelerator, network, self.steps)
        if settings.class_weights:
            count, labels = np.arange(len(self.classes)), self.train_data.labels.cpu().numpy()
            self.step.class_weights = normalize.mean.new_tensor(
                compute_class_weight("balanced", classes=count, y=labels)
            )
        about = {
            "classes": list(self.classes),
            "train_images": len(self.train_data),
            "input_size": [normalize.mean.numel(), *network.size],
            "mean": normalize.mean.flatten().tolist(),
            "std": normalize.std.flatten().tolist(),
        }
        if settings.numbered:  # now that nothing is refused any more
            folder = str(numbered_folder()) if self.accelerator.is_main_process else None
            self.settings = settings = replace(settings, output=broadcast_object_list([folder])[0])
            self.accelerator.project_configuration.logging_dir = str(settings.folder / "logs")
        self.folder = RunFolder(settings.folder)
        self.checkpoints = Checkpoints(settings, self.folder, self.step, network, about)
        self.look_every = 1 if self.accelerator.device.type == "cpu" else LOOK_EVERY
        #: a signal that came; 0 where none did
        self.signal = 0
        at_once = settings.images_at_once(self.accelerator.num_processes)
        self.how_to_evaluate = {"batch_size": at_once, "accelerator": self.accelerator, "between": self.between}

    def train(self, checkpoint: CheckpointFile | None = None) -> Result:
        """Train from the first step, or the one after an interruption, to the last, alone in the folder of the run."""
        main = self.accelerator.is_main_process
        with self.folder.alone() if main else nullcontext():
            if main and checkpoint is None and not self.settings.overwrite:  # one may have ended here since then
                self.folder.refuse_another_run()
            return self.train_here(checkpoint)

    def train_here(self, checkpoint: CheckpointFile | None) -> Result:
        """:meth:`train`, in a folder that no other run writes to."""
        settings, accelerator, main = self.settings, self.accelerator, self.accelerator.is_main_process
        if checkpoint is not None:
            self.checkpoints.restore(checkpoint)
        progress = self.checkpoints.progress
        if checkpoint is not None:
            middle = f" and step {progress.step} of the next" if progress.step else ""
            ahead = f"{settings.epochs - progress.epoch} of {settings.epochs} epochs are ahead"
            self.log(f"resumed after epoch {progress.epoch}{middle} from {checkpoint.path}: {ahead}")
        if main:
            if checkpoint is None:  # once the folder can be written and has room, a run that lies there may go
                self.checkpoints.save_last()
            self.folder.open(settings, clear=checkpoint is None)
            if self.network.inserted is not None:
                self.folder.write("inserted.txt", f"{lines_of(self.network.inserted)}\n".encode())
            self.folder.write_metrics(progress.rows)  # a run may be killed before its last one is written
        accelerator.wait_for_everyone()
        config = {
            name: str(value) if value is None or isinstance(value, list) else value
            for name, value in settings.as_dict().items()
        }
        accelerator.init_trackers("vision_attn", config=config)
        with self.signals_noted(), lost_worker_named():
            final, seen = self.evaluate()
            self.log(f"before epoch {progress.epoch + 1}: {final}")
            while progress.epoch < settings.epochs and not self.out_of_patience():
                self.step.enter_epoch(progress.epoch, self.log)
                loss = self.train_epoch()
                raw = self.evaluate(self.step.model)[0] if self.step.ema else None
                final, seen = self.evaluate()
                self.close_epoch(loss, final, seen, raw)
            evaluated = self.step.evaluated, self.normalize, self.eval_data
            closed = evaluate_closed(*evaluated, final, seen, **self.how_to_evaluate)
            if closed:
                self.log(str(closed))
            if self.asked_to_stop():
                self.leave()
        if main:
            self.folder.write_metrics(progress.rows, at_end=True)
        best = progress.best or final
        self.log(f"best epoch: {best}, in {self.folder.path / 'best.pth'}")
        self.step.unwrap()
        return Result(self.network, self.step.evaluated, self.normalize, final, best, closed, progress.seconds)

    def out_of_patience(self) -> bool:
        """Whether the last epochs, as many as early stopping has patience with, were no better than one before."""
        scores = [float(str(row["eval_top1"])) for row in self.checkpoints.progress.rows]
        worse = len(scores) - 1 - scores.index(max(scores)) if scores else 0
        over = self.settings.early_stopping is not None and worse >= self.settings.early_stopping
        if over:
            self.log(f"stopped early: {worse} epochs have not surpassed the top-1 of epoch {len(scores) - worse}")
        return over

    def evaluate(self, model: nn.Module | None = None) -> tuple[Evaluation, Tensor]:
        """How well a model, else the weights that count, does on the evaluation images; what this process saw."""
        if self.accelerator.num_processes > 1:
            # Each process has seen other images, and its batch norms have other statistics: those of the first, which
            # are the ones that are saved, are the network's.
            averages = self.step.ema.module.buffers() if self.step.ema else ()
            for buffer in (*self.step.model.buffers(), *averages):
                torch.distributed.broadcast(buffer, src=0)
        return evaluate(model or self.step.evaluated, self.normalize, self.eval_data, **self.how_to_evaluate)

    def train_epoch(self) -> float:
        """Train on every image once, but for those at the end that are too few for a step; returns the mean loss."""
        settings, accelerator, progress = self.settings, self.accelerator, self.checkpoints.progress
        device, batch, done = accelerator.device, settings.batch_size, progress.step
        mine = share(batch, accelerator.process_index, accelerator.num_processes)
        seed = settings.seed * 1_000_003 + progress.epoch
        order = torch.randperm(len(self.train_data), generator=torch.Generator().manual_seed(seed))
        rows = order[: self.steps * batch].view(self.steps, batch)[:, mine]
        # What was drawn for steps before an interruption is drawn again, and passed over.
        choices = islice(self.augmentation.choices(batch, seed=seed, device=device), done, None)
        mine = mine.to(device)

        self.step.model.train()
        total = torch.tensor(progress.loss, device=device)
        begin = time.perf_counter() - progress.epoch_seconds
        bar = Bar(
            self.train_data.batches(rows[done:], seed=seed),
            f"epoch {progress.epoch + 1}/{settings.epochs}",
            self.steps,
            initial=done,
            hidden=not accelerator.is_main_process,
        )
        step = done
        try:
            for images, labels in bar:
                # The choices are made for the whole batch on every process, which then takes its share.
                images, labels = self.augmentation.apply(
                    images, labels, next(choices)[mine], normalize=self.normalize, classes=len(self.classes)
                )
                total += self.step(images, labels, progress.epoch, step)
                step += 1
                if step % self.look_every == 0 or step == self.steps:
                    self.look(total, step, time.perf_counter() - begin)
                    bar.set_postfix(loss=f"{total.item() / step:.4f}", refresh=False)
        except DataError:  # in this process alone: the others cannot be waited for
            progress.reached(step, total.item(), time.perf_counter() - begin)
            if accelerator.is_main_process and self.is_finite(total):
                self.checkpoints.save_last()
            raise
        progress.reached(self.steps, accelerator.reduce(total, "mean").item(), time.perf_counter() - begin)
        return progress.loss / self.steps

    def close_epoch(self, loss: float, score: Evaluation, seen: Tensor, raw: Evaluation | None) -> None:
        """Log an epoch that is over, and save what is needed to go on from here."""
        progress, seconds = self.checkpoints.progress, self.checkpoints.progress.epoch_seconds
        images = self.steps * self.settings.batch_size / max(seconds, 1e-9)  # a clock may stand still
        progress.epoch += 1
        progress.seconds += seconds
        progress.reached(0, 0.0, 0.0)
        row = {
            "epoch": progress.epoch,
            "lr": f"{self.step.rate:.6g}",
            "train_loss": f"{loss:.6f}",
            "eval_loss": f"{score.loss:.6f}",
            "eval_top1": f"{score.top1:.4f}",
            "eval_top5": "" if score.top5 is None else f"{score.top5:.4f}",
            "branch_share": "" if score.branch_share is None else f"{score.branch_share:.6f}",
            "seconds": f"{seconds:.2f}",
            "images_per_second": f"{images:.0f}",
            "raw_loss": "" if raw is None else f"{raw.loss:.6f}",
            "raw_top1": "" if raw is None else f"{raw.top1:.4f}",
        }
        progress.rows.append(row)
        averaged = "" if raw is None else f" (not averaged: top-1 {raw.top1:.2f} %, loss {raw.loss:.4f})"
        self.log(
            f"epoch {progress.epoch}/{self.settings.epochs}: train loss {loss:.4f}, {score}{averaged}, "
            f"{seconds:.0f} s, {images:.0f} images/s"
        )
        self.accelerator.log({key: float(str(value)) for key, value in row.items() if value != ""}, step=progress.epoch)
        improved = progress.best is None or score.top1 > progress.best.top1
        if improved:
            progress.best = score
            if self.settings.report_classes:
                report_classes(self.folder, seen, self.classes, self.accelerator)
        if self.accelerator.is_main_process:
            if improved:
                self.checkpoints.save_best()
            self.checkpoints.save_last()
            self.folder.write_metrics(progress.rows)

    @contextmanager
    def signals_noted(self) -> Iterator[None]:
        """Note the first Ctrl-C or SIGTERM inside; Ctrl-C after it leaves at once, saving nothing.

        What the process ignores, as one in the background of a shell ignores Ctrl-C, stays ignored. Python takes
        signals in its main thread: a run in another one is left to them as ever.
        """
        before = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    before[number] = signal.signal(number, self.note_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def note_signal(self, number: int, frame: object) -> None:
        """The handler."""
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = self.signal or number

    def is_finite(self, total: Tensor) -> bool:
        """Whether a loss and all weights are finite."""
        return bool(total.isfinite()) and all(bool(p.isfinite().all()) for p in self.step.model.parameters())

    def asked_to_stop(self, *, broken: bool = False) -> bool:
        """Whether any process got a signal, or is broken; all of them ask at the same place."""
        if self.signal or broken:
            self.accelerator.set_trigger()
        stop: bool = self.accelerator.check_trigger()
        return stop

    def between(self, batch: int) -> None:
        """Leave between two batches of an evaluation where a signal asked to."""
        if batch % self.look_every == 0 and self.asked_to_stop():
            self.leave()

    def look(self, total: Tensor, step: int, seconds: float) -> None:
        """Stop after a step where a process was asked to, or where a loss or weight is not finite."""
        progress = self.checkpoints.progress
        finite = self.is_finite(total) if step == self.steps else bool(total.isfinite())
        if not self.asked_to_stop(broken=not finite):
            return
        total = self.accelerator.reduce(total, "mean")
        # What is saved is whole: the loss of a step is of the weights before it.
        if not self.is_finite(total):
            raise TrainingError(
                f"the loss ({total.item()}) or a weight is not finite at step {step} of {self.steps} of epoch "
                f"{progress.epoch + 1}, at a learning rate of {self.step.rate:.3g}: lower --lr, lengthen "
                f"--warmup-epochs or set --clip-grad. The last good checkpoint is {self.checkpoints.last}"
            )
        progress.reached(step, total.item(), seconds)
        self.leave()

    def leave(self) -> None:
        """Save the run as far as it has come, and end."""
        progress, last, message = self.checkpoints.progress, self.checkpoints.last, ""
        if self.accelerator.is_main_process:
            self.checkpoints.save_last()
            message = (
                f"interrupted; saved after step {progress.step} of {self.steps} of epoch {progress.epoch + 1} in "
                f"{last}: go on with the same settings and --resume {last}"
            )
        self.accelerator.wait_for_everyone()
        raise Interrupted(self.signal or signal.SIGTERM, message)
