"""Fine-tuning: gates, a frozen backbone, and parameter groups for an optimizer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn

from vision_attn.attention.position import PositionEncoding
from vision_attn.checks import as_list, check_number
from vision_attn.networks.insertion.attach import inserted_blocks, inserted_keys, replaced_modules
from vision_attn.networks.insertion.backbone import plain_network
from vision_attn.networks.insertion.hooks import NORMS
from vision_attn.text import Report, Table, shorten

#: The attribute in which a module keeps the names of its frozen parameters, and whether its statistics are frozen.
FROZEN = "_before_freezing"

#: Keys of parameters that do not decay, beside those of one axis.
NO_DECAY = re.compile(r"(.*\.)?(bias|gate|(gamma|layer_scale)[^.]*)")


class Gates(Report, dict[str, nn.Parameter]):
    """Gates by site; prints as a table of their values."""

    def parts(self) -> list[Table]:
        rows = [("where", "channels", "mean", "smallest", "largest")]
        for site, gate in self.items():
            rows.append((site, f"{gate.numel()}", f"{gate.mean():.4g}", f"{gate.min():.4g}", f"{gate.max():.4g}"))
        return [Table(rows)]


def gates(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the gates of a model's inserted blocks by site: the parameters, with one value a channel.

    Blocks without a gate, such as a convolution's replacement, have no entry.

    Args:
        model: a model that blocks are inserted in.

    Returns:
        A gate ``(c,)`` for each site. Printed, and in a notebook, it is a table of their values.

    Raises:
        ValueError: no block of the model has a gate.

    >>> from vision_attn.networks.insertion import insert_
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    >>> report = insert_(model, names="0", num_heads=2, example_input=(1, 3, 16, 16))
    >>> {site: gate.shape for site, gate in gates(model).items()}
    {'0': torch.Size([8])}
    >>> print(gates(model))
    where  channels  mean  smallest  largest
    0             8     1         1        1
    """
    found = {site: getattr(block, "gate", None) for site, block in inserted_blocks(model).items()}
    live = Gates({site: gate for site, gate in found.items() if isinstance(gate, nn.Parameter)})
    if not live:
        what = f"the blocks at {', '.join(map(repr, found))} have none" if found else "nothing is inserted in it"
        raise ValueError(f"model has no gate ({what}): insert a block that has one, such as AttentionBlock2d")
    return live


def freeze_backbone_(model: nn.Module, *, also_train: str | Iterable[str] = ()) -> int:
    """Freeze all of a model but its inserted blocks, in place: parameters and running statistics keep their values.

    A frozen batch norm normalizes with its running statistics and does not update them, also after ``model.train()``.
    Dropout and stochastic depth follow the mode as usual. A second call replaces the first.
    :func:`unfreeze_backbone_` restores every parameter and every norm.

    Args:
        model: a model that blocks are inserted in. Copies and pickles of a frozen model are frozen; convert batch
            norms to synchronized ones before freezing.
        also_train: globs on keys of the state dict that are trained beside the blocks, such as ``"fc.*"``; ``"head"``
            for the classifier that the model declares. A batch norm keeps its statistics unless they match.

    Returns:
        The number of trainable parameters (scalars).

    Raises:
        ValueError: nothing would be left to train, or a glob matches no key.

    >>> from torchvision.models import resnet18
    >>> from vision_attn.networks.insertion import insert_
    >>> model = resnet18()
    >>> report = insert_(model, stages=-1)
    >>> freeze_backbone_(model) == report.parameters
    True
    """
    model = plain_network(model)
    live = inserted_keys(model) | select_keys(model, also_train)
    if not live:
        raise ValueError('model has nothing to train when frozen: insert a block, or pass also_train="head"')
    unfreeze_backbone_(model)
    # A tensor that is in a block as well is trained under each of its names.
    tensors = {id(p) for key, p in model.named_parameters(remove_duplicate=False) if key in live}
    for name, module in model.named_modules():
        parameters = dict(module.named_parameters(recurse=False))
        frozen = [key for key, p in parameters.items() if p.requires_grad and id(p) not in tensors]
        # Batch and instance norms, torch's and timm's, call them running_mean and running_var.
        buffers = (key for key, _ in module.named_buffers(prefix=name, recurse=False))
        statistics = {key for key in buffers if key.rpartition(".")[2].startswith("running_")}
        fixed = bool(statistics) and not statistics & live
        vars(module)[FROZEN] = frozen, fixed
        for key in frozen:
            parameters[key].requires_grad_(False)
        if fixed:
            # A partial of a function is copied and pickled with its module, and graphs see no more than the mode.
            vars(module)["train"] = partial(train_frozen_norm, module)
            module.training = False
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def unfreeze_backbone_(model: nn.Module) -> int:
    """Undo :func:`freeze_backbone_` in place: parameters and norms train as they did before.

    Args:
        model: a model, frozen or not.

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
    model = plain_network(model)
    for module in (part for root in (model, *replaced_modules(model).values()) for part in root.modules()):
        frozen, fixed = vars(module).pop(FROZEN, ((), False))
        for name in frozen:
            module.get_parameter(name).requires_grad_()
        if fixed:
            del vars(module)["train"]
            module.training = model.training
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def select_keys(model: nn.Module, also_train: str | Iterable[str]) -> set[str]:
    """Return the keys of the state dict that ``also_train`` selects.

    Classifiers are declared as in timm, or named as in torchvision's models.
    """
    state = model.state_dict()
    declared = (getattr(model, "pretrained_cfg", None) or {}).get("classifier") or ()
    names = [declared] if isinstance(declared, str) else [*declared] or ["fc", "classifier", "heads", "head"]
    heads = [name for name in names if any(key.startswith(f"{name}.") for key in state)]
    known = f'. The classifier of this model is {shorten(map(repr, heads))}; pass also_train="head"' if heads else ""
    named = {"head": [f"{head}.*" for head in heads]} if heads else {}
    given = as_list("also_train", also_train, 'globs on keys, or "head"', single=str)
    globs = [glob for one in given for glob in named.get(one, [one])]
    return match_keys("also_train", globs, state, known)


def check_optimizer(model: nn.Module, optimizer: Any) -> None:
    """Raise if an inserted block has a trainable parameter that is in no group of an optimizer.

    An optimizer that was created before a block was inserted does not update the block.

    Args:
        model: a model that blocks are inserted in.
        optimizer: an optimizer, or several that train the model together: anything with ``param_groups``.

    Raises:
        ValueError: a block is left out; the message lists the sites of all such blocks.

    >>> import torch
    >>> from vision_attn.networks.insertion import insert_
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
    >>> report = insert_(model, names="0", num_heads=2, example_input=(1, 3, 16, 16))
    >>> check_optimizer(model, optimizer)
    Traceback (most recent call last):
    ValueError: optimizer lacks parameters of the blocks at '0': create it after inserting the blocks
    >>> check_optimizer(model, torch.optim.SGD(model.parameters(), 0.1))
    """
    optimizers = [optimizer] if hasattr(optimizer, "param_groups") else [*optimizer]
    known = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    blocks = inserted_blocks(model)
    trained = {site: {id(p) for p in block.parameters() if p.requires_grad} for site, block in blocks.items()}
    if sites := ", ".join(repr(site) for site in trained if not trained[site] <= known):
        raise ValueError(f"optimizer lacks parameters of the blocks at {sites}: create it after inserting the blocks")


def match_keys(argument: str, globs: str | Iterable[str], keys: Iterable[str], hint: str = "") -> set[str]:
    """Return the keys that match any of the globs, each of which must match one."""
    keys, found = list(keys), set[str]()
    for glob in as_list(argument, globs, "globs on keys", single=str):
        matches = {key for key in keys if fnmatchcase(key, glob)}
        if not matches:
            raise ValueError(f"{argument}={glob!r} matches no parameter; the model has {shorten(keys)}{hint}")
        found |= matches
    return found


def train_frozen_norm(module: nn.Module, mode: bool = True) -> nn.Module:
    """Set the mode of the children of a norm, such as the dropout in some norms of timm, but not its own."""
    type(module).train(module, mode)
    module.training = False
    return module


# --- groups for an optimizer ------------------------------------------------------------------------------------------


def parameter_groups(
    model: nn.Module,
    lr: float,
    *,
    weight_decay: float = 0.0,
    attention_lr: float | None = None,
    layer_decay: float | None = None,
) -> list[dict[str, Any]]:
    """Return parameter groups for any optimizer of torch: inserted blocks and backbone, with and without weight decay.

    Biases, parameters of one axis, norms, gates, position terms, LayerScale and what the model's ``no_weight_decay()``
    lists do not decay. With ``layer_decay`` the learning rate of a layer of the backbone is
    ``lr · layer_decay^(layers from it to the last)``; inserted blocks have ``attention_lr`` at any depth.

    The layers are those of ``group_matcher``, which timm's networks have.

    Args:
        model: the network; parameters with ``requires_grad`` False are left out.
        lr: learning rate of the backbone, and of its last layer with ``layer_decay``.
        weight_decay: of the groups that decay.
        attention_lr: learning rate of the inserted blocks; ``lr`` when None.
        layer_decay: factor from one layer to the one before it, above 0; for networks of timm.

    Returns:
        Groups with ``name``, ``params``, ``lr`` and ``weight_decay``, from the stem to the head and then the blocks, in
        the same order for the same model, so that an optimizer's saved state fits.

    Raises:
        ValueError: a rate or factor is not above 0, no parameter is trained, ``attention_lr`` is given and no block is,
            or ``layer_decay`` is given and the network declares no layers.

    Source: a rate for each layer is Bao et al., *BEiT*, 2021, https://arxiv.org/abs/2106.08254

    >>> from torchvision.models import resnet18
    >>> [group["name"] for group in parameter_groups(resnet18(), lr=0.1, weight_decay=1e-4)]
    ['backbone, decay', 'backbone, no decay']
    """
    for name, value in (("lr", lr), ("attention_lr", attention_lr), ("layer_decay", layer_decay)):
        if value is not None:
            check_number(name, value, above=0)
    model = plain_network(model)
    blocks = inserted_keys(model)
    trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError("model has no parameter to train, all are frozen: call unfreeze_backbone_(model) first")
    if attention_lr is not None and not blocks & trained.keys():
        raise ValueError("attention_lr applies to inserted blocks, and none is trained: insert_ one, or leave it out")
    undecayed = keys_without_decay(model)
    depths = layer_depths(model, blocks) if layer_decay is not None else {}
    last = max(depths.values(), default=0)

    groups: dict[tuple[bool, int, bool], dict[str, Any]] = {}
    for key, parameter in trained.items():
        attends, depth, decays = key in blocks, depths.get(key, last), key not in undecayed
        name, rate = "backbone", lr * (layer_decay or 1.0) ** (last - depth)
        if attends:
            name, rate = "attention", lr if attention_lr is None else attention_lr
        elif layer_decay is not None:
            name = f"backbone, layer {depth}"
        name += ", decay" if decays else ", no decay"
        group = {"name": name, "params": [], "lr": rate, "weight_decay": weight_decay if decays else 0.0}
        groups.setdefault((attends, depth, not decays), group)["params"].append(parameter)
    return [groups[place] for place in sorted(groups)]


def keys_without_decay(model: nn.Module) -> set[str]:
    """Return the keys of parameters for which zero is not a neutral value."""
    scales = [name for name, module in model.named_modules() if isinstance(module, (*NORMS, PositionEncoding))]
    globs = [*getattr(model, "no_weight_decay", tuple)(), *(f"{name}.*" for name in scales)]
    axes = {key: parameter.dim() for key, parameter in model.named_parameters()}
    fixed = {key for key in axes if axes[key] <= 1 or NO_DECAY.fullmatch(key)}
    return fixed.union(key for key in axes if any(fnmatchcase(key, glob) for glob in globs))


def layer_depths(model: nn.Module, blocks: set[str]) -> dict[str, int]:
    """Return the layer of each parameter of the backbone, counted from the stem, without inserted blocks."""
    from timm.models import group_parameters

    matcher = getattr(model, "group_matcher", None)
    if matcher is None:
        raise ValueError(f"layer_decay needs layers, which timm's networks declare; {type(model).__name__} has none")
    found = group_parameters(model, matcher(coarse=False), reverse=True)
    return {key: layer for key, layer in found.items() if key not in blocks}
