"""The parameters of a network with blocks in it, in groups for an optimiser: which rate, and whether they decay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from vision_attn.attention.position import PositionTerm
from vision_attn.checks import check_number, check_type
from vision_attn.networks.insertion.attach import inserted_keys
from vision_attn.networks.insertion.backbone import plain_network

#: Norms, whose scales do not decay whatever their shape.
NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)

#: Modules that are no layer themselves: what they hold is.
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def parameter_groups(
    model: nn.Module,
    lr: float,
    *,
    weight_decay: float = 0.0,
    attention_lr: float | None = None,
    layer_decay: float | None = None,
) -> list[dict[str, Any]]:
    """Groups for any optimiser of torch: inserted blocks and backbone apart, each with its rate and its decay.

    Biases, parameters of one axis, norms, gates, position terms, LayerScale and what the model's ``no_weight_decay()``
    names do not decay. With ``layer_decay`` the rate of a layer of the backbone is
    ``lr · layer_decay^(layers from it to the last)``; inserted blocks have ``attention_lr`` at any depth.

    The layers are those of timm's ``group_matcher`` where the model has one. In any other network the layers are its
    children in their order, a container's (``Sequential``, ``ModuleList``, ``ModuleDict``) being layers themselves, and
    what has no matrix or kernel, such as a norm, belongs to the layer before it.

    Args:
        model: the network; parameters with ``requires_grad`` False are left out.
        lr: rate of the backbone, and of its last layer where rates decay.
        weight_decay: of the groups that decay.
        attention_lr: rate of the inserted blocks; ``lr`` when None.
        layer_decay: factor from one layer to the one before it, above 0 and at most 1.

    Returns:
        Groups with ``name``, ``params``, ``lr`` and ``weight_decay``, from the stem to the head and then the blocks, in
        the same order for the same model, so that an optimiser's saved state fits.

    Raises:
        ValueError: a value is out of range, no parameter is trained, or ``attention_lr`` is given and no block is.

    Source: a rate for each layer is Bao et al., *BEiT*, 2021, https://arxiv.org/abs/2106.08254

    >>> from torchvision.models import resnet18
    >>> [group["name"] for group in parameter_groups(resnet18(), lr=0.1, weight_decay=1e-4)]
    ['backbone, decay', 'backbone, no decay']
    """
    check_rates(lr, weight_decay, attention_lr, layer_decay)
    model = plain_network(model)
    blocks = inserted_keys(model)
    trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError(
            "model has no parameter to train, all are frozen: thaw it with freeze_backbone_(model, False) "
            "or model.requires_grad_()"
        )
    if attention_lr is not None and not blocks & trained.keys():
        raise ValueError("attention_lr applies to inserted blocks, and none is trained: insert_ one, or leave it out")
    undecayed = keys_without_decay(model)
    depths = layer_depths(model, blocks) if layer_decay is not None else {}
    last = max(depths.values(), default=0)

    groups: dict[tuple[bool, int, bool], dict[str, Any]] = {}
    for key, parameter in trained.items():
        attends, depth, decays = key in blocks, depths.get(key, last), key not in undecayed
        if attends:
            name, rate = "attention", lr if attention_lr is None else attention_lr
        elif layer_decay is None:
            name, rate = "backbone", lr
        else:
            name, rate = f"backbone, layer {depth}", lr * layer_decay ** (last - depth)
        group = {
            "name": f"{name}, {'decay' if decays else 'no decay'}",
            "params": [],
            "lr": rate,
            "weight_decay": weight_decay if decays else 0.0,
        }
        groups.setdefault((attends, depth, not decays), group)["params"].append(parameter)
    return [groups[place] for place in sorted(groups)]


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that does not have every parameter that is to be trained, as one made before :func:`insert_`.

    Args:
        model: the network; parameters with ``requires_grad`` False are not looked for.
        optimizer: what trains it.

    Raises:
        ValueError: a parameter is in no group of the optimizer.

    >>> from vision_attn.networks.insertion import insert_
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 1))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> report = insert_(model, names="0", example_input=(1, 3, 16, 16))
    >>> check_optimizer(model, optimizer)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: optimizer lacks 7 parameters that are to be trained (0.inserted.gate, ...): make it after insert_, ...
    """
    check_type("optimizer", optimizer, torch.optim.Optimizer, "an optimizer of torch")
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trained = plain_network(model).named_parameters()
    lacking = [key for key, parameter in trained if parameter.requires_grad and id(parameter) not in known]
    if lacking:
        raise ValueError(
            f"optimizer lacks {len(lacking)} parameters that are to be trained ({', '.join(lacking[:3])}"
            f"{', …' if len(lacking) > 3 else ''}): make it after insert_, add them by add_param_group, or freeze them"
        )


def check_rates(lr: float, weight_decay: float, attention_lr: float | None, layer_decay: float | None) -> None:
    check_number("lr", lr, above=0)
    for name, value in (("attention_lr", attention_lr), ("layer_decay", layer_decay)):
        if value is not None:
            check_number(name, value, above=0)
    if layer_decay is not None and layer_decay > 1:
        raise ValueError(f"layer_decay must be at most 1, which leaves all rates as they are; got {layer_decay}")
    check_number("weight_decay", weight_decay)
    if weight_decay < 0:
        raise ValueError(f"weight_decay must be at least 0; got {weight_decay}")


def keys_without_decay(model: nn.Module) -> set[str]:
    """Where a decay would draw towards zero what zero is no neutral value of."""
    named: Iterable[str] = getattr(model, "no_weight_decay", tuple)()
    scales = [name for name, module in model.named_modules() if isinstance(module, (*NORMS, PositionTerm))]
    prefixes = tuple(f"{name}." for name in scales)
    return {
        key
        for key, parameter in model.named_parameters()
        if parameter.dim() <= 1
        or key.startswith(prefixes)
        or key.rpartition(".")[2] in ("bias", "gate")
        or key.rpartition(".")[2].startswith(("gamma", "layer_scale"))
        or any(fnmatchcase(key, pattern) for pattern in named)
    }


def layer_depths(model: nn.Module, blocks: set[str]) -> dict[str, int]:
    """The layer that each parameter of the backbone belongs to, counted from the stem; blocks count for nothing."""
    matcher = getattr(model, "group_matcher", None)
    if matcher is not None:
        from timm.models import group_parameters

        found = group_parameters(model, matcher(coarse=False), reverse=True)
    else:
        found = {}
        depth = -1
        for path, layer in layers_in_order(model):
            own = [(key, p) for key, p in layer.named_parameters(prefix=path) if key not in blocks]
            depth += any(p.dim() > 1 for _, p in own)
            found.update((key, max(depth, 0)) for key, _ in own)
    # What hangs on the network itself, such as a class token, enters with its images.
    return {key: found.get(key, 0) for key, _ in model.named_parameters() if key not in blocks}


def layers_in_order(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if isinstance(child, CONTAINERS):
            yield from layers_in_order(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child
