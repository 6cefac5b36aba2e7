"""Contribution of the blocks of a network: the size of their branches, and the effect of disabling them."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.attention.blocks import Attention
from vision_attn.attention.blocks.attention_maps import weights_on_map
from vision_attn.attention.blocks.gated_residual import is_residual
from vision_attn.attention.plan import AttentionInputs
from vision_attn.attention.scopes import scope
from vision_attn.checks import product
from vision_attn.errors import SiteError
from vision_attn.networks.capture.maps import AttentionMap
from vision_attn.networks.insertion.attributes import get_record
from vision_attn.networks.insertion.registry import inserted_blocks, replaced_modules
from vision_attn.networks.inspection.network import quiet_eval
from vision_attn.networks.inspection.selection import Globs, Where, match_modules
from vision_attn.networks.inspection.wrappers import unwrap_model
from vision_attn.text import Report, Table

#: Number of attention weights of which the entropy is computed at a time.
MAX_WEIGHTS = 2**24


@dataclass(frozen=True)
class Ablation:
    """Effect of disabling blocks, which then return their input unchanged."""

    #: number of predictions that change; None if the model returns no class scores
    predictions_changed: int | None
    #: increase of the mean cross-entropy; None without labels
    loss: float | None


@dataclass(frozen=True)
class BlockContribution:
    """Contribution of one block."""

    #: path of the module at which the block is inserted, or of the block if it is part of the network
    site: str
    #: root mean square of the branch, divided by the root mean square of the input of the block
    ratio: float
    #: the same ratio for each channel, ``(c,)``
    ratio_per_channel: Tensor
    #: effect of disabling only this block
    ablation: Ablation


@dataclass(frozen=True, repr=False)
class Contribution(Report):
    """Contribution of the blocks of a network; prints as a table.

    >>> print(Contribution((), all_blocks=Ablation(predictions_changed=3, loss=None), predictions=64))
    change when a block is disabled
    site        residual ratio  predictions changed  loss
    all blocks                              3 of 64
    """

    #: contributions in the order of the modules
    blocks: tuple[BlockContribution, ...]
    #: effect of disabling all blocks
    all_blocks: Ablation
    #: number of predictions: one per image, or one per position if the scores are a feature map
    predictions: int

    def parts(self) -> list[str | Table]:
        lines = [("site", "residual ratio", "predictions changed", "loss")]
        rows = [(block.site, f"{block.ratio:.4f}", block.ablation) for block in self.blocks]
        for site, ratio, without in (*rows, ("all blocks", "", self.all_blocks)):
            count = without.predictions_changed
            changed = "" if count is None else f"{count} of {self.predictions}"
            lines.append((site, ratio, changed, "" if without.loss is None else f"{without.loss:+.4f}"))
        notes = [] if self.predictions else ["The model returns no class scores, so predictions are not compared."]
        if self.all_blocks.loss is not None and round(self.all_blocks.loss, 4) < 0:
            remedy = "Train longer, choose another site, or call va.remove_(model)."
            notes.append(f"The loss on this batch is lower with all blocks disabled. {remedy}")
        return ["change when a block is disabled", Table(lines), *notes]


def contribution(model: nn.Module, batch: Tensor | Sequence[Tensor]) -> Contribution:
    """Measure the contribution of each inserted block to a network, and of all blocks.

    Two measures are reported. *residual ratio* is ``rms(block(x) - x) / rms(x)``: the root mean square of the residual
    branch, divided by the root mean square of its input. The second measure compares the predictions with and without
    the block: the number of predictions that change when the block is disabled, and the increase of the loss. A
    disabled block returns its input unchanged. The model runs in evaluation mode.

    Args:
        model: a network with inserted blocks, or with :class:`vision_attn.AttentionBlock2d` as part of the network.
            Modules from :func:`vision_attn.replace_` have no residual branch and are not measured.
        batch: images, or a pair of images and labels; for detection models, a list of images ``(c, h, w)``. The output
            of the model is a tensor of scores ``(b, classes, …)``, or contains the scores as ``logits`` or ``out``. A
            single score is the logit of the second of two classes. For other outputs, only *residual ratio* is
            measured.

    Returns:
        A report with a record for each block and one for all blocks; prints as a table. It contains a note if the loss
        is lower without the blocks.

    Raises:
        ValueError: the model has no block with a residual branch.

    >>> import vision_attn as va
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    >>> report = va.insert_(model, names="0", num_heads=2, example_input=(1, 3, 16, 16))
    >>> print(va.contribution(model, torch.randn(4, 3, 16, 16)))
    change when a block is disabled
    site        residual ratio  predictions changed  loss
    0                   0.0000               0 of 4
    all blocks                               0 of 4
    """
    images, labels = split_batch(batch)
    blocks = require_branches(model)

    def ablate(off: Iterable[nn.Module]) -> Ablation:
        with disable(model, off):
            ablated = compute_scores(model, images)
        if scores is None or ablated is None:
            return Ablation(predictions_changed=None, loss=None)
        rise = None if labels is None else float(F.cross_entropy(ablated, labels) - F.cross_entropy(scores, labels))
        return Ablation(int((scores.argmax(1) != ablated.argmax(1)).sum()), rise)

    with quiet_eval(model):
        with measure_branches(model, blocks) as squares:
            scores = compute_scores(model, images)
        contributions = tuple(
            BlockContribution(site, rms_ratio(x.sum(1)).item(), rms_ratio(x), ablate([blocks[site]]))
            for site, x in squares.items()
        )
        all_blocks = ablate(blocks.values())
    return Contribution(contributions, all_blocks, 0 if scores is None else scores.argmax(1).numel())


def measure_blocks(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, dict[str, float]]:
    """Run a model on a batch, and return plain numbers for each of its blocks, to be logged during training.

    The model runs in evaluation mode without gradients, and its modes are restored.

    Args:
        model: a network with inserted blocks, or with :class:`vision_attn.AttentionBlock2d` as part of the network.
        *args: arguments of the model, such as a batch of images.
        **kwargs: keyword arguments of the model.

    Returns:
        For each block, by the names in the table of :func:`contribution`: ``"residual_ratio"``, the root mean square of
        the branch divided by that of its input; ``"gate"``, the mean magnitude of the gate, if the block has one; and
        ``"entropy"``, the mean entropy of the attention weights in nats, if the block has attention:
        ``ln(positions)`` for uniform attention.

    Raises:
        ValueError: the model has no block with a residual branch.

    >>> from vision_attn.attention.blocks import AttentionBlock2d
    >>> measure_blocks(nn.Sequential(AttentionBlock2d(8, 2)), torch.zeros(1, 8, 4, 4))
    {'0': {'residual_ratio': 0.0, 'gate': 1.0, 'entropy': 2.7725887298583984}}
    """
    blocks = require_branches(model)
    entropies: dict[str, list[Tensor]] = {site: [] for site in blocks}

    def record(sites: Iterable[str], inputs: AttentionInputs) -> None:
        queries, grouping = inputs.q, inputs.grouping
        rows = torch.arange(product(grouping.query_layout.size), device=queries.device)
        weights_of_row = queries.shape[0] * queries.shape[1] // grouping.groups * product(grouping.key_layout.size)
        for part in rows.split(max(1, MAX_WEIGHTS // weights_of_row)):
            weights = AttentionMap(weights_on_map(inputs, part), (), ())
            for site in sites:
                entropies[site].append(weights.entropy().flatten(0, 1).mean(0))

    owners = defaultdict[nn.Module, list[str]](list)  # blocks may share or wrap their attention
    for site, block in blocks.items():
        for module in filter(lambda x: isinstance(x, Attention), block.modules()):
            owners[module].append(site)
    attention = {module: partial(record, sites) for module, sites in owners.items()}
    with quiet_eval(model), measure_branches(model, blocks) as squares, scope(model, "attention", attention):
        unwrap_model(model)(*args, **kwargs)
    measures = {}
    for site, block in blocks.items():
        measures[site] = {"residual_ratio": rms_ratio(squares[site].sum(1)).item()}
        if isinstance(gate := getattr(block, "gate", None), Tensor):
            whole = getattr(gate, "full_tensor", gate.detach)()  # a gate that is sharded by FSDP2
            measures[site]["gate"] = whole.abs().mean().item()
        if entropies[site]:
            measures[site]["entropy"] = torch.cat(entropies[site]).mean().item()
    return measures


def split_batch(batch: Tensor | Sequence[Tensor]) -> tuple[Tensor | list[Tensor], Tensor | None]:
    """Return the images, and the labels or None."""
    if isinstance(batch, Tensor):
        return batch, None
    parts: list[Any] = [*batch] if isinstance(batch, list | tuple) else [batch]
    are_tensors = all(isinstance(part, Tensor) for part in parts)
    if are_tensors and all(part.dim() == 3 and part.is_floating_point() for part in parts):
        return parts, None
    if not are_tensors or len(parts) != 2:
        got = ", ".join(type(part).__name__ for part in parts)
        raise ValueError(f"batch must be images, or a pair of images and labels, as tensors, got {got}")
    return parts[0], parts[1]


def compute_scores(model: nn.Module, images: Tensor | list[Tensor]) -> Tensor | None:
    """Return the scores ``(b, classes, …)`` of a model, or None if the output has no scores."""
    output = unwrap_model(model)(images)
    if isinstance(output, Mapping):
        output = next((output[key] for key in ("out", "logits") if key in output), output)
    output = getattr(output, "logits", output)
    if not isinstance(output, Tensor) or output.dim() < 2:
        return None
    scores = output.float()
    return scores if scores.shape[1] > 1 else torch.cat([torch.zeros_like(scores), scores], 1)


def branches(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks with a residual branch by site or path: inserted blocks, and gated blocks of the network."""
    replaced, inserted = replaced_modules(unwrap_model(model)), inserted_blocks(model)
    inside = {module for block in inserted.values() for module in block.modules()}  # a wrapper may have several copies
    blocks = {site: block for site, block in inserted.items() if site not in replaced}
    gated = {path: x for path, x in unwrap_model(model).named_modules() if is_residual(x) and x not in inside}
    # A block that is inserted at a gated block has its own path, because the other one has the path of the site.
    return {get_record(x).block_path if site in gated else site: x for site, x in blocks.items()} | gated


def require_branches(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks with a residual branch by site or path; raise if there are none."""
    if not (blocks := branches(model)):
        raise ValueError("model has no block with a residual branch. Insert one with va.insert_(model, …)")
    return blocks


def disabled(model: nn.Module, names: Globs = None, *, where: Where = None) -> AbstractContextManager[None]:
    """Disable blocks inside a ``with`` block: they return their input unchanged, in this thread or task only.

    The model is not changed: other threads, including threads that are started inside the ``with`` block, and copies of
    the model run the blocks. A compiled model runs in eager mode inside the ``with`` block. With activation
    checkpointing, the backward pass may run inside or outside of it.

    Args:
        model: a network with inserted blocks.
        names: globs on the names of blocks, as listed by :func:`contribution`: disable only these blocks.
        where: function of name and block that returns True for these blocks. If ``names`` is also given, both must
            match.

    Raises:
        SiteError: no block matches ``names`` or ``where``.

    >>> import vision_attn as va
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3))
    >>> report = va.insert_(model, names="0", num_heads=2, gate_init=1.0, example_input=(1, 3, 16, 16))
    >>> images = torch.randn(2, 3, 16, 16)
    >>> with va.disabled(model, "0"):
    ...     without = model(images)
    >>> torch.equal(model(images), without), torch.equal(va.remove_(model) and model(images), without)
    (False, True)
    """
    blocks = branches(model)
    sites = match_modules(blocks, names, where)
    if where is not None and not sites:
        raise SiteError(f"where returns True for no block. The model has blocks at {', '.join(blocks)}")
    return disable(model, [blocks[site] for site in sites])


def disable(model: nn.Module, blocks: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Return the input of these blocks as their output, inside a ``with`` block."""
    return scope(model, "output", dict.fromkeys(blocks, lambda x, y: x))


def rms_ratio(squares: Tensor) -> Tensor:
    """Return the square root of the ratio of two sums of squares ``(2, …)``; zero if the first sum is zero."""
    branch, stream = squares
    return torch.where(branch != 0, branch / stream, 0).sqrt()


@contextmanager
def measure_branches(model: nn.Module, blocks: Mapping[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """Sum the squares of the branch and of the input of each block, inside a ``with`` block.

    Yields:
        The sums over all forward passes by site and channel, ``(2, c)``.
    """
    sums_by_site = {site: torch.zeros(2, 1) for site in blocks}

    def measure(site: str, x: Tensor, y: Tensor) -> Tensor:
        stream, output = (z.detach().float().transpose(0, 1).flatten(1) for z in (x, y))
        sums = torch.stack([(output - stream).square().sum(1), stream.square().sum(1)])
        sums_by_site[site] = sums_by_site[site].to(x.device) + sums
        return y

    with scope(model, "output", {block: partial(measure, site) for site, block in blocks.items()}):
        yield sums_by_site
