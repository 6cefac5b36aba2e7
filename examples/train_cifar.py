"""Train a CIFAR ResNet with attention in its last stage, from scratch: a whole run to read in one sitting.

    python examples/train_cifar.py --data ~/data                       # one seed; fetches CIFAR-100, 170 MB
    python examples/train_cifar.py --data ~/data --plain               # the same network without attention
    python examples/train_cifar.py --data ~/data --seeds 5 --compile   # mean and standard deviation over five seeds
    python examples/train_cifar.py --data ~/data --epochs 1 --images 2000   # to try it, half a minute on a CPU

Expected after 60 epochs: top-1 … ± … % (--plain: … ± …), … s a seed on …, … images a second.  (to be measured)

All images lie on the device as one tensor of bytes, where each batch is cropped and flipped. What differs from any
other CIFAR script is marked (1), (2), (3).
"""

import argparse
import time
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from timm.utils import ModelEmaV3
from torch.optim.lr_scheduler import OneCycleLR
from torchvision.datasets import CIFAR10, CIFAR100, ImageFolder
from torchvision.transforms.functional import pil_to_tensor

import vision_attn as va
import vision_attn.networks.models  # registers resnet20 and others with timm

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--data", required=True, help="folder of the data set, or of train/CLASS/IMAGE and test/CLASS/IMAGE"
)
parser.add_argument("--dataset", default="cifar100", choices=("cifar10", "cifar100"))
parser.add_argument("--model", default="resnet20", help="resnet20, 32, 44, 56, or any of timm's for 32×32 images")
parser.add_argument("--plain", action="store_true", help="without attention")
parser.add_argument("--epochs", type=int, default=60)
parser.add_argument("--batch-size", type=int, default=512)
parser.add_argument("--lr", type=float, default=0.4, help="at the top of the cycle")
parser.add_argument("--weight-decay", type=float, default=5e-4)
parser.add_argument("--seeds", type=int, default=1, help="how many runs")
parser.add_argument("--compile", action="store_true", help="faster after a minute of compiling")
parser.add_argument("--images", type=int, help="fewer of them, to try it")
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
options = parser.parse_args()


def load(train):
    """Images as bytes (b, 3, 32, 32) and labels, some of them where that is asked for, on the device."""
    root = Path(options.data).expanduser()
    if (root / "train").is_dir():
        found = ImageFolder(root / ("train" if train else "test"))
        images = torch.stack([pil_to_tensor(image) for image, _ in found])
    else:
        found = {"cifar10": CIFAR10, "cifar100": CIFAR100}[options.dataset](root, train, download=True)
        images = torch.from_numpy(found.data).permute(0, 3, 1, 2).contiguous()
    chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[: options.images]
    return images[chosen].to(options.device), torch.tensor(found.targets)[chosen].to(options.device)


def batches(images, labels):
    """An epoch of batches: shuffled, cropped out of a border of four pixels, half of them flipped."""
    padded, steps = F.pad(images, (4, 4, 4, 4)), torch.arange(32, device=images.device)
    for rows in torch.randperm(len(images), device=images.device).split(options.batch_size):
        if len(rows) == options.batch_size:
            top, left = torch.randint(9, (2, len(rows), 1), device=images.device)
            flip = torch.rand(len(rows), 1, device=images.device) < 0.5
            y, x = top + steps, left + torch.where(flip, steps.flip(0), steps)
            yield padded[rows[:, None, None], :, y[:, :, None], x[:, None]].permute(0, 3, 1, 2), labels[rows]


def network_input(images):
    return ((images.float() - mean) / std).contiguous(memory_format=torch.channels_last)


def autocast():
    return torch.autocast(torch.device(options.device).type, torch.bfloat16)


@torch.no_grad()
def top1(model):
    """Percent of the test images that are right, seen as they are and flipped."""
    model.eval()
    right = 0
    for images, labels in zip(test_images.split(1000), test_labels.split(1000), strict=True):
        with autocast():
            x = network_input(images)
            right += ((model(x) + model(x.flip(3))).argmax(1) == labels).sum()
    return 100 * right.item() / len(test_labels)


def run(seed):
    torch.manual_seed(seed)
    model = timm.create_model(options.model, num_classes=int(train_labels.max()) + 1)
    if (
        not options.plain
    ):  # (1) a block after each residual block of the last stage; it adds nothing until it is trained
        report = va.insert_(model, names="layer3.*", num_heads=4, example_input=(1, 3, 32, 32))
        print(report if seed == 0 else "")
    model = model.to(options.device, memory_format=torch.channels_last)
    # (2) no weight decay for biases, norms and the gates of the blocks
    groups = va.parameter_groups(model, lr=options.lr, weight_decay=options.weight_decay)
    optimizer = torch.optim.SGD(groups, momentum=0.9, nesterov=True)
    steps = options.epochs * (len(train_labels) // options.batch_size)
    schedule = OneCycleLR(optimizer, options.lr, total_steps=steps + 1, pct_start=0.2, cycle_momentum=False)
    average = ModelEmaV3(model, decay=0.995, use_warmup=True)
    forward = torch.compile(model) if options.compile else model
    step, seconds = 0, 0.0
    for epoch in range(options.epochs):
        begin, total = time.perf_counter(), torch.zeros((), device=options.device)
        model.train()
        for images, labels in batches(train_images, train_labels):
            with autocast():
                loss = F.cross_entropy(forward(network_input(images)), labels, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            average.update(model, step=step)
            total += loss.detach()
            step += 1
        loss = total.item() * options.epochs / steps  # .item() waits for the device, so the clock is right
        seconds += time.perf_counter() - begin
        score, speed = top1(average.module), step * options.batch_size / seconds
        print(f"epoch {epoch + 1}/{options.epochs}: loss {loss:.3f}, top-1 {score:.2f} %, {speed:,.0f} images/s")
    if not options.plain:  # (3) how much the blocks add to their maps, and how many predictions change without them
        print(va.contribution(average.module, (network_input(test_images[:1000]), test_labels[:1000])))
    print(f"seed {seed}: top-1 {score:.2f} %, {seconds:.0f} s of training\n")
    return score


(train_images, train_labels), (test_images, test_labels) = load(True), load(False)
mean, std = (fold(train_images[:10_000].float(), (0, 2, 3)).view(1, 3, 1, 1) for fold in (torch.mean, torch.std))
scores = torch.tensor([run(seed) for seed in range(options.seeds)])
print(f"top-1 {scores.mean():.2f} ± {scores.std(correction=min(1, len(scores) - 1)):.2f} % over {len(scores)} seed(s)")
