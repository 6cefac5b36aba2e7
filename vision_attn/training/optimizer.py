"""The optimiser of a run: by its name, with its groups of parameters and the schedule of their rates."""

from __future__ import annotations

import difflib
from typing import Any

import torch
from timm.optim import create_optimizer_v2, get_optimizer_class, get_optimizer_info, list_optimizers
from timm.scheduler import CosineLRScheduler
from torch import nn

from vision_attn.insertion import check_optimizer, parameter_groups
from vision_attn.training.settings import Settings

__all__ = ["check_optimizer_name", "make_optimizer", "make_schedule", "optimizer_bytes"]


def check_optimizer_name(settings: Settings) -> None:
    """Refuse an optimiser that cannot be used, before anything else is done."""
    name = settings.opt
    if name not in list_optimizers():
        close = difflib.get_close_matches(name, list_optimizers(), n=5)
        hint = f"; close to it: {', '.join(close)}" if close else ""
        raise ValueError(f"opt: there is no {name!r}{hint} (see timm.optim.list_optimizers())")
    try:
        get_optimizer_class(name)
    except (AssertionError, ImportError) as error:  # those of apex and bitsandbytes
        raise ValueError(f"opt: {name!r} cannot be used here ({error}): choose another") from error
    info = get_optimizer_info(name)
    if info.second_order:
        raise ValueError(f"opt: {name!r} needs second derivatives, which the training step does not make")
    if settings.momentum != type(settings).momentum and not info.has_momentum:
        raise ValueError(f"momentum applies to optimisers such as sgd; {name!r} has none that is set by it")
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
    check_optimizer(model, optimizer)
    return optimizer


def make_schedule(optimizer: torch.optim.Optimizer, settings: Settings, steps: int) -> CosineLRScheduler:
    """Linear warm-up and a cosine over the whole run; it has no state, as it goes by the number of the step."""
    warmup = round(settings.warmup_epochs * steps)
    return CosineLRScheduler(
        optimizer,
        t_initial=max(1, settings.epochs * steps - warmup),
        lr_min=settings.min_lr,
        warmup_t=warmup,
        warmup_lr_init=settings.base_lr / 100,
        warmup_prefix=True,
        t_in_epochs=False,
    )


def optimizer_bytes(optimizer: torch.optim.Optimizer, settings: Settings) -> int:
    """About how many bytes an optimiser's state takes, once it has one."""
    info = get_optimizer_info(settings.opt)
    averages = info.num_betas if info.has_betas else 1
    return averages * sum(p.numel() * p.element_size() for group in optimizer.param_groups for p in group["params"])
