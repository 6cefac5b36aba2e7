"""Compare ways to insert attention in three planned experiments.

    python examples/experiments/evidence.py cifar --data cifar100  # with train/ and test/
    python examples/experiments/evidence.py positions --data cifar10 --weights cifar10_resnet20.pth  # with test/
    python examples/experiments/evidence.py adapters --data cifar100 --weights cifar10_resnet20.pth

An interrupted run resumes if the same command is run again. On two idle cores, the first takes about seven hours and
the others about one hour each, with the two environment variables of docs/performance.md. The recorded runs are in the
folder `results`.

The plans, written before the runs:

**cifar.** ResNet-20 is trained on CIFAR-100 from scratch. First, seven ways to insert attention are trained on nine
tenths of the training images, for ten epochs with seeds 0, 1 and 2, and scored on the remaining tenth. Then the way
with the highest mean is compared with the plain network, a convolution, squeeze-and-excitation as in its paper, and a
normalized shortcut: all training images, ten epochs, seeds 10 to 14, scored on the test images. Two controls were added
after these runs: squeeze-and-excitation as a residual block, which had the highest score in an earlier comparison, and
averaging, which shows whether the attention weights matter.

**positions.** A canvas contains four photographs of two classes. Are the two photographs of one class in a row, in a
column or on a diagonal? Chance is one third, because the classes and their number contain no information about the
answer. The photographs are test images of CIFAR-10, 8,000 for training and 2,000 for evaluation, processed by a frozen
ResNet-20 that was trained on CIFAR-10. One block after its last stage and a new classifier are trained for eight epochs
with seeds 0 to 4. Attention with positions is compared with eight other variants. **matching**, a later plan, compares
attention with positions with the same block and `qk_norm="match"`.

**adapters.** The same frozen network has a new classifier for CIFAR-100, and an adapter after each residual block of
the first or the last stage: attention (in windows of 8×8 in the first stage), a convolution, squeeze-and-excitation as
a residual block, or a normalized shortcut. Two epochs, seeds 0 to 4; all pairs are compared.

The recorded runs were made with an earlier version, in which images were augmented on the device. In the recorded runs
of **positions** and **adapters**, the new classifier is initialized at random; ``vision-attn
train`` initializes it with zeros. The plans announced 95 % Games–Howell intervals over all pairs of a table. After the
runs, the rule was changed for all comparisons of this project: paired intervals of attention minus each other variant
(`docs/results.md`). In **adapters**, they are computed for each stage.
"""

import argparse
import functools
import hashlib
import os
import sys
from dataclasses import replace
from pathlib import Path

import timm
import torch
from PIL import Image
from timm.layers import AttentionPool2d, SqueezeExcite
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import nn
from torchvision.transforms.functional import pil_to_tensor

import vision_attn as va
from vision_attn import cli
from vision_attn.networks.models.cifar_resnet import CIFAR10, CifarResNet
from vision_attn.recipes.compare import compare_settings, settings_for_variant
from vision_attn.recipes.data import Folder
from vision_attn.recipes.settings import Settings

#: The settings of runs refer to the block below by the name of this module, which worker processes import too.
sys.modules.setdefault("evidence", sys.modules[__name__])
#: controls that the best way to insert attention is compared with
CONTROLS = {
    "plain": "plain",
    "convolution": "--block controls:ConvBlock2d",
    "large-kernel": "--block controls:ConvBlock2d --block-options kernel_size=13",
    "pooled-mlp": "--block controls:ConvBlock2d --block-options kernel_size=None",
    "se": "--block se --block-options rd_ratio=2",
    "se-residual": "--block controls:SqueezeExciteBlock2d",
    "norm-shortcut": "--block controls:NormBlock2d",
    "averaging": "averaging",
    "attention": "attention",
}
MACHINE = {"amp": "bfloat16", "channels_last": True}
#: options of attention; "bmm" is the fastest implementation on a CPU for these feature maps
HEADS = ("num_heads=4", "impl=bmm")
SIDE = 32


class Gating(va.AttentionBlock2d):
    """Attention as a gate of channels: ``x + gate · norm(x) · sigmoid(attention(norm(x)))``."""

    def __init__(self, channels, *, gate_init=0.0, **options):
        super().__init__(channels, gate_init=gate_init, **options)

    def forward(self, x):
        y = self.norm(x)
        return self.add(x, y * self.attn(y).sigmoid())


def register_modified(name, modify):
    """Register ResNet-20 with a modification other than blocks that are inserted after modules."""

    def build(pretrained=False, **options):
        model = timm.create_model("resnet20", **options)
        modify(model, {"example_input": (1, model.conv1.in_channels, SIDE, SIDE)})
        return model

    build.__name__, build.__module__ = name, "evidence"
    return register_model(build)


def augmented_conv(channels, *, out_channels, **options):
    sizes = {
        "num_heads": 4,
        "key_channels": 16,
        "value_channels": 8,
        "bias": False,
        "impl": "bmm",
    }
    return va.blocks.AugmentedConv2d(channels, out_channels, 3, **sizes, **options)


def use_attention_pool(model, example):
    model.global_pool = AttentionPool2d(64, SIDE // 4, num_heads=4, head_dim=None)


#: modifications of ResNet-20 by name
NETWORKS = {
    "botnet": lambda model, example: va.replace_(
        model,
        names="layer3.*.conv2",
        num_heads=4,
        groups=1,
        impl="bmm",
        position=va.RelPosDecomposed(SIDE // 4),
        **example,
    ),
    "augmented": lambda model, example: va.replace_(
        model, augmented_conv, names=["layer2.*.conv2", "layer3.*.conv2"], **example
    ),
    "se": lambda model, example: va.insert_(model, SqueezeExcite, names="layer[123].*.bn2", **example),
    "attention_pool": use_attention_pool,
}
if "resnet20_botnet" not in timm.list_models("resnet20_*"):
    for name, modify in NETWORKS.items():
        register_modified(f"resnet20_{name}", modify)


def variant(name, text, common):
    """Return the settings of a variant, given as the flags of `vision-attn compare --variants`."""
    return settings_for_variant(f"{name}={text}", common)[1]


def cifar(options):
    recipe = Settings(
        data=Path(options.data), model="resnet20", img_size=SIDE, lr=0.1, warmup_epochs=0.5, label_smoothing=0.1,
        compile=options.compile, block_options=HEADS, epochs=options.epochs or 10, **MACHINE,
    )  # fmt: skip
    ways = {
        "in the last stage": "--names layer3.*",
        "after two stages": f"--names layer2 layer3 --block-options 'position=RelPosTable({SIDE // 2})'",
        "botnet": "plain --model resnet20_botnet",
        "augmented": "plain --model resnet20_augmented",
        "with se": "--model resnet20_se --names layer3",
        "gating": f"--names layer3.* --block evidence:Gating --block-options {' '.join(HEADS)}",
        "attention pool": "plain --model resnet20_attention_pool",
    }
    ways = {name: variant(name, text, recipe) for name, text in ways.items()}
    candidates = {name: replace(settings, val_fraction=0.1) for name, settings in ways.items()}
    shared = {"jobs": options.jobs, "command": f"python examples/experiments/evidence.py cifar --data {options.data}"}
    seeds = options.seeds or (0, 1, 2)
    scores = compare_settings(candidates, seeds=seeds, output=f"{options.output}/ways", **shared)
    totals = {name: sum(run["top-1 %"] for run in by_seed.values()) for name, by_seed in scores.items()}
    best = max(totals, key=totals.get)
    names = ("plain", "convolution", "se", "se-residual", "norm-shortcut", "averaging")
    common = replace(recipe, names=("layer3.*",))
    variants = {name: variant(name, CONTROLS[name], common) for name in names} | {best: ways[best]}
    seeds = [10 + seed for seed in options.seeds or range(5)]
    compare_settings(variants, seeds=seeds, output=options.output, **shared)


#: arrangements of two photographs of class a and two of class b, row by row
ARRANGEMENTS = {"row": "aabb", "column": "abab", "diagonal": "abba"}


def make_canvases(photographs, folder):
    """Write folders ``train`` and ``val`` of canvases; no photograph occurs in both."""
    samples = Folder(Path(photographs) / "test").samples
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0)).tolist()
    held_out = len(samples) // 5
    for split, rows in (("train", order[held_out:]), ("val", order[:held_out])):
        by_class = {}
        for row in rows:
            by_class.setdefault(samples[row][1], []).append(samples[row][0])
        generator = torch.Generator().manual_seed(len(rows))
        for index in range(len(rows)):
            label = list(ARRANGEMENTS)[index % 3]
            two = dict(zip("ab", torch.randperm(len(by_class), generator=generator)[:2].tolist(), strict=True))
            canvas = Image.new("RGB", (2 * SIDE, 2 * SIDE))
            for position, letter in enumerate(ARRANGEMENTS[label]):
                paths = list(by_class.values())[two[letter]]
                path = paths[int(torch.randint(len(paths), (), generator=generator))]
                with Image.open(path) as image:
                    canvas.paste(image, (position % 2 * SIDE, position // 2 * SIDE))
            (folder / split / label).mkdir(parents=True, exist_ok=True)
            canvas.save(folder / split / label / f"{index:05}.png")


#: environment variable with the file of feature maps, for the processes of the runs
MAPS = "EVIDENCE_MAPS"


class CachedResNet(CifarResNet):
    """A frozen network whose feature maps are read from a file, because they are the same in every epoch and run."""

    def __init__(self, **options):
        super().__init__(20, **options)
        self.features = nn.Identity()

    def forward_features(self, x):
        rows, maps = load_maps(os.environ[MAPS])
        indices = [None if x.is_meta else rows.get(digest(image)) for image in x]
        if None in indices:  # example inputs, which the file does not contain
            return self.features(super().forward_features(x))
        assert not any(parameter.requires_grad for parameter in self.layer3.parameters())
        return self.features(maps[indices].to(x.device, memory_format=torch.channels_last))


default_cfgs = generate_default_cfgs({"cached_resnet20.cifar10": CIFAR10})
if "cached_resnet20" not in timm.list_models("cached_*"):

    @register_model
    def cached_resnet20(pretrained=False, **options):
        return build_model_with_cfg(CachedResNet, "cached_resnet20", pretrained, **options)


def digest(image):
    """Return a hash of the pixels of a normalized image."""
    mean, std = (torch.tensor(CIFAR10[name], device=image.device).view(3, 1, 1) for name in ("mean", "std"))
    pixels = ((image.detach() * std + mean) * 255).round().to("cpu", torch.uint8)
    return hashlib.blake2b(pixels.numpy().tobytes(), digest_size=16).hexdigest()


@functools.cache
def load_maps(path):
    content = torch.load(path, mmap=True, weights_only=True)
    return content["rows"], content["maps"]


@torch.no_grad()
def save_maps(weights, canvases, path):
    """Write the feature maps of the frozen network for each canvas and its mirror image."""
    model = timm.create_model("resnet20").eval().to(memory_format=torch.channels_last)
    va.load_checkpoint_(model, weights)
    mean, std = (torch.tensor(CIFAR10[name]).view(3, 1, 1) for name in ("mean", "std"))
    rows, maps = {}, []
    for file in sorted(canvases.rglob("*.png")):
        with Image.open(file) as image:
            pixels = pil_to_tensor(image) / 255
        images = torch.stack([(pixels - mean) / std, (pixels.flip(2) - mean) / std])
        with torch.autocast("cpu", torch.bfloat16):
            maps += model.forward_features(images.contiguous(memory_format=torch.channels_last))
        rows.update((digest(image), len(maps) - 2 + index) for index, image in enumerate(images))
    torch.save({"rows": rows, "maps": torch.stack(maps).contiguous(memory_format=torch.channels_last)}, f"{path}.new")
    os.replace(f"{path}.new", path)


def frozen_network(options, **others):
    """Return settings for a network trained on CIFAR-10, of which only the new layers are trained."""
    return Settings(
        weights=options.weights, reset_head=True, freeze_backbone=True, block_options=HEADS, opt="adamw", lr=3e-3,
        weight_decay=0.01, **{**MACHINE, **others},
    )  # fmt: skip


def positions(options):
    canvases = Path(options.output) / "canvases"
    if not (canvases / "val").is_dir():
        make_canvases(options.data, canvases)
    os.environ[MAPS] = str(canvases / "maps.pt")
    if not Path(os.environ[MAPS]).exists():
        save_maps(options.weights, canvases, os.environ[MAPS])
    common = frozen_network(
        options, data=canvases, model="cached_resnet20", names=("features",), img_size=2 * SIDE, crop_scale=1.0,
        epochs=options.epochs or 8,
    )  # fmt: skip
    names = ("plain", "convolution", "se", "se-residual", "pooled-mlp", "large-kernel", "averaging", "attention")
    variants = {name: variant(name, CONTROLS[name], common) for name in names}
    position = f"--block-options 'position=RelPosDecomposed({SIDE // 2})'"
    if options.plan == "matching":
        variants = {"matching": variant("matching", f"{position} qk_norm=match", common)}
    variants["attention with positions"] = variant("attention with positions", position, common)
    command = f"python examples/experiments/evidence.py {options.plan} --data {options.data}"
    shared = {"jobs": options.jobs, "command": f"{command} --weights {options.weights}"}
    compare_settings(variants, seeds=options.seeds or range(5), output=options.output, **shared)


def adapters(options):
    data, epochs = Path(options.data), options.epochs or 2
    common = frozen_network(options, data=data, model="resnet20.cifar10", img_size=SIDE, epochs=epochs)
    command = f"python examples/experiments/evidence.py adapters --data {options.data} --weights {options.weights}"
    shared = {"seeds": options.seeds or range(5), "jobs": options.jobs, "command": command}
    # With full attention on 32×32 positions, a step takes 40 seconds.
    windows = f"--block-options 'pattern=Window({SIDE // 4})'"
    for stage in ("layer1", "layer3"):
        here = replace(common, names=(f"{stage}.*",))
        variants = {"head alone": variant("head alone", "plain", here)}
        names = ("norm-shortcut", "se-residual", "convolution")
        variants |= {name: variant(name, CONTROLS[name], here) for name in names}
        variants["attention"] = variant("attention", windows if stage == "layer1" else "attention", here)
        compare_settings(variants, output=f"{options.output}/{stage}", **shared)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("plan", choices=("cifar", "positions", "matching", "adapters"), help="experiment to run")
    parser.add_argument("--data", required=True, help="folder of images: CIFAR-10 for positions, else CIFAR-100")
    parser.add_argument("--weights", help="checkpoint of a ResNet-20 that was trained on CIFAR-10")
    parser.add_argument("--output", help="folder of the runs (default: runs/evidence-PLAN)")
    parser.add_argument("--compile", action="store_true", help="compile the networks of the plan cifar")
    parser.add_argument("--jobs", type=int, help="runs at a time (default: number of GPUs, or of cores)")
    parser.add_argument("--epochs", type=int, help="training epochs (default: as planned)")
    parser.add_argument("--seeds", type=int, nargs="+", help="random seeds (default: as planned)")
    options = parser.parse_args(arguments)
    if options.plan != "cifar" and options.weights is None:
        parser.error(f"--weights is required for the plan {options.plan}: a checkpoint of the frozen network")
    options.output = options.output or f"runs/evidence-{options.plan}"
    {"cifar": cifar, "positions": positions, "matching": positions, "adapters": adapters}[options.plan](options)


if __name__ == "__main__":
    sys.exit(cli.run_program("evidence", main, interrupted="interrupted; run the same command to resume"))
