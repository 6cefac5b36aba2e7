"""What is trained: the gates of inserted blocks, and a backbone that keeps its parameters and running statistics."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import nn

from vision_attn.checks import as_list, check_flags, check_number, check_type
from vision_attn.networks.insertion.attach import inserted, inserted_keys, replaced
from vision_attn.networks.insertion.backbone import all_or_nothing, plain_network
from vision_attn.text import Report, Table

#: The attribute in which a module with something frozen keeps what it was.
FROZEN = "_before_freezing"


@dataclass
class BeforeFreezing:
    """What a frozen module goes back to."""

    #: names of its own parameters that were trained
    trained: tuple[str, ...]
    #: the mode that it was in, or was last asked to be in
    training: bool


class Gates(Report, dict[str, nn.Parameter]):
    """Gates by site; prints as a table of how far each is open."""

    def parts(self) -> list[Table]:
        header = ("where", "channels", "mean", "smallest", "largest")
        gates = {site: gate.detach() for site, gate in self.items()}
        rows = [
            (site, f"{gate.numel()}", *(f"{value:.4g}" for value in (gate.mean(), gate.min(), gate.max())))
            for site, gate in gates.items()
        ]
        return [Table([header, *rows])]


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
    found = {site: getattr(block, "gate", None) for site, block in inserted(model).items()}
    live = Gates({site: gate for site, gate in found.items() if isinstance(gate, nn.Parameter)})
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

    >>> from vision_attn.networks.insertion import insert_
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
    check_flags(frozen=frozen)
    found = gates(model)
    for gate in found.values():
        gate.requires_grad_(not frozen)
    return len(found)


@all_or_nothing
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
    >>> from vision_attn.networks.insertion import insert_
    >>> model = resnet18()
    >>> report = insert_(model, stages=-1)
    >>> freeze_backbone_(model) == report.parameters
    True
    """
    check_flags(frozen=frozen)
    globs = tuple(as_list("also_train", also_train, "globs on keys", single=str))
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


def print_trainable_parameters(model: nn.Module) -> None:
    """Print how many parameters are trained, of how many, in the words of PEFT.

    Args:
        model: any network.

    >>> from vision_attn.networks.insertion import insert_
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    >>> report = insert_(model, names="0", num_heads=2, example_input=(1, 3, 16, 16))
    >>> trained = freeze_backbone_(model)
    >>> print_trainable_parameters(model)
    trainable params: 312 || all params: 536 || trainable%: 58.2090
    """
    parameters = list(plain_network(model).parameters())
    total, trained = sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)
    share = 100 * trained / total if total else 0.0
    print(f"trainable params: {trained:,d} || all params: {total:,d} || trainable%: {share:.4f}")


def trained_keys(model: nn.Module, globs: tuple[str, ...]) -> set[str]:
    keys = model.state_dict().keys()
    live = inserted_keys(model)
    for pattern in globs:
        check_type("also_train", pattern, str, "a glob on keys, or several")
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
