"""A warning about blocks that no optimizer updates, for example because the optimizer was created before insertion."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Mapping

from torch import Tensor, nn

#: Number of updates of the other parameters after which a block without an update is reported.
PATIENCE = 5


class Watch:
    """Updates of a block, and of the other parameters of its model, since insertion."""

    def __init__(self, model: nn.Module, block: nn.Module) -> None:
        # The garbage collector cannot follow hooks of tensors, so a hook must not refer to the model or its tensors.
        self.references = weakref.ref(model), weakref.ref(block)
        self.initial: float | None = None
        self.updates: set[float] = set()

    def is_updated(self) -> bool:
        """Return True if the block has changed since the first call, or no longer exists."""
        model, block = (reference() for reference in self.references)
        if model is None or block is None:
            return True
        value = fingerprint(block.parameters())
        self.initial = value if self.initial is None else self.initial
        return value != self.initial

    def count_updates(self) -> int:
        """Return the number of updates of the other parameters that have been observed so far."""
        model, block = (reference() for reference in self.references)
        if model is not None and block is not None:
            others = {*model.parameters()}.difference(block.parameters())
            self.updates.add(fingerprint(p for p in others if p.requires_grad))
        return len(self.updates)


#: Watched blocks of each model, by site.
WATCHES: weakref.WeakKeyDictionary[nn.Module, dict[str, Watch]] = weakref.WeakKeyDictionary()


def warn_if_untrained(model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
    """Warn once if other parameters of a model are updated and those of some blocks are not.

    The check runs after gradients have been accumulated in the first trainable parameter of a block, until this
    parameter is updated. It works with any optimizer, compiled or not. Copies of the network are not checked.
    """
    watches = WATCHES.setdefault(model, {})
    for site, block in blocks.items():
        if (parameter := next((p for p in block.parameters() if p.requires_grad), None)) is not None:
            watches[site] = Watch(model, block)
            register_check(parameter, watches, site)


def register_check(parameter: Tensor, watches: dict[str, Watch], site: str) -> None:
    """Register the hook that checks the block at a site; it removes itself after an update or a warning."""
    watch = watches[site]

    def check(parameter: Tensor) -> None:
        if watches.get(site) is watch and not watch.is_updated():
            if watch.count_updates() <= PATIENCE:
                return
            # The other blocks may not have received gradients in this backward pass yet.
            stale = [x for x, other in watches.items() if len(other.updates) >= PATIENCE and not other.is_updated()]
            for other in stale:
                del watches[other]
            warnings.warn(
                f"the optimizer does not update the blocks at {', '.join(map(repr, stale))}: it was probably created "
                "before insertion. Create it after insertion; va.check_optimizer(model, optimizer) lists such blocks",
                stacklevel=2,
            )
        handle.remove()

    handle = parameter.register_post_accumulate_grad_hook(check)


def fingerprint(parameters: Iterable[Tensor]) -> float:
    """Return a number that changes with an update: fused optimizers change values without increasing the version."""
    return sum(p._version + float(p.detach().flatten()[0]) for p in parameters if p.numel())
