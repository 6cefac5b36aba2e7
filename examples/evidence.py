"""When attention helps: plans of comparisons, written before their runs. Each goes on where it was interrupted.

    python examples/evidence.py cifar --data cifar100                                        # train/ and test/ in it
    python examples/evidence.py positions --data cifar10 --weights cifar10_resnet20.pth      # test/CLASS/IMAGE in it
    python examples/evidence.py adapters --data cifar100 --weights cifar10_resnet20.pth

**cifar.** ResNet-20 on CIFAR-100 from scratch. Seven ways to put attention in are trained on nine tenths of the
training images, ten epochs with seeds 0, 1 and 2, and scored on the tenth that is left. The one with the highest mean
is then compared with the plain network, convolution, squeeze and excitation as in its paper, and the normalised
shortcut: all training images, ten epochs, seeds 10 to 14, scored on the test images. Two more controls were added
when these runs had been seen: squeeze and excitation as a residual block, which led an earlier comparison, and
averaging, which tells whether it matters where attention looks.

**positions.** Four photographs of two classes on one canvas: is the pair of one class in a row, in a column or on a
diagonal? Chance is a third; which classes are there, and how often, never tells. The photographs are CIFAR-10's test
images, 8,000 for training and 2,000 for evaluation, seen through a frozen ResNet-20 that was trained on CIFAR-10. One
block after its last stage and a new classifier learn, eight epochs, seeds 0 to 4. Attention with positions is compared
with eight others. **matching**, a later plan, is the same for attention with positions and `qk_norm="match"` beside it.

**adapters.** The same frozen network, a new classifier for CIFAR-100, and adapters after each residual block of the
first or the last stage: attention (in windows of 8×8 in the first), convolution, squeeze and excitation as a residual
block, and the normalised shortcut alone. Two epochs, seeds 0 to 4, each pair compared.

Verdicts are by Games and Howell's intervals of 95 %, over all pairs of a table. On two idle cores the first takes
about seven hours, the others one each, with the two variables of docs/performance.md. What each run came to is in
the folder `results`.
"""

import argparse
import functools
import hashlib
import os
import sys
from pathlib import Path

import timm
import torch
from PIL import Image
from timm.layers import AttentionPool2d, SqueezeExcite
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import nn
from torchvision.transforms.functional import pil_to_tensor

import vision_attn as va
from vision_attn.networks.models.cifar_resnet import CifarResNet, cifar_cfg
from vision_attn.tools import cli
from vision_attn.tools.comparison.runs import compare
from vision_attn.tools.comparison.variants import settings_for_variant
from vision_attn.tools.training.data import Folder

#: Settings name the block below by this module, which worker processes import too.
sys.modules.setdefault("evidence", sys.modules[__name__])
CIFAR100 = {"img_size": 32, "mean": (0.5071, 0.4867, 0.4408), "std": (0.2673, 0.2564, 0.2761)}
CIFAR10 = {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2023, 0.1994, 0.201)}
#: What the best way to put attention in is compared with.
FINAL = ("plain", "convolution", "se", "se-residual", "norm-shortcut", "averaging")
MACHINE = {"amp": "bfloat16", "channels_last": True}
#: On a CPU the products of bmm are the fastest for these maps.
HEADS = ("num_heads=4", "impl=bmm")
SIDE = 32


class Gating(va.AttentionBlock2d):
    """``x + gate · norm(x) · sigmoid(attention(norm(x)))``: attention that weighs channels, as excitation does."""

    def __init__(self, channels, *, gate_init=0.0, **options):
        super().__init__(channels, gate_init=gate_init, **options)

    def forward(self, x):
        y = self.norm(x)
        return self.add(x, y * self.attn(y).sigmoid())


def changed(name, change):
    """Register ResNet-20 with something in it that is no block after a module."""

    def make(pretrained=False, **options):
        model = timm.create_model("resnet20", **options)
        change(model, {"example_input": (1, model.conv1.in_channels, SIDE, SIDE)})
        return model

    make.__name__, make.__module__ = name, "evidence"
    return register_model(make)


def augmented(channels, *, out_channels, **options):
    sizes = {
        "num_heads": 4,
        "key_channels": 16,
        "value_channels": 8,
        "bias": False,
        "impl": "bmm",
    }
    return va.AugmentedConv2d(channels, out_channels, 3, **sizes, **options)


def pooled(model, example):
    model.global_pool = AttentionPool2d(64, SIDE // 4, num_heads=4, head_dim=None)


#: Networks that differ by more than inserted blocks.
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
        model, augmented, names=["layer2.*.conv2", "layer3.*.conv2"], **example
    ),
    "excited": lambda model, example: va.insert_(model, SqueezeExcite, names="**.layer[123].*", at="branch", **example),
    "attention_pool": pooled,
}
if "resnet20_botnet" not in timm.list_models("resnet20_*"):
    for name, change in NETWORKS.items():
        changed(f"resnet20_{name}", change)


def cifar(options):
    recipe = {
        "data": options.data, "model": "resnet20", "lr": 0.1, "warmup_epochs": 0.5, "label_smoothing": 0.1,
        "compile": options.compile, "block_options": HEADS, **CIFAR100, **MACHINE,
    }  # fmt: skip
    table = {"block_options": (f"position=RelPosTable({SIDE // 2})",)}
    ways = {
        "in the last stage": ("attention", {"insert": ("layer3.*",)}),
        "at two ends": ("attention", {"insert": ("layer2", "layer3"), **table}),
        "botnet": ("plain", {"model": "resnet20_botnet"}),
        "augmented": ("plain", {"model": "resnet20_augmented"}),
        "beside se": ("attention", {"model": "resnet20_excited", "insert": ("layer3",)}),
        "gating": ("attention", {"insert": ("layer3.*",), "block": "evidence:Gating", "block_options": HEADS}),
        "attention pool": ("plain", {"model": "resnet20_attention_pool"}),
    }
    ways = {name: settings_for_variant(base, custom, recipe) for name, (base, custom) in ways.items()}
    screened = {name: {**way, "val_share": 0.1, "epochs": options.epochs or 10} for name, way in ways.items()}
    common = {**recipe, "insert": ("layer3.*",), "epochs": options.epochs or 10}
    how = {"jobs": options.jobs, "command": f"python examples/evidence.py cifar --data {options.data}"}
    found = compare(screened, seeds=options.seeds or (0, 1, 2), output=f"{options.output}/ways", **how)
    means = {name: sum(one["top-1 %"] for one in by_seed.values()) for name, by_seed in found.items()}
    best = max(means, key=means.get)
    variants = {name: settings_for_variant(name, {}, common) for name in FINAL}
    variants[best] = {**ways[best], "epochs": common["epochs"]}
    seeds = [10 + seed for seed in options.seeds or range(5)]
    compare(variants, seeds=seeds, output=options.output, **how)


#: Where the four photographs lie that are of the classes a, a, b and b.
PLACES = {"row": "aabb", "column": "abab", "diagonal": "abba"}


def make_canvases(photographs, folder):
    """Folders ``train`` and ``val`` of canvases, from photographs that are not in both."""
    found = Folder(Path(photographs) / "test").samples
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0)).tolist()
    held = len(found) // 5
    for half, rows in (("train", order[held:]), ("val", order[:held])):
        by_class = {}
        for row in rows:
            by_class.setdefault(found[row][1], []).append(found[row][0])
        draw = torch.Generator().manual_seed(len(rows))
        for index in range(len(rows)):
            answer = list(PLACES)[index % 3]
            two = dict(zip("ab", torch.randperm(len(by_class), generator=draw)[:2].tolist(), strict=True))
            canvas = Image.new("RGB", (2 * SIDE, 2 * SIDE))
            for place, letter in enumerate(PLACES[answer]):
                paths = list(by_class.values())[two[letter]]
                path = paths[int(torch.randint(len(paths), (), generator=draw))]
                with Image.open(path) as image:
                    canvas.paste(image, (place % 2 * SIDE, place // 2 * SIDE))
            (folder / half / answer).mkdir(parents=True, exist_ok=True)
            canvas.save(folder / half / answer / f"{index:05}.png")


#: Names the file of maps to the processes of the runs.
MAPS = "EVIDENCE_MAPS"


class Remembering(CifarResNet):
    """A frozen network, which makes the same maps of an image in every epoch of every run: here they are read."""

    def __init__(self, **options):
        super().__init__(20, **options)
        self.seen = nn.Identity()

    def forward_features(self, x):
        rows, maps = kept_maps(os.environ[MAPS])
        found = [None if x.is_meta else rows.get(digest(image)) for image in x]
        if None in found:  # what the network is measured with
            return self.seen(super().forward_features(x))
        assert not any(parameter.requires_grad for parameter in self.layer3.parameters())
        return self.seen(maps[found].to(x.device, memory_format=torch.channels_last))


default_cfgs = generate_default_cfgs({"remembering_resnet20.cifar10": cifar_cfg(10, **CIFAR10)})
if "remembering_resnet20" not in timm.list_models("remembering_*"):

    @register_model
    def remembering_resnet20(pretrained=False, **options):
        return build_model_with_cfg(Remembering, "remembering_resnet20", pretrained, **options)


def digest(image):
    """By the pixels of what a network is given."""
    mean, std = (torch.tensor(CIFAR10[name], device=image.device).view(3, 1, 1) for name in ("mean", "std"))
    pixels = ((image.detach() * std + mean) * 255).round().to("cpu", torch.uint8)
    return hashlib.blake2b(pixels.numpy().tobytes(), digest_size=16).hexdigest()


@functools.cache
def kept_maps(path):
    kept = torch.load(path, mmap=True, weights_only=True)
    return kept["rows"], kept["maps"]


@torch.no_grad()
def keep_maps(weights, canvases, path):
    """Write what the frozen network makes of each canvas, and of it flipped."""
    model = timm.create_model("resnet20").eval().to(memory_format=torch.channels_last)
    va.load_checkpoint(model, weights)
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


def frozen(options):
    """A network that knows CIFAR-10, of which what is new is trained."""
    return {
        "model": "resnet20", "weights": options.weights, "reset_head": True, "freeze_backbone": True,
        "block_options": HEADS, "opt": "adamw", "lr": 3e-3, "weight_decay": 0.01, **CIFAR10, **MACHINE,
    }  # fmt: skip


def positions(options):
    canvases = Path(options.output) / "canvases"
    if not (canvases / "val").is_dir():
        make_canvases(options.data, canvases)
    os.environ[MAPS] = str(canvases / "maps.pt")
    if not Path(os.environ[MAPS]).exists():
        keep_maps(options.weights, canvases, os.environ[MAPS])
    common = {
        **frozen(options), "data": str(canvases), "model": "remembering_resnet20", "insert": ("seen",), "at": "after",
        "img_size": 2 * SIDE, "crop_padding": 0, "epochs": options.epochs or 8,
    }  # fmt: skip
    names = ("plain", "convolution", "se", "se-residual", "pooled-mlp", "large-kernel", "averaging", "attention")
    variants = {name: settings_for_variant(name, {}, common) for name in names}
    where = f"position=RelPosDecomposed({SIDE // 2})"
    with_positions = settings_for_variant("attention", {"block_options": (where,)}, common)
    if options.plan == "matching":
        variants = {"matching": settings_for_variant("attention", {"block_options": (where, "qk_norm=match")}, common)}
    variants["attention with positions"] = with_positions
    command = f"python examples/evidence.py {options.plan} --data {options.data} --weights {options.weights}"
    how = {"jobs": options.jobs, "command": command}
    compare(variants, seeds=options.seeds or range(5), output=options.output, **how)


def adapters(options):
    common = {**frozen(options), "data": options.data, "img_size": SIDE, "epochs": options.epochs or 2}
    variants = {
        f"{name} in {stage}": settings_for_variant(name, {"insert": (f"{stage}.*",)}, common)
        for stage in ("layer1", "layer3")
        for name in ("norm-shortcut", "se-residual", "convolution", "attention")
    }
    # On 32×32 positions in full a step takes 40 seconds.
    near = {"insert": ("layer1.*",), "block_options": (f"pattern=Window({SIDE // 4})",)}
    variants["attention in layer1"] = settings_for_variant("attention", near, common)
    command = f"python examples/evidence.py adapters --data {options.data} --weights {options.weights}"
    how = {"jobs": options.jobs, "command": command}
    variants = {"head alone": settings_for_variant("plain", {}, common), **variants}
    compare(variants, seeds=options.seeds or range(5), output=options.output, **how)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("plan", choices=("cifar", "positions", "matching", "adapters"))
    parser.add_argument("--data", required=True, help="folder of images, as the header says")
    parser.add_argument("--weights", help="of a ResNet-20 that was trained on CIFAR-10")
    parser.add_argument("--output", help="folder of the runs (default: runs/evidence-PLAN)")
    parser.add_argument("--compile", action="store_true", help="pays on some CPUs; of cifar alone")
    parser.add_argument("--jobs", type=int, help="runs side by side (default: as many as GPUs, or as cores)")
    parser.add_argument("--epochs", type=int, help="fewer than planned, to try it")
    parser.add_argument("--seeds", type=int, nargs="+", help="others than planned, to try it")
    options = parser.parse_args(arguments)
    if options.plan != "cifar" and options.weights is None:
        parser.error("--weights must name the network that is frozen")
    options.output = options.output or f"runs/evidence-{options.plan}"
    {"cifar": cifar, "positions": positions, "matching": positions, "adapters": adapters}[options.plan](options)


if __name__ == "__main__":
    sys.exit(cli.run_program("evidence", main, interrupted="interrupted: the same command goes on from here"))
