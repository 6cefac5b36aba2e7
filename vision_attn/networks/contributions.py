"""Contribution of the blocks of a network: the size of their branches, and the effect of disabling them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.attention.blocks.gated_residual import GatedResidual
from vision_attn.attention.scopes import scope
from vision_attn.checks import as_list
from vision_attn.networks.insertion import inserted_blocks, replaced_modules
from vision_attn.networks.network import quiet_eval, unwrap_model
from vision_attn.text import Report, Table

#: The note of a report if the loss is lower without the blocks.
HARMFUL = (
    "The loss on this batch is lower with all blocks disabled, so the blocks make the predictions worse.\n"
    "Train longer or with a higher learning rate for the blocks (attention_lr), choose another site, or remove the "
    "blocks with va.remove_(model)."
)


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
            notes.append(HARMFUL)
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
            of the model is a tensor of scores ``(b, classes, …)``, or contains the scores as ``logits`` or ``out``. For
            other outputs, only *residual ratio* is measured.

    Returns:
        A report with a record for each block and one for all blocks; prints as a table. It contains a note if the loss
        is lower without the blocks.

    Raises:
        ValueError: the model has no block with a residual branch, or ``batch`` is neither images nor
            a pair of images and labels.

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
    sites = list(branches(model))
    if not sites:
        raise ValueError("model has no block with a residual branch. Insert one with va.insert_(model, …)")

    def ablate(off: Iterable[str]) -> Ablation:
        with disabled(model, off):
            ablated = compute_scores(model, images)
        if scores is None or ablated is None:
            return Ablation(predictions_changed=None, loss=None)
        rise = None if labels is None else float(F.cross_entropy(ablated, labels) - F.cross_entropy(scores, labels))
        return Ablation(int((scores.argmax(1) != ablated.argmax(1)).sum()), rise)

    with quiet_eval(model):
        with measure_branches(model) as found:
            scores = compute_scores(model, images)
        blocks = tuple(
            BlockContribution(site, rms_ratio(squares.sum(1)).item(), rms_ratio(squares), ablate([site]))
            for site, squares in found.items()
        )
        all_blocks = ablate(sites)
    return Contribution(blocks, all_blocks, 0 if scores is None else scores.argmax(1).numel())


def split_batch(batch: Tensor | Sequence[Tensor]) -> tuple[Tensor | list[Tensor], Tensor | None]:
    """Return the images, and the labels or None."""
    if isinstance(batch, Tensor):
        return batch, None
    tensors = isinstance(batch, (tuple, list)) and len(batch) > 0 and all(isinstance(part, Tensor) for part in batch)
    if tensors and all(part.dim() == 3 and part.is_floating_point() for part in batch):
        return list(batch), None
    if not tensors or len(batch) != 2:
        what = "a tensor of images, or a pair of images and labels"
        raise ValueError(f"batch must be {what}, got {type(batch).__name__}")
    return batch[0], batch[1]


def compute_scores(model: nn.Module, images: Tensor | list[Tensor]) -> Tensor | None:
    """Return the scores ``(b, classes, …)`` of a model, or None if the output contains no scores."""
    try:
        output = unwrap_model(model)(images)
    except TypeError as error:
        expected = "a batch of images, or a pair of images and labels, for a model with one input"
        raise ValueError(f"batch must be {expected}. The model does not run on it ({error})") from error
    output = output.get("out", output) if isinstance(output, Mapping) else output  # torchvision's segmentation models
    output = getattr(output, "logits", output)
    return output.float() if isinstance(output, Tensor) and output.dim() > 1 else None


def branches(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks with a residual branch by site or path: inserted blocks, and gated blocks of the network."""
    replaced = replaced_modules(model)
    found = {site: block for site, block in inserted_blocks(model).items() if site not in replaced}
    for path, module in unwrap_model(model).named_modules():
        if isinstance(module, GatedResidual) and module not in found.values():
            found[path] = module
    return found


def disabled(model: nn.Module, sites: str | Iterable[str] | None = None) -> AbstractContextManager[None]:
    """Disable blocks inside a ``with`` block: they return their input unchanged, in this thread or task only.

    The model is not changed: other threads, including threads that are started inside the ``with`` block, and copies of
    the model run the blocks. A compiled model runs in eager mode inside the ``with`` block.

    Args:
        model: a network with inserted blocks.
        sites: one or several blocks, by the names in the table of :func:`contribution`; all blocks when None.

    Raises:
        ValueError: there is no block at a site.

    >>> import vision_attn as va
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3))
    >>> report = va.insert_(model, names="0", num_heads=2, gate_init=1.0, example_input=(1, 3, 16, 16))
    >>> images = torch.randn(2, 3, 16, 16)
    >>> with va.disabled(model, "0"):
    ...     without = model(images)
    >>> torch.equal(model(images), without), torch.equal(va.remove_(model) and model(images), without)
    (False, True)
    """
    found = branches(model)
    sites = list(found) if sites is None else as_list("sites", sites, "names of blocks", single=str)
    for site in sites:
        if site not in found:
            raise ValueError(f"sites must be among {', '.join(map(repr, found)) or 'none'}, got {site!r}")
    return scope(model, "output", {found[site]: lambda x, y: x for site in sites})


def rms_ratio(squares: Tensor) -> Tensor:
    """Return the square root of the ratio of two sums of squares ``(2, …)``; zero if the first sum is zero."""
    branch, stream = squares
    return torch.where(branch != 0, branch / stream, 0).sqrt()


@contextmanager
def measure_branches(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Sum the squares of the branch and of the input of each block, inside a ``with`` block.

    Yields:
        The sums over all forward passes by site and channel, ``(2, c)``.
    """
    found = {site: torch.zeros(2, 1) for site in branches(model)}

    def measure(site: str, x: Tensor, y: Tensor) -> Tensor:
        stream, output = (z.detach().float().transpose(0, 1).flatten(1) for z in (x, y))
        sums = torch.stack([(output - stream).square().sum(1), stream.square().sum(1)])
        found[site] = found[site].to(x.device) + sums
        return y

    with scope(model, "output", {block: partial(measure, site) for site, block in branches(model).items()}):
        yield found
