"""One step of training: the optimiser, the schedule of its rates, and forward, loss and backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import timm
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from timm.optim import create_optimizer_v2, get_optimizer_info
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from vision_attn.networks.insertion import freeze_backbone_, parameter_groups
from vision_attn.tools.training.network import Network
from vision_attn.tools.training.settings import Settings

__all__ = ["TrainingStep", "check_optimizer_settings", "make_optimizer"]


def check_optimizer_settings(settings: Settings) -> None:
    """Refuse an optimiser that timm does not know, and what does not go with it, before anything long is done."""
    info = get_optimizer_info(settings.opt)
    if info.second_order:
        raise ValueError(f"opt: {info.name!r} needs second derivatives, which the training step does not make")
    if settings.momentum != type(settings).momentum and not info.has_momentum:
        raise ValueError(f"momentum applies to optimisers such as sgd; {info.name!r} has none that is set by it")
    if settings.min_lr > settings.base_lr:
        raise ValueError(f"min_lr must be at most lr={settings.base_lr}, which falls to it; got {settings.min_lr}")


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """The optimiser of all parameters that are trained, in groups whose rates keep their ratio throughout."""
    # timm's schedules begin their warm-up and end their cosine at the same rate for every group, and then multiply it
    # by the group's own lr_scale: in that, not in their rate, these groups differ.
    rate = settings.base_lr
    groups: list[dict[str, Any]] = parameter_groups(
        model,
        rate,
        weight_decay=settings.weight_decay,
        attention_lr=settings.attention_lr,
        layer_decay=settings.layer_decay,
    )
    scaled = [{**group, "lr": rate, "lr_scale": group["lr"] / rate} for group in groups]
    optimizer = create_optimizer_v2(scaled, opt=settings.opt, lr=rate, momentum=settings.momentum)
    return optimizer


def make_schedule(optimizer: torch.optim.Optimizer, settings: Settings, steps: int) -> Scheduler:
    """timm's schedule by its name; it has no state, as it goes by the number of the step."""
    warmup, decay = round(settings.warmup_epochs * steps), settings.decay_epochs
    schedule, _ = create_scheduler_v2(
        optimizer,
        settings.sched,
        num_epochs=max(1, settings.epochs * steps - warmup),  # all of these are steps
        decay_milestones=[epoch * steps for epoch in sorted(settings.decay_milestones)],
        decay_rate=settings.decay_rate,
        min_lr=settings.min_lr,
        warmup_lr=settings.base_lr / 100,
        warmup_epochs=warmup,
        warmup_prefix=settings.sched not in ("step", "multistep"),  # whose epochs are those of the run
        step_on_epochs=False,
        updates_per_epoch=1,
        **({} if decay is None else {"decay_epochs": decay * steps if decay >= 1 else decay}),
    )
    if schedule is None:
        raise ValueError(f"sched: timm {timm.__version__} knows no {settings.sched!r}: upgrade timm, or choose another")
    return schedule


class TrainingStep:
    """Changes a network a step at a time.

    Everything random in a step, and its rate, follows from the seed, the epoch and the step.
    """

    def __init__(self, settings: Settings, accelerator: Accelerator, network: Network, steps: int) -> None:
        self.settings = settings
        self.accelerator = accelerator
        self.new_head = network.new_head
        #: of an epoch
        self.steps = steps
        self.model = model = network.model
        self.ema = ModelEmaV3(model, settings.model_ema_decay, use_warmup=True) if settings.model_ema else None
        self.optimizer = make_optimizer(model, settings)
        #: how much an image of each class counts in the loss; None where all count the same
        self.class_weights: Tensor | None = None
        self.schedule = make_schedule(self.optimizer, settings, steps)
        self.frozen: bool | None = None
        #: what dropout is drawn from; torch.manual_seed, which looks for devices, is slow
        self.generators = [torch.default_generator]
        if accelerator.device.type == "cuda":
            self.generators.append(torch.cuda.default_generators[accelerator.device.index or 0])

    @property
    def evaluated(self) -> nn.Module:
        """The weights that count: the moving average where there is one."""
        return self.model if self.ema is None else self.ema.module

    @property
    def rate(self) -> float:
        """The rate of a group that has no other: what the schedule makes of ``lr``."""
        group = self.optimizer.param_groups[0]
        return float(group["lr"] / group["lr_scale"])

    def enter_epoch(self, epoch: int, log: Callable[[str], None]) -> None:
        """Freeze or thaw the backbone, and wrap the network, where a stage of the training begins."""
        settings, frozen = self.settings, epoch < self.settings.freeze_epochs
        if frozen == self.frozen:
            return
        self.unwrap()
        self.frozen = frozen
        if settings.freeze_epochs:
            count = freeze_backbone_(self.model, frozen, also_train=self.new_head if frozen else ())
            stage = f"the backbone is frozen for {settings.freeze_epochs - epoch} epochs" if frozen else "all is thawed"
            log(f"{stage}: {count:,} parameters are trained")
        # Of axes of length one, as kernels of depthwise convolutions have: torch makes all other strides alike itself.
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
        # Processes settle what they exchange when the network is wrapped: it is wrapped anew in each stage.
        self.wrapped, self.stepper = self.accelerator.prepare(self.model, self.optimizer)
        self.forward = torch.compile(self.wrapped) if settings.compile else self.wrapped

    def unwrap(self) -> None:
        """Leave the plain network, without what let it run in half precision and on several processes."""
        if self.frozen is None:
            return
        self.accelerator.unwrap_model(self.wrapped, keep_fp32_wrapper=False)
        self.accelerator.free_memory()
        vars(self.model).pop("_is_accelerate_prepared", None)  # or it is not wrapped again

    def __call__(self, images: Tensor, labels: Tensor, epoch: int, step: int) -> Tensor:
        """Make a step; returns its loss, the mean over the images of this process."""
        settings, accelerator = self.settings, self.accelerator
        # Dropout is drawn by each process for its own images.
        place = np.random.SeedSequence((settings.seed, epoch, step, accelerator.process_index))
        for generator in self.generators:
            generator.manual_seed(int(place.generate_state(1)[0]))
        self.schedule.step_update(epoch * self.steps + step)
        layout = torch.channels_last if settings.channels_last else torch.contiguous_format
        images = images.contiguous(memory_format=layout)
        parts = settings.grad_accum_steps
        mean = torch.zeros((), device=images.device)
        for some_images, some_labels in zip(images.chunk(parts), labels.chunk(parts), strict=True):
            # Accelerate divides the gradients by the number of parts, and lets the last part alone make the step.
            with accelerator.accumulate(self.wrapped):
                logits = self.forward(some_images).float()
                # With weights the mean is over images: over their weights, parts of a batch would not count the same.
                loss = F.cross_entropy(
                    logits, some_labels, self.class_weights, label_smoothing=settings.label_smoothing,
                    reduction="mean" if self.class_weights is None else "none",
                ).mean()  # fmt: skip
                accelerator.backward(loss)
                if accelerator.sync_gradients and settings.clip_grad is not None:
                    accelerator.clip_grad_norm_(self.model.parameters(), settings.clip_grad)
                self.stepper.step()
                self.stepper.zero_grad()
            mean += loss.detach() / parts
        if self.ema is not None:
            self.ema.update(self.model, step=epoch * self.steps + step)
        return mean
