"""One step of training: forward, loss and backward, over the whole batch or its parts, through what is not frozen."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from timm.utils import ModelEmaV3
from torch import Tensor

from vision_attn.insertion import freeze_backbone_
from vision_attn.training.network import Network
from vision_attn.training.optimizer import make_optimizer, make_schedule
from vision_attn.training.settings import Settings

__all__ = ["TrainingStep"]


class TrainingStep:
    """Changes a network a step at a time.

    Everything random in a step, and its rate, follows from the seed, the epoch and the step.
    """

    def __init__(self, settings: Settings, accelerator: Accelerator, network: Network, steps: int) -> None:
        self.settings = settings
        self.accelerator = accelerator
        self.new_head = network.new_head
        self.steps = steps
        self.model = model = network.model
        self.ema = ModelEmaV3(model, decay=settings.model_ema_decay) if settings.model_ema else None
        self.optimizer = make_optimizer(model, settings)
        self.schedule = make_schedule(self.optimizer, settings, steps)
        self.frozen: bool | None = None
        #: what dropout is drawn from; torch.manual_seed, which looks for devices, is slow
        self.generators = [torch.default_generator]
        if accelerator.device.type == "cuda":
            self.generators.append(torch.cuda.default_generators[accelerator.device.index or 0])

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
        """Make a step."""
        settings, accelerator = self.settings, self.accelerator
        # Dropout is drawn by each process for its own images.
        place = np.random.SeedSequence((settings.seed, epoch, step, accelerator.process_index))
        for generator in self.generators:
            generator.manual_seed(int(place.generate_state(1)[0]))
        self.schedule.step_update(epoch * self.steps + step)
        images = images.contiguous(
            memory_format=torch.channels_last if settings.channels_last else torch.contiguous_format
        )
        parts = settings.grad_accum_steps
        mean = torch.zeros((), device=images.device)
        for some_images, some_labels in zip(images.chunk(parts), labels.chunk(parts), strict=True):
            # Accelerate divides the gradients by the number of parts, and lets the last part alone make the step.
            with accelerator.accumulate(self.wrapped):
                logits = self.forward(some_images).float()
                loss = F.cross_entropy(logits, some_labels, label_smoothing=settings.label_smoothing)
                accelerator.backward(loss)
                if accelerator.sync_gradients and settings.clip_grad is not None:
                    accelerator.clip_grad_norm_(self.model.parameters(), settings.clip_grad)
                self.stepper.step()
                self.stepper.zero_grad()
            mean += loss.detach() / parts
        if self.ema is not None:
            self.ema.update(self.model, step=epoch * self.steps + step)
        return mean

    @property
    def rate(self) -> float:
        """The rate of a group that has no other: what the schedule makes of ``lr``."""
        group = self.optimizer.param_groups[0]
        return float(group["lr"] / group["lr_scale"])
