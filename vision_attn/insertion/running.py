"""A model run on an example, without a trace of it left in the model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from vision_attn.insertion.sites import SiteError

__all__ = ["example_images", "plain_network", "quiet_eval", "run_quietly"]


def plain_network(model: nn.Module) -> nn.Module:
    """The network inside torch.compile's and DataParallel's wrappers; what cannot be changed any more is refused."""
    while True:
        if isinstance(model, torch.jit.ScriptModule):
            raise SiteError("model is a TorchScript program, which cannot be changed: insert before scripting it")
        if type(model).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"):
            raise SiteError(
                f"model is wrapped in {type(model).__name__}, which has counted its parameters already: insert into "
                "the network and wrap it then"
            )
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.DataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


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


def run_quietly(model: nn.Module, example: Tensor) -> object:
    """One forward that leaves no trace in the model; returns what the model does.

    Raises:
        SiteError: the model does not run on the example.
    """
    try:
        with quiet_eval(model):
            return model(example)
    except Exception as error:
        raise SiteError(
            f"the model does not run on an example of shape {tuple(example.shape)} ({type(error).__name__}: {error}): "
            "give one that it takes as example_input"
        ) from error


@contextmanager
def quiet_eval(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients, uncompiled; afterwards every module is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False  # without its train(), which may keep account of what it is told
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if "torch._dynamo" in sys.modules:  # parts of the model may be compiled, and are not to be again for this
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield
    finally:
        for module, training in modes:
            module.training = training
