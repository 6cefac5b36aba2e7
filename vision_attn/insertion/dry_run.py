"""A forward pass to look at a network: which maps its modules give, and whether its blocks are run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vision_attn.insertion.sites import SiteError

__all__ = ["FeatureMap", "example_images", "quiet_eval", "trace_maps", "verify_reached"]


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


@dataclass(frozen=True)
class FeatureMap:
    """A map that a module gives, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def trace_maps(model: nn.Module, sites: list[str], example: Tensor) -> dict[str, FeatureMap]:
    """The map at each site, by one forward of the model.

    Raises:
        SiteError: the model does not run on the example, or a site gives no map.
    """
    maps = {site: one_map(site, outputs) for site, outputs in run_and_record(model, sites, example).items()}
    for site, found in maps.items():
        check_layout(site, found, example)
    if any(len(set(found.shape[1:])) == 1 for found in maps.values()):
        # As many channels as rows and columns: a wider image tells which axis is which.
        wider = torch.cat([example, example], dim=3)
        for site, outputs in run_and_record(model, sites, wider).items():
            check_layout(site, one_map(site, outputs), wider)
    return {site: FeatureMap(tuple(found.shape), found.dtype, found.device) for site, found in maps.items()}


def run_and_record(model: nn.Module, sites: list[str], example: Tensor) -> dict[str, list[object]]:
    """What the modules at the sites return, a list for each, in one forward."""
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
    except Exception as error:
        raise SiteError(
            f"the model does not run on an example of shape {tuple(example.shape)} ({type(error).__name__}: {error}): "
            "give one that it takes as example_input"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return outputs


def one_map(site: str, outputs: list[object]) -> Tensor:
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
    return output


def check_layout(site: str, output: Tensor, example: Tensor) -> None:
    # A map keeps the aspect of the image, give or take a cell of rounding on either side. What does not has its
    # channels elsewhere, as in networks that work on (batch, height, width, channels).
    height, width = output.shape[2:]
    rows, columns = example.shape[2:]
    if abs(height * columns - width * rows) > rows + columns:
        raise SiteError(
            f"{site!r} returns {tuple(output.shape)} for an image of {rows}×{columns}: that is not "
            "(batch, channels, height, width), the only layout that blocks are inserted in"
        )


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
            raise SiteError(
                f"the block at {site!r} would run {times} times in a forward pass: "
                "choose the modules inside or around it"
            )


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
