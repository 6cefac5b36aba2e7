"""Several adapters on one network: one of them is in it, the others are held beside, with their own parameters."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from vision_attn.networks.insertion import changeable, inserted
from vision_attn.networks.insertion.attach import RECORD, as_now, forget_compiled_graphs
from vision_attn.networks.insertion.attach import attach_ as attach
from vision_attn.networks.insertion.attach import detach_ as detach

#: The attribute in which a network keeps its named adapters.
ADAPTERS = "named_adapters"


@dataclass
class NamedAdapters:
    """The adapters of a network, by name."""

    #: the one that is in the network; None while it is as its checkpoint has it
    active: str | None = None
    #: of each adapter the blocks, while it is aside; where they go is in their records
    blocks: dict[str, list[nn.Module]] = field(default_factory=dict)
    #: of each adapter the values of what else it has of its own: while it is in the network, the network's values of it
    also: dict[str, dict[str, Tensor]] = field(default_factory=dict)


def named_adapters(model: nn.Module) -> NamedAdapters:
    """Those of a network, which may be none."""
    found: NamedAdapters = vars(model).get(ADAPTERS) or NamedAdapters()
    return found


def set_adapter(model: nn.Module, name: str | None) -> None:
    """Put one of several adapters into their network, in the place of the one that is in it.

    Parameters stay the objects that they are, so that optimizers stay valid. What is in the network can be trained and
    saved by :func:`vision_attn.save_adapter`; a state dict holds nothing of the others.

    Args:
        model: a network with adapters that :func:`vision_attn.load_adapter_` loaded under names.
        name: the adapter; None for the network alone, as its checkpoint has it.

    Raises:
        ValueError: the network has no adapter of this name.

    >>> import tempfile
    >>> from pathlib import Path
    >>> import vision_attn as va
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 1))
    >>> report = va.insert_(model, names="0", example_input=(1, 3, 8, 8))
    >>> file = va.save_adapter(model, Path(tempfile.mkdtemp()) / "pets.safetensors")
    >>> removed = va.remove_(model)
    >>> for name in ("pets", "birds"):
    ...     report = va.load_adapter_(model, file, name=name)
    >>> set_adapter(model, "pets")
    >>> list(va.inserted(model))
    ['0']
    >>> set_adapter(model, None)
    >>> list(va.inserted(model))
    []
    """
    model = changeable(model)
    adapters = named_adapters(model)
    if name is not None and (not isinstance(name, str) or name not in adapters.blocks):
        named = ", ".join(map(repr, adapters.blocks)) or "none: load_adapter_(model, path, name=…) first"
        raise ValueError(f"name must be that of an adapter of the model, or None; it has {named}; got {name!r}")
    if name == adapters.active:
        return
    also = {key: dict(values) for key, values in adapters.also.items()}
    adapters = vars(model)[ADAPTERS] = NamedAdapters(adapters.active, dict(adapters.blocks), also)
    changed: list[tuple[Tensor, Tensor]] = []
    try:
        if adapters.active is not None:
            exchange_values(model, adapters.also[adapters.active], changed)
            blocks = inserted(model)
            for site, block in blocks.items():
                detach(model, site, block)
            adapters.blocks[adapters.active] = list(blocks.values())
            adapters.active = None
        if name is not None:
            for block in adapters.blocks[name]:
                target = model.get_submodule(vars(block)[RECORD].site)
                as_now(block, target if any(True for _ in target.parameters()) else model)
                attach(model, block)
            exchange_values(model, adapters.also[name], changed)
            adapters.blocks[name], adapters.active = [], name
    except BaseException:
        for tensor, value in reversed(changed):
            tensor.copy_(value)
        raise
    forget_compiled_graphs()


def exchange_values(model: nn.Module, others: dict[str, Tensor], changed: list[tuple[Tensor, Tensor]]) -> None:
    """Give tensors of a network other values, and keep those that they had in the place of these, and in a list."""
    state = model.state_dict()
    for key, value in others.items():
        others[key] = state[key].clone()
        changed.append((state[key], others[key]))
        state[key].copy_(value)
