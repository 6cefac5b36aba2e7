"""The training loop: from a network and its images to a folder of results, on one process or many.

Everything random in a step follows from the seed, the epoch, the step and the process, and rates follow from the number
of the step. So a run that is killed and resumed ends with the bits of one that was not.
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
from vision_attn.networks.insertion import freeze_backbone_, inserted_blocks, parameter_groups, unfreeze_backbone_
from vision_attn.networks.models.folder import save_model
from vision_attn.networks.safe.write import rename_folder
from vision_attn.tools.training.data import InMemory, Workers, crop_of, seed_all
from vision_attn.tools.training.evaluation import Evaluation, Scores
from vision_attn.tools.training.folder import newest_state, write_rows
from vision_attn.tools.training.network import Network, Say
from vision_attn.tools.training.settings import Settings

#: Steps between two looks at the loss and at signals on CUDA, where each waits for the device.
LOOK_EVERY = 10
#: Seconds that an epoch takes for its end to draw the curves, which takes a third of one.
LONG = 10
#: Images in the picture of the first batch.
PICTURED = 32


@dataclass
class Progress:
    """How far a run has come, as ``progress.json`` of a state has it."""

    #: epochs that are over, and steps of the one under way
    epoch: int = 0
    step: int = 0
    #: sum of the losses of these steps
    loss: float = 0.0
    #: that they took
    seconds: float = 0.0
    #: of ``metrics.csv``, one for each epoch that is over
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def best(self) -> int:
        """The place in ``rows`` of the first epoch with the highest accuracy."""
        return max(range(len(self.rows)), key=lambda place: self.rows[place]["eval_top1"])


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """The optimizer of all parameters that are trained, in groups whose rates keep their ratio throughout."""
    # timm's schedules begin and end at the same rate for every group, and then multiply it by the group's own
    # lr_scale: in that, not in their rate, these groups differ.
    rate = settings.base_lr
    how = {name: getattr(settings, name) for name in ("weight_decay", "attention_lr", "layer_decay")}
    groups: list[dict[str, Any]] = parameter_groups(model, rate, **how)
    scaled = [{**group, "lr": rate, "lr_scale": group["lr"] / rate} for group in groups]
    return create_optimizer_v2(scaled, opt=settings.opt, lr=rate, momentum=settings.momentum)


def make_schedule(optimizer: torch.optim.Optimizer, settings: Settings, steps: int) -> Scheduler:
    """timm's schedule by its name; it has no state, as it goes by the number of the step."""
    warmup, decays = round(settings.warmup_epochs * steps), [epoch * steps for epoch in sorted(settings.decay_epochs)]
    schedule, _ = create_scheduler_v2(
        optimizer, settings.sched,
        num_epochs=max(1, settings.epochs * steps - warmup),  # all of these are steps
        decay_epochs=decays[0] if decays else 1, decay_milestones=decays, decay_rate=settings.decay_rate,
        min_lr=settings.min_lr, warmup_lr=settings.base_lr / 100, warmup_epochs=warmup,
        warmup_prefix=settings.sched not in ("step", "multistep"),  # whose epochs are those of the run
        step_on_epochs=False, updates_per_epoch=1,
    )  # fmt: skip
    assert schedule is not None
    return schedule


def crop_and_flip(images: Tensor, padding: int, hflip: float) -> Tensor:
    """Crop each image out of its zero-padded self and flip some left to right, in one gather."""
    b, _, h, w = images.shape
    device = images.device
    y, x = (torch.randint(2 * padding + 1, (b, 1), device=device) + torch.arange(n, device=device) for n in (h, w))
    x = torch.where(torch.rand(b, 1, device=device) < hflip, x.flip(1), x)
    padded = F.pad(images, (padding,) * 4)
    image = torch.arange(b, device=device)
    return padded[image[:, None, None], :, y[:, :, None], x[:, None]].permute(0, 3, 1, 2)


class Trainer:
    """One run of training, from its first or a later step to its last."""

    def __init__(
        self, settings: Settings, network: Network, data: InMemory | Workers, evaluation: Evaluation, say: Say
    ) -> None:
        self.settings, self.network, self.data, self.evaluation, self.say = settings, network, data, evaluation, say
        self.folder = Path(str(settings.output))
        self.accelerator = accelerator = evaluation.accelerator
        self.steps = len(data.labels) // settings.batch_size
        self.progress = Progress()
        self.frozen, self.signal = False, 0
        self.model = model = network.model.to(accelerator.device)
        #: without what lets a network run in half precision and on several processes: what is saved
        self.plain = copy.deepcopy(model).cpu().eval()
        if settings.channels_last:
            model.to(memory_format=torch.channels_last)
        optimizer = make_optimizer(model, settings)
        self.schedule = make_schedule(optimizer, settings, self.steps)
        self.ema = None if settings.ema is None else ModelEmaV3(model, settings.ema, use_warmup=True)
        self.wrapped, self.optimizer = accelerator.prepare(model, optimizer)
        #: the weights that count: the moving average where there is one
        self.evaluated: nn.Module = model
        if self.ema is not None:
            self.evaluated = accelerator.prepare_model(self.ema.module, evaluation_mode=True)  # so the state has it
        self.forward = torch.compile(self.wrapped) if settings.compile else self.wrapped
        self.padding = settings.crop_padding if crop_of(settings, network.config) == "pad" else 0
        self.erase = RandomErasing(settings.reprob, mode="pixel", device=accelerator.device)
        self.mixup = Mixup(settings.mixup, settings.cutmix, label_smoothing=0.0, num_classes=len(network.classes))
        self.class_weights: Tensor | None = None
        if settings.class_weights:
            counts = data.labels.bincount(minlength=len(network.classes)).to(accelerator.device)
            self.class_weights = len(data.labels) / (len(counts) * counts.clamp(min=1))

    @property
    def rate(self) -> float:
        """The rate of a group that has no other: what the schedule makes of ``lr``."""
        group = self.optimizer.param_groups[0]
        return float(group["lr"] / group["lr_scale"])

    @property
    def place(self) -> str:
        """How far the run has come, in words."""
        return f"step {self.progress.step} of {self.steps} of epoch {self.progress.epoch + 1}"

    def save(self) -> None:
        """Write all that is needed to go on from here: aside, and renamed when it is whole."""
        if not all(bool(parameter.isfinite().all()) for parameter in self.model.parameters()):
            self.refuse_to_go_on("a weight")
        accelerator, progress = self.accelerator, self.progress
        new = self.folder.resolve() / "state" / f"{progress.epoch:05}-{progress.step:07}"
        aside = new.with_name(f".{new.name}.new")  # the same in every process, and after one was killed
        try:
            accelerator.save_state(str(aside))
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                (aside / "progress.json").write_text(json.dumps(asdict(progress)))
                rename_folder(aside, new)
        except Exception as error:  # a full disk is told by each library in its own way
            shutil.rmtree(aside, ignore_errors=True)
            raise TrainingError(
                f"{self.folder} cannot be written ({' '.join(str(error).split())}): make room, and --resume it"
            ) from error
        if accelerator.is_main_process:
            for other in [*new.parent.glob("[0-9]*-[0-9]*"), *new.parent.glob(".*-*.new")]:
                if other != new:
                    shutil.rmtree(other)
        accelerator.wait_for_everyone()

    def restore(self) -> None:
        """Become what the newest state in the folder holds."""
        found = newest_state(self.folder) or self.folder
        try:
            self.progress = progress = Progress(**json.loads((found / "progress.json").read_bytes()))
            self.accelerator.load_state(str(found))
        except Exception as error:  # what is damaged can fail in any way; nothing of it is run
            raise CheckpointError(f"{found} is damaged, and nothing can go on from it: {error}") from error
        self.say(f"resumed after epoch {progress.epoch} and step {progress.step} of the next from {found}")

    def train(self) -> tuple[Scores, Tensor]:
        """Train from where the run is to its end; the scores of the last epoch, and what this process saw of them."""
        settings, progress = self.settings, self.progress
        with self.signals_noted():
            final, seen = self.evaluation(self.evaluated)
            self.say(f"before epoch {progress.epoch + 1}: {final}")
            while progress.epoch < settings.epochs and not self.out_of_patience():
                if self.frozen != (frozen := progress.epoch < settings.freeze_epochs):
                    self.frozen = frozen
                    new_head = self.network.new_head
                    count = (
                        freeze_backbone_(self.model, also_train=new_head) if frozen else unfreeze_backbone_(self.model)
                    )
                    self.say(f"the backbone is {'frozen' if frozen else 'unfrozen'}: {count:,} parameters are trained")
                self.train_epoch()
                final, seen = self.evaluation(self.evaluated)
                self.close_epoch(final)
        if self.accelerator.is_main_process:
            write_rows(self.folder, progress.rows, draw=True)
        return final, seen

    def out_of_patience(self) -> bool:
        """Whether the last epochs, as many as early stopping has patience with, were no better than one before."""
        rows = self.progress.rows
        worse = len(rows) - 1 - self.progress.best if rows else 0
        over = self.settings.early_stopping is not None and worse >= self.settings.early_stopping
        if over:
            self.say(f"stopped early: {worse} epochs have not surpassed the top-1 of epoch {len(rows) - worse}")
        return over

    def train_epoch(self) -> None:
        """Train on every image once, but for those at the end that are too few for a step."""
        settings, progress, accelerator = self.settings, self.progress, self.accelerator
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + progress.epoch)
        order = torch.randperm(len(self.data.labels), generator=generator)[: self.steps * settings.batch_size]
        rows = order.view(self.steps, -1)[progress.step :, accelerator.process_index :: accelerator.num_processes]
        self.model.train()
        total = torch.tensor(progress.loss, device=accelerator.device)
        begin = time.perf_counter() - progress.seconds
        name, hidden = f"epoch {progress.epoch + 1}/{settings.epochs}", None if accelerator.is_main_process else True
        batches = self.data.batches(list(rows), progress.epoch)
        bar = tqdm(batches, name, self.steps, initial=progress.step, leave=False, disable=hidden)
        for step, (images, labels) in enumerate(bar, progress.step + 1):
            total += self.step(images, labels, progress.epoch, step - 1)
            due = step == self.steps or (settings.save_every and step % settings.save_every == 0)
            if due or step % LOOK_EVERY == 0 or accelerator.device.type == "cpu":
                progress.step, progress.seconds = step, time.perf_counter() - begin
                self.look(total, bool(due))
                bar.set_postfix(loss=f"{total.item() / step:.4f}", refresh=False)

    def look(self, total: Tensor, due: bool) -> None:
        """Save where that is due, or where any process got a signal; stop where a loss is not finite."""
        stop, broken = self.accelerator.reduce(torch.stack([total.new_tensor(self.signal > 0), ~total.isfinite()]))
        if broken:
            self.refuse_to_go_on("the loss")
        if due or stop:
            total.copy_(self.accelerator.reduce(total, "mean"))
            self.progress.loss = total.item()
            self.save()
        if stop:
            said = f"interrupted; saved after {self.place} in {self.folder}: go on with --resume {self.folder}"
            raise Interrupted(self.signal or signal.SIGTERM, said if self.accelerator.is_main_process else "")

    def refuse_to_go_on(self, what: str) -> None:
        raise TrainingError(
            f"{what} is not finite at {self.place}, at a learning rate of {self.rate:.3g}: lower --lr, lengthen "
            f"--warmup-epochs or set --clip-grad. The last good state is in {self.folder}"
        )

    def vary(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """From bytes to what a network and its loss take, by chance."""
        images = self.evaluation.normalize(crop_and_flip(images, self.padding, self.settings.hflip))
        if self.settings.reprob:
            images = self.erase(images)
        if self.settings.mixup or self.settings.cutmix:
            images, labels = self.mixup(images, labels)
        layout = torch.channels_last if self.settings.channels_last else torch.contiguous_format
        return images.contiguous(memory_format=layout), labels

    def step(self, images: Tensor, labels: Tensor, epoch: int, step: int) -> Tensor:
        """Make a step; returns its loss, the mean over the images of this process."""
        settings, accelerator, parts = self.settings, self.accelerator, self.settings.grad_accum_steps
        number = epoch * self.steps + step
        seed_all(settings.seed, epoch, step, accelerator.process_index)
        self.schedule.step_update(number)
        images, labels = self.vary(*(part.to(accelerator.device, non_blocking=True) for part in (images, labels)))
        if number == 0 and accelerator.is_main_process:
            save_image(images[:PICTURED], self.folder / "first_batch.png", normalize=True)
        mean = torch.zeros((), device=images.device)
        for some_images, some_labels in zip(images.chunk(parts), labels.chunk(parts), strict=True):
            # Accelerate divides the gradients by the number of parts, and lets the last part alone make the step.
            with accelerator.accumulate(self.wrapped):
                logits = self.forward(some_images).float()
                # With weights the mean is over images: over their weights, parts of a batch would not count the same.
                each = F.cross_entropy(
                    logits, some_labels, self.class_weights, label_smoothing=settings.label_smoothing, reduction="none"
                )
                accelerator.backward(each.mean())
                if accelerator.sync_gradients and settings.clip_grad is not None:
                    accelerator.clip_grad_norm_(self.model.parameters(), settings.clip_grad)
                self.optimizer.step()
                self.optimizer.zero_grad()
            mean += each.detach().mean() / parts
        if self.ema is not None:
            self.ema.update(self.model, step=number)
        return mean

    def close_epoch(self, score: Scores) -> None:
        """Log an epoch that is over, and save what is needed to go on from here."""
        progress, seconds, loss = self.progress, self.progress.seconds, self.progress.loss / self.steps
        speed = self.steps * self.settings.batch_size / max(seconds, 1e-9)  # a clock may stand still
        progress.epoch, progress.step, progress.loss, progress.seconds = progress.epoch + 1, 0, 0.0, 0.0
        row = {
            "epoch": progress.epoch, "lr": self.rate, "train_loss": loss, "eval_loss": score.loss,
            "eval_top1": score.top1, "eval_top5": score.top5, "branch_share": score.branch_share, "seconds": seconds,
            "images_per_second": round(speed),
        }  # fmt: skip
        progress.rows.append(row)
        done = f"epoch {progress.epoch}/{self.settings.epochs}"
        self.say(f"{done}: train loss {loss:.4f}, {score}, {seconds:.0f} s, {speed:.0f} images/s")
        self.accelerator.log({key: value for key, value in row.items() if value is not None}, step=progress.epoch)
        if self.accelerator.is_main_process:
            if progress.best == len(progress.rows) - 1:
                self.save_best()
            write_rows(self.folder, progress.rows, draw=seconds > LONG)
        self.save()

    def network_now(self) -> nn.Module:
        """The network with the weights that count, plain, on the CPU, in evaluation mode."""
        self.plain.load_state_dict(self.evaluated.state_dict())
        return self.plain

    def save_best(self) -> None:
        """Write the network, and the blocks by themselves where all else is as it came."""
        model, about = self.network_now(), {key: self.network.config[key] for key in ("input_size", "mean", "std")}
        arguments = {} if about["input_size"][0] == 3 else {"in_chans": about["input_size"][0]}
        save_model(model, self.folder / "model", classes=self.network.classes, model_args=arguments)
        if self.settings.freeze_backbone and inserted_blocks(model):
            about = {"classes": list(self.network.classes), **about}
            save_adapter(model, self.folder / "adapter.safetensors", also=self.network.new_head, about=about)

    @contextmanager
    def signals_noted(self) -> Iterator[None]:
        """Note Ctrl-C and SIGTERM inside, so that a run ends after a step; what the process ignores stays ignored."""
        in_main = threading.current_thread() is threading.main_thread()  # Python takes signals there
        before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM) if in_main}
        before = {n: handler for n, handler in before.items() if handler not in (signal.SIG_IGN, None)}
        for n in before:
            signal.signal(n, lambda number, frame: setattr(self, "signal", number))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
