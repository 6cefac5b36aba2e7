"""Evaluation of a network on a data set, with and without its blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor, nn
from torchvision.transforms import v2
from tqdm import tqdm

from vision_attn.networks.contributions import branches, compute_scores, measure_branches, rms_ratio
from vision_attn.networks.inspection.network import quiet_eval
from vision_attn.tools.training.data import DataSplit, Images, open_images
from vision_attn.tools.training.network import NetworkSetup
from vision_attn.tools.training.settings import Settings


@dataclass(frozen=True)
class Scores:
    """Scores of a network on a data set."""

    #: mean cross-entropy per image
    loss: float
    #: percentage of images whose class has the highest score
    top1: float
    #: percentage of images whose class is among the five highest scores; None for up to five classes
    top5: float | None
    #: root mean square of the residual branch over that of its input, averaged over the blocks; None without blocks
    residual_ratio: float | None = None

    def __str__(self) -> str:
        top5 = "" if self.top5 is None else f"top-5 {self.top5:.2f} %, "
        branch = "" if self.residual_ratio is None else f", residual ratio {self.residual_ratio:.4f}"
        return f"top-1 {self.top1:.2f} %, {top5}loss {self.loss:.4f}{branch}"


@dataclass(frozen=True)
class BlockAblation:
    """Comparison of the scores with and without the inserted blocks."""

    #: scores with the blocks
    scores: Scores
    #: scores with all blocks disabled
    scores_without_blocks: Scores
    #: number of predictions that change
    predictions_changed: int
    #: number of predictions
    images: int

    def __str__(self) -> str:
        with_blocks, without = self.scores, self.scores_without_blocks
        return (
            f"ablation, with the blocks disabled: top-1 {without.top1:.2f} % ({without.top1 - with_blocks.top1:+.2f}), "
            f"loss {without.loss:.4f} ({without.loss - with_blocks.loss:+.4f}); "
            f"{self.predictions_changed} of {self.images} predictions change"
        )


class Evaluation:
    """Evaluation of networks on one set of images, distributed over all processes."""

    def __init__(self, source: DataSplit, settings: Settings, network: NetworkSetup, accelerator: Accelerator) -> None:
        config = network.config
        self.accelerator, self.batch_size = accelerator, settings.batch
        self.count = len(source)
        share = replace(source, indices=source.indices[accelerator.process_index :: accelerator.num_processes])
        #: images that this process evaluates
        self.data: Images = open_images(share, settings, config, accelerator.device)
        #: conversion of bytes to the network's input: ``(x / 255 - mean) / std`` in each channel
        to_float = v2.ToDtype(torch.float32, scale=True)
        self.normalize = v2.Compose([to_float, v2.Normalize(config["mean"], config["std"])])

    def __call__(self, model: nn.Module, off: Iterable[str] = ()) -> tuple[Scores, Tensor]:
        """Return the scores over all images, and the prediction for each image of this process.

        Blocks in ``off`` are disabled.
        """
        accelerator, processes = self.accelerator, self.accelerator.num_processes
        if processes > 1:  # the statistics of batch norms differ between processes: use those of the first
            for buffer in model.buffers():
                broadcast(buffer)
        classes, totals = 0, torch.zeros(3, dtype=torch.float64, device=accelerator.device)
        predictions = [torch.empty(0, dtype=torch.long, device=accelerator.device)]
        indices = torch.arange(len(self.data.labels)).split(self.batch_size // processes)
        with quiet_eval(model), accelerator.autocast(), measure_branches(model) as measures:
            for batch in tqdm(self.data.batches(indices), "evaluate", len(indices), leave=False, disable=None):
                images, labels = (part.to(accelerator.device, non_blocking=True) for part in batch)
                logits = compute_scores(model, self.normalize(images), off)
                assert logits is not None  # a classifier
                classes = logits.shape[1]
                choices = logits.topk(min(5, classes)).indices
                correct = choices == labels[:, None]
                predictions.append(choices[:, 0])
                loss = F.cross_entropy(logits, labels, reduction="sum")
                totals += torch.stack([loss.double(), correct[:, 0].sum(), correct.sum()])
        squares = [sums.sum(1).to(totals) for sums in measures.values()]
        reduced = accelerator.reduce(torch.cat([totals, *squares]))
        loss, top1, top5 = (reduced[:3] / self.count).tolist()
        ratio = rms_ratio(reduced[3:].view(-1, 2).T).mean().item() if squares else None
        return Scores(loss, 100 * top1, 100 * top5 if classes > 5 else None, ratio), torch.cat(predictions)

    def compare_without_blocks(self, model: nn.Module, scores: Scores, predictions: Tensor) -> BlockAblation | None:
        """Compare the given scores with those without blocks; return None if there are no blocks."""
        if scores.residual_ratio is None:
            return None
        without, others = self(model, branches(model))
        changed = int(self.accelerator.reduce((predictions != others).sum()))
        return BlockAblation(scores, without, changed, self.count)
