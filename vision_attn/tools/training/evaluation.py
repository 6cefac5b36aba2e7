"""How well a network does on a data set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from vision_attn.networks.contributions import disabled, measured, share
from vision_attn.networks.insertion import quiet_eval
from vision_attn.tools.training.images import Bar, Images
from vision_attn.tools.training.run_folder import RunFolder

__all__ = ["Closed", "Evaluation", "Normalize", "evaluate", "evaluate_closed", "report_classes"]


@dataclass(frozen=True)
class Evaluation:
    """Mean cross-entropy over a data set, and the share of its images, in percent, that are classified right."""

    #: mean cross-entropy of an image
    loss: float
    #: the right class is the first choice
    top1: float
    #: the right class is among the first five choices; None where there are no more than five
    top5: float | None
    #: root mean square of what a block adds over that of its map, the mean over the blocks; None where there are none
    branch_share: float | None = None

    def __str__(self) -> str:
        top5 = "" if self.top5 is None else f"top-5 {self.top5:.2f} %, "
        branch = "" if self.branch_share is None else f", branch/stream {self.branch_share:.4f}"
        return f"top-1 {self.top1:.2f} %, {top5}loss {self.loss:.4f}{branch}"


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
) -> tuple[Evaluation, Tensor]:
    """The accuracy and loss over a whole data set, and what this process saw of it.

    Args:
        model: is in evaluation mode meanwhile.
        normalize: pixels to network input.
        data: the images.
        batch_size: images that go through the network at a time.
        accelerator: that of the processes which share the images; None for one process.
        between: called after each batch, equally often in each process.

    Returns:
        The scores over all processes, and ``(2, images)``: class and prediction of each image of this one.
    """
    process, processes = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
    classes = 0
    totals = torch.zeros(3, dtype=torch.float64, device=data.device)
    seen = [torch.empty(2, 0, dtype=torch.long, device=data.device)]
    parts = torch.arange(len(data)).split(batch_size)
    mine = [part[process::processes] for part in parts if len(part) > process]
    with quiet_eval(model), accelerator.autocast() if accelerator else nullcontext(), measured(model) as branches:
        bar = Bar(data.batches(mine), "evaluate", len(mine), hidden=process > 0)
        for done, (images, labels) in enumerate(bar, 1):
            logits = model(normalize(images)).float()
            classes = logits.shape[1]
            choices = logits.topk(min(5, classes)).indices
            right = choices == labels[:, None]
            seen.append(torch.stack([labels, choices[:, 0]]))
            loss = F.cross_entropy(logits, labels, reduction="sum")
            totals += torch.stack([loss.double(), right[:, 0].sum(), right.sum()])
            if done <= len(parts) // processes:
                between(done)
    squares = [branch.squares.sum(1).to(totals) for branch in branches.values()]
    everything = torch.cat([totals, *squares])
    if accelerator:
        everything = accelerator.reduce(everything)
    loss, top1, top5 = (everything[:3] / len(data)).tolist()
    evaluation = Evaluation(
        loss,
        100 * top1,
        100 * top5 if classes > 5 else None,
        share(everything[3:].view(-1, 2).T).mean().item() if squares else None,
    )
    return evaluation, torch.cat(seen, 1)


def report_classes(folder: RunFolder, seen: Tensor, classes: Sequence[str], accelerator: Accelerator) -> None:
    """Write how many images of each class were taken for which, of what all processes saw."""
    count = len(classes)
    confusions = torch.bincount(seen[0] * count + seen[1], minlength=count**2)
    confusions = accelerator.reduce(confusions).view(count, count).cpu()
    if accelerator.is_main_process:
        folder.write_classes(confusions, classes)


@dataclass(frozen=True)
class Closed:
    """What blocks are worth: the same evaluation with all of them closed."""

    #: with the blocks
    whole: Evaluation
    #: with all of them closed
    without: Evaluation
    #: predictions that are others then
    changed: int
    #: predictions in all
    images: int

    def __str__(self) -> str:
        if not self.changed:
            return (
                f"closing the blocks changes none of {self.images} predictions: they have learned nothing here; train "
                "longer or with a higher --attention-lr, or insert them elsewhere"
            )
        top1, loss = self.without.top1 - self.whole.top1, self.without.loss - self.whole.loss
        return (
            f"with the blocks closed: top-1 {self.without.top1:.2f} % ({top1:+.2f}), loss {self.without.loss:.4f} "
            f"({loss:+.4f}); {self.changed} of {self.images} predictions change"
        )


def evaluate_closed(
    model: nn.Module,
    normalize: Callable[[Tensor], Tensor],
    data: Images,
    whole: Evaluation,
    seen: Tensor,
    *,
    accelerator: Accelerator,
    **how: Any,
) -> Closed | None:
    """What the blocks are worth, beside what :func:`evaluate` gave with them; None where there are none."""
    if whole.branch_share is None:
        return None
    with disabled(model):
        without, others = evaluate(model, normalize, data, accelerator=accelerator, **how)
    changed = int(accelerator.reduce((seen[1] != others[1]).sum()))
    return Closed(whole, without, changed, len(data))
