"""How an inserted block should begin: the same network without it, and with each of four beginnings, over seeds.

    python examples/compare_openings.py digits  # a small network and everybody's loop, some minutes on a CPU
    python examples/compare_openings.py --dataset folder --data flowers --weights cifar10_resnet20.pth --reset-head ...

The second form takes any flag of `vision-attn train` and of compare_blocks.py.

Three beginnings leave the network as it was, bit for bit: a gate of zero; a gate of zero that moves ten times as far in
a step; an output projection of zeros behind a gate of one. A gate of 0.1 does not, and is there to compare.

The plan, made before the runs: the beginning is chosen whose branch has come to weigh most against the stream, and
whose closing changes most predictions, among those that leave the network as it was, that stay finite at ten times the
rate and in bfloat16, and whose accuracy is not below that of the network without a block by more than the 95 % interval
of the difference.
"""

import sys
from statistics import median

import compare_blocks
import torch
import torch.nn.functional as F
from torch import nn

import vision_attn as va
from vision_attn import cli
from vision_attn.training import network, settings


class FasterGate(va.AttentionBlock2d):
    """A gate of zero with a scale of its own: what multiplies the branch moves ten times as far in a step."""

    def __init__(self, channels, **options):
        super().__init__(channels, gate_init=0.0, **options)

    def add(self, x, branch):
        return super().add(x, 10 * branch)


ARMS = {
    "without a block": None,
    "gate 0": {"gate_init": 0.0},
    "gate 0, ten times the step": {"block": FasterGate},
    "gate 0.1": {"gate_init": 0.1},
    "projection 0 behind gate 1": {},
}


def arms(common, site, attention_options):
    site = common.pop("insert", (site,))
    settings.CHOICES["block"] = (*settings.CHOICES["block"], "faster gate")
    network.BLOCKS["faster gate"] = FasterGate

    def options(block=None, gate_init=None):
        if block is not None:
            return {"insert": site, "block": "faster gate"}
        words = () if gate_init is None else (f"gate_init={gate_init}",)
        return {"insert": site, "block_options": (*words, *attention_options)}

    return {name: {} if arm is None else options(**arm) for name, arm in ARMS.items()}


LOOPS = {
    "SGD 0.01": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4}, torch.float32),
    "SGD 0.1": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}, torch.float32),
    "SGD 1": (torch.optim.SGD, {"lr": 1.0, "momentum": 0.9, "weight_decay": 5e-4}, torch.float32),
    "AdamW 3e-4": (torch.optim.AdamW, {"lr": 3e-4}, torch.float32),
    "AdamW 3e-3": (torch.optim.AdamW, {"lr": 3e-3}, torch.float32),
    "AdamW 3e-4, bfloat16": (torch.optim.AdamW, {"lr": 3e-4}, torch.bfloat16),
}


def small_network():
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )


def steps(model, optimizer, images, labels, count):
    model.train()
    for _ in range(count):
        batch = torch.randint(len(labels), (64,))
        loss = F.cross_entropy(model(images[batch]).float(), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()


def digits(seeds=range(5)):
    """A small network reads digits for 200 steps; then a block goes in, and both are trained for 100 more."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images, labels = torch.tensor(found.images).float()[:, None] / 8 - 1, torch.tensor(found.target)
    print(f"| {' | '.join(['branch/stream, loss on held-out digits', *LOOPS])} |\n|---|{'---:|' * len(LOOPS)}")
    for name, options in ARMS.items():
        cells = []
        for kind, how, dtype in LOOPS.values():
            shares, losses = [], []
            for seed in seeds:
                torch.manual_seed(seed)
                order = torch.randperm(len(labels))
                train, held = order[:1200], order[1200:]
                model = small_network().to(dtype)
                seen = images[train].to(dtype), labels[train]
                steps(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), *seen, 200)
                if options is not None:
                    va.insert_(model, names="5", num_heads=4, example_input=(1, 1, 8, 8), **options)
                steps(model, kind(model.parameters(), **how), *seen, 100)
                with torch.no_grad():
                    losses.append(F.cross_entropy(model(images[held].to(dtype)).float(), labels[held]).item())
                if options is not None:
                    shares.append(va.contribution(model, images[held].to(dtype)).blocks[0].share)
            cells.append((f"{median(shares):.4f}, " if shares else "") + f"{median(losses):.3f}")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    if sys.argv[1:] == ["digits"]:
        digits()
    else:
        sys.exit(cli.run_program("compare_openings", lambda: compare_blocks.main(arms=arms)))
