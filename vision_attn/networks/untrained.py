"""A warning about blocks that no optimizer updates, for example because it was created before insertion."""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn

#: Number of updates of the network after which a block without an update is reported. A separate optimizer of the
#: blocks may take a step only every few batches.
MAX_MISSED_UPDATES = 10


@dataclass
class Waiting:
    """A block that was not updated yet."""

    handle: Any
    #: the sums of the parameters of the block, and of the last other parameter, in the last backward pass
    sums: list[float] = field(default_factory=list)
    #: number of backward passes before which only the other parameter was updated
    missed: int = 0


def warn_if_untrained(model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
    """Warn once if the last layer of a model is updated between backward passes, but new blocks, by site, are not.

    Each block is checked in every backward pass that reaches it, until it was updated. Copies are not checked.
    """
    waiting, network = dict[str, Waiting](), ref(model)

    def check(site: str, block: ref[nn.Module], parameter: object) -> None:
        model, module, state = network(), block(), waiting.get(site)
        if model is None or module is None or state is None:
            return
        params = {id(p): p for p in module.parameters()}
        others = [p for p in model.parameters() if p.requires_grad and id(p) not in params]
        before, state.sums = state.sums, [add_up(params.values()), add_up(others[-1:])]
        if before and state.sums[0] != before[0]:
            waiting.pop(site).handle.remove()
            return
        state.missed += before not in ([], state.sums)
        if state.missed > MAX_MISSED_UPDATES:
            sites = ", ".join(repr(site) for site, other in waiting.items() if other.missed >= MAX_MISSED_UPDATES)
            while waiting:
                waiting.popitem()[1].handle.remove()
            what = f"the optimizer does not contain the blocks at {sites}: it was probably created before insertion"
            remedy = "Create it after insertion; va.check_optimizer(model, optimizer) lists such blocks"
            warnings.warn(f"{what}. {remedy}", stacklevel=2)

    for site, block in blocks.items():
        if (first := next((p for p in block.parameters() if p.requires_grad), None)) is not None:
            waiting[site] = Waiting(first.register_post_accumulate_grad_hook(partial(check, site, ref(block))))


@torch.no_grad()
def add_up(parameters: Iterable[Any]) -> float:
    """Return the sum of the magnitudes of parameters, or of this process's part of a sharded parameter."""
    return sum(float(getattr(p, "to_local", p.detach)().abs().sum()) for p in parameters)
