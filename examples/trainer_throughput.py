"""What the trainer costs beside the training: its images per second as a share of those of a bare loop.

    python examples/trainer_throughput.py --data ~/data --dataset-download      # ResNet-20 on CIFAR-100, on a GPU
    python examples/trainer_throughput.py --dataset digit-pairs --model digit_pairs --device cpu --epochs 4

The bare loop goes forward, backward and through the same optimiser, with the same network and precision, always on one
batch that lies on the device: no data, no augmentation, no schedule, no look at the loss. Each epoch of the trainer is
followed by as many steps of the bare loop, in one process; the first of both warms up and does not count. All flags of
`vision-attn train` apply.
"""

import csv
import sys
import tempfile
import time
from dataclasses import replace
from statistics import median

import torch
import torch.nn.functional as F
from vision_attn.tools.training.step import make_optimizer
from vision_attn.tools.training.train import train

from vision_attn.tools import cli
from vision_attn.tools.training.data import open_data
from vision_attn.tools.training.network import build_network
from vision_attn.tools.training.settings import Settings

USUAL = "--dataset cifar100 --model resnet20 --epochs 8 --batch-size 512 --lr 0.1"


class BareLoop:
    """As many steps as an epoch has, timed."""

    def __init__(self, settings, network, device, steps):
        model = network.model.train()
        self.optimizer = make_optimizer(model, settings)
        self.model = torch.compile(model) if settings.compile else model
        self.precision = torch.autocast(device.type, getattr(torch, settings.amp_dtype), enabled=settings.amp)
        layout = torch.channels_last if settings.channels_last else torch.contiguous_format
        batch = torch.randn(settings.batch_size, len(network.mean), *network.size, device=device)
        self.images = batch.contiguous(memory_format=layout)
        self.labels = torch.zeros(settings.batch_size, dtype=torch.long, device=device)
        self.steps = steps

    def __call__(self):
        if self.images.is_cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(self.steps):
            with self.precision:
                logits = self.model(self.images)
            F.cross_entropy(logits.float(), self.labels).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.images.is_cuda:
            torch.cuda.synchronize()
        return self.steps * len(self.images) / (time.perf_counter() - begin)


def measure(settings):
    """Images per second of the trainer and of the bare loop after it, for each epoch but the first."""
    source = open_data(settings, train=True)
    network = build_network(settings, source, lambda line: None)
    device = torch.device(settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    network.model.to(device)
    bare = BareLoop(settings, network, device, steps=len(source) // settings.batch_size)
    rates = []

    def say(line):
        print(line)
        if line.startswith("epoch "):  # is over: what is done here is not in its time
            rates.append(bare())
            print(f"bare loop: {rates[-1]:,.0f} images/s")

    train(settings, say)
    with open(settings.folder / "metrics.csv") as table:
        trainer = [int(row["images_per_second"]) for row in csv.DictReader(table)]
    return trainer[1:], rates[1:]


def main(arguments=None):
    command = cli.parser().parse_args(["train", *USUAL.split(), *(sys.argv[1:] if arguments is None else arguments)])
    settings = Settings(**cli.given(Settings, command))
    if settings.epochs < 2:
        raise ValueError("epochs must be at least 2, as the first one warms up")
    with tempfile.TemporaryDirectory() as folder:
        trainer, bare = measure(replace(settings, output=folder, overwrite=True))
    shares = sorted(100 * one / other for one, other in zip(trainer, bare, strict=True))
    print(
        f"\ntrainer {median(trainer):,.0f} images/s, bare loop {median(bare):,.0f}: "
        f"{median(shares):.1f} % (of {len(shares)} epochs, {shares[0]:.1f} to {shares[-1]:.1f})"
    )


if __name__ == "__main__":
    sys.exit(cli.run_program("trainer_throughput", main))
