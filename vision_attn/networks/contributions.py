"""Contributions of the blocks of a network: the size of their branches, and what changes when they are disabled."""

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
from vision_attn.networks.insertion import inserted_blocks, plain_network, quiet_eval, replaced_modules
from vision_attn.text import Report, Table


@dataclass(frozen=True)
class Ablation:
    """What changes when blocks are disabled, so that they pass their feature map on unchanged."""

    #: number of predictions that change; None if the model returns no scores of classes
    changed: int | None
    #: increase of the mean cross-entropy; None without labels
    loss: float | None


@dataclass(frozen=True)
class BlockContribution:
    """Contribution of one block."""

    #: path of the module at which the block was inserted, or of the block itself
    site: str
    #: root mean square of the branch, over that of the feature map that it is added to
    share: float
    #: the same for each channel, ``(c,)``
    by_channel: Tensor
    #: what changes when only this block is disabled
    without: Ablation


@dataclass(frozen=True, repr=False)
class Contribution(Report):
    """Contributions of the blocks of a network; prints as a table.

    >>> print(Contribution((), together=Ablation(changed=3, loss=None), predictions=64))
    what changes when a block is disabled
    where     branch/stream  predictions changed  loss
    together                             3 of 64
    """

    #: in the order of the network's modules
    blocks: tuple[BlockContribution, ...]
    #: what changes when all of them are disabled
    together: Ablation
    #: number of predictions: one an image, or one a position if the scores are a feature map
    predictions: int

    def parts(self) -> list[str | Table]:
        lines = [("where", "branch/stream", "predictions changed", "loss")]
        rows = [(block.site, f"{block.share:.4f}", block.without) for block in self.blocks]
        for site, share, without in (*rows, ("together", "", self.together)):
            changed = "" if without.changed is None else f"{without.changed} of {self.predictions}"
            lines.append((site, share, changed, "" if without.loss is None else f"{without.loss:+.4f}"))
        unread = [] if self.predictions else ["the model gives no scores of classes to compare"]
        return ["what changes when a block is disabled", Table(lines), *unread]


def contribution(model: nn.Module, batch: Tensor | Sequence[Tensor]) -> Contribution:
    """Measure what each inserted block contributes to a network, and all of them together.

    Two measures. The share of a block is ``rms(block(x) - x) / rms(x)``, the root mean square of what it adds to its
    map over that of the map. And the network predicts once as it is, and once with the block disabled, its map going on
    as it came: how many predictions change, and by how much the loss rises. The model is in evaluation mode meanwhile.

    Args:
        model: a network with inserted blocks in it, or with :class:`vision_attn.AttentionBlock2d` of its own. What
            :func:`vision_attn.replace_` put in the place of another module adds to no map, and is left out.
        batch: images, or a pair of images and labels; of detection models a list of images, each ``(c, h, w)``. The
            model gives scores ``(b, classes, …)`` for them, by themselves, as ``logits`` or as ``out``; of one that
            gives others only the shares are measured.

    Returns:
        A record for each block, and one of all together. It prints as a table.

    Raises:
        ValueError: the model has no block that adds to a map, or the batch is neither images nor a pair.

    >>> import vision_attn as va
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    >>> report = va.insert_(model, names="0", num_heads=2, example_input=(1, 3, 16, 16))
    >>> print(va.contribution(model, torch.randn(4, 3, 16, 16)))
    what changes when a block is disabled
    where     branch/stream  predictions changed  loss
    0                0.0000               0 of 4
    together                              0 of 4
    """
    images, labels = split_batch(batch)
    sites = list(branches(model))
    if not sites:
        raise ValueError("model has no block that adds to a map: insert one by insert_(model, …)")

    def ablate(off: Iterable[str]) -> Ablation:
        with disabled(model, off):
            ablated = compute_scores(model, images)
        if scores is None or ablated is None:
            return Ablation(changed=None, loss=None)
        rise = None if labels is None else float(F.cross_entropy(ablated, labels) - F.cross_entropy(scores, labels))
        return Ablation(int((scores.argmax(1) != ablated.argmax(1)).sum()), rise)

    with quiet_eval(model):
        with measure_branches(model) as found:
            scores = compute_scores(model, images)
        blocks = tuple(
            BlockContribution(site, rms_ratio(squares.sum(1)).item(), rms_ratio(squares), ablate([site]))
            for site, squares in found.items()
        )
        together = ablate(sites)
    return Contribution(blocks, together, 0 if scores is None else scores.argmax(1).numel())


def split_batch(batch: Tensor | Sequence[Tensor]) -> tuple[Tensor | list[Tensor], Tensor | None]:
    """Return the images, and the labels if there are any."""
    if isinstance(batch, Tensor):
        return batch, None
    tensors = isinstance(batch, (tuple, list)) and len(batch) > 0 and all(isinstance(part, Tensor) for part in batch)
    if tensors and all(part.dim() == 3 and part.is_floating_point() for part in batch):
        return list(batch), None
    if not tensors or len(batch) != 2:
        raise ValueError(f"batch must be images or a pair of images and labels, as tensors; got {type(batch).__name__}")
    return batch[0], batch[1]


def compute_scores(model: nn.Module, images: Tensor | list[Tensor]) -> Tensor | None:
    """Return the scores ``(b, classes, …)`` of a model; None if it returns something else."""
    try:
        output = plain_network(model)(images)
    except TypeError as error:
        expected = "a batch of images, or a pair of images and labels, for a model that takes one batch"
        raise ValueError(f"batch must be {expected}. The model does not run on it ({error})") from error
    output = output.get("out", output) if isinstance(output, Mapping) else output  # torchvision's segmentation
    output = getattr(output, "logits", output)
    return output.float() if isinstance(output, Tensor) and output.dim() > 1 else None


def branches(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks that add to a feature map by site or path: inserted ones, and gated ones of the network."""
    taken = replaced_modules(model)
    found = {site: block for site, block in inserted_blocks(model).items() if site not in taken}
    for path, module in plain_network(model).named_modules():
        if isinstance(module, GatedResidual) and module not in found.values():
            found[path] = module
    return found


def disabled(model: nn.Module, sites: str | Iterable[str] | None = None) -> AbstractContextManager[None]:
    """Disable blocks inside a ``with`` block, in this thread or task alone: they pass their feature map on unchanged.

    Nothing on the model is changed: other threads and copies of the model run the blocks. A compiled model runs in
    eager inside. A thread that is started inside the ``with`` block is outside of it.

    Args:
        model: a network with inserted blocks in it.
        sites: the block to disable, or several, by the names in :func:`contribution`'s table; all of them when None.

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
            raise ValueError(f"sites must be among {', '.join(map(repr, found)) or 'none'}; got {site!r}")
    return scope(model, "output", {found[site]: lambda x, y: x for site in sites})


def rms_ratio(squares: Tensor) -> Tensor:
    """Return the root of the ratio of two sums of squares ``(2, …)``; zero where the first is."""
    branch, stream = squares
    return torch.where(branch != 0, branch / stream, 0).sqrt()


@contextmanager
def measure_branches(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Sum the squares of the branch of each block, and of the feature map that it is added to, inside a ``with`` block.

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
