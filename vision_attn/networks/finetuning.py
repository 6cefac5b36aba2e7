"""Fine-tuning: gates, freezing the backbone, and parameter groups for an optimizer."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from fnmatch import fnmatchcase
from functools import partial
from numbers import Real
from types import SimpleNamespace
from typing import Any

from torch import nn

from vision_attn.attention.position import PositionEncoding
from vision_attn.checks import check_above
from vision_attn.networks.insertion.attributes import original_module
from vision_attn.networks.insertion.build import CONTAINERS
from vision_attn.networks.insertion.hooks import checked_network, hooks_inside, remove_hooks_
from vision_attn.networks.insertion.registry import inserted_blocks, inserted_keys, replaced_modules
from vision_attn.networks.inspection.network import NORMS
from vision_attn.networks.inspection.selection import ancestor_paths, find_module, select_keys
from vision_attn.networks.inspection.wrappers import is_layer_wrapper, synchronizer, unwrap_key, unwrap_model

#: Names of position tables and class tokens in timm and torchvision.
POSITIONS = r"pos_embed|pos_embedding|class_token|cls_token|relative_position_bias_table"
#: Keys of parameters without weight decay, in addition to all parameters with one axis.
NO_DECAY = re.compile(rf"(.*\.)?(bias|gate|logit_scale|{POSITIONS}|(gamma|layer_scale)[^.]*)")

#: Names of buffers of norms, and of torch's two spectral norms, that a forward pass in training mode updates.
STATISTICS = re.compile(r"running_var|(weight)?_u")


def freeze_backbone_(model: nn.Module, *, also_train: str | Iterable[str] = ()) -> int:
    """Freeze a model except its inserted blocks, in place: parameters and running statistics keep their values.

    A frozen batch norm normalizes with its running statistics and does not update them, even after ``model.train()``.
    The same holds for the vectors of spectral norms. The function ``update_bn`` of torch, which resets running
    statistics, raises an error. Dropout and stochastic depth follow the mode of the model. A second call replaces the
    settings of the first. :func:`unfreeze_backbone_` restores every parameter and every norm.

    Args:
        model: a model with inserted blocks. Copies and pickles of a frozen model are frozen, also with batch norms that
            were converted to synchronized batch norms.
        also_train: globs on state-dict keys to train in addition to the blocks, such as ``"fc.*"``, or ``"head"`` for
            the classifier from the model's metadata. The statistics of a batch norm are frozen unless they match.

    Returns:
        The number of trainable parameters (scalars).

    Raises:
        ValueError: the model would have no trainable parameter, a glob matches no key, all parameters that match have
            ``requires_grad=False``, or frozen parameters would be trained in a model that is already wrapped in
            ``DistributedDataParallel``.

    >>> from torchvision.models import resnet18
    >>> from vision_attn.networks.insertion import insert_
    >>> model = resnet18()
    >>> report = insert_(model, stages=-1)
    >>> freeze_backbone_(model) == report.parameters
    True
    """
    network = unwrap_model(model)
    roots = {"": network, **replaced_modules(network)}  # va.remove_ restores replaced modules
    keys = [f"{site}.{key}".lstrip(".") for site, root in roots.items() for key in root.state_dict()]
    # Wrappers of activation checkpointing leave their part of a path out of the keys of a state dict.
    also = set(map(unwrap_key, select_keys("also_train", also_train, network, keys)))
    # A tensor with several names, for example because a block shares it, is trained under each of them.
    named = [pair for site, root in roots.items() for pair in root.named_parameters(site, remove_duplicate=False)]
    buffers = [pair for site, root in roots.items() for pair in root.named_buffers(site, remove_duplicate=False)]
    chosen = {id(p) for key, p in named if unwrap_key(key) in also}
    live = also | inserted_keys(network)
    trained = {id(x) for key, x in named + buffers if unwrap_key(key) in live}
    trainable = {id(p) for p in (*frozen_parameters(network), *(p for _, p in named if p.requires_grad))}
    if chosen and chosen.isdisjoint(trainable):
        what = f"also_train={also_train!r} matches only parameters with requires_grad=False"
        raise ValueError(f"{what}. Call requires_grad_() on them first, or omit model.requires_grad_(False)")
    if trained.isdisjoint(trainable):
        what = "model has nothing to train when frozen. Insert a block"
        raise ValueError(f'{what} with parameters that require gradients, or pass also_train="head"')
    refuse_in_wrapper(model, (p for p in frozen_parameters(network) if id(p) in trained), "va.freeze_backbone_")
    unfreeze_(network)
    for site, root in roots.items():
        freeze_(dict(root.named_modules(prefix=site)), site, trained)
    return sum(p.numel() for p in network.parameters() if p.requires_grad)


def freeze_(modules: Mapping[str, nn.Module], root: str, trained: Set[int]) -> None:
    """Freeze parameters and norms of a module, and register the hooks that store their paths.

    Args:
        modules: the module and all modules inside it, by path.
        root: path of the module.
        trained: identities of parameters that stay trainable, and of buffers that are updated.
    """
    #: keys of parameters, and paths of norms with their momentum, by the path of the module whose hook stores them; a
    #: norm without momentum is stored with True if it has counted batches
    parameters, norms = defaultdict[str, list[str]](list), defaultdict[str, dict[str, Any]](dict)
    # Copies of the wrapper of torch.compile have no hooks.
    owners = {x for x, y in modules.items() if not isinstance(y, CONTAINERS) and not is_layer_wrapper(y)}
    for path, module in modules.items():
        around = [x for x in ancestor_paths(path) if x in owners]
        owner = max(around, default=root, key=len)
        start = len(owner) + bool(owner)
        for name, p in module.named_parameters(recurse=False):
            if p.requires_grad and id(p) not in trained:
                p.requires_grad_(False)
                parameters[owner].append(f"{path}.{name}"[start:].lstrip("."))
        own = dict(module.named_buffers(recurse=False))
        if has_statistics(module) and trained.isdisjoint(map(id, own.values())):
            module.training = False
            momentum = getattr(module, "momentum", None)
            norms[owner][path[start:]] = before = momentum, momentum is None and bool(own.get("num_batches_tracked"))
            norms[path] |= {"": before} if owner != path else {}  # Code calls a norm in a list without its owner.
    for owner in parameters.keys() | norms.keys():
        hook = partial(keep_frozen, parameters=tuple(parameters[owner]), norms=norms[owner])
        modules[owner].register_forward_pre_hook(hook)


def unfreeze_backbone_(model: nn.Module) -> int:
    """Revert :func:`freeze_backbone_` in place: parameters and norms are trained as before.

    Args:
        model: any model, frozen or not.

    Returns:
        The number of trainable parameters (scalars).

    Raises:
        SiteError: a block no longer runs, because other code has replaced or removed the module at its site.
        ValueError: the model is wrapped in ``DistributedDataParallel``, which would not synchronize the parameters.

    >>> from torchvision.models import resnet18
    >>> from vision_attn.networks.insertion import insert_
    >>> model = resnet18()
    >>> report = insert_(model, stages=-1)
    >>> frozen = freeze_backbone_(model)
    >>> unfreeze_backbone_(model) == sum(p.numel() for p in model.parameters())
    True
    """
    network = checked_network(model)
    refuse_in_wrapper(model, (p for p in frozen_parameters(network) if not p.requires_grad), "va.unfreeze_backbone_")
    unfreeze_(network)
    return sum(p.numel() for p in network.parameters() if p.requires_grad)


def has_statistics(module: nn.Module) -> bool:
    """Return True for a norm with statistics that a forward pass in training mode updates."""
    return any(STATISTICS.fullmatch(name) for name, _ in module.named_buffers(recurse=False))


def keep_frozen(module: nn.Module, args: object, *, parameters: Iterable[str], norms: Mapping[str, Any]) -> None:
    """Set frozen norms to evaluation mode before a module runs, whatever the mode of the network, in a pre-hook.

    The norms are found by path, because other code converts them. The hook also stores the keys of frozen parameters.
    """
    for path, (momentum, counted) in norms.items():
        norm = find_module(module, path)
        if norm is not None and norm.training and has_statistics(norm):
            now = getattr(norm, "momentum", momentum)
            if (counted and not norm.num_batches_tracked) or (momentum is not None and now is None):
                what = "update_bn has reset the running statistics of frozen norms, which are therefore lost"
                remedy = "Load them again, and skip update_bn or call va.unfreeze_backbone_ before it"
                raise RuntimeError(f"{what}. {remedy}")
            norm.training = False


def is_mark(hook: object) -> bool:
    """Return True for a hook that only stores the keys of frozen parameters, and changes no norms."""
    return isinstance(hook, partial) and hook.func is keep_frozen and not hook.keywords["norms"]


def frozen_parts(network: nn.Module) -> Iterator[tuple[nn.Module, partial[Any]]]:
    """Yield the modules with a hook of frozen parts, in a network and in the modules that blocks replaced."""
    for root in (network, *replaced_modules(network).values()):
        yield from hooks_inside(root, (keep_frozen,))


def frozen_parameters(network: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that were frozen, also after pruning, weight norm or a parametrization."""
    for module, hook in frozen_parts(network):
        for key in map(plain_key, hook.keywords["parameters"]):
            path, _, name = key.rpartition(".")
            if (owner := find_module(module, path)) is not None:
                parameters = original_module(owner).named_parameters()
                yield from (p for key, p in parameters if plain_key(unwrap_key(key)) == name)


def plain_key(key: str) -> str:
    """Return the key of a parameter without the parts that torch's pruning and parametrizations add.

    >>> plain_key("conv.weight_orig"), plain_key("conv.parametrizations.weight.original0")
    ('conv.weight', 'conv.weight')
    """
    return re.sub(r"parametrizations\.(\w+)\.original\d*$|(_orig|_[gv])$", r"\1", key)


def unfreeze_(network: nn.Module) -> None:
    """Train frozen parameters, return frozen norms to the mode of the network, and remove the hooks of both."""
    for p in [*frozen_parameters(network)]:
        p.requires_grad_()
    for module, hook in frozen_parts(network):
        remove_hooks_(module, lambda found: found.func is keep_frozen)
        for norm in (find_module(module, path) for path in hook.keywords["norms"]):
            if norm is not None:
                norm.training = network.training


def refuse_in_wrapper(model: nn.Module, parameters: Iterable[nn.Parameter], call: str) -> None:
    """Raise if parameters that were frozen when a model was wrapped would be trained without synchronization."""
    if any(True for _ in parameters) and (wrapper := synchronizer(model)) not in (None, "FSDPModule"):
        why = "which does not synchronize parameters that were frozen when it was created"
        raise ValueError(f"model is wrapped in {wrapper}, {why}. Call {call} on the network before wrapping it")


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
    optimizers = [optimizer] if hasattr(optimizer, "param_groups") else optimizer
    known = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    blocks = inserted_blocks(model)
    trained = {site: {id(p) for p in block.parameters() if p.requires_grad} for site, block in blocks.items()}
    if sites := ", ".join(repr(site) for site in trained if not trained[site] <= known):
        what = f"optimizer does not contain the parameters of the blocks at {sites}"
        raise ValueError(f"{what}. Create it after inserting the blocks")


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
        ValueError: a learning rate or factor is not above 0, ``weight_decay`` is below 0, ``attention_lr`` is given but
            no block is trained, or ``layer_decay`` is given but the network has no ``group_matcher``.

    Source: layer-wise learning rates are from Bao et al., *BEiT*, 2021, https://arxiv.org/abs/2106.08254

    >>> from torchvision.models import resnet18
    >>> [group["name"] for group in parameter_groups(resnet18(), lr=0.1, weight_decay=1e-4)]
    ['backbone, decay', 'backbone, no decay']
    """
    check_above(0, lr=lr, attention_lr=attention_lr, layer_decay=layer_decay)
    if not (isinstance(weight_decay, Real) and weight_decay >= 0):  # optimizers check only their own default
        raise ValueError(f"weight_decay must be a number, at least 0, got {weight_decay!r}")
    model = unwrap_model(model)
    inserted = inserted_keys(model)
    blocks = {key for key, _ in model.named_parameters() if unwrap_key(key) in inserted}
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
    globs = [*getattr(model, "no_weight_decay", tuple)(), *(f"{unwrap_key(name)}.*" for name in scales)]
    axes = {key: parameter.dim() for key, parameter in model.named_parameters()}
    fixed = {key for key in axes if axes[key] <= 1 or NO_DECAY.fullmatch(key)}
    return fixed.union(key for key in axes if any(fnmatchcase(unwrap_key(key), glob) for glob in globs))


def layer_depths(model: nn.Module, blocks: set[str]) -> dict[str, int]:
    """Return the number of the layer of each parameter of the backbone, counted from the stem."""
    from timm.models import group_parameters

    if (matcher := getattr(model, "group_matcher", None)) is None:
        raise ValueError(f"layer_decay requires group_matcher, as in timm's networks; {type(model).__name__} has none")
    keys = {key: unwrap_key(key) for key, _ in model.named_parameters()}
    # timm's patterns match the keys without the parts that wrappers of stages add.
    unwrapped: Any = SimpleNamespace(named_parameters=lambda: [(key, None) for key in keys.values()])
    found = group_parameters(unwrapped, matcher(coarse=False), reverse=True)
    return {key: found[keys[key]] for key in keys if key not in blocks}
