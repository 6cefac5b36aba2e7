"""What spatial attention is for, shown in minutes on a CPU: one task, three networks, the same recipe for each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vision_attn.attend import IMPLS
from vision_attn.blocks import use_impl
from vision_attn.capture import capture
from vision_attn.checkpoints import write_atomically
from vision_attn.explorer import explore
from vision_attn.figures import attention_figure, save_figure
from vision_attn.insertion import quiet_eval
from vision_attn.models.folder import save_model
from vision_attn.training.digits import CANVAS, CLASSES, PLAY, digit_pairs
from vision_attn.training.loop import Result
from vision_attn.training.settings import Settings
from vision_attn.training.train import train

__all__ = ["ARMS", "demo"]

#: The site of the block, in the arms that have one.
SITE = "stage3"
#: What the arms have in common.
RECIPE: dict[str, Any] = {
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
ARMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "convolution": {"insert": (SITE,), "block": "conv"},
    "attention": {"insert": (SITE,), "block": "attention", "num_heads": 4},
}
#: How many pairs of either kind are drawn, and what the kinds are called.
EXAMPLES = 3
KINDS = ("different classes", "same class")


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
        results[arm] = train(Settings(**RECIPE, **insertion, epochs=epochs, seed=seed, output=str(folder / arm)), say)
        say("")
    trained = results["attention"]
    images, labels = digit_pairs(train=False)
    agreements = compare_implementations(trained, images, labels)

    say(f"{'network':<14}{'parameters':>11}{'top-1 %':>10}{'seconds':>10}")
    for arm, result in results.items():
        say(f"{arm:<14}{result.network.parameters:>11,}{result.final.top1:>10.2f}{result.seconds:>10.0f}")
    say("\nThe trained attention block by every implementation, on the held-out canvases:")
    for impl, found in agreements.items():
        say(
            f"  {impl:<8} top-1 {found['top1']:.2f} %   largest difference of a logit from 'sdpa' "
            f"{found['largest_logit_difference']:.1e}"
        )
    save_model(trained.model, folder / "network", architecture="digit_pairs_attention")
    draw(trained, images, labels, folder)
    arms = {
        arm: {
            "parameters": result.network.parameters,
            "top1": round(result.final.top1, 4),
            "loss": round(result.final.loss, 6),
            "training_seconds": round(result.seconds, 1),
        }
        for arm, result in results.items()
    }
    summary = {"epochs": epochs, "seed": seed, "arms": arms, "implementations": agreements}
    write_atomically(folder / "results.json", json.dumps(summary, indent=2).encode())
    say(
        f"\nIn {folder}: attention.png and explorer.html (look at them), results.json, network (the trained one), a "
        "folder for each run."
    )
    return results


def compare_implementations(trained: Result, images: Tensor, labels: Tensor) -> dict[str, dict[str, float]]:
    """The accuracy by each implementation, and how far its logits are from those that the network was trained by."""
    logits = {}
    for impl in IMPLS:
        with quiet_eval(trained.model), use_impl(trained.model, impl):
            logits[impl] = torch.cat([trained.model(trained.normalize(part)) for part in images.split(500)])
    return {
        impl: {
            "top1": round(100 * float((found.argmax(1) == labels).double().mean()), 4),
            "largest_logit_difference": float((found - logits["sdpa"]).abs().max()),
        }
        for impl, found in logits.items()
    }


def draw(trained: Result, images: Tensor, labels: Tensor, folder: Path) -> None:
    """Three pairs of either kind, looked at from the middle of the left digit, and as a page to explore.

    Such as are got right, if there are.
    """
    images, labels = images[:500], labels[:500]
    query = (CANVAS[0] / 2, PLAY + CANVAS[0] / 2)
    with capture(trained.model, queries=[query]) as maps, quiet_eval(trained.model):
        answers = trained.model(trained.normalize(images)).argmax(1)
    rightly = (answers != labels).argsort(stable=True)  # those first
    chosen = torch.cat([rightly[labels[rightly] == label][:EXAMPLES] for label in (1, 0)])
    titles = [
        f"{KINDS[label]}; the network says {CLASSES[answer]}"
        for label, answer in zip(labels[chosen].tolist(), answers[chosen].tolist(), strict=True)
    ]
    (attention,) = maps.values()
    attention = replace(attention, weights=attention.weights[chosen])
    images = images[chosen] / 255
    save_figure(attention_figure(images, attention, titles=titles, width=9.0), folder / "attention.png")
    explore(
        trained.model,
        images,
        folder / "explorer.html",
        normalize=lambda pixels: trained.normalize(255 * pixels),
        classes=CLASSES,
        titles=titles,
        title="Two digits: are they of the same class?",
    )
