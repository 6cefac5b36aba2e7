"""Parameters, MACs and milliseconds of blocks at the stages of a ResNet-50, as Markdown tables.

    python benchmarks/block_costs.py
    python benchmarks/block_costs.py --only attention cbam --sides 14 7
    python benchmarks/block_costs.py --page docs/performance.md

MACs are for one image. Milliseconds are for a batch, forward and with gradients: medians of rounds in which all blocks
take turns. The first row is the block that `insert_` creates by default. The other blocks are from this library and
from timm's `create_attn`. The default measurements take a few minutes on an idle core. With `--page`, the tables of
parameters and MACs are written to a page.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from page_sections import markdown, write_section
from speed import describe_machine, format_number, time_in_turns, with_gradients
from timm.layers import create_attn
from torch import nn

import vision_attn as va
from vision_attn.networks.inspection.costs import count_macs

sys.path.append(str(Path(__file__).parents[1] / "examples" / "experiments"))
from controls import ConvBlock2d

#: Number of channels by the side of the feature map, as in a ResNet-50 on images of 224×224.
STAGES = {56: 256, 28: 512, 14: 1024, 7: 2048}


def inserted(channels, **options):
    """Return the block that `insert_` creates for a feature map with this number of channels."""
    network = nn.Sequential(nn.Identity())
    va.insert_(network, names="0", example_input=(1, channels, 7, 7), **options)
    return va.inserted_blocks(network)["0"]


BLOCKS = {
    "attention block of `insert_`": inserted,
    "attention block, windows of 7×7": lambda channels: inserted(channels, pattern=va.Window(7)),
    "attention block, `kv_stride=2`": lambda channels: inserted(channels, kv_stride=2),
    "attention block, `RelPosDecomposed`": lambda channels: inserted(channels, position=va.RelPosDecomposed(56)),
    "`AttentionBlock2d`, as wide as the feature map": va.AttentionBlock2d,
    "`LinearAttention2d`": va.blocks.LinearAttention2d,
    "`TransformerBlock2d`": va.blocks.TransformerBlock2d,
    "convolution (`ConvBlock2d`)": ConvBlock2d,
    **{f"timm's `{name}`": lambda channels, name=name: create_attn(name, channels) for name in ("se", "eca", "cbam")},
    **{f"timm's `{name}`": lambda channels, name=name: create_attn(name, channels) for name in ("coord", "gc", "nl")},
}
#: The tables that are printed. The first two, which do not depend on the machine, are also written to the page.
TITLES = ("Parameters", "MACs in millions", "Milliseconds, forward", "Milliseconds, with gradients")


def costs_at(side, names, batch, rounds, threads):
    """Yield the parameters, MACs, and milliseconds forward and with gradients of each block."""
    shape = (batch, STAGES[side], side, side)
    x = torch.randn(shape)
    modules = {name: BLOCKS[name](STAGES[side]).eval() for name in names}
    calls = {(name, "forward"): torch.no_grad()(lambda module=module: module(x)) for name, module in modules.items()}
    calls |= {(name, "gradients"): with_gradients(module, x) for name, module in modules.items()}
    seconds = time_in_turns(calls, rounds=rounds, threads=threads)
    for name, module in modules.items():
        parameters = sum(p.numel() for p in module.parameters())
        counts = [f"{parameters:,}", f"{count_macs(module, (1, *shape[1:])) / 1e6:,.1f}"]
        yield counts + [
            format_number(1000 * float(np.median(seconds[name, what]))) for what in ("forward", "gradients")
        ]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", type=int, nargs="+", default=list(STAGES), choices=list(STAGES))
    parser.add_argument("--only", nargs="+", default=[""], help="measure blocks whose names contain one of these words")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--page", type=Path, help="Markdown page with a section for the tables")
    args = parser.parse_args(arguments)
    names = [name for name in BLOCKS if any(part in name for part in args.only)]
    if not names:
        parser.error(f"--only: no block name contains {' or '.join(args.only)}")
    torch.manual_seed(0)
    costs = [list(costs_at(side, names, args.batch_size, args.rounds, args.threads)) for side in args.sides]
    header = ["", *(f"{side}×{side}, {STAGES[side]} channels" for side in args.sides)]
    tables = []
    for i, title in enumerate(TITLES):
        rows = [[name, *(at_side[row][i] for at_side in costs)] for row, name in enumerate(names)]
        tables.append(f"**{title}**\n\n{markdown([header, *rows])}")
    machine = describe_machine(torch.device("cpu"), args.threads, "float32")
    print(f"Batch {args.batch_size}, medians of {args.rounds} rounds; {machine}.", *tables, sep="\n\n")
    if args.page:
        write_section(args.page, "block_costs", "\n\n".join(tables[:2]))


if __name__ == "__main__":
    main()
