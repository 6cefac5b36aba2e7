"""How well a network does on a data set, and what its blocks are worth there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor, nn
from torchvision.transforms import v2
from tqdm import tqdm

from vision_attn.networks.contributions import disabled, measured, share
from vision_attn.networks.insertion import quiet_eval
from vision_attn.tools.training.data import InMemory, Workers


@dataclass(frozen=True)
class Scores:
    """How well a network does on a data set."""

    #: mean cross-entropy of an image
    loss: float
    #: percent of the images whose class is the first choice
    top1: float
    #: percent of those whose class is among the first five choices; None where there are no more than five
    top5: float | None
    #: root mean square of what a block adds over that of its map, the mean over the blocks; None where there are none
    branch_share: float | None = None

    def __str__(self) -> str:
        top5 = "" if self.top5 is None else f"top-5 {self.top5:.2f} %, "
        branch = "" if self.branch_share is None else f", branch/stream {self.branch_share:.4f}"
        return f"top-1 {self.top1:.2f} %, {top5}loss {self.loss:.4f}{branch}"


@dataclass(frozen=True)
class Disabled:
    """What blocks are worth: the same evaluation with all of them disabled."""

    #: with the blocks
    whole: Scores
    #: with all of them disabled
    without: Scores
    #: predictions that change
    changed: int
    #: predictions in all
    images: int

    def __str__(self) -> str:
        top1, loss = self.without.top1 - self.whole.top1, self.without.loss - self.whole.loss
        return (
            f"with the blocks disabled: top-1 {self.without.top1:.2f} % ({top1:+.2f}), loss {self.without.loss:.4f} "
            f"({loss:+.4f}); {self.changed} of {self.images} predictions change"
        )


def normalization(config: Mapping[str, Any]) -> v2.Transform:
    """From bytes to what a network of this configuration takes: ``(x / 255 - mean) / std`` in each channel."""
    return v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(config["mean"], config["std"])])


@dataclass(frozen=True)
class Evaluation:
    """Evaluates networks on one set of images, by all processes together."""

    accelerator: Accelerator
    #: bytes to network input
    normalize: v2.Transform
    data: InMemory | Workers
    #: images that go through a network at a time, over all processes
    batch_size: int

    def __call__(self, model: nn.Module) -> tuple[Scores, Tensor]:
        """The scores over the whole set, and the prediction of each image of this process."""
        accelerator, count = self.accelerator, len(self.data.labels)
        process, processes = accelerator.process_index, accelerator.num_processes
        if processes > 1:  # each has seen other images; what is evaluated and saved are the batch norms of the first
            for buffer in model.buffers():
                broadcast(buffer)
        classes, totals = 0, torch.zeros(3, dtype=torch.float64, device=accelerator.device)
        seen = [torch.empty(0, dtype=torch.long, device=accelerator.device)]
        rows = torch.arange(process, count, processes).split(self.batch_size // processes)
        with quiet_eval(model), accelerator.autocast(), measured(model) as branches:
            for batch in tqdm(self.data.batches(rows), "evaluate", len(rows), leave=False, disable=None):
                images, labels = (part.to(accelerator.device, non_blocking=True) for part in batch)
                logits = model(self.normalize(images)).float()
                classes = logits.shape[1]
                choices = logits.topk(min(5, classes)).indices
                right = choices == labels[:, None]
                seen.append(choices[:, 0])
                loss = F.cross_entropy(logits, labels, reduction="sum")
                totals += torch.stack([loss.double(), right[:, 0].sum(), right.sum()])
        squares = [branch.squares.sum(1).to(totals) for branch in branches.values()]
        everything = accelerator.reduce(torch.cat([totals, *squares]))
        loss, top1, top5 = (everything[:3] / count).tolist()
        size = share(everything[3:].view(-1, 2).T).mean().item() if squares else None
        return Scores(loss, 100 * top1, 100 * top5 if classes > 5 else None, size), torch.cat(seen)

    def without_blocks(self, model: nn.Module, whole: Scores, seen: Tensor) -> Disabled | None:
        """What the blocks are worth, beside what an evaluation gave with them; None where there are none."""
        if whole.branch_share is None:
            return None
        with disabled(model):
            without, others = self(model)
        changed = int(self.accelerator.reduce((seen != others).sum()))
        return Disabled(whole, without, changed, len(self.data.labels))
