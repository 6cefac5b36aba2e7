"""The network to look at: made by its name, and what each of its stages has of its parameters and of its work."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from vision_attn.insertion import example_images, quiet_eval

__all__ = ["TORCHVISION", "Share", "Work", "example_for", "measure", "network_of"]

#: What stands before the names of torchvision's networks.
TORCHVISION = "torchvision:"


def network_of(name: str) -> nn.Module:
    """A network without weights, by a name that timm knows or, after ``torchvision:``, that torchvision knows."""
    if not name.startswith(TORCHVISION):
        from timm.models import get_pretrained_cfg

        from vision_attn.models import create_model

        config = get_pretrained_cfg(name)
        return create_model(name, num_classes=config.num_classes if config else 1000)

    import torchvision

    wanted, known = name.removeprefix(TORCHVISION), torchvision.models.list_models(torchvision.models)
    if wanted not in known:
        close = difflib.get_close_matches(wanted, known, n=5)
        hint = f"close to it: {', '.join(close)}" if close else "torchvision.models.list_models() names them all"
        raise ValueError(f"model: torchvision has no classifier {wanted!r}; {hint}")
    # Weights are drawn and then never looked at: some of torchvision's networks ask, with a warning, how to draw them.
    options = {"init_weights": False} if wanted in ("googlenet", "inception_v3") else {}
    model = torchvision.models.get_model(wanted, weights=None, **options)
    assert isinstance(model, nn.Module)
    return model


def example_for(model: nn.Module, input_size: int | Sequence[int] | None) -> Tensor:
    """One empty image of the size that is asked for, or of the model's own."""
    own = example_images(model, None)
    if input_size is None:
        return own
    size = (input_size, input_size) if isinstance(input_size, int) else tuple(input_size)
    if len(size) != 2 or any(isinstance(side, bool) or not isinstance(side, int) or side < 1 for side in size):
        raise ValueError(f"input_size must be a side or a height and a width, in pixels; got {input_size!r}")
    return own.new_zeros(1, own.shape[1], *size)


@dataclass(frozen=True)
class Share:
    """How much of something a part of the network has, or would have."""

    #: numbers that are learned
    parameters: int
    #: in one forward of one image
    multiply_adds: int


@dataclass(frozen=True)
class Work:
    """What a network has and does."""

    #: of the network
    whole: Share
    #: by site: of what runs after the site before it, up to this one
    of_stage: dict[str, Share]


def measure(model: nn.Module, sites: Sequence[str], example: Tensor) -> Work:
    """The parameters and multiply-adds of a network and of each of its stages, by one forward."""
    from torch.utils.flop_counter import FlopCounterMode  # which loads Triton

    met: set[nn.Parameter] = set()
    until: dict[str, Share] = {}
    counter = FlopCounterMode(display=False)

    def meet(module: nn.Module, args: object, output: object) -> None:
        met.update(module.parameters(recurse=False))

    def note(site: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: object, output: object) -> None:
            until[site] = Share(sum(p.numel() for p in met), counter.get_total_flops() // 2)

        return hook

    handles = [module.register_forward_hook(meet) for module in model.modules()]
    handles += [model.get_submodule(site).register_forward_hook(note(site)) for site in sites]
    try:
        with quiet_eval(model), counter:
            model(example)
    finally:
        for handle in handles:
            handle.remove()
    of_stage, before = {}, Share(0, 0)
    for site, so_far in until.items():  # in the order in which they run
        of_stage[site] = Share(so_far.parameters - before.parameters, so_far.multiply_adds - before.multiply_adds)
        before = so_far
    whole = Share(sum(p.numel() for p in model.parameters()), counter.get_total_flops() // 2)
    return Work(whole, of_stage)
