"""What is trained and at which rate: gates, a backbone that keeps its values, and groups for an optimiser."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn

from vision_attn.attention.position import PositionEncoding
from vision_attn.checks import as_list, check_number
from vision_attn.networks.insertion.attach import inserted_blocks, inserted_keys, replaced
from vision_attn.networks.insertion.backbone import plain_network
from vision_attn.networks.insertion.hooks import NORMS
from vision_attn.text import Report, Table, shorten

#: The attribute in which a module with something frozen keeps the names of its own parameters that were trained.
FROZEN = "_before_freezing"


class Gates(Report, dict[str, nn.Parameter]):
    """Gates by site; prints as a table of how far each is open."""

    def parts(self) -> list[Table]:
        rows = [("where", "channels", "mean", "smallest", "largest")]
        for site, gate in self.items():
            mean, smallest, largest = (f"{value:.4g}" for value in (gate.mean(), gate.min(), gate.max()))
            rows.append((site, f"{gate.numel()}", mean, smallest, largest))
        return [Table(rows)]


def gates(model: nn.Module) -> dict[str, nn.Parameter]:
    """The gates of a model's inserted blocks by site: the parameters themselves, one value a channel.

    Blocks without a gate, such as a convolution's replacement, have no entry.

    Args:
        model: a model that blocks are inserted in.

    Returns:
        A gate ``(c,)`` for each site. Printed, and in a notebook, it is a table of how far each is open.

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
    live = inserted_keys(model) | trained_keys(model, also_train)
    if not live:
        raise ValueError('model has nothing to train when frozen: insert a block, or pass also_train="head"')
    unfreeze_backbone_(model)
    # A tensor that is in a block as well is trained under each of its names.
    named = dict(model.named_parameters(remove_duplicate=False))
    tensors = {id(named[key]) for key in live & named.keys()}
    for name, module in model.named_modules():
        freeze(module, f"{name}." if name else "", live, tensors)
    return trainable(model)


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
    kept = [part for module in replaced(model).values() for part in module.modules()]  # those out of place, too
    for module in (*model.modules(), *kept):
        trained: tuple[str, ...] | None = vars(module).pop(FROZEN, None)
        for name in trained or ():
            module._parameters[name].requires_grad_()  # type: ignore[union-attr]
        if trained is not None and vars(module).pop("train", None) is not None:
            module.training = model.training
    return trainable(model)


def trainable(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def trained_keys(model: nn.Module, also_train: str | Iterable[str]) -> set[str]:
    """Return the keys of the state dict that ``also_train`` selects."""
    heads = classifiers_of(model)
    globs = as_list("also_train", also_train, 'globs on keys, or "head"', single=str)
    globs = [glob for one in globs for glob in ([f"{head}.*" for head in heads] if one == "head" and heads else [one])]
    known = f'. The classifier of this model is {shorten(map(repr, heads))}; pass also_train="head"' if heads else ""
    return matching("also_train", globs, model.state_dict(), known)


def classifiers_of(model: nn.Module) -> list[str]:
    """Return the paths of a model's classifiers, declared as in timm or under the names of torchvision's models."""
    declared = (getattr(model, "pretrained_cfg", None) or {}).get("classifier") or ()
    names = [declared] if isinstance(declared, str) else [*declared] or ["fc", "classifier", "heads", "head"]
    modules = dict(model.named_modules())
    return [name for name in names if name in modules and any(True for _ in modules[name].parameters())]


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
    ValueError: optimizer lacks parameters of the blocks at '0': create it after the blocks are inserted
    >>> check_optimizer(model, torch.optim.SGD(model.parameters(), 0.1))
    """
    optimizers = [optimizer] if hasattr(optimizer, "param_groups") else [*optimizer]
    known = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    blocks = inserted_blocks(model).items()
    lacking = [
        site for site, block in blocks if any(p.requires_grad and id(p) not in known for p in block.parameters())
    ]
    if lacking:
        sites = ", ".join(map(repr, lacking))
        raise ValueError(
            f"optimizer lacks parameters of the blocks at {sites}: create it after the blocks are inserted"
        )


def matching(argument: str, globs: str | Iterable[str], keys: Iterable[str], hint: str = "") -> set[str]:
    """The keys that match any of the globs, each of which must match one."""
    keys, found = list(keys), set[str]()
    for glob in as_list(argument, globs, "globs on keys", single=str):
        matches = {key for key in keys if fnmatchcase(key, glob)}
        if not matches:
            raise ValueError(f"{argument}={glob!r} matches no parameter; the model has {shorten(keys)}{hint}")
        found |= matches
    return found


def freeze(module: nn.Module, prefix: str, live: Collection[str], tensors: Collection[int]) -> None:
    """Freeze what a module holds itself, by its path; its children are other modules'."""
    own = {name: p for name, p in module._parameters.items() if p is not None}
    trained = tuple(name for name, p in own.items() if p.requires_grad and id(p) not in tensors)
    # Batch and instance norms, torch's and timm's, call them running_mean and running_var.
    statistics = {name for name, buffer in module.named_buffers(recurse=False) if name.startswith("running_")}
    held = bool(statistics) and not any(prefix + name in live for name in statistics)
    if not (trained or held):
        return
    vars(module)[FROZEN] = trained
    for name in trained:
        own[name].requires_grad_(False)
    if held:
        # A partial of a function is copied and pickled with its module, and graphs see no more than the mode.
        vars(module)["train"] = partial(stay_in_evaluation, module)
        module.training = False


def stay_in_evaluation(module: nn.Module, mode: bool = True) -> nn.Module:
    """What ``train`` is for a frozen norm: its children, the dropout in some norms of timm, take the mode."""
    type(module).train(module, mode)
    module.training = False
    return module


# --- groups for an optimiser ------------------------------------------------------------------------------------------


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

    The layers are those of ``group_matcher``, which timm's networks have.

    Args:
        model: the network; parameters with ``requires_grad`` False are left out.
        lr: rate of the backbone, and of its last layer where rates decay.
        weight_decay: of the groups that decay.
        attention_lr: rate of the inserted blocks; ``lr`` when None.
        layer_decay: factor from one layer to the one before it, above 0; for networks of timm.

    Returns:
        Groups with ``name``, ``params``, ``lr`` and ``weight_decay``, from the stem to the head and then the blocks, in
        the same order for the same model, so that an optimiser's saved state fits.

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
    """Where a decay would draw towards zero what zero is no neutral value of."""
    named: Iterable[str] = getattr(model, "no_weight_decay", tuple)()
    scales = [name for name, module in model.named_modules() if isinstance(module, (*NORMS, PositionEncoding))]
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
    from timm.models import group_parameters

    matcher = getattr(model, "group_matcher", None)
    if matcher is None:
        raise ValueError(f"layer_decay needs layers, which timm's networks declare; {type(model).__name__} has none")
    found = group_parameters(model, matcher(coarse=False), reverse=True)
    # What hangs on the network itself, such as a class token, enters with its images.
    return {key: found.get(key, 0) for key, _ in model.named_parameters() if key not in blocks}
