"""A warning about blocks that no optimizer contains, for example because it was created before insertion."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from vision_attn.networks.insertion.record import get_record

#: Number of steps of the optimizers of the other parameters after which a block without a step is reported. A separate
#: optimizer of the blocks may take a step only every few batches.
MAX_MISSED_STEPS = 10


class Monitor:
    """Blocks of a model that were in no step of an optimizer yet, and the number of steps since the last insertion."""

    def __init__(self) -> None:
        self.blocks, self.steps = WeakSet[nn.Module](), 0

    def check(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Warn if the optimizers have updated the other parameters of the model for too many steps."""
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if updated.isdisjoint(map(id, model.parameters())):
            return
        modules = {*model.modules()}
        for block in [*self.blocks]:
            trained = {id(p) for p in block.parameters() if p.requires_grad}
            if block not in modules or not trained or trained & updated:
                self.blocks.remove(block)
        self.steps += 1
        if self.blocks and self.steps > MAX_MISSED_STEPS:
            sites = ", ".join(sorted(repr(get_record(block).site) for block in self.blocks))
            self.blocks.clear()
            warnings.warn(
                f"the optimizer does not contain the blocks at {sites}: it was probably created before insertion. "
                "Create it after insertion; va.check_optimizer(model, optimizer) lists such blocks",
                stacklevel=4,
            )


#: Monitors of the models with inserted blocks.
MONITORS: WeakKeyDictionary[nn.Module, Monitor] = WeakKeyDictionary()


def warn_if_untrained(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Warn once if optimizers update other parameters of a model, but do not contain these blocks.

    Every step of any torch optimizer is checked until each block was in one. Copies of the network are not checked.
    """
    monitor = MONITORS.setdefault(model, Monitor())
    monitor.blocks.update(blocks)
    monitor.steps = 0


def check_optimizers(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Check the models with inserted blocks, in a hook after each step of an optimizer."""
    for model, monitor in [*MONITORS.items()]:
        if monitor.blocks:
            monitor.check(model, optimizer)


register_optimizer_step_post_hook(check_optimizers)
