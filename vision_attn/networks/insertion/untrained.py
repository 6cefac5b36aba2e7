"""A warning for a block that no optimizer updates, as one that was created before the block was inserted."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable

from torch import Tensor, nn

#: Updates of the other parameters after which a block that has not been updated is reported.
PATIENCE = 5


def warn_if_untrained(model: nn.Module, block: nn.Module, site: str) -> None:
    """Warn once for a block if other parameters of a model are updated and those of a block are not.

    The check runs after gradients have been accumulated in the first trainable parameter of the block, for any
    optimizer, compiled or not, until that parameter has been updated. Copies of the network are not watched.
    """
    watched = next((p for p in block.parameters() if p.requires_grad), None)
    if watched is None:
        return
    # Tensors keep their hooks alive outside of the garbage collector's sight: a hook must not refer to them.
    references = weakref.ref(model), weakref.ref(block)
    values, updates = list[float](), set[float]()

    def check(parameter: Tensor) -> None:
        model, block = (reference() for reference in references)
        own = list(block.parameters()) if block is not None else []
        values.append(fingerprint(own))
        if model is not None and values[-1] == values[0]:
            others = {*model.parameters()}.difference(own)
            updates.add(fingerprint(p for p in others if p.requires_grad))
            if len(updates) <= PATIENCE:
                return
            warnings.warn(
                f"the block at {site!r} gets gradients and is not updated: the optimizer is older than the block. "
                "Create it after insertion; va.check_optimizer(model, optimizer) lists the blocks that it lacks",
                stacklevel=2,
            )
        handle.remove()

    handle = watched.register_post_accumulate_grad_hook(check)


def fingerprint(parameters: Iterable[Tensor]) -> float:
    """Return a number that changes with an update: fused optimizers change values without counting a version."""
    return sum(p._version + float(p.detach().flatten()[0]) for p in parameters if p.numel())
