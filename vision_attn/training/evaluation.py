"""How well a network does on a data set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from vision_attn.insertion import quiet_eval
from vision_attn.training.images import Images

__all__ = ["Evaluation", "Normalize", "evaluate"]


@dataclass(frozen=True)
class Evaluation:
    """Mean cross-entropy over a data set, and the share of its images, in percent, that are classified right."""

    #: mean cross-entropy of an image
    loss: float
    #: the right class is the first choice
    top1: float
    #: the right class is among the first five choices; None where there are no more than five
    top5: float | None

    def __str__(self) -> str:
        top5 = "" if self.top5 is None else f"top-5 {self.top5:.2f} %, "
        return f"top-1 {self.top1:.2f} %, {top5}loss {self.loss:.4f}"


class Normalize(nn.Module):
    """Pixels of 0…255 to what a network expects: ``(x / 255 - mean) / std`` in each channel.

    >>> Normalize((0.5, 0.5, 0.5), (0.25, 0.25, 0.25), channels=3)(torch.zeros(2, 3, 8, 8, dtype=torch.uint8)).shape
    torch.Size([2, 3, 8, 8])
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float], channels: int) -> None:
        super().__init__()
        for name, values in (("mean", mean), ("std", std)):
            if len(values) != channels and channels == 1:
                values = [sum(values) / len(values)]
            if len(values) != channels:
                raise ValueError(f"{name} must have a value for each of the {channels} channels; got {tuple(values)}")
            self.register_buffer(name, torch.tensor(tuple(values)).view(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        return (images.float() / 255 - self.mean) / self.std


def evaluate(
    model: nn.Module,
    normalize: Callable[[Tensor], Tensor],
    data: Images,
    *,
    batch_size: int = 500,
    accelerator: Accelerator | None = None,
    between: Callable[[int], None] = lambda batch: None,
) -> Evaluation:
    """The accuracy and loss over a whole data set; the model is in evaluation mode meanwhile."""
    share, processes = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
    classes = 0
    totals = torch.zeros(3, dtype=torch.float64, device=data.device)
    parts = torch.arange(len(data)).split(batch_size)
    mine = [part[share::processes] for part in parts if len(part) > share]
    with quiet_eval(model), accelerator.autocast() if accelerator else nullcontext():
        for done, (images, labels) in enumerate(data.batches(mine), 1):
            logits = model(normalize(images)).float()
            classes = logits.shape[1]
            right = logits.topk(min(5, classes)).indices == labels[:, None]
            loss = F.cross_entropy(logits, labels, reduction="sum")
            totals += torch.stack([loss.double(), right[:, 0].sum(), right.sum()])
            if done <= len(parts) // processes:
                between(done)
    loss, top1, top5 = (accelerator.reduce(totals) if accelerator else totals).tolist()
    count = len(data)
    return Evaluation(loss / count, 100 * top1 / count, 100 * top5 / count if classes > 5 else None)
