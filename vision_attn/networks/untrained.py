"""A warning about blocks that no optimizer updates, for example because it was created before insertion."""

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn

#: Number of updates of the network after which a block without an update is reported. A separate optimizer of the
#: blocks may take a step only every few batches.
MAX_MISSED_UPDATES = 10


def warn_if_untrained(model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
    """Warn once if the last layer of a model is updated between backward passes, but new blocks, by site, are not.

    Each block is checked in every backward pass that reaches it, until it was updated. Copies are not checked.
    """
    network = ref(model)
    # By site: the hook of a block that was not updated yet; the sums of its parameters and of the last other parameter
    # in the last backward pass; the number of backward passes before which only the last other parameter was updated.
    hooks, sums, missed = dict[str, Any](), dict[str, list[float]](), Counter[str]()

    def check(site: str, block: ref[nn.Module], parameter: object) -> None:
        model, module = network(), block()
        if model is None or module is None or site not in hooks:
            return
        params = {id(p): p for p in module.parameters()}
        others = [p for p in model.parameters() if p.requires_grad and id(p) not in params]
        before, sums[site] = sums.get(site), [add_up(params.values()), add_up(others[-1:])]
        if before and sums[site][0] != before[0]:
            hooks.pop(site).remove()
            return
        missed[site] += before not in (None, sums[site])
        if missed[site] > MAX_MISSED_UPDATES:
            sites = ", ".join(repr(site) for site in hooks if missed[site] >= MAX_MISSED_UPDATES)
            while hooks:
                hooks.popitem()[1].remove()
            what = f"the optimizer does not contain the blocks at {sites}: it was probably created before insertion"
            remedy = "Create it after insertion; va.check_optimizer(model, optimizer) lists such blocks"
            warnings.warn(f"{what}. {remedy}", stacklevel=2)

    for site, block in blocks.items():
        if (first := next((p for p in block.parameters() if p.requires_grad), None)) is not None:
            hooks[site] = first.register_post_accumulate_grad_hook(partial(check, site, ref(block)))


@torch.no_grad()
def add_up(parameters: Iterable[Any]) -> float:
    """Return the sum of the magnitudes of parameters, or of this process's part of a sharded parameter."""
    return sum(float(getattr(p, "to_local", p.detach)().abs().sum()) for p in parameters)
