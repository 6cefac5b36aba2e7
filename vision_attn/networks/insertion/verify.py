"""Attach blocks to a network and verify that the output stays bitwise identical."""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.checks import get_version
from vision_attn.errors import SiteError
from vision_attn.networks.insertion.attributes import get_record
from vision_attn.networks.insertion.registry import attach_blocks_
from vision_attn.networks.insertion.second_map import random_contexts
from vision_attn.networks.inspection.dry_run import DryRun, bitwise_equal, get_tensors, has_no_values

#: Largest relative change of an output because of another memory format.
ROUNDING = 1e-5


class ChildError(SiteError):
    """Raised if modules cannot have a block as their child."""


class ChangedOutputError(SiteError):
    """Raised if blocks change the output of the network, and may not."""


def attach_verified(dry_run: DryRun, blocks: Sequence[nn.Module], may_change: bool) -> tuple[float, str]:
    """Attach blocks and verify that the network's output changes only through the outputs of the blocks.

    The blocks are detached if an error is raised.

    Returns:
        Relative change of the output that the blocks cause, and a sentence that states what was verified.
    """
    with attach_blocks_(dry_run.model, blocks):
        changed, reason = verify_evaluation(dry_run, blocks)
        if changed and not may_change:
            raise ChangedOutputError(f"{quote_sites(blocks)}: the output of the network changes")
        if reason:
            return changed, f"not verified: {reason}"
        if reason := verify_training(dry_run, blocks, may_change):
            return changed, f"verified in evaluation mode; not verified in training mode: {reason}"
        return changed, "verified in evaluation and training mode"


def verify_evaluation(dry_run: DryRun, blocks: Sequence[nn.Module]) -> tuple[float, str]:
    """Return the relative change of the output in evaluation mode, and the reason if the output cannot be compared."""
    try:
        output, _ = run_with(dry_run, blocks)
    except SiteError:
        compare_copies(dry_run, blocks, dry_run.output)  # raises an error that names the cause, if it is a copy
        raise
    if bitwise_equal(dry_run.output, output):
        return 0.0, why_incomparable(output)
    if reason := compare_copies(dry_run, blocks, dry_run.output):
        return 0.0, reason
    changed = relative_change(dry_run.output, output)
    if not math.isfinite(changed):
        raise SiteError(f"{get_record(blocks[0]).block} makes the network's output NaN or infinite")
    return changed, ""


def verify_training(dry_run: DryRun, blocks: Sequence[nn.Module], may_change: bool) -> str:
    """Compare copies with their originals in training mode. Return the reason if the output cannot be compared."""
    try:
        output, maps = run_with(dry_run, blocks, (), training=True)
    except SiteError:
        return "the network does not run on the example in training mode, or runs other modules"
    if reason := why_incomparable(output):
        return reason
    # If the network changes no feature map in place, a copy makes no difference.
    changes_maps = any(get_version(x) != version for x, version in maps)
    if changes_maps and (reason := compare_copies(dry_run, blocks, output, training=True)):
        return reason
    if not may_change:
        trained, _ = run_with(dry_run, blocks, None, training=True)
        if relative_change(output, trained) > ROUNDING:
            return "the output differs: a block is not an identity in this mode, or draws random numbers"
    return ""


def compare_copies(dry_run: DryRun, blocks: Sequence[nn.Module], expected: object, training: bool = False) -> str:
    """Raise if blocks that return a copy of their input change the output, whatever the network does with the copy.

    Return the reason if the output cannot be compared.
    """

    def is_unchanged(copies: Collection[nn.Module], expected: object = expected) -> bool:
        return bitwise_equal(expected, run_with(dry_run, blocks, copies, training)[0])

    copied, _ = run_with(dry_run, blocks, blocks, training)
    if bitwise_equal(expected, copied):
        return ""
    if not is_unchanged(blocks, copied):
        return "the output of the network varies from run to run"
    if not is_unchanged(()):
        raise child_error(blocks)
    culprits = [block for block in blocks if not is_unchanged([block])]
    what = f"{quote_sites(culprits or blocks)} cannot take a block: the network changes this tensor in place"
    why = f"{' in training mode' * training} and also reads it elsewhere, where the change would be missing"
    raise SiteError(f"{what}{why}. Choose another module, or set inplace=False in it")


def why_incomparable(output: object) -> str:
    """Return the reason why an output cannot be compared; empty if it can be."""
    empty = all(has_no_values(x) or not x.numel() for x in get_tensors(output))
    return "the output of the network contains no tensors with values" if empty else ""


def quote_sites(blocks: Iterable[nn.Module]) -> str:
    return ", ".join(repr(get_record(block).site) for block in blocks)


def child_error(blocks: Iterable[nn.Module]) -> ChildError:
    """Return the error for modules that depend on their children."""
    why = "cannot have a block as its child, because it loops over its children or counts them"
    return ChildError(f"{quote_sites(blocks)} {why}. Choose another module")


def run_with(
    dry_run: DryRun, blocks: Sequence[nn.Module], copies: Collection[nn.Module] | None = None, training: bool = False
) -> tuple[object, list[tuple[Tensor, int]]]:
    """Run the network with its blocks.

    If ``copies`` is given, these blocks return a copy of their input, and the other blocks return the input.

    Returns:
        The output of the network and, in training mode, the inputs of the blocks with their versions.

    Raises:
        SiteError: the network does not run, or does not call a block as often as the module at its site.
    """
    calls, maps = list[nn.Module](), list[tuple[Tensor, int]]()

    def replace_output(block: nn.Module, args: tuple[Tensor, ...], kwargs: Any, output: Tensor) -> Tensor:
        calls.append(block)
        if training:
            maps.append((args[0], get_version(args[0])))
        if copies is None:
            return output
        return args[0].clone() if block in copies else args[0]

    paths = [get_record(block).block_path for block in blocks]
    try:
        with random_contexts(dry_run.model, blocks, dry_run.example.shape[0]):
            output = dry_run.run([(path, replace_output) for path in paths], training=training)
    except SiteError as error:
        if copies is None or error.__cause__ is None:  # errors of the network have a cause, others of ours not
            raise
        raise child_error(blocks) from error
    if wrong := [x for x in blocks if calls.count(x) != len(dry_run.calls[get_record(x).site])]:
        raise child_error(wrong)
    return output, maps


def relative_change(before: object, after: object) -> float:
    """Return the root mean square of the change of an output, divided by that of the output; 1 if that is zero."""
    change, total = 0.0, 0.0
    for x, y in zip(get_tensors(before), get_tensors(after), strict=True):
        if not has_no_values(x):
            y = y if y.shape == x.shape else torch.zeros_like(x)  # A detector may return another number of boxes.
            change += float((y.double() - x.double())[x.isfinite()].square().sum())
            total += float(x.double()[x.isfinite()].square().sum())
    return math.sqrt(change / (total or change)) if change else 0.0
