"""Attach blocks to a network and verify that the output stays bitwise identical."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from vision_attn.errors import SiteError
from vision_attn.networks.insertion.attach import attach_blocks_
from vision_attn.networks.insertion.dry_run import DryRun, bitwise_equal, get_tensors, has_no_values
from vision_attn.networks.insertion.hooks import RECORD


def attach_verified(dry_run: DryRun, blocks: Sequence[nn.Module]) -> float:
    """Attach blocks and verify that the network's output changes only through the outputs of the blocks.

    Returns:
        Relative change of the output that the blocks cause.
    """
    with attach_blocks_(dry_run.model, blocks):
        failure = None
        try:
            output = run_with(dry_run, blocks)
            if bitwise_equal(dry_run.output, output):
                return 0.0
        except SiteError as error:
            failure = error
        # Blocks that return a copy of their input must not change the output, whatever the network does with the copy.
        copy = run_with(dry_run, blocks, blocks)
        # A network whose output varies from run to run cannot be compared.
        if not bitwise_equal(dry_run.output, copy) and bitwise_equal(copy, run_with(dry_run, blocks, blocks)):
            if not bitwise_equal(dry_run.output, run_with(dry_run, blocks, ())):
                raise child_error(blocks)
            culprits = [x for x in blocks if not bitwise_equal(dry_run.output, run_with(dry_run, blocks, [x]))]
            raise SiteError(
                f"{quote_sites(culprits)} cannot take a block: the network changes this tensor in place and also reads "
                "it elsewhere, where the change would be missing. Choose another module, or set inplace=False in it"
            )
        if failure is not None:
            raise failure
        changed = relative_change(dry_run.output, output) if bitwise_equal(dry_run.output, copy) else 0.0
        if not math.isfinite(changed):
            raise SiteError(f"{vars(blocks[0])[RECORD].block} makes the network's output NaN or infinite")
        return changed


def quote_sites(blocks: Iterable[nn.Module]) -> str:
    return ", ".join(repr(vars(block)[RECORD].site) for block in blocks)


def child_error(blocks: Iterable[nn.Module]) -> SiteError:
    """Return the error for modules that depend on their children."""
    why = "cannot have a block as its child, because it loops over its children or counts them"
    return SiteError(f"{quote_sites(blocks)} {why}. Choose another module")


def run_with(dry_run: DryRun, blocks: Sequence[nn.Module], copies: Collection[nn.Module] | None = None) -> object:
    """Run the network with its blocks.

    If ``copies`` is given, these blocks return a copy of their input, and the other blocks return the input.

    Raises:
        SiteError: the network does not run, or does not call a block as often as the module at its site.
    """
    calls: list[nn.Module] = []

    def forward(block: nn.Module, original: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        calls.append(block)
        if copies is None:
            return original(x)
        return x.clone() if block in copies else x

    try:
        for block in blocks:
            vars(block)["forward"] = partial(forward, block, block.forward)
        output = dry_run.run()
    except SiteError as error:
        if copies is None:
            raise
        raise child_error(blocks) from error
    finally:
        for block in blocks:
            vars(block).pop("forward", None)
    if wrong := [x for x in blocks if calls.count(x) != len(dry_run.calls[vars(x)[RECORD].site])]:
        raise child_error(wrong)
    return output


def relative_change(before: object, after: object) -> float:
    """Return the root mean square of the change of an output, divided by the root mean square of the output."""
    change, total = 0.0, 0.0
    for x, y in zip(get_tensors(before), get_tensors(after), strict=True):
        if not has_no_values(x):
            y = y if y.shape == x.shape else torch.zeros_like(x)  # A detector may return another number of boxes.
            change += float((y.double() - x.double())[x.isfinite()].square().sum())
            total += float(x.double()[x.isfinite()].square().sum())
    return math.sqrt(change / total) if change else 0.0
