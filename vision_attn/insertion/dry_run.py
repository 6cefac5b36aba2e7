"""A forward pass to look at a network: which maps its modules give, and whether its blocks are run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vision_attn.insertion.sites import SiteError

__all__ = ["example_images", "quiet_eval", "trace_maps", "verify_reached"]


def example_images(model: nn.Module, example_input: Tensor | tuple[int, ...] | None) -> Tensor:
    if isinstance(example_input, Tensor):
        return example_input
    if example_input is None:
        config = getattr(model, "pretrained_cfg", None) or {}
        example_input = (1, *config.get("input_size", (3, 224, 224)))
    if len(example_input) != 4:
        raise ValueError(
            f"example_input must be an image batch or its shape (batch, channels, height, width); got {example_input}"
        )
    reference = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    return torch.zeros(example_input, device=reference.device, dtype=reference.dtype)


def trace_maps(model: nn.Module, sites: list[str], example: Tensor) -> dict[str, tuple[int, ...]]:
    """The shape of the map at each site, by one forward of the model."""
    outputs: dict[str, list[object]] = {site: [] for site in sites}
    handles = [
        model.get_submodule(site).register_forward_hook(
            lambda module, args, output, site=site: outputs[site].append(output)
        )
        for site in sites
    ]
    try:
        with quiet_eval(model):
            model(example)
    finally:
        for handle in handles:
            handle.remove()
    return {site: check_map(site, found, example) for site, found in outputs.items()}


def check_map(site: str, outputs: list[object], example: Tensor) -> tuple[int, ...]:
    if not outputs:
        raise SiteError(f"{site!r} is not called in the forward pass of the model: choose a module that is")
    if len(outputs) > 1:
        raise SiteError(
            f"{site!r} is called {len(outputs)} times in one forward pass, so one block cannot follow it: "
            "choose the module around it"
        )
    output = outputs[0]
    if not isinstance(output, Tensor):
        raise SiteError(f"{site!r} returns a {type(output).__name__}, not one map: choose a module inside it")
    if output.dim() != 4:
        raise SiteError(
            f"{site!r} returns a tensor of shape {tuple(output.shape)}, not maps (batch, channels, height, width): "
            "choose an earlier module"
        )
    # A map keeps the aspect of the image, give or take a cell of rounding on either side. What does not has its
    # channels elsewhere, as in networks that work on (batch, height, width, channels).
    height, width = output.shape[2:]
    rows, columns = example.shape[2:]
    if abs(height * columns - width * rows) > rows + columns:
        raise SiteError(
            f"{site!r} returns {tuple(output.shape)} for an image of {rows}×{columns}: that is not "
            "(batch, channels, height, width), the only layout that blocks are inserted in"
        )
    return tuple(output.shape)


def verify_reached(model: nn.Module, blocks: Mapping[str, nn.Module], example: Tensor) -> None:
    """Run the model once more: a block that is not run exactly once is at a site that cannot take it.

    The blocks only count how often they are called, so that the pass costs no more than the model's own.
    """
    calls = dict.fromkeys(blocks, 0)

    def count(site: str) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            calls[site] += 1
            return x

        return forward

    for site, block in blocks.items():
        vars(block)["forward"] = count(site)
    try:
        with quiet_eval(model):
            model(example)
    except Exception as error:
        raise SiteError(
            f"the model no longer runs with blocks at {', '.join(map(repr, blocks))} "
            f"({type(error).__name__}: {error}): a module there does not take a child; "
            "choose the modules inside or around it"
        ) from error
    finally:
        for block in blocks.values():
            del vars(block)["forward"]
    for site, times in calls.items():
        if times != 1:
            raise SiteError(f"the block at {site!r} would run {times} times in a forward pass: choose another module")


@contextmanager
def quiet_eval(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every module is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
