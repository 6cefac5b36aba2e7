"""The training loop: from a network and its images to a folder of results, on one process or many."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from tqdm import tqdm

from vision_attn.errors import DataError
from vision_attn.training.augmentation import Augmentation, share
from vision_attn.training.curves import Curves
from vision_attn.training.evaluation import Closed, Evaluation, Normalize, evaluate, evaluate_closed
from vision_attn.training.images import Images
from vision_attn.training.network import Network
from vision_attn.training.run_folder import RunFolder
from vision_attn.training.saving import Saving
from vision_attn.training.settings import Settings
from vision_attn.training.state import TrainingState
from vision_attn.training.step import TrainingStep
from vision_attn.training.watch import Watch

__all__ = ["Result", "Run"]


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


class Run:
    """One run of training, from its first or a later step to its last."""

    def __init__(
        self,
        settings: Settings,
        accelerator: Accelerator,
        log: Callable[[str], None],
        network: Network,
        normalize: Normalize,
        classes: tuple[str, ...],
        train_data: Images,
        eval_data: Images,
    ) -> None:
        self.settings = settings
        self.accelerator = accelerator
        self.log = log
        self.network = network
        self.normalize = normalize
        self.classes = classes
        self.train_data = train_data
        self.eval_data = eval_data
        self.folder = RunFolder(settings.folder)
        self.curves = Curves(self.folder.path / "curves.png")
        self.augmentation = Augmentation(
            network.size,
            crop_padding=settings.crop_padding if settings.train_crop == "pad" else 0,
            hflip=settings.hflip,
            cutout=settings.cutout,
            mixup=settings.mixup,
            cutmix=settings.cutmix,
            mixup_switch_prob=settings.mixup_switch_prob,
        )
        self.model = network.model
        self.steps = len(train_data) // settings.batch_size
        self.step = TrainingStep(settings, accelerator, network, self.steps)
        self.ema = self.step.ema
        self.state = TrainingState(self.model, self.ema, self.step.optimizer, accelerator.scaler)
        self.saving = Saving(settings, self.folder, self.state, network, normalize, classes, len(train_data))
        self.watch = Watch(accelerator, self.state, self.saving, self.step)

    def go(self, checkpoint: Path | None = None) -> Result:
        """Train from the first step, or the one after an interruption, to the last."""
        settings, state = self.settings, self.state
        if checkpoint is not None:
            self.saving.restore(checkpoint)
            done = state.progress
            middle = f" and step {done.step} of the next" if done.step else ""
            self.log(f"resumed after epoch {done.epoch}{middle} from {checkpoint}")
        if self.accelerator.is_main_process:
            self.saving.open()
        self.accelerator.wait_for_everyone()
        if settings.tensorboard:
            self.accelerator.init_trackers("tensorboard")

        with self.watch.watching():
            final, predicted = self.evaluate()
            self.log(f"before epoch {state.progress.epoch + 1}: {final}")
            while state.progress.epoch < settings.epochs:
                self.step.enter_epoch(state.progress.epoch, self.log)
                loss = self.train_epoch()
                final, predicted = self.evaluate()
                self.record(loss, final)
            worth = evaluate_closed(
                self.state.evaluated, self.normalize, self.eval_data, final, predicted, **self.how_to_evaluate
            )
            if worth:
                self.log(str(worth))
        if settings.tensorboard:
            self.accelerator.end_training()
        if self.accelerator.is_main_process:
            self.curves.draw(state.progress.rows, at_once=True)
        best = state.progress.best or final
        self.log(f"best epoch: {best}, in {self.folder.path / 'best.pth'}")
        self.step.unwrap()
        return Result(self.network, self.state.evaluated, self.normalize, final, best, worth, state.progress.seconds)

    def evaluate(self) -> tuple[Evaluation, Tensor]:
        """How well the weights that count do on the evaluation images, and what this process predicts for its share."""
        if self.accelerator.num_processes > 1:
            # Each process has seen other images, and its batch norms have other statistics: those of the first, which
            # are the ones that are saved, are the network's.
            for buffer in (*self.model.buffers(), *(self.ema.module.buffers() if self.ema else ())):
                torch.distributed.broadcast(buffer, src=0)
        return evaluate(self.state.evaluated, self.normalize, self.eval_data, **self.how_to_evaluate)

    @property
    def how_to_evaluate(self) -> dict[str, Any]:
        return {
            "batch_size": self.settings.images_at_once(self.accelerator.num_processes),
            "accelerator": self.accelerator,
            "between": self.watch.evaluating,
        }

    def train_epoch(self) -> float:
        """Train on every image once, but for those at the end that are too few for a step."""
        settings, accelerator, progress = self.settings, self.accelerator, self.state.progress
        device, batch, done = accelerator.device, settings.batch_size, progress.step
        mine = share(batch, accelerator.process_index, accelerator.num_processes)
        seed = settings.seed * 1_000_003 + progress.epoch
        order = torch.randperm(len(self.train_data), generator=torch.Generator().manual_seed(seed))
        rows = order[: self.steps * batch].view(self.steps, batch)[:, mine]
        # What was drawn for steps before an interruption is drawn again, and passed over.
        choices = islice(self.augmentation.choices(batch, seed=seed, device=device), done, None)
        mine = mine.to(device)

        self.model.train()
        total = torch.tensor(progress.loss, device=device)
        begin = time.perf_counter() - progress.epoch_seconds
        bar = tqdm(
            self.train_data.batches(rows[done:], seed=seed),
            f"epoch {progress.epoch + 1}/{settings.epochs}",
            self.steps,
            initial=done,
            leave=False,
            disable=None if accelerator.is_main_process else True,  # None: off where there is no terminal
        )
        step = done
        try:
            for images, labels in bar:
                # The choices are made for the whole batch on every process, which then takes its share.
                images, labels = self.augmentation.apply(
                    images, labels, next(choices)[mine], normalize=self.normalize, classes=len(self.classes)
                )
                loss = self.step(images, labels, progress.epoch, step)
                total += loss
                step += 1
                self.watch.training(total, step, time.perf_counter() - begin)
                if not bar.disable and step % 50 == 1:
                    bar.set_postfix(loss=f"{loss.item():.3f}")
        except DataError:  # in this process alone: the others cannot be waited for
            progress.reached(step, total.item(), time.perf_counter() - begin)
            if accelerator.is_main_process and self.watch.whole():
                self.saving.save_last()
            raise
        progress.reached(self.steps, accelerator.reduce(total, "mean").item(), time.perf_counter() - begin)
        return progress.loss / self.steps

    def record(self, loss: float, score: Evaluation) -> None:
        """Close an epoch: log it, and save what is needed to go on from here."""
        progress, seconds = self.state.progress, self.state.progress.epoch_seconds
        images = self.steps * self.settings.batch_size / seconds
        progress.epoch += 1
        progress.seconds += seconds
        progress.reached(0, 0.0, 0.0)
        progress.rows.append(
            {
                "epoch": progress.epoch,
                "lr": f"{self.step.rate:.6g}",
                "train_loss": f"{loss:.6f}",
                "eval_loss": f"{score.loss:.6f}",
                "eval_top1": f"{score.top1:.4f}",
                "eval_top5": "" if score.top5 is None else f"{score.top5:.4f}",
                "branch_share": "" if score.branch_share is None else f"{score.branch_share:.6f}",
                "seconds": f"{seconds:.2f}",
                "images_per_second": f"{images:.0f}",
            }
        )
        self.log(
            f"epoch {progress.epoch}/{self.settings.epochs}: train loss {loss:.4f}, {score}, "
            f"{seconds:.0f} s, {images:.0f} images/s"
        )
        if self.settings.tensorboard:
            values = {key: float(str(value)) for key, value in progress.rows[-1].items() if key != "epoch" and value}
            self.accelerator.log(values, step=progress.epoch)
        improved = progress.best is None or score.top1 > progress.best.top1
        if improved:
            progress.best = score
        if self.accelerator.is_main_process:
            if improved:
                self.saving.save_best()
            self.saving.save_last()
            self.folder.write_metrics(progress.rows)
            self.curves.draw(progress.rows)
