"""Train a CIFAR ResNet from scratch without a block, with a convolution and with attention, and compare the accuracy.

    python examples/experiments/cifar.py --data ~/data  # downloads CIFAR-100, 170 MB
    python examples/experiments/cifar.py --data ~/data --variants attention --seeds 0  # one run
    python examples/experiments/cifar.py --data ~/data --epochs 1 --images 2000 --seeds 0 --output runs/trial
    python examples/experiments/cifar.py --data ~/data --jobs 10  # ten runs at a time share a GPU
    python examples/experiments/cifar.py --data ~/data --jobs 10 --output runs/controls \
        --variants resnet32 se-residual large-kernel averaging attention            # the controls

The script prints the loss of each epoch and, at the end, a table of the accuracies. Expected top-1 with five seeds:
66.8 ± 0.3 % without a block (40.8 M MACs), 67.2 ± 0.4 % with a convolution (43.9 M MACs), and 69.0 ± 0.2 % with
attention (45.5 M MACs). The 95 % intervals of the gain of attention are 1.8 to 2.5 and 0.8 to 2.6 points. Of the
controls, averaging has 68.0 ± 0.1 %; attention gains 0.6 to 1.2 points more. On an NVIDIA
H200 that ten runs share, a run takes 3.2 minutes without a block and 3.6 minutes with attention.

All images are stored in one tensor of bytes on the device, where each batch is cropped and flipped. A run saves its
state after each epoch; run the same command to resume. The steps specific to this library are marked (1), (2) and (3).

The plan, written before the runs: CIFAR-100, ResNet-20, 30 epochs, seeds 0 to 4. Test images are evaluated with the
averaged weights of the last epoch, and are not used for any choice. All intervals are reported, regardless of the
result.

The plan of the controls, written before their runs: the same recipe, data and seeds, with four controls beside
attention: averaging (attention with `scale=0`), squeeze and excitation as a residual block, a large kernel (13×13), and
a plain ResNet-32, which is the way to spend more parameters and MACs without a block. All blocks have about the same
number of parameters. Attention is run again beside them, so that all runs share one machine. All variants of a seed see
the same batches; except for ResNet-32, they also have the same initial weights outside of the blocks. Attention is
compared with each control by paired intervals, corrected for the four comparisons. If the interval of attention −
averaging is above zero, attention weights help in this task. Otherwise, a mean over all positions gains as much, and
the pages say so. All results are reported, regardless of the result.
"""

import argparse
import math
import os
import sys
import time
from functools import cache
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from controls import ConvBlock2d, SqueezeExciteBlock2d
from experiments import trials
from timm.utils import ModelEmaV3
from torch.optim.lr_scheduler import LambdaLR
from torchvision.datasets import CIFAR10, CIFAR100, ImageFolder
from torchvision.transforms.functional import pil_to_tensor

import vision_attn as va
import vision_attn.networks.models  # registers resnet20 and others with timm
from vision_attn import cli
from vision_attn.errors import TrainingError

#: Blocks to insert after each residual block of the last stage. All have about the same number of parameters.
BLOCKS = {
    "plain": None,
    "resnet32": None,
    "convolution": (ConvBlock2d, {}),
    "large-kernel": (ConvBlock2d, {"kernel_size": 13}),
    "se-residual": (SqueezeExciteBlock2d, {}),
    "averaging": (va.AttentionBlock2d, {"num_heads": 4, "scale": 0.0}),
    "attention": (va.AttentionBlock2d, {"num_heads": 4}),
}
#: Options of single variants, which take precedence over the command line.
OPTIONS = {"resnet32": {"model": "resnet32"}}


@cache
def load(data, dataset, device, train):
    """Load images as bytes ``(b, 3, 32, 32)`` and their labels."""
    root = Path(data).expanduser()
    if (root / "train").is_dir():
        source = ImageFolder(root / ("train" if train else "test"))
        images = torch.stack([pil_to_tensor(image) for image, _ in source])
    else:
        source = {"cifar10": CIFAR10, "cifar100": CIFAR100}[dataset](root, train, download=True)
        images = torch.from_numpy(source.data).permute(0, 3, 1, 2).contiguous()
    return images.to(device), torch.tensor(source.targets, device=device)


def batches(images, labels, batch_size):
    """Yield shuffled batches of an epoch: random crops of images padded by four pixels, half of them flipped."""
    padded, offsets = F.pad(images, (4, 4, 4, 4)), torch.arange(32, device=images.device)
    for rows in torch.randperm(len(images), device=images.device).split(batch_size):
        if len(rows) == batch_size:
            top, left = torch.randint(9, (2, len(rows), 1), device=images.device)
            flip = torch.rand(len(rows), 1, device=images.device) < 0.5
            y, x = top + offsets, left + torch.where(flip, offsets.flip(0), offsets)
            yield padded[rows[:, None, None], :, y[:, :, None], x[:, None]].permute(0, 3, 1, 2), labels[rows]


@torch.no_grad()
def top1(predict, images, labels):
    """Return the top-1 accuracy in percent, with logits averaged over each image and its mirror image."""
    batches = zip(images.split(1000), labels.split(1000), strict=True)
    return 100 * sum(((predict(x) + predict(x.flip(3))).argmax(1) == y).sum() for x, y in batches).item() / len(labels)


def run(variant, seed, *, data, dataset, model, epochs, batch_size, lr, weight_decay, compiled, images, device, states):
    settings = {"data": data, "dataset": dataset, "model": model, "epochs": epochs, "batch_size": batch_size, "lr": lr,
                "weight_decay": weight_decay, "images": images}  # fmt: skip
    torch.manual_seed(seed)
    (train_x, train_y), (test_x, test_y) = (load(data, dataset, device, train) for train in (True, False))
    subset = torch.randperm(len(train_x), generator=torch.Generator().manual_seed(0))[:images].to(device)
    train_x, train_y = train_x[subset], train_y[subset]
    std, mean = torch.std_mean(train_x[:10_000].float(), (0, 2, 3), keepdim=True)
    network = timm.create_model(model, num_classes=int(train_y.max()) + 1)
    if BLOCKS[variant]:  # (1) Insert the blocks. They do not change the outputs of the untrained network.
        block, options = BLOCKS[variant]
        print(va.insert_(network, block, names="layer3.*", example_input=(1, 3, 32, 32), **options))
    network = network.to(device, memory_format=torch.channels_last)
    # (2) Exclude biases, norms and the gates of the blocks from weight decay.
    groups = va.parameter_groups(network, lr=lr, weight_decay=weight_decay)
    optimizer = torch.optim.SGD(groups, momentum=0.9, nesterov=True)
    steps = epochs * (len(train_x) // batch_size)
    warmup = steps // 5 + 1  # the learning rate rises for a fifth of the steps, and then decays
    schedule = LambdaLR(optimizer, lambda step: min((step + 1) / warmup, (steps - step) / (steps - warmup + 1)))
    average = ModelEmaV3(network, decay=0.995, use_warmup=True)
    forward = torch.compile(network) if compiled else network
    file, first_epoch, step, seconds = Path(states) / f"{variant}-{seed}.pt", 0, 0, 0.0
    stateful = {"network": network, "optimizer": optimizer, "schedule": schedule, "average": average}
    if file.exists():
        saved = torch.load(file, map_location=device, weights_only=True)
        if saved["settings"] != settings:
            message = f"{file} belongs to a run with other settings: expected {settings}, got {saved['settings']}"
            raise ValueError(f"{message}. Pass another --output.")
        first_epoch, step, seconds = saved["epochs"], saved["step"], saved["seconds"]
        for name, part in stateful.items():
            part.load_state_dict(saved[name])
    for epoch in range(first_epoch, epochs):
        torch.manual_seed(1000 * seed + epoch)  # a resumed run draws the same batches
        start, total = time.perf_counter(), torch.zeros((), device=device)
        network.train()
        for x, y in batches(train_x, train_y, batch_size):
            with mixed_precision(device):
                loss = F.cross_entropy(forward(normalize(x, mean, std)), y, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            average.update(network, step=step)
            total += loss.detach()
            step += 1
        loss = total.item() * epochs / steps  # .item() waits for the device, so the measured time is correct
        if not math.isfinite(loss):
            raise TrainingError(f"epoch {epoch + 1}: the loss is {loss}")
        seconds += time.perf_counter() - start
        print(f"{variant}, seed {seed}, epoch {epoch + 1}/{epochs}: loss {loss:.3f}, {seconds:.0f} s", flush=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        saved = {name: part.state_dict() for name, part in stateful.items()}
        saved |= {"settings": settings, "epochs": epoch + 1, "step": step, "seconds": seconds}
        torch.save(saved, f"{file}.new")
        os.replace(f"{file}.new", file)
    averaged = average.module.eval()
    if BLOCKS[variant]:  # (3) Report the size of the blocks' outputs and the number of predictions that depend on them.
        print(va.contribution(averaged, (normalize(test_x[:1000], mean, std), test_y[:1000])))
    with mixed_precision(device):
        score = top1(lambda x: averaged(normalize(x, mean, std)), test_x, test_y)
    size = sum(p.numel() for p in network.parameters())
    return {"parameters": size, "top-1 %": score, "images/s": step * batch_size / seconds}


def mixed_precision(device):
    """Return a context that computes in bfloat16 on a GPU; most CPUs are faster in float32."""
    return torch.autocast("cuda", torch.bfloat16, enabled=torch.device(device).type == "cuda")


def normalize(images, mean, std):
    return ((images.float() - mean) / std).contiguous(memory_format=torch.channels_last)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", required=True, help="folder for the data set, or folder with train/CLASS/IMAGE and test/CLASS/IMAGE")
    add("--dataset", default="cifar100", choices=("cifar10", "cifar100"), help="data set to download")
    add("--model", default="resnet20", help="resnet20, resnet32, resnet44, resnet56 or another timm model for 32×32")
    add("--variants", nargs="+", default=["plain", "convolution", "attention"], choices=BLOCKS,
        help="variants to compare; the last one is compared with the others")  # fmt: skip
    add("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4], help="random seeds")
    add("--epochs", type=int, default=30, help="training epochs")
    add("--batch-size", type=int, default=512, help="images per step")
    add("--lr", type=float, default=0.4, help="maximum learning rate")
    add("--weight-decay", type=float, default=5e-4, help="weight decay")
    add("--compile", dest="compiled", action="store_true", help="compile the network, which takes about a minute")
    add("--images", type=int, help="number of training images (default: all)")
    add("--jobs", type=int, default=1, help="runs at a time")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="device of all runs")
    add("--output", default="runs/cifar", help="folder of the results")
    options = vars(parser.parse_args(arguments))
    variants = {name: OPTIONS.get(name, {}) for name in options.pop("variants")}
    trials(run, variants, states=f"{options['output']}/states", **options)


if __name__ == "__main__":
    sys.exit(cli.run_program("cifar", main, interrupted="interrupted; run the same command to resume"))
