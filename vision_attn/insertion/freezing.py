"""A backbone that stays as it is while the blocks in it are trained: its parameters and its running statistics."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

from torch import nn

from vision_attn.insertion.out import inserted_keys, replaced
from vision_attn.insertion.running import plain_network

__all__ = ["freeze_backbone_"]

#: The attribute in which a module with something frozen keeps what it was.
FROZEN = "_before_freezing"


@dataclass
class BeforeFreezing:
    """What a frozen module goes back to."""

    #: names of its own parameters that were trained
    trained: tuple[str, ...]
    #: the mode that it was in, or was last asked to be in
    training: bool


def freeze_backbone_(model: nn.Module, frozen: bool = True, *, also_train: str | Iterable[str] = ()) -> int:
    """Train the inserted blocks alone, in place: all else keeps its values, running statistics included.

    A frozen batch norm normalises with its running statistics and leaves them as they are, also after
    ``model.train()``. Dropout and stochastic depth go with the mode as ever. Frozen once more, a model is thawed
    first, so that the last call is the one that counts; thawed, every parameter and every norm is what it was.

    Args:
        model: a model that blocks are inserted in. Copies and pickles of it are frozen as it is; convert batch norms
            to synchronised ones before, not after.
        frozen: False to thaw it.
        also_train: globs on keys of the state dict that are trained beside the blocks: ``"fc.*"`` for a new head.
            A batch norm keeps its statistics unless they match.

    Returns:
        How many parameters (numbers) are trained then.

    Raises:
        ValueError: nothing would be left to train, or a glob matches no key.

    >>> from torchvision.models import resnet18
    >>> from vision_attn.insertion import insert_
    >>> model = resnet18()
    >>> report = insert_(model, stages=-1)
    >>> freeze_backbone_(model) == report.parameters
    True
    """
    globs = (also_train,) if isinstance(also_train, str) else tuple(also_train)
    if globs and not frozen:
        raise ValueError(f"also_train applies to frozen=True; got {globs} to thaw")
    model = plain_network(model)
    live = trained_keys(model, globs) if frozen else set()
    thaw(model)
    if frozen:
        # A tensor that is in a block as well is trained under each of its names.
        named = dict(model.named_parameters(remove_duplicate=False))
        tensors = {id(named[key]) for key in live & named.keys()}
        for name, module in model.named_modules():
            freeze(module, f"{name}." if name else "", live, tensors)
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def trained_keys(model: nn.Module, globs: tuple[str, ...]) -> set[str]:
    keys = model.state_dict().keys()
    live = inserted_keys(model)
    for pattern in globs:
        matched = {key for key in keys if fnmatchcase(key, pattern)}
        if not matched:
            raise ValueError(f"also_train: {pattern!r} matches no key of the model: see model.state_dict()")
        live |= matched
    if not live:
        raise ValueError(
            "model has no inserted block, and frozen it would have nothing to train: "
            'insert_ one first, or name what to train with also_train, such as "fc.*"'
        )
    return live


def freeze(module: nn.Module, prefix: str, live: Collection[str], tensors: Collection[int]) -> None:
    """Freeze what a module holds itself, by its path; its children are other modules'."""
    own = {name: p for name, p in module._parameters.items() if p is not None}
    trained = tuple(name for name, p in own.items() if p.requires_grad and id(p) not in tensors)
    # Batch and instance norms, torch's and timm's, call them running_mean and running_var.
    statistics = {
        name for name, buffer in module._buffers.items() if name.startswith("running_") and buffer is not None
    }
    held = bool(statistics) and not any(prefix + name in live for name in statistics)
    if not (trained or held):
        return
    vars(module)[FROZEN] = BeforeFreezing(trained, module.training)
    for name in trained:
        own[name].requires_grad_(False)
    if held:
        # A partial of a function is copied and pickled with its module, and graphs see no more than the mode.
        vars(module)["train"] = partial(stay_in_evaluation, module)
        module.training = False


def thaw(model: nn.Module) -> None:
    kept = [part for module in replaced(model).values() for part in module.modules()]  # those out of place, too
    for module in (*model.modules(), *kept):
        before: BeforeFreezing | None = vars(module).pop(FROZEN, None)
        if before is None:
            continue
        for name in before.trained:
            module._parameters[name].requires_grad_()  # type: ignore[union-attr]
        if vars(module).pop("train", None) is not None:
            module.training = before.training


def stay_in_evaluation(module: nn.Module, mode: bool = True) -> nn.Module:
    """What ``train`` is for a frozen norm: its children, the dropout in some norms of timm, take the mode."""
    type(module).train(module, mode)
    vars(module)[FROZEN].training = mode
    module.training = False
    return module
