"""Few-shot labels in a mosaic: five photographs have a label, and the network labels the other twenty.

    python examples/experiments/mosaic.py --data cifar100 --weights cifar10_resnet20.pth
    python examples/experiments/mosaic.py --data cifar100 --weights cifar10_resnet20.pth --thaw 300 --output runs/thawed

A mosaic contains 5×5 photographs of five classes of CIFAR-100 in random order. One photograph of each class has a
label. The labels are permuted in each mosaic, so they can only be copied from these examples. A frozen ResNet-20 that
was trained on CIFAR-10 turns each photograph into one position of a feature map, and a 1×1 convolution adds the labels.
One block and a classifier of every position follow. Eighty classes are for training and twenty for evaluation; chance
is 20 %. For comparison, the variant nearest-neighbor copies the label of the example with the highest cosine
similarity. Completed runs are saved in --output; run the same command to resume.

The plan, written after a pilot with one seed and four blocks, and before the runs: thirteen blocks, five seeds, 800
steps. Attention is expected to be 15 points better than every other block except linear attention, because five labels
are few enough to be stored in one sum: the pilot scored 42.1 % with attention, 40.8 % with linear attention, and 41.7 %
with the nearest neighbor.

With --thaw, the last stage of the network is also trained in additional steps; the nearest neighbor is then trained
through its cosine similarities. The plan: 300 steps, five blocks, five seeds; attention is expected to be better than
the nearest neighbor on frozen features. A pilot on 20 of the training classes scored 54 and 56 % with matching (200 and
600 steps), 58 % with the nearest neighbor, and 41 % with the nearest neighbor on frozen features. After these runs,
attention was below the trained nearest neighbor, so both were also trained for 900 steps, to find out whether attention
only needs more steps.

With --parts 4, each position contains the 4×4 parts of its photograph, concatenated to 1,024 channels. The plan:
attention in all channels (`full-width`), in 512 as by default (`matching`) and in 256 (`narrow`), 400 and 800 steps,
five seeds; only the time is expected to differ. A pilot on 20 of the training classes scored 46.1 and 49.3 % with
`narrow`, and 48.6 % with the nearest neighbor.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from experiments import build_parser, time_steps, trials
from PIL import Image
from recall import retrieval_blocks
from timm.layers import freeze_batch_norm_2d
from torch import nn
from torchvision.transforms.functional import normalize, to_tensor

import vision_attn as va
from vision_attn import cli
from vision_attn.checks import check_above
from vision_attn.networks.inspection.network import quiet_eval
from vision_attn.networks.models import create_model

SIDE, LABELS, WIDTH, IGNORED, NEAREST = 5, 5, 64, -100, "nearest-neighbor"
BATCH, MOSAICS, THAWED_BATCH, THAWED_LEARNING_RATE = 64, 512, 16, 1e-3
PHOTOGRAPHS, HELD_OUT = 200, 20  # photographs per class, classes for evaluation
#: attention with `qk_norm="match"` by fraction of the channels; None is the default, all channels but at most 512
MATCHING = {"narrow": 0.25, "full-width": 1, "matching": None}
BLOCKS = retrieval_blocks(SIDE)
VARIANTS = (NEAREST, *BLOCKS, *MATCHING)


@torch.no_grad()
def save_features(data, weights, file, parts):
    """Write the feature maps before the last stage and the final features of each photograph."""
    model, saved = create_model("resnet20", num_classes=10).eval(), {"maps": [], "features": []}
    va.load_checkpoint_(model, weights)
    config = model.pretrained_cfg
    model.layer3.register_forward_pre_hook(lambda _, inputs: saved["maps"].append(inputs[0].bfloat16()))
    for folder in sorted(path for path in Path(data, "train").iterdir() if path.is_dir()):
        paths = sorted(folder.iterdir())[:PHOTOGRAPHS]
        images = torch.stack([to_tensor(Image.open(path).convert("RGB")) for path in paths])
        with torch.autocast("cpu", torch.bfloat16):
            features = model.forward_features(normalize(images, config["mean"], config["std"])).float()
        saved["features"].append(F.adaptive_avg_pool2d(features, parts).flatten(1))
    torch.save({name: torch.stack(values) for name, values in saved.items()}, f"{file}.new")
    Path(f"{file}.new").replace(file)


def load_features(file, train, thawed=False):
    """Load features by class and photograph, ``(…, c)``, or feature maps before the last stage, ``(…, 32, 16, 16)``."""
    saved = torch.load(file, weights_only=True, mmap=True)["maps" if thawed else "features"]
    order = torch.randperm(len(saved), generator=torch.Generator().manual_seed(0))
    return saved[order[HELD_OUT:] if train else order[:HELD_OUT]]


def mosaics(count, pool, generator):
    """Draw photographs ``(b, 25, …)`` from a pool, given labels ``(b, 25, 5)``, and target labels ``(b, 25)``."""
    classes = torch.rand(count, len(pool), generator=generator).argsort(1)[:, :LABELS]  # class of each label
    further = torch.randint(LABELS, (count, SIDE**2 - LABELS), generator=generator)
    label = torch.cat([torch.arange(LABELS).expand(count, -1), further], 1)
    chosen = torch.rand(count, SIDE**2, pool.shape[1], generator=generator).argmax(2)
    given, target = F.one_hot(label, LABELS).float(), label.clone()
    given[:, LABELS:], target[:, :LABELS] = 0, IGNORED
    shuffle = torch.arange(count)[:, None], torch.rand(count, SIDE**2, generator=generator).argsort(1)
    return pool[classes.gather(1, label)[shuffle], chosen[shuffle]], given[shuffle], target[shuffle]


class FeatureExtractor(nn.Module):
    """Return the saved features of photographs, or compute them from feature maps with a trainable last stage."""

    def __init__(self):
        super().__init__()
        self.stage = nn.Identity()

    def thaw(self, weights, parts):
        network = create_model("resnet20", num_classes=10)
        va.load_checkpoint_(network, weights)
        self.stage = nn.Sequential(freeze_batch_norm_2d(network.layer3), nn.AdaptiveAvgPool2d(parts), nn.Flatten())

    def features(self, photographs):
        return self.stage(photographs.flatten(0, 1).float()).unflatten(0, photographs.shape[:2])


class Labeler(FeatureExtractor):
    """Score the labels at each position, ``(b, 5, 25)``, with a block of so many channels."""

    def __init__(self, variant, channels):
        super().__init__()
        self.norm = nn.BatchNorm2d(channels, affine=False)
        self.labels = nn.Conv2d(LABELS, channels, 1, bias=False)
        self.block = nn.Sequential(nn.Identity())
        hidden = nn.Conv2d(channels, WIDTH, 1), nn.BatchNorm2d(WIDTH), nn.ReLU()
        self.classify = nn.Sequential(*hidden, nn.Conv2d(WIDTH, LABELS, 1))
        block, options = BLOCKS.get(variant, ("attention", {"qk_norm": "match"}))
        if block == "attention":
            options = {"num_heads": 4, **options}
        if fraction := MATCHING.get(variant):
            options |= dict.fromkeys(("key_dim", "value_dim"), int(fraction * channels) // 4)
        if block is not None:
            va.insert_(self.block, block, names="0", example_input=(1, channels, SIDE, SIDE), **options)

    def forward(self, photographs, given):
        features, given = (x.mT.unflatten(2, (SIDE, SIDE)) for x in (self.features(photographs), given))
        return self.classify(self.block(self.norm(features) + self.labels(given))).flatten(2)


class NearestNeighbor(FeatureExtractor):
    """Score labels by the cosine similarity with their examples, ``(b, 5, 25)``, times a learned scale."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(10.0))

    def forward(self, photographs, given):
        features = F.normalize(self.features(photographs), dim=2)
        return self.scale * given.mT @ features @ features.mT


def build_network(variant, seed, parts):
    torch.manual_seed(seed)
    return NearestNeighbor() if variant == NEAREST else Labeler(variant, WIDTH * parts**2)


def training(model, pool, steps, generator, batch=BATCH, learning_rate=3e-3):
    """Return a function that runs one training step."""
    optimizer = torch.optim.AdamW(va.parameter_groups(model.train(), learning_rate, weight_decay=0.05))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, max(steps, 10))

    def step():
        photographs, given, target = mosaics(batch, pool, generator)
        loss = F.cross_entropy(model(photographs, given), target, ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()

    return step


def accuracy(model, pool, seed):
    photographs, given, target = mosaics(MOSAICS, pool, torch.Generator().manual_seed(seed))
    with quiet_eval(model):
        correct = model(photographs, given).argmax(1) == target
    return 100 * correct[target != IGNORED].double().mean().item()


def run(variant, seed, steps, thaw, parts, file, weights):
    model, generator = build_network(variant, seed, parts), torch.Generator().manual_seed(seed)
    step = training(model, load_features(file, True), steps, generator)
    for _ in range(0 if variant == NEAREST else steps):
        step()
    parameters = 0 if variant == NEAREST else sum(p.numel() for p in model.parameters())
    measured = {"parameters": parameters, "accuracy %": accuracy(model, load_features(file, False), seed)}
    if thaw:
        model.thaw(weights, parts)
        pool = load_features(file, True, thawed=True)
        step = training(model, pool, thaw, generator, THAWED_BATCH, THAWED_LEARNING_RATE)
        for _ in range(thaw):
            with torch.autocast("cpu", torch.bfloat16):
                step()
        measured["last stage trained %"] = accuracy(model, load_features(file, False, thawed=True), seed)
    return measured


def training_step(variant, file, parts):
    """Return a function that runs one training step on frozen features, for timing."""
    return training(build_network(variant, 0, parts), load_features(file, True), 100, torch.default_generator)


def main(arguments=None):
    parser = build_parser(__doc__, VARIANTS, steps=800, output="runs/mosaic")
    parser.set_defaults(variants=[NEAREST, *BLOCKS, "matching"])
    parser.add_argument("--data", required=True, help="folder of CIFAR-100, with train/CLASS/IMAGE in it")
    parser.add_argument("--weights", required=True, help="checkpoint of a ResNet-20 for CIFAR-10")
    parser.add_argument("--thaw", type=int, help="additional steps in which the last stage is also trained")
    parser.add_argument("--parts", type=int, default=1, help="parts per side of a photograph, 64 channels each")
    options = vars(parser.parse_args(arguments))
    data, parts = options.pop("data"), options["parts"]
    check_above(0, steps=options["steps"], thaw=options["thaw"], parts=parts)
    file = Path(options["output"]) / f"photographs-{parts}.pt"  # runs with other --parts may share the folder
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        save_features(data, options["weights"], file, parts)
    trials(run, file=str(file), **options)
    time_steps(lambda variant: training_step(variant, str(file), parts), options["variants"], options["output"])


if __name__ == "__main__":
    sys.exit(cli.run_program("mosaic", main, interrupted="interrupted; run the same command to resume"))
