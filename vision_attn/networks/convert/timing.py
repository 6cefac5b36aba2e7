"""How long a block takes beside the module that it would stand for."""

from __future__ import annotations

import math
from functools import cache
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from vision_attn.networks.convert.exchanged import Exchange, bare_copy, put_in
from vision_attn.networks.insertion.backbone import Hook, example_of, run_quietly, shown

__all__ = ["SLOWEST", "times_of"]

#: In parts of the module's time; a block that takes more is not exchanged for it.
SLOWEST = 1.05

#: How often module and block are timed in turns, and the least seconds that they are repeated for each time.
ROUNDS, SHORTEST = 11, 5e-3


def times_of(
    model: nn.Module, modules: dict[str, nn.Module], exchanges: dict[str, Exchange], example_input: Any
) -> dict[str, float]:
    """The time of each block in parts of its module's, for what that is given in a forward of the model."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    calls: dict[str, tuple[Any, Any]] = {}

    def hook_for(name: str) -> Hook:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            weights = tuple(x.shape for x in module.parameters())
            kept = exchanges[name]
            alike = groups.setdefault((kept.family, str(kept.settings), weights, shown(args), shown(kwargs)), [])
            if name not in alike:
                alike.append(name)
            calls.setdefault(alike[0], (args, kwargs))

        return hook

    run_quietly(model, example_of(model, example_input), {name: hook_for(name) for name in modules})
    return {
        name: ratio
        for first, *others in groups.values()
        for ratio in [time_ratio(modules[first], exchanges[first], *calls[first])]
        for name in (first, *others)
    }


def time_ratio(module: nn.Module, kept: Exchange, args: Any, kwargs: Any) -> float:
    theirs, ours = bare_copy(module), bare_copy(module)
    put_in(ours, ours, kept)
    device = next(module.parameters()).device
    leaf = cache(lambda x: x.detach().requires_grad_(module.training and x.is_floating_point()))
    args, kwargs = tree_map_only(Tensor, leaf, (args, kwargs))  # one tensor that is given twice stays one
    trained = [x for x in (*module.parameters(), *tree_leaves((args, kwargs))) if getattr(x, "requires_grad", False)]

    def seconds(one: nn.Module, count: int) -> float:
        began = finished(device)
        for _ in range(count):
            y = one(*args, **kwargs)
            y = y[0] if isinstance(y, tuple) else y
            if module.training:
                torch.autograd.grad(y.sum(), trained, allow_unused=True)
        return finished(device) - began

    with torch.set_grad_enabled(module.training), torch.random.fork_rng(enabled=module.training):
        last = [seconds(one, 1) for one in (theirs, ours) * 2][-1]
        count = math.ceil(SHORTEST / max(last, 1e-6))
        ratios = []
        for turn in range(ROUNDS):
            order = (theirs, ours) if turn % 2 else (ours, theirs)
            took = {one is ours: seconds(one, count) for one in order}
            ratios.append(took[True] / took[False])
    return median(ratios)


def finished(device: torch.device) -> float:
    """The time when all that a device was given is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()
