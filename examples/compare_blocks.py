"""What a block is worth: one network plain, and with each of three blocks of as many parameters, over several seeds.

    python examples/compare_blocks.py --data ~/data --dataset-download            # CIFAR-100, on a GPU in bfloat16
    python examples/compare_blocks.py --dataset digit-pairs --seeds 0 1 2         # minutes on a CPU, nothing to fetch
    python examples/compare_blocks.py --data ~/data --model wrn16_4 --epochs 100  # any flag of `vision-attn train`

All arms have one recipe, which flags override; those of blocks go to the arms that they suit, as in
`--insert 'layer3.*' --block-options gate_init=1 --attention-options 'position=Rope2d()' --impl bmm`.
The accuracy is that of the last epoch: the best one would be chosen by the images that it is measured on. Each arm and
seed has a run folder with its settings, metrics and log in --output; the same command again goes on where it was
interrupted, and more seeds are added to those that are there.
"""

import argparse
import csv
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

import torch

import vision_attn as va
from vision_attn import cli
from vision_attn.checkpoints import write_atomically
from vision_attn.insertion import count_multiply_adds
from vision_attn.training.settings import Settings
from vision_attn.training.train import train

CIFAR = """--model resnet20 --epochs 200 --batch-size 128 --opt sgd --lr 0.1 --weight-decay 5e-4 --warmup-epochs 5
    --label-smoothing 0.1 --crop-padding 4 --hflip 0.5"""
DIGITS = """--model digit_pairs --epochs 5 --batch-size 128 --opt adamw --lr 0.006 --weight-decay 0.01
    --warmup-epochs 0.5 --crop-padding 0 --hflip 0 --device cpu"""
#: Where the block goes, and the recipe.
RECIPES = {
    "cifar100": ("layer3", CIFAR),
    "cifar10": ("layer3", CIFAR),
    "folder": ("layer3", CIFAR),
    "digit-pairs": ("stage3", DIGITS),
}
#: What a comparison decides for each of its runs.
DECIDED = {
    "seed": "give --seeds",
    "block": "each arm has its own",
    "resume": "the same command goes on where it was interrupted",
    "overwrite": "to begin anew, give another --output",
    "test_only": "what is complete is only evaluated",
}


def on_a_gpu(device):
    return device != "cpu" and torch.cuda.is_available()


def arms(common, site, attention_options):
    """What each arm has of its own; takes what only blocks have out of what all arms have in common."""

    def taken(*names):
        return {name: common.pop(name) for name in names if name in common}

    blocks = {"insert": (site,), "block_options": (), **taken("insert", "at", "block_options", "attention_lr")}
    if not common.get("reset_head"):  # with a new head there is something to train in all of them
        blocks |= taken("freeze_backbone", "freeze_epochs")
    attention = {"num_heads": 4, **taken("num_heads", "impl")}
    return {
        "plain": {},
        "convolution": {**blocks, "block": "conv"},
        "squeeze and excitation": {**blocks, "block": "se"},
        "attention": {**blocks, **attention, "block_options": (*blocks["block_options"], *attention_options)},
    }


@dataclass
class Outcome:
    parameters: int
    multiply_adds: int
    top1: float
    shares: list[float]  # of the branch in the stream, by epoch; empty without blocks
    changed: float | None  # part of the predictions that are others with the blocks closed


def run(settings):
    """One arm with one seed: trained, gone on with, or only evaluated where it is complete."""
    settings.folder.mkdir(parents=True, exist_ok=True)
    with open(settings.folder / "log.txt", "a", buffering=1) as log:

        def say(line):
            print(line)
            print(line, file=log)

        result = train(settings, say)
    network = result.network
    work = count_multiply_adds(network.model, (1, len(network.mean), *network.size))
    rows = csv.DictReader((settings.folder / "metrics.csv").read_text().splitlines())
    closed = result.closed
    return Outcome(
        network.parameters,
        work,
        result.final.top1,
        [float(row["branch_share"]) for row in rows if row["branch_share"]],
        None if closed is None else closed.changed / closed.images,
    )


def recipe_of(settings):
    """What it trains and on what, and the further flags that its result depends on, of the arm with attention."""
    values = settings.as_dict()
    for name in dict.fromkeys(["dataset", "model", *settings.differences(Settings(data="").as_dict())]):
        value = values[name]
        words = [] if value is True else value if isinstance(value, list) else [value]
        yield " ".join(map(str, (f"--{name.replace('_', '-')}", *words)))


def opened(found):
    """How far the branches have come after the first, third and last epoch, and what closing them changes."""
    if not found[0].shares:
        return "— | —"
    epochs = sorted({1, 3, len(found[0].shares)} & set(range(1, 1 + len(found[0].shares))))
    shares = ", ".join(f"{mean(one.shares[epoch - 1] for one in found):.4f} ({epoch})" for epoch in epochs)
    return f"{shares} | {100 * mean(one.changed for one in found):.1f}"


def table(outcomes, settings, seeds):
    shares = "branch/stream after epochs | changed when closed %"
    lines = [
        f"| block | parameters | multiply-adds | top-1 % | {shares} | by seed |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for name, found in outcomes.items():
        scores = [outcome.top1 for outcome in found]
        spread = f" ± {stdev(scores):.2f}" if len(scores) > 1 else ""
        lines.append(
            f"| {name} | {found[0].parameters:,} | {found[0].multiply_adds:,} | {mean(scores):.2f}{spread} "
            f"| {opened(found)} | {', '.join(f'{score:.2f}' for score in scores)} |"
        )
    machine = (
        torch.cuda.get_device_name() if on_a_gpu(settings.device) else f"{torch.get_num_threads()} threads of a CPU"
    )
    lines.append(
        f"\nSeeds {', '.join(map(str, seeds))}; top-1 of the last epoch, mean ± standard deviation. "
        f"`{' '.join(recipe_of(settings))}`; {machine}, torch {torch.__version__}, vision_attn {va.__version__}.\n"
    )
    return "\n".join(lines)


def main(arguments=None, arms=arms):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--dataset", choices=tuple(RECIPES), default="cifar100", help="kind of data")
    parser.add_argument("--attention-options", nargs="+", default=[], help="as --block-options, of attention alone")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="of each arm")
    parser.add_argument("--output", default="runs/compare", help="folder of the runs and of table.md")
    parser.add_argument("--arms", nargs="+", help="some of the arms alone")
    options, flags = parser.parse_known_args(arguments)

    site, recipe = RECIPES[options.dataset]
    command = ["train", "--dataset", options.dataset, *recipe.split(), *flags]
    common = cli.given(Settings, cli.parser().parse_args(command))
    for name, remedy in DECIDED.items():
        if name in common:
            raise ValueError(f"--{name.replace('_', '-')} does not apply to a comparison: {remedy}")
    if on_a_gpu(common.get("device")):
        common = {"amp": True, "channels_last": True, **common}
    chosen = arms(common, site, options.attention_options)
    unknown = [name for name in options.arms or () if name not in chosen]
    if unknown:
        raise ValueError(f"--arms must be among {', '.join(map(repr, chosen))}; got {unknown[0]!r}")
    chosen = {name: chosen[name] for name in options.arms or chosen}
    outcomes = {name: [] for name in chosen}
    for done, seed in enumerate(options.seeds, 1):  # seed by seed: cut short, there are as many of each arm
        for name, alone in chosen.items():
            print(f"\n--- {name}, seed {seed}")
            folder = Path(options.output) / f"{name.replace(' ', '-')}-{seed}"
            further = {"seed": seed, "output": str(folder), "resume": "auto"}
            outcomes[name].append(run(Settings(**{**common, **alone, **further})))
        text = table(outcomes, Settings(**{**common, **list(chosen.values())[-1]}), options.seeds[:done])
        write_atomically(Path(options.output) / "table.md", text.encode())
    print(f"\n{text}\nin {options.output}/table.md")


if __name__ == "__main__":
    sys.exit(cli.run_program("compare_blocks", main, interrupted="interrupted: the same command goes on from here"))
