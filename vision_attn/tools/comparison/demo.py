"""What spatial attention is for, shown in minutes on a CPU: one task, seven networks, the same recipe for each."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torchvision.transforms.v2 import Normalize

from vision_attn.attention.blocks import use_impl
from vision_attn.attention.implementations import IMPLS
from vision_attn.networks.figures import attention_figure, save_figure
from vision_attn.networks.insertion import quiet_eval
from vision_attn.networks.models.folder import load_model
from vision_attn.networks.recording import capture
from vision_attn.networks.safe import write_atomically
from vision_attn.tools.comparison.arms import recipe, settings_of_arm
from vision_attn.tools.comparison.runs import compare
from vision_attn.tools.explorer import explore
from vision_attn.tools.training.digits import CANVAS, CLASSES, PLAY, digit_pairs

#: What is compared, each with as many parameters but the plain network and the last block.
ARMS = ("plain", "convolution", "large-kernel", "se", "pooled-mlp", "averaging", "attention")
#: How many pairs of either kind are drawn, and what the kinds are called.
EXAMPLES = 3
KINDS = ("different classes", "same class")

TASK = """\
Two handwritten digits at the ends of a canvas: are they of the same class?
A CNN that ends in the mean over all positions and a linear classifier adds up
what it finds at each place. The answer is no such sum: every digit is as
frequent in both answers. A large kernel and attention may see both digits;
squeeze and excitation and a perceptron may make of the mean what is not linear.
Averaging is attention to all places alike. One recipe for all, held-out digits:
"""


def run_demo(output: str | Path, *, epochs: int = 3, seed: int = 0, jobs: int | None = None) -> None:
    """Train the arms, compare them, and leave what they made in a folder."""
    print(TASK)
    common = recipe({"dataset": "digit-pairs", "epochs": epochs})
    arms = {arm: settings_of_arm(arm, {}, common) for arm in ARMS}
    outcomes = compare(arms, seeds=(seed,), output=str(output), jobs=jobs).outcomes
    folder, found = Path(output), {arm: by_seed[seed] for arm, by_seed in outcomes.items()}
    model = load_model(folder / f"attention-{seed}")
    config = vars(model)["pretrained_cfg"]
    network = nn.Sequential(Normalize(config["mean"], config["std"]), model).eval()
    images, labels = digit_pairs(train=False)
    images = images / 255
    agreements = compare_implementations(network, images, labels)

    chance = 196 * (0.25 / len(labels)) ** 0.5  # in percent, of 95 % of those who guess
    better = [f"{arm} ({one.top1:.1f})" for arm, one in found.items() if one.top1 > 50 + chance]
    others = [f"{arm} ({one.top1:.1f})" for arm, one in found.items() if one.top1 <= 50 + chance]
    print(f"\nGuessing scores 50 ± {chance:.1f} % on {len(labels):,} canvases. Better: {', '.join(better) or 'none'}.")
    print(f"Not better: {', '.join(others) or 'none'}.")
    print("\nThe trained attention block by every implementation, on the held-out canvases:")
    for impl, one in agreements.items():
        largest = f"{one['largest_logit_difference']:.1e}"
        print(f"  {impl:<8} top-1 {one['top1']:.2f} %   largest difference of a logit from 'sdpa' {largest}")
    draw(network, images[:500], labels[:500], folder)
    summary = {"arms": {arm: asdict(one) for arm, one in found.items()}, "implementations": agreements}
    write_atomically(folder / "results.json", json.dumps(summary, indent=2).encode())
    print(f"\nIn {folder} too: attention.png and explorer.html (look at them), results.json; the trained network is in")
    print(f"{folder}/attention-{seed}/model")


def compare_implementations(network: nn.Module, images: Tensor, labels: Tensor) -> dict[str, dict[str, float]]:
    """The accuracy by each implementation, and how far its logits are from those of the fused kernel."""
    logits = {}
    for impl in IMPLS:
        with quiet_eval(network), use_impl(network, impl):
            logits[impl] = torch.cat([network(part) for part in images.split(500)])
    return {
        impl: {
            "top1": round(100 * float((found.argmax(1) == labels).double().mean()), 4),
            "largest_logit_difference": float((found - logits["sdpa"]).abs().max()),
        }
        for impl, found in logits.items()
    }


def draw(network: nn.Module, images: Tensor, labels: Tensor, folder: Path) -> None:
    """Three pairs of either kind, looked at from the middle of the left digit, and as a page to explore.

    They are such as the network gets right, if there are.
    """
    query = (CANVAS[0] / 2, PLAY + CANVAS[0] / 2)
    with capture(network, queries=[query]) as maps, quiet_eval(network):
        answers = network(images).argmax(1)
    rightly = (answers != labels).argsort(stable=True)  # those first
    chosen = torch.cat([rightly[labels[rightly] == label][:EXAMPLES] for label in (1, 0)])
    titles = [
        f"{KINDS[label]}; the network says {CLASSES[answer]}"
        for label, answer in zip(labels[chosen].tolist(), answers[chosen].tolist(), strict=True)
    ]
    (attention,) = maps.values()
    attention = replace(attention, weights=attention.weights[chosen])
    save_figure(attention_figure(images[chosen], attention, titles=titles, width=9.0), folder / "attention.png")
    title = "Two digits: are they of the same class?"
    explore(network, images[chosen], folder / "explorer.html", classes=CLASSES, titles=titles, title=title)
