"""The gates of inserted blocks: to read while they open, to set, and to hold during a warm-up."""

from __future__ import annotations

import torch
from torch import nn

from vision_attn.checks import check_number
from vision_attn.insertion.out import inserted

__all__ = ["freeze_gates_", "gates", "set_gates_"]


def gates(model: nn.Module) -> dict[str, nn.Parameter]:
    """The gates of a model's inserted blocks by site: the parameters themselves, one value a channel.

    Blocks without a gate, such as a convolution's replacement, have no entry.

    Args:
        model: a model that blocks are inserted in.

    Returns:
        A gate ``(c,)`` for each site.

    Raises:
        ValueError: no block of the model has a gate.

    >>> from vision_attn.insertion import insert_
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    >>> report = insert_(model, names="0", num_heads=2, example_input=(1, 3, 16, 16))
    >>> {site: gate.shape for site, gate in gates(model).items()}
    {'0': torch.Size([8])}
    """
    found = {site: getattr(block, "gate", None) for site, block in inserted(model).items()}
    live = {site: gate for site, gate in found.items() if isinstance(gate, nn.Parameter)}
    if not live:
        what = f"the blocks at {', '.join(map(repr, found))} have none" if found else "nothing is inserted in it"
        raise ValueError(f"model has no gate ({what}): insert a block that has one, such as AttentionBlock2d")
    return live


@torch.no_grad()
def set_gates_(model: nn.Module, value: float) -> int:
    """Give every channel of every gate one value, in place.

    Args:
        model: a model that blocks are inserted in.
        value: 0 for the network without its blocks, 1 for their whole contribution.

    Returns:
        How many gates there are.

    Raises:
        ValueError: no block of the model has a gate, or the value is not a finite number.

    >>> from vision_attn.insertion import insert_
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    >>> report = insert_(model, names="0", num_heads=2, example_input=(1, 3, 16, 16))
    >>> freeze_gates_(model)
    1
    >>> for step in range(100):
    ...     _ = set_gates_(model, 0.1 * (step + 1) / 100)  # and a step of the optimiser
    """
    check_number("value", value)
    found = gates(model)
    for gate in found.values():
        gate.fill_(value)
    return len(found)


def freeze_gates_(model: nn.Module, frozen: bool = True) -> int:
    """Take the gates out of training, or put them back, in place.

    What is behind a gate that is frozen at zero gets no gradient: give it another value with :func:`set_gates_`.

    Args:
        model: a model that blocks are inserted in.
        frozen: whether they keep their values.

    Returns:
        How many gates there are.

    Raises:
        ValueError: no block of the model has a gate.

    >>> freeze_gates_(nn.ReLU())
    Traceback (most recent call last):
    ValueError: model has no gate (nothing is inserted in it): insert a block that has one, such as AttentionBlock2d
    """
    found = gates(model)
    for gate in found.values():
        gate.requires_grad_(not frozen)
    return len(found)
