"""A warning about blocks that no optimizer updates, for example because the optimizer was created before insertion."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

#: Number of updates of the other parameters after which a block without an update is reported.
MAX_MISSED_UPDATES = 5


class UpdateMonitor:
    """Updates of a block, and of the other parameters of its model, since insertion."""

    def __init__(self, model: nn.Module, block: nn.Module) -> None:
        # The garbage collector cannot follow hooks of tensors, so a hook must not refer to the model or its tensors.
        self.references = weakref.ref(model), weakref.ref(block)
        self.values, self.updates = set[float](), set[float]()

    def is_updated(self) -> bool:
        """Record the current state. Return True if the block has been updated, or no longer exists."""
        model, block = (reference() for reference in self.references)
        if model is None or block is None:
            return True
        self.values.add(version_checksum(block.parameters()))
        others = {*model.parameters()}.difference(block.parameters())
        self.updates.add(version_checksum(p for p in others if p.requires_grad))
        return len(self.values) > 1


#: Monitors of the blocks of each model, by site.
MONITORS: weakref.WeakKeyDictionary[nn.Module, dict[str, UpdateMonitor]] = weakref.WeakKeyDictionary()


def warn_if_untrained(model: nn.Module, block: nn.Module, site: str) -> None:
    """Warn once if other parameters of a model are updated, but the parameters of a block are not.

    The check runs after gradients have been accumulated in the first trainable parameter of the block, until the block
    is updated. It works with any optimizer, compiled or not. One warning lists all such blocks of the model. Copies of
    the network are not checked.
    """
    parameter = next((p for p in block.parameters() if p.requires_grad), None)
    if parameter is None:
        return
    monitors, monitor = MONITORS.setdefault(model, {}), UpdateMonitor(model, block)
    monitors[site] = monitor

    def check(parameter: Tensor) -> None:
        if monitors.get(site) is monitor and not monitor.is_updated():
            if len(monitor.updates) <= MAX_MISSED_UPDATES:
                return
            if has_optimizer(parameter):  # It may update the block only every few batches.
                handle.remove()
                return
            # The other blocks may not have received gradients in this backward pass yet.
            stale = [
                x
                for x, other in monitors.items()
                if len(other.updates) >= MAX_MISSED_UPDATES and not other.is_updated()
            ]
            for other in stale:
                del monitors[other]
            warnings.warn(
                f"the optimizer does not update the blocks at {', '.join(map(repr, stale))}: it was probably created "
                "before insertion. Create it after insertion; va.check_optimizer(model, optimizer) lists such blocks",
                stacklevel=2,
            )
        handle.remove()

    handle = parameter.register_post_accumulate_grad_hook(check)


def has_optimizer(parameter: Tensor) -> bool:
    """Return True if an optimizer exists that contains a parameter."""
    optimizers = (x for x in gc.get_objects() if issubclass(type(x), Optimizer))
    groups = (group for optimizer in optimizers for group in getattr(optimizer, "param_groups", ()))
    return any(parameter is p for group in groups for p in group["params"])


def version_checksum(parameters: Iterable[Tensor]) -> float:
    """Return a number that changes with an update: fused optimizers change values without increasing the version."""
    return sum(p._version + float(p.detach().flatten()[0]) for p in parameters if p.numel())
