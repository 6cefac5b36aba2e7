"""Fine-tuning: gates, freezing the backbone, and parameter groups for an optimizer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from vision_attn.attention.position import PositionEncoding
from vision_attn.checks import check_above
from vision_attn.networks.insertion.attach import inserted_blocks, inserted_keys, replaced_modules
from vision_attn.networks.network import NORMS, unwrap_model
from vision_attn.networks.selection import select_keys

#: The attribute in which a module stores the names of its frozen parameters.
FROZEN = "_before_freezing"

#: Keys of parameters without weight decay, in addition to all parameters with one axis.
NO_DECAY = re.compile(r"(.*\.)?(bias|gate|logit_scale|(gamma|layer_scale)[^.]*)")


def freeze_backbone_(model: nn.Module, *, also_train: str | Iterable[str] = ()) -> int:
    """Freeze a model except its inserted blocks, in place: parameters and running statistics keep their values.

    A frozen batch norm normalizes with its running statistics and does not update them, even after ``model.train()``.
    Dropout and stochastic depth follow the mode of the model. A second call replaces the settings of the first.
    :func:`unfreeze_backbone_` restores every parameter and every norm.

    Args:
        model: a model with inserted blocks. Copies and pickles of a frozen model are frozen. Convert batch norms to
            synchronized batch norms before freezing.
        also_train: globs on state-dict keys to train in addition to the blocks, such as ``"fc.*"``, or ``"head"`` for
            the classifier from the model's metadata. The statistics of a batch norm are frozen unless they match.

    Returns:
        The number of trainable parameters (scalars).

    Raises:
        ValueError: the model would have no trainable parameter, or a glob matches no key.

    >>> from torchvision.models import resnet18
    >>> from vision_attn.networks.insertion import insert_
    >>> model = resnet18()
    >>> report = insert_(model, stages=-1)
    >>> freeze_backbone_(model) == report.parameters
    True
    """
    model = unwrap_model(model)
    live = inserted_keys(model) | select_keys("also_train", also_train, model, model.state_dict())
    if not live:
        raise ValueError('model has nothing to train when frozen. Insert a block, or pass also_train="head"')
    unfreeze_backbone_(model)
    # A tensor that is shared with a block is trained under each of its names.
    tensors = {id(p) for key, p in model.named_parameters(remove_duplicate=False) if key in live}
    for name, module in model.named_modules():
        parameters = dict(module.named_parameters(recurse=False))
        frozen = [key for key, p in parameters.items() if p.requires_grad and id(p) not in tensors]
        # Batch and instance norms of torch and timm have running_mean and running_var.
        buffers = (key for key, _ in module.named_buffers(prefix=name, recurse=False))
        statistics = {key for key in buffers if key.rpartition(".")[2].startswith("running_")}
        setattr(module, FROZEN, frozen)
        for key in frozen:
            parameters[key].requires_grad_(False)
        if statistics and not statistics & live:
            module.register_forward_pre_hook(use_running_statistics)
            module.training = False
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def unfreeze_backbone_(model: nn.Module) -> int:
    """Revert :func:`freeze_backbone_` in place: parameters and norms are trained as before.

    Args:
        model: any model, frozen or not.

    Returns:
        The number of trainable parameters (scalars).

    >>> from torchvision.models import resnet18
    >>> from vision_attn.networks.insertion import insert_
    >>> model = resnet18()
    >>> report = insert_(model, stages=-1)
    >>> frozen = freeze_backbone_(model)
    >>> unfreeze_backbone_(model) == sum(p.numel() for p in model.parameters())
    True
    """
    model = unwrap_model(model)
    for module in (part for root in (model, *replaced_modules(model).values()) for part in root.modules()):
        for name in getattr(module, FROZEN, ()):
            module.get_parameter(name).requires_grad_()
        if hasattr(module, FROZEN):
            delattr(module, FROZEN)
        for key in [key for key, hook in module._forward_pre_hooks.items() if hook is use_running_statistics]:
            del module._forward_pre_hooks[key]
            module.training = model.training
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def check_optimizer(model: nn.Module, optimizer: Any) -> None:
    """Raise if an inserted block has a trainable parameter that is in no parameter group of an optimizer.

    An optimizer that was created before the insertion does not update the block.

    Args:
        model: a model with inserted blocks.
        optimizer: an optimizer or several optimizers of the model, with the attribute ``param_groups``.

    Raises:
        ValueError: the optimizer does not contain a block; the message lists the sites of all missing blocks.

    >>> import torch
    >>> from vision_attn.networks.insertion import insert_
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
    >>> report = insert_(model, names="0", num_heads=2, example_input=(1, 3, 16, 16))
    >>> check_optimizer(model, optimizer)
    Traceback (most recent call last):
    ValueError: optimizer does not contain the parameters of the blocks at '0'. Create it after inserting the blocks
    >>> check_optimizer(model, torch.optim.SGD(model.parameters(), 0.1))
    """
    optimizers = [optimizer] if hasattr(optimizer, "param_groups") else [*optimizer]
    known = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    blocks = inserted_blocks(model)
    trained = {site: {id(p) for p in block.parameters() if p.requires_grad} for site, block in blocks.items()}
    if sites := ", ".join(repr(site) for site in trained if not trained[site] <= known):
        what = f"optimizer does not contain the parameters of the blocks at {sites}"
        raise ValueError(f"{what}. Create it after inserting the blocks")


def use_running_statistics(module: nn.Module, args: object) -> None:
    """Set a frozen norm to evaluation mode before it runs, whatever the mode of the network."""
    module.training = False


# --- groups for an optimizer ------------------------------------------------------------------------------------------


def parameter_groups(
    model: nn.Module,
    lr: float,
    *,
    weight_decay: float = 0.0,
    attention_lr: float | None = None,
    layer_decay: float | None = None,
) -> list[dict[str, Any]]:
    """Return parameter groups for any torch optimizer: inserted blocks and backbone, with and without weight decay.

    Biases, parameters with one axis, norms, gates, position encodings, LayerScale and the parameters listed by the
    model's ``no_weight_decay()`` have no weight decay. With ``layer_decay``, the learning rate of a layer of the
    backbone is ``lr · layer_decay^(number of layers after it)``, with layers from timm's ``group_matcher``. Inserted
    blocks have the learning rate ``attention_lr`` at any depth.

    Args:
        model: the network. Parameters with ``requires_grad=False`` are omitted.
        lr: learning rate of the backbone; with ``layer_decay``, of its last layer.
        weight_decay: weight decay of the groups with decay.
        attention_lr: learning rate of the inserted blocks; ``lr`` when None.
        layer_decay: ratio of the learning rates of one layer and the next, above 0; only for timm's networks.

    Returns:
        Groups with ``name``, ``params``, ``lr`` and ``weight_decay``, from the stem to the head, followed by the
        blocks. The order is deterministic, so that saved optimizer states can be loaded.

    Raises:
        ValueError: a learning rate or factor is not above 0, ``attention_lr`` is given but no block is trained, or
            ``layer_decay`` is given but the network has no ``group_matcher``.

    Source: layer-wise learning rates are from Bao et al., *BEiT*, 2021, https://arxiv.org/abs/2106.08254

    >>> from torchvision.models import resnet18
    >>> [group["name"] for group in parameter_groups(resnet18(), lr=0.1, weight_decay=1e-4)]
    ['backbone, decay', 'backbone, no decay']
    """
    check_above(0, lr=lr, attention_lr=attention_lr, layer_decay=layer_decay)
    model = unwrap_model(model)
    blocks = inserted_keys(model)
    trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
    if attention_lr is not None and not blocks & trained.keys():
        what = "attention_lr applies to inserted blocks, but the model has no trainable block"
        raise ValueError(f"{what}. Insert a block with va.insert_, or omit attention_lr")
    undecayed = keys_without_decay(model)
    depths = layer_depths(model, blocks) if layer_decay is not None else {}
    last = max(depths.values(), default=0)

    groups: dict[tuple[bool, int, bool], dict[str, Any]] = {}
    for key, parameter in trained.items():
        in_block, depth, decays = key in blocks, depths.get(key, last), key not in undecayed
        name, group_lr = "backbone", lr * (layer_decay or 1.0) ** (last - depth)
        if in_block:
            name, group_lr = "attention", lr if attention_lr is None else attention_lr
        elif layer_decay is not None:
            name = f"backbone, layer {depth}"
        name += ", decay" if decays else ", no decay"
        group = {"name": name, "params": [], "lr": group_lr, "weight_decay": weight_decay if decays else 0.0}
        groups.setdefault((in_block, depth, not decays), group)["params"].append(parameter)
    return [groups[key] for key in sorted(groups)]


def keys_without_decay(model: nn.Module) -> set[str]:
    """Return the keys of parameters without weight decay."""
    scales = [name for name, module in model.named_modules() if isinstance(module, (*NORMS, PositionEncoding))]
    globs = [*getattr(model, "no_weight_decay", tuple)(), *(f"{name}.*" for name in scales)]
    axes = {key: parameter.dim() for key, parameter in model.named_parameters()}
    fixed = {key for key in axes if axes[key] <= 1 or NO_DECAY.fullmatch(key)}
    return fixed.union(key for key in axes if any(fnmatchcase(key, glob) for glob in globs))


def layer_depths(model: nn.Module, blocks: set[str]) -> dict[str, int]:
    """Return the number of the layer of each parameter of the backbone, counted from the stem."""
    from timm.models import group_parameters

    matcher = getattr(model, "group_matcher", None)
    if matcher is None:
        raise ValueError(f"layer_decay requires group_matcher, as in timm's networks; {type(model).__name__} has none")
    found = group_parameters(model, matcher(coarse=False), reverse=True)
    return {key: layer for key, layer in found.items() if key not in blocks}
