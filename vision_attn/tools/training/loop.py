"""The training loop, on one process or several.

All randomness in a step is determined by the seed, the epoch, the step and the process, and the learning rates by the
number of the step. An interrupted and resumed run is therefore bitwise identical to an uninterrupted run.
"""

from __future__ import annotations

import copy
import json
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from timm.data import Mixup
from timm.data.random_erasing import RandomErasing
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torchvision.utils import save_image
from tqdm import tqdm

from vision_attn.errors import CheckpointError, Interrupted, TrainingError
from vision_attn.networks.checkpoints import save_adapter
from vision_attn.networks.checkpoints.folder import save_model
from vision_attn.networks.finetuning import parameter_groups
from vision_attn.networks.insertion import inserted_blocks
from vision_attn.networks.safe.write import rename_folder
from vision_attn.tools.training.data import Images, choose_crop, seed_all
from vision_attn.tools.training.evaluation import Evaluation, Scores
from vision_attn.tools.training.folder import newest_state, write_table
from vision_attn.tools.training.network import Log, NetworkSetup
from vision_attn.tools.training.settings import Settings

#: Steps between two checks of the loss and of signals on CUDA, where each check waits for the device.
CHECK_EVERY = 10
#: Number of images in ``first_batch.png``.
PICTURED = 32


@dataclass
class Progress:
    """Progress of a run, which a state contains as ``progress.json``."""

    #: number of completed epochs
    epoch: int = 0
    #: number of completed steps of the current epoch, the sum of their losses, and their duration in seconds
    step: int = 0
    loss: float = 0.0
    seconds: float = 0.0
    #: rows of ``metrics.csv``: the metrics of each completed epoch
    history: list[dict[str, Any]] = field(default_factory=list)

    @property
    def best(self) -> int:
        """Index in ``history`` of the first epoch with the highest accuracy."""
        return max(range(len(self.history)), key=lambda index: self.history[index]["eval_top1"])


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Create the optimizer of all trainable parameters, in groups with constant ratios of their learning rates."""
    # timm's schedules compute one learning rate for all groups and multiply it by the lr_scale of each group.
    lr = settings.base_lr
    options = {name: getattr(settings, name) for name in ("weight_decay", "attention_lr", "layer_decay")}
    groups: list[dict[str, Any]] = parameter_groups(model, lr, **options)
    scaled = [{**group, "lr": lr, "lr_scale": group["lr"] / lr} for group in groups]
    return create_optimizer_v2(scaled, opt=settings.optimizer, lr=lr, momentum=settings.momentum)


def make_schedule(optimizer: torch.optim.Optimizer, settings: Settings, steps: int) -> Scheduler:
    """Create a schedule of timm, which has no state because it depends only on the number of the step."""
    warmup = round(settings.warmup_epochs * steps)
    schedule, _ = create_scheduler_v2(
        optimizer, settings.sched,
        num_epochs=max(1, settings.epochs * steps - warmup),  # in steps, like all arguments below
        min_lr=settings.min_lr, warmup_lr=optimizer.defaults["lr"] / 100, warmup_epochs=warmup, warmup_prefix=True,
        step_on_epochs=False, updates_per_epoch=1,
    )  # fmt: skip
    assert schedule is not None
    return schedule


def crop_and_flip(images: Tensor, padding: int, hflip: float) -> Tensor:
    """Pad each image with zeros, crop it at random and flip it with a probability, in one indexing operation."""
    b, _, h, w = images.shape
    device = images.device
    y, x = (torch.randint(2 * padding + 1, (b, 1), device=device) + torch.arange(n, device=device) for n in (h, w))
    x = torch.where(torch.rand(b, 1, device=device) < hflip, x.flip(1), x)
    padded = F.pad(images, (padding,) * 4)
    image = torch.arange(b, device=device)
    return padded[image[:, None, None], :, y[:, :, None], x[:, None]].permute(0, 3, 1, 2)


class Trainer:
    """Training of one network from the first step, or from a saved state, to the last step."""

    def __init__(
        self,
        settings: Settings,
        network: NetworkSetup,
        data: Images,
        evaluation: Evaluation,
        log: Log,
    ) -> None:
        self.settings, self.network, self.data, self.evaluation, self.log = settings, network, data, evaluation, log
        self.folder, self.accelerator = Path(str(settings.output)), evaluation.accelerator
        self.steps = len(data.labels) // settings.batch
        self.progress, self.signal = Progress(), 0
        device = self.accelerator.device
        self.model = model = network.model.to(device)
        #: copy for saving, without the wrappers for mixed precision and several processes
        self.plain = copy.deepcopy(model).cpu().eval()
        self.layout = torch.channels_last if settings.channels_last else torch.contiguous_format
        model.to(memory_format=self.layout)
        optimizer = make_optimizer(model, settings)
        self.schedule = make_schedule(optimizer, settings, self.steps)
        self.ema = None if settings.ema is None else ModelEmaV3(model, settings.ema, use_warmup=True)
        self.wrapped, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.forward = torch.compile(self.wrapped) if settings.compile else self.wrapped
        #: network to evaluate and save: the moving average if there is one
        self.evaluated: nn.Module = model
        if self.ema is not None:
            # Its state is saved, because it is prepared.
            self.evaluated = self.accelerator.prepare_model(self.ema.module, evaluation_mode=True)
        self.padding = settings.crop_padding if choose_crop(settings, network.config) == "pad" else 0
        self.erase = RandomErasing(settings.reprob, mode="pixel", device=device)
        self.mixup = Mixup(settings.mixup, settings.cutmix, label_smoothing=0.0, num_classes=len(network.classes))
        weights = None
        if settings.class_weights:
            counts = data.labels.bincount(minlength=len(network.classes)).to(device)
            weights = len(data.labels) / (len(counts) * counts.clamp(min=1))
        self.loss = nn.CrossEntropyLoss(weights, label_smoothing=settings.label_smoothing, reduction="none")

    @property
    def lr(self) -> float:
        """Learning rate of the parameters without a scale."""
        group = self.optimizer.param_groups[0]
        return float(group["lr"] / group["lr_scale"])

    @property
    def position(self) -> str:
        return f"step {self.progress.step} of {self.steps} of epoch {self.progress.epoch + 1}"

    def train(self) -> tuple[Scores, Tensor]:
        """Train to the end; return the scores of the last epoch and the predictions of this process."""
        with self.catch_signals():
            scores, predictions = self.evaluation(self.evaluated)
            self.log(f"before epoch {self.progress.epoch + 1}: {scores}")
            while self.progress.epoch < self.settings.epochs:
                self.train_epoch()
                scores, predictions = self.evaluation(self.evaluated)
                self.finish_epoch(scores)
        return scores, predictions

    def train_epoch(self) -> None:
        """Train for one epoch, without the last incomplete batch."""
        settings, progress, accelerator = self.settings, self.progress, self.accelerator
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + progress.epoch)
        order = torch.randperm(len(self.data.labels), generator=generator)[: self.steps * settings.batch]
        indices = order.view(self.steps, -1)[progress.step :, accelerator.process_index :: accelerator.num_processes]
        self.model.train()
        total = torch.tensor(progress.loss, device=accelerator.device)
        begin = time.perf_counter() - progress.seconds
        name, hidden = f"epoch {progress.epoch + 1}/{settings.epochs}", None if accelerator.is_main_process else True
        batches = self.data.batches(list(indices), progress.epoch)
        bar = tqdm(batches, name, self.steps, initial=progress.step, leave=False, disable=hidden)
        for step, (images, labels) in enumerate(bar, progress.step + 1):
            total += self.step(images, labels, progress.epoch, step - 1)
            if step == self.steps or step % CHECK_EVERY == 0 or accelerator.device.type == "cpu":
                progress.step, progress.seconds = step, time.perf_counter() - begin
                self.check_step(total)
                bar.set_postfix(loss=f"{total.item() / step:.4f}", refresh=False)

    def check_step(self, total: Tensor) -> None:
        """Raise if a loss is not finite; save after the last step, or after a signal to any process, and then stop."""
        stop, broken = self.accelerator.reduce(torch.stack([total.new_tensor(self.signal > 0), ~total.isfinite()]))
        if broken:
            self.raise_not_finite("the loss")
        if stop or self.progress.step == self.steps:
            total.copy_(self.accelerator.reduce(total, "mean"))
            self.progress.loss = total.item()
            self.save()
        if stop:
            message = f"interrupted; saved after {self.position}. Continue with --resume {self.folder}"
            raise Interrupted(self.signal or signal.SIGTERM, message if self.accelerator.is_main_process else "")

    def raise_not_finite(self, what: str) -> None:
        where = f"{self.position}, with a learning rate of {self.lr:.3g}"
        remedy = f"Use a lower --lr, more --warmup-epochs or --clip-grad. The last valid state is in {self.folder}"
        raise TrainingError(f"{what} is not finite at {where}. {remedy}")

    def step(self, images: Tensor, labels: Tensor, epoch: int, step: int) -> Tensor:
        """Run one training step; return the mean loss over the images of this process."""
        settings, accelerator, parts = self.settings, self.accelerator, self.settings.grad_accum_steps
        number = epoch * self.steps + step
        seed_all(settings.seed, epoch, step, accelerator.process_index)
        self.schedule.step_update(number)
        images, labels = self.augment(*(part.to(accelerator.device, non_blocking=True) for part in (images, labels)))
        if number == 0 and accelerator.is_main_process:
            save_image(images[:PICTURED], self.folder / "first_batch.png", normalize=True)
        mean = torch.zeros((), device=images.device)
        for some_images, some_labels in zip(images.chunk(parts), labels.chunk(parts), strict=True):
            # Accelerate divides the gradients by the number of parts and updates the weights after the last part.
            with accelerator.accumulate(self.wrapped):
                logits = self.forward(some_images).float()
                # The mean is over images, not over class weights, so that all parts of a batch have equal weight.
                losses = self.loss(logits, some_labels)
                accelerator.backward(losses.mean())
                if accelerator.sync_gradients and settings.clip_grad is not None:
                    accelerator.clip_grad_norm_(self.model.parameters(), settings.clip_grad)
                self.optimizer.step()
                self.optimizer.zero_grad()
            mean += losses.detach().mean() / parts
        if self.ema is not None:
            self.ema.update(self.model, step=number)
        return mean

    def augment(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Augment and normalize a batch of bytes: crop, flip, erase and mix."""
        images = self.evaluation.normalize(crop_and_flip(images, self.padding, self.settings.hflip))
        if self.settings.reprob:
            images = self.erase(images)
        if self.settings.mixup or self.settings.cutmix:
            images, labels = self.mixup(images, labels)
        return images.contiguous(memory_format=self.layout), labels

    def finish_epoch(self, scores: Scores) -> None:
        """Log a completed epoch, save the network if it is the best, and save the state."""
        epoch, seconds, loss = self.progress.epoch + 1, self.progress.seconds, self.progress.loss / self.steps
        speed = self.steps * self.settings.batch / max(seconds, 1e-9)  # the clock may be too coarse for a short epoch
        row = {
            "epoch": epoch, "lr": self.lr, "train_loss": loss, "eval_loss": scores.loss, "eval_top1": scores.top1,
            "eval_top5": scores.top5, "residual_ratio": scores.residual_ratio, "seconds": seconds,
            "images_per_second": round(speed),
        }  # fmt: skip
        self.progress = progress = Progress(epoch, history=[*self.progress.history, row])
        done = f"epoch {epoch}/{self.settings.epochs}"
        self.log(f"{done}: train loss {loss:.4f}, {scores}, {seconds:.0f} s, {speed:.0f} images/s")
        self.accelerator.log({key: value for key, value in row.items() if value is not None}, step=epoch)
        if self.accelerator.is_main_process:
            if progress.best == len(progress.history) - 1:
                self.save_best()
            write_table(self.folder / "metrics.csv", [row.keys(), *(one.values() for one in progress.history)])
        self.save()

    def get_network_to_save(self) -> nn.Module:
        """Return the network to save, on the CPU and in evaluation mode."""
        self.plain.load_state_dict(self.evaluated.state_dict())
        return self.plain

    def save_best(self) -> None:
        """Save the network and, if the backbone is frozen, the adapter."""
        model, network = self.get_network_to_save(), self.network
        save_model(model, self.folder / "model", classes=network.classes)
        if self.settings.freeze_backbone and inserted_blocks(model):
            metadata = {key: network.config[key] for key in ("input_size", "mean", "std")}
            metadata["classes"] = list(network.classes)
            save_adapter(model, self.folder / "adapter.safetensors", also=network.new_head, metadata=metadata)

    def save(self) -> None:
        """Write the complete state of the run to a temporary folder, rename it, and remove older states."""
        if not all(bool(parameter.isfinite().all()) for parameter in self.model.parameters()):
            self.raise_not_finite("a weight")
        accelerator, progress = self.accelerator, self.progress
        state = self.folder.resolve() / "state" / f"{progress.epoch:05}-{progress.step:07}"
        temporary = state.with_name(f".{state.name}.new")  # the same name in every process and after a restart
        try:
            accelerator.save_state(str(temporary))
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                (temporary / "progress.json").write_text(json.dumps(asdict(progress)))
                rename_folder(temporary, state)
                for other in [*state.parent.glob("[0-9]*-[0-9]*"), *state.parent.glob(".*-*.new")]:
                    if other != state:
                        shutil.rmtree(other)
        except (OSError, RuntimeError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, RuntimeError) and "inline_container" not in str(error):  # not of torch.save
                raise
            reason = f"cannot write to {self.folder} ({' '.join(str(error).split())})"
            raise TrainingError(f"{reason}. Check the disk, and continue with --resume {self.folder}") from error
        accelerator.wait_for_everyone()

    def restore(self) -> None:
        """Load the newest state in the folder."""
        state = newest_state(self.folder) or self.folder
        try:
            self.progress = progress = Progress(**json.loads((state / "progress.json").read_bytes()))
            self.accelerator.load_state(str(state))
        except Exception as error:  # a damaged state can cause any error; no code in it is run
            raise CheckpointError(f"{state} is damaged, so the run cannot be resumed: {error}") from error
        self.log(f"resumed at epoch {progress.epoch + 1}, step {progress.step}, from {state}")

    @contextmanager
    def catch_signals(self) -> Iterator[None]:
        """Record Ctrl-C and SIGTERM, so that training stops after a step; ignored signals stay ignored."""
        in_main = threading.current_thread() is threading.main_thread()  # required to handle signals
        signals = (signal.SIGINT, signal.SIGTERM) if in_main else ()
        numbers = [n for n in signals if signal.getsignal(n) not in (signal.SIG_IGN, None)]
        before = {n: signal.signal(n, lambda number, frame: setattr(self, "signal", number)) for n in numbers}
        try:
            yield
        finally:
            for n, handler in before.items():
                signal.signal(n, handler)
