"""The training loop: from a network and its images to a folder of results, on one process or many."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch import nn
from tqdm import tqdm

from vision_attn.checkpoints import CheckpointError, read_checkpoint, save_adapter
from vision_attn.insertion import parameter_groups, plain_network
from vision_attn.training.data import ImageSet, augment, draw_augmentation
from vision_attn.training.errors import TrainingError
from vision_attn.training.evaluation import Evaluation, Normalize, evaluate
from vision_attn.training.network import Network
from vision_attn.training.run_folder import RunFolder
from vision_attn.training.settings import Settings

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
    #: wall-clock of training, without evaluation
    seconds: float


class Run:
    """One run of training, from its first or a later epoch to its last.

    Args:
        settings: what to do.
        accelerator: device, precision and processes.
        log: told each line.
        network: the network, on the device.
        normalize: pixels to network input.
        classes: name of each class.
        train_data: images to train on, on the device.
        eval_data: images to evaluate on, on the device.

    Raises:
        ValueError: no parameter of the network is trained, or ``attention_lr`` is set and no block is.
    """

    def __init__(
        self,
        settings: Settings,
        accelerator: Accelerator,
        log: Callable[[str], None],
        network: Network,
        normalize: Normalize,
        classes: tuple[str, ...],
        train_data: ImageSet,
        eval_data: ImageSet,
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
        self.steps = len(train_data) // settings.batch_size

        self.model = model = network.model
        self.ema = ModelEmaV3(model, decay=settings.model_ema_decay) if settings.model_ema else None
        optimizer = create_optimizer_v2(
            scaled_groups(model, settings), opt=settings.opt, lr=settings.base_lr, momentum=settings.momentum
        )
        warmup = round(settings.warmup_epochs * self.steps)
        self.schedule = CosineLRScheduler(
            optimizer,
            t_initial=max(1, settings.epochs * self.steps - warmup),
            lr_min=settings.min_lr,
            warmup_t=warmup,
            warmup_lr_init=settings.base_lr / 100,
            warmup_prefix=True,
            t_in_epochs=False,
        )
        self.wrapped, self.optimizer = accelerator.prepare(model, optimizer)
        self.forward = torch.compile(self.wrapped) if settings.compile else self.wrapped

        self.epoch = 0
        self.rows: list[dict[str, object]] = []
        self.best: Evaluation | None = None
        self.seconds = self.epoch_seconds = 0.0

    def go(self) -> Result:
        """Train from the first epoch, or the one after an interruption, to the last.

        Returns:
            The network and how well it does.

        Raises:
            ValueError: the run to go on with has other settings.
            CheckpointError: its checkpoint cannot be read.
            TrainingError: the loss is no longer a number.
            OSError: the folder of the run cannot be written.
        """
        settings = self.settings
        if settings.resume:
            self.restore(settings.resume)
        final = self.evaluate()
        self.log(f"before epoch {self.epoch + 1}: {final}")
        if self.accelerator.is_main_process:
            self.folder.open(clear=not settings.resume)
            self.folder.write_settings(settings.as_dict())
            if self.network.inserted is not None:
                self.folder.write_text("inserted.txt", f"{self.network.inserted}\n")
        self.accelerator.wait_for_everyone()
        if settings.tensorboard:
            self.accelerator.init_trackers("tensorboard")

        while self.epoch < settings.epochs:
            loss = self.train_epoch()
            final = self.evaluate()
            self.record(loss, final)
        if settings.tensorboard:
            self.accelerator.end_training()
        best = self.best or final
        self.log(f"best epoch: {best}, in {self.folder.path / 'best.pth'}")
        # Without the wrapper that let it run in half precision: what leaves the run is the plain network.
        self.accelerator.unwrap_model(self.wrapped, keep_fp32_wrapper=False)
        return Result(self.network, self.evaluated, self.normalize, final, best, self.seconds)

    @property
    def evaluated(self) -> nn.Module:
        """The weights that count: the moving average where there is one."""
        return self.model if self.ema is None else self.ema.module

    def evaluate(self) -> Evaluation:
        """How well the weights that count do on the evaluation images."""
        if self.accelerator.num_processes > 1:
            # Each process has seen other images, and its batch norms have other statistics: those of the first, which
            # are the ones that are saved, are the network's.
            for buffer in (*self.model.buffers(), *(self.ema.module.buffers() if self.ema else ())):
                torch.distributed.broadcast(buffer, src=0)
        return evaluate(self.evaluated, self.normalize, self.eval_data, accelerator=self.accelerator)

    def train_epoch(self) -> float:
        """Train on every image once, but for those at the end that are too few for a step.

        Returns:
            The mean loss.

        Raises:
            TrainingError: it is not finite.
        """
        settings, accelerator, epoch = self.settings, self.accelerator, self.epoch
        device, batch = accelerator.device, settings.batch_size
        share = batch // accelerator.num_processes
        mine = slice(accelerator.process_index * share, (accelerator.process_index + 1) * share)
        seed = settings.seed * 1_000_003 + epoch
        order = torch.randperm(len(self.train_data), generator=torch.Generator().manual_seed(seed)).to(device)
        generator = torch.Generator(device).manual_seed(seed)
        torch.manual_seed(seed + 7919 * accelerator.process_index)  # dropout

        self.model.train()
        total = torch.zeros((), device=device)
        begin = time.perf_counter()
        bar = tqdm(
            range(self.steps),
            f"epoch {epoch + 1}/{settings.epochs}",
            leave=False,
            disable=None if accelerator.is_main_process else True,  # None: off where there is no terminal
        )
        for step in bar:
            # The choices are made for the whole batch on every process, which then takes its share.
            choice = draw_augmentation(batch, padding=settings.crop_padding, hflip=settings.hflip, generator=generator)
            chosen = order[step * batch : (step + 1) * batch][mine]
            images = augment(self.train_data.images[chosen], choice[mine], settings.crop_padding)
            labels = self.train_data.labels[chosen]
            images = self.normalize(images).contiguous(
                memory_format=torch.channels_last if settings.channels_last else torch.contiguous_format
            )
            self.schedule.step_update(epoch * self.steps + step)
            logits = self.forward(images).float()
            loss = F.cross_entropy(logits, labels, label_smoothing=settings.label_smoothing)
            self.optimizer.zero_grad()
            accelerator.backward(loss)
            if settings.clip_grad is not None:
                accelerator.clip_grad_norm_(self.model.parameters(), settings.clip_grad)
            self.optimizer.step()
            if self.ema is not None:
                self.ema.update(self.model, step=epoch * self.steps + step)
            total += loss.detach()
            if not bar.disable and step % 50 == 0:
                bar.set_postfix(loss=f"{loss.item():.3f}")
        mean = accelerator.reduce(total, "mean").item() / self.steps
        self.epoch_seconds = time.perf_counter() - begin
        if not math.isfinite(mean):
            raise TrainingError(
                f"the loss of epoch {epoch + 1} is {mean}, at a learning rate of {self.rate:.3g}: lower --lr, lengthen "
                f"--warmup-epochs or set --clip-grad. {self.last_good()}"
            )
        return mean

    @property
    def rate(self) -> float:
        """The rate of a group that has no other: what the schedule makes of ``lr``."""
        group = self.optimizer.param_groups[0]
        return float(group["lr"] / group["lr_scale"])

    def last_good(self) -> str:
        """The checkpoint from which training could go on, in a sentence."""
        last = self.folder.path / "last.pth"
        return f"The last good checkpoint is {last}" if self.epoch and last.exists() else "Nothing was saved yet"

    def record(self, loss: float, score: Evaluation) -> None:
        """Close an epoch: log it, and save what is needed to go on from here.

        Args:
            loss: mean of the epoch's training.
            score: of the evaluation after it.
        """
        self.epoch += 1
        self.seconds += self.epoch_seconds
        images = self.steps * self.settings.batch_size / self.epoch_seconds
        self.rows.append(
            {
                "epoch": self.epoch,
                "lr": f"{self.rate:.6g}",
                "train_loss": f"{loss:.6f}",
                "eval_loss": f"{score.loss:.6f}",
                "eval_top1": f"{score.top1:.4f}",
                "eval_top5": "" if score.top5 is None else f"{score.top5:.4f}",
                "seconds": f"{self.epoch_seconds:.2f}",
                "images_per_second": f"{images:.0f}",
            }
        )
        self.log(
            f"epoch {self.epoch}/{self.settings.epochs}: train loss {loss:.4f}, {score}, "
            f"{self.epoch_seconds:.0f} s, {images:.0f} images/s"
        )
        if self.settings.tensorboard:
            values = {key: float(str(value)) for key, value in self.rows[-1].items() if key != "epoch" and value}
            self.accelerator.log(values, step=self.epoch)
        improved = self.best is None or score.top1 > self.best.top1
        if improved:
            self.best = score
        if self.accelerator.is_main_process:
            if improved:
                self.folder.save("best.pth", {"model": weights(self.evaluated), **self.about(), "epoch": self.epoch})
                if self.settings.freeze_backbone and self.network.inserted is not None:
                    path = self.folder.path / "adapter.safetensors"
                    save_adapter(self.evaluated, path, also=self.network.new_head)
            self.folder.save("last.pth", self.state())
            self.folder.write_metrics(self.rows)

    def about(self) -> dict[str, object]:
        """What each checkpoint says of its run."""
        return {
            "settings": self.settings.as_dict(),
            "classes": list(self.classes),
            "mean": self.normalize.mean.flatten().tolist(),
            "std": self.normalize.std.flatten().tolist(),
            "sites": [block.site for block in self.network.inserted.blocks] if self.network.inserted else [],
        }

    def state(self) -> dict[str, object]:
        """What the next epoch depends on, all of it."""
        state = {
            "model": weights(self.model),
            "optimizer": self.optimizer.state_dict(),
            "epoch": self.epoch,
            "rows": self.rows,
            "best": None if self.best is None else asdict(self.best),
            "seconds": self.seconds,
            **self.about(),
        }
        if self.ema is not None:
            state["model_ema"] = weights(self.ema.module)
        return state

    def restore(self, path: str) -> None:
        """Go on from a checkpoint of :meth:`state`, if it is of the same run.

        Args:
            path: of the checkpoint.

        Raises:
            CheckpointError: it cannot be read, or is not one to go on from.
            ValueError: it is of a run with other settings.
        """
        state = read_checkpoint(path)
        needed = {"model", "optimizer", "epoch", "rows", "best", "settings"} | ({"model_ema"} if self.ema else set())
        if not needed <= set(state):
            raise CheckpointError(
                f"{path} is not the last.pth of such a run (it lacks {', '.join(sorted(needed - set(state)))}): "
                "to begin a new run from its weights, give it to --weights"
            )
        differences = self.settings.differences(state["settings"])  # type: ignore[arg-type]
        if differences:
            raise ValueError(
                f"resume goes on with the same run, but {', '.join(differences)} differ from {path}: give the same "
                "settings, or begin a new run from its weights with --weights"
            )
        self.model.load_state_dict(state["model"])  # type: ignore[arg-type]
        if self.ema is not None:
            self.ema.module.load_state_dict(state["model_ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch = int(state["epoch"])  # type: ignore[call-overload]
        self.rows = list(state["rows"])  # type: ignore[call-overload]
        self.best = Evaluation(**state["best"])  # type: ignore[arg-type]
        self.seconds = float(state["seconds"])  # type: ignore[arg-type]
        self.log(f"resumed after epoch {self.epoch} from {path}")


def scaled_groups(model: nn.Module, settings: Settings) -> list[dict[str, Any]]:
    """The parameters in groups whose rates keep their ratio throughout.

    timm's schedules begin their warm-up and end their cosine at the same rate for every group, and then multiply it by
    the group's own ``lr_scale``: in that, not in their rate, these groups differ.
    """
    groups = parameter_groups(
        model,
        settings.base_lr,
        weight_decay=settings.weight_decay,
        attention_lr=settings.attention_lr,
        layer_decay=settings.layer_decay,
    )
    return [{**group, "lr": settings.base_lr, "lr_scale": group["lr"] / settings.base_lr} for group in groups]


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """A state dict on the CPU, of plain names."""
    return {key: value.detach().cpu().clone() for key, value in plain_network(model).state_dict().items()}
