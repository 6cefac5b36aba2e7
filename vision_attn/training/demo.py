"""What spatial attention is for, shown in minutes on a CPU: one task, three networks, the same recipe for each."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import einx
import matplotlib
import numpy as np
import timm
import torch
import torchvision

from vision_attn.attend import IMPLS
from vision_attn.blocks import use_impl
from vision_attn.capture import capture
from vision_attn.checkpoints import write_atomically
from vision_attn.figures import attention_figure, save_figure
from vision_attn.insertion import quiet_eval
from vision_attn.models.registry import save_model
from vision_attn.training.data import open_data
from vision_attn.training.digits import CANVAS, CLASSES, PLAY
from vision_attn.training.images import ImageSet
from vision_attn.training.loop import Result
from vision_attn.training.settings import Settings
from vision_attn.training.train import train
from vision_attn.version import __version__

__all__ = ["ARMS", "demo"]

#: The site of the block, in the arms that have one.
SITE = "stage3"
#: What the arms have in common.
RECIPE = {
    "dataset": "digit-pairs",
    "model": "digit_pairs",
    "opt": "adamw",
    "lr": 6e-3,
    "weight_decay": 0.01,
    "warmup_epochs": 0.5,
    "crop_padding": 0,
    "hflip": 0.0,
    "device": "cpu",
    "overwrite": True,
}
#: What each arm has of its own: settings by its name.
ARMS: dict[str, dict[str, object]] = {
    "plain": {},
    "convolution": {"insert": (SITE,), "block": "conv"},
    "attention": {"insert": (SITE,), "block": "attention", "num_heads": 4},
}
#: How many pairs of either kind are drawn, and what the kinds are called.
EXAMPLES = 3
KINDS = ("different classes", "same class")


@dataclass(frozen=True)
class Agreement:
    """How far an implementation is from the one that the network was trained with, on the held-out canvases."""

    impl: str
    top1: float
    #: largest difference of a logit
    difference: float


def demo(output: str, *, epochs: int = 5, seed: int = 0, say: Callable[[str], None] = print) -> dict[str, Result]:
    """Train the three arms, compare them, and leave what they made in a folder."""
    folder = Path(output)
    say(
        "Two handwritten digits at the ends of a canvas: are they of the same class? Evaluated on held-out digits;\n"
        "50 % is chance. Three networks, the same recipe, seed and number of steps.\n"
    )
    results = {}
    for arm, insertion in ARMS.items():
        say(f"--- {arm}")
        settings = Settings(**RECIPE, **insertion, epochs=epochs, seed=seed, output=str(folder / arm))  # type: ignore[arg-type]
        results[arm] = train(settings, say)
        say("")
    trained = results["attention"]
    held_out = open_data(Settings(dataset="digit-pairs"), train=False).read(CANVAS)
    agreements = compare_implementations(trained, held_out)

    say(table(results))
    say("")
    say("The trained attention block by every implementation, on the held-out canvases:")
    for agreement in agreements:
        say(
            f"  {agreement.impl:<8} top-1 {agreement.top1:.2f} %   largest difference of a logit from 'sdpa' "
            f"{agreement.difference:.1e}"
        )
    save_model(trained.model, folder / "network", architecture="digit_pairs_attention")
    draw(trained, held_out, folder / "attention.png")
    write_atomically(folder / "results.json", json.dumps(summary(results, agreements, epochs, seed), indent=2).encode())
    say(f"\nIn {folder}: attention.png (look at it), results.json, network (the trained one), a folder for each run.")
    return results


def compare_implementations(trained: Result, data: ImageSet) -> list[Agreement]:
    images = trained.normalize(data.images)
    logits = {}
    for impl in IMPLS:
        with quiet_eval(trained.model), use_impl(trained.model, impl):
            logits[impl] = torch.cat([trained.model(part) for part in images.split(500)])
    return [
        Agreement(
            impl,
            top1=100 * float((found.argmax(1) == data.labels).double().mean()),
            difference=float((found - logits["sdpa"]).abs().max()),
        )
        for impl, found in logits.items()
    ]


def table(results: dict[str, Result]) -> str:
    lines = [f"{'network':<14}{'parameters':>11}{'top-1 %':>10}{'seconds':>10}"]
    lines += [
        f"{arm:<14}{result.network.parameters:>11,}{result.final.top1:>10.2f}{result.seconds:>10.0f}"
        for arm, result in results.items()
    ]
    return "\n".join(lines)


def draw(trained: Result, data: ImageSet, path: Path) -> None:
    """Three pairs of either kind, looked at from the middle of the left digit."""
    chosen = torch.cat([torch.nonzero(data.labels == label)[:EXAMPLES, 0] for label in (1, 0)])
    images = data.images[chosen]
    query = (CANVAS[0] / 2, PLAY + CANVAS[0] / 2)
    with capture(trained.model, queries=[query]) as maps, quiet_eval(trained.model):
        answers = trained.model(trained.normalize(images)).argmax(1)
    titles = [
        f"{KINDS[label]}; the network says {CLASSES[answer]}"
        for label, answer in zip(data.labels[chosen].tolist(), answers.tolist(), strict=True)
    ]
    (attention,) = maps.values()
    save_figure(attention_figure(images / 255, attention, titles=titles, width=9.0), path)


def summary(results: dict[str, Result], agreements: list[Agreement], epochs: int, seed: int) -> dict[str, object]:
    return {
        "task": "digit pairs: same class or not, held-out digits",
        "epochs": epochs,
        "seed": seed,
        "arms": {
            arm: {
                "parameters": result.network.parameters,
                "top1": round(result.final.top1, 4),
                "loss": round(result.final.loss, 6),
                "training_seconds": round(result.seconds, 1),
            }
            for arm, result in results.items()
        },
        "implementations": {
            agreement.impl: {"top1": round(agreement.top1, 4), "largest_logit_difference": agreement.difference}
            for agreement in agreements
        },
        "machine": {
            "python": platform.python_version(),
            "threads": torch.get_num_threads(),
            "cores": os.cpu_count(),
            "platform": platform.platform(),
            **{package.__name__: package.__version__ for package in (torch, torchvision, timm, einx, np, matplotlib)},
            "vision_attn": __version__,
        },
    }
