"""Which backbones take attention: every family of timm and torchvision, at its smallest model, at all of its stages.

    python tests/reach.py                       # writes docs/reach.md, in about a quarter of an hour on two cores
    python tests/reach.py --only convnext swin  # prints these families' rows

Each row is made by doing it: insert at every stage that `stage_names` gives, compare, train a step, remove, compare.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import timm
import torch
import torchvision
from timm.models import list_models, list_modules
from torch import Tensor, nn

import vision_attn as va
from vision_attn.networks.insertion import inserted_keys, records
from vision_attn.networks.inspection import network_of

#: What this script writes.
TABLE = Path(__file__).resolve().parents[1] / "docs" / "reach.md"

#: Side of the images where a model takes any: 2×2 cells at a stride of 32.
SMALL = 64

HEAD = """# Reach

The smallest model of every model module of timm {timm} and of every classification family of torchvision
{torchvision}, as `python tests/reach.py` found it with torch {torch} on {threads} thread(s) of a CPU. A block of
attention, in windows of 8×8 for the sake of the largest maps, goes in at every stage. Then the output on random images
must be the same bits, and the network's own keys the same in the same order; gradients must reach the output
projection of every block whose map is read and, after one step, the others; and after removal every module, hook and
tensor must be the same object, and the output the same bits.

{summary}

{table}
"""


#: What is seen to hold in each row.
CHECKS = ("identical", "keys kept", "output learns", "attention learns", "removed")
HEADER = ("library", "family", "model", "size", "layout", "sites", *CHECKS, "seconds", "refused")


@dataclass
class Row:
    library: str
    family: str
    model: str = ""
    size: int = 0
    layout: str = ""
    stages: int = 0
    sites: int = 0
    read: int = 0
    #: those of :data:`CHECKS` that were made
    checks: dict[str, bool] = field(default_factory=dict)
    seconds: float = 0.0
    refusals: list[str] = field(default_factory=list)

    @property
    def reached(self) -> bool:
        """Attention at every stage, and nothing harmed."""
        return 0 < self.stages == self.sites and self.read > 0 and self.unharmed

    @property
    def unharmed(self) -> bool:
        return all(self.checks.values())

    def cells(self) -> list[str]:
        checks = ("yes" if self.checks.get(name) else "**no**" if self.sites else "" for name in CHECKS)
        where = f"`{self.model}`", str(self.size), self.layout, f"{self.sites} of {self.stages}"
        return [self.library, self.family, *where, *checks, f"{self.seconds:.0f}", "; ".join(self.refusals)]


def parameters(library: str, name: str) -> float:
    if library == "torchvision":
        return int(torchvision.models.get_model_weights(name).DEFAULT.meta["num_params"])
    try:
        with torch.device("meta"):
            return sum(p.numel() for p in make(library, name).parameters())
    except Exception:  # some need more than their name: another package, an argument
        return float("inf")


def make(library: str, name: str) -> nn.Module:
    return timm.create_model(name) if library == "timm" else network_of(f"torchvision:{name}")


def families() -> Iterator[tuple[str, str, list[str]]]:
    """Library, family and the names of its models."""
    for module in list_modules():
        # timm's own tests have still smaller ones, which nobody uses; and others register theirs, as this library does.
        names = [name for name in list_models(module=module) if not name.startswith("test_")]
        if timm.model_entrypoint(names[0]).__module__.startswith("timm."):
            yield "timm", module, names
    by_module: dict[str, list[str]] = {}
    for name in torchvision.models.list_models(module=torchvision.models):
        builder = torchvision.models.get_model_builder(name)
        by_module.setdefault(builder.__module__.rpartition(".")[2], []).append(name)
    for module, names in by_module.items():
        yield "torchvision", module, names


def size_of(model: nn.Module) -> list[int]:
    """Sides of images to try, the cheapest first."""
    config = getattr(model, "pretrained_cfg", None) or {}
    usual = config.get("input_size", (3, 224, 224))[-1]
    return [usual] if config.get("fixed_input_size") else sorted({min(SMALL, usual), usual})


def as_after_training(model: nn.Module) -> None:
    """No weight as it was initialised: many networks begin with branches, scales or heads at zero."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() < 2 or not tensor.any():
                tensor += 0.1 * torch.randn(tensor.shape, generator=generator)


def block(channels: int, **options: object) -> nn.Module:
    heads = max(count for count in range(1, 9) if channels % count == 0)
    return va.AttentionBlock2d(channels, heads, pattern=va.Window(8), **options)


def tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for item in items for tensor in tensors(item)]


def anatomy(model: nn.Module) -> tuple[dict[str, tuple[object, ...]], list[tuple[str, int, int]]]:
    """Every module and tensor by identity; and each one's hooks, children and mode, or how often it was changed."""
    return {
        name: (
            id(module),
            list(module._modules),
            module.training,
            *map(list, (module._forward_hooks, module._forward_pre_hooks)),
        )
        for name, module in model.named_modules()
    }, [(key, id(tensor), tensor._version) for key, tensor in model.state_dict(keep_vars=True).items()]


def insert_everywhere(model: nn.Module, row: Row, shape: tuple[int, ...]) -> None:
    stages = list(dict.fromkeys(va.stage_names(model, shape)))
    row.stages = len(stages)
    try:
        row.sites = len(va.insert_(model, block, names=stages, example_input=shape))
        return
    except va.SiteError:
        pass  # which of them it is
    for stage in stages:
        try:
            row.sites += len(va.insert_(model, block, names=[stage], example_input=shape))
        except va.SiteError as error:
            row.refusals.append(str(error).split(": choose")[0])


def measure(library: str, family: str, names: list[str]) -> Row:
    begin = time.perf_counter()
    row = Row(library, family, min(names, key=lambda name: parameters(library, name)))
    torch.manual_seed(0)
    model = make(library, row.model).eval().requires_grad_(False)  # gradients pass through it, to the blocks
    as_after_training(model)
    for row.size in size_of(model):
        shape = (1, 3, row.size, row.size)
        images = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        try:
            with torch.no_grad():
                before = tensors(model(images))
            break
        except Exception as error:
            failure = f"does not run on images alone ({type(error).__name__})"
    else:
        row.refusals.append(failure)
        return row
    was = anatomy(model)
    try:
        insert_everywhere(model, row, shape)
    except va.SiteError as error:
        row.refusals.append(str(error))
    if row.sites:
        row.layout = " and ".join(sorted({record.layout for record in records(model)}))
        with torch.no_grad():
            row.checks["identical"] = all(map(torch.equal, before, tensors(model(images))))
        own = [key for key in model.state_dict() if key not in inserted_keys(model)]
        row.checks["keys kept"] = own == [key for key, *_ in was[1]]
        row.refusals += [f"{record.site}: not read" for record in records(model) if not record.read]
        blocks = [block for block in va.inserted_blocks(model).values() if block.insertion.read]
        row.read = len(blocks)
        optimizer = torch.optim.Adam(
            [p for block in va.inserted_blocks(model).values() for p in block.parameters()], lr=1e-3
        )
        for step in range(2 * bool(blocks)):
            optimizer.zero_grad()
            sum(tensor.abs().mean() for tensor in tensors(model(images[:1]))).backward()
            if step == 0:
                row.checks["output learns"] = all(bool(block.attn.proj.weight.grad.any()) for block in blocks)
            row.checks["attention learns"] = all(bool(block.attn.qkv.weight.grad.any()) for block in blocks)
            optimizer.step()
        va.remove_(model)
        with torch.no_grad():
            after = tensors(model(images))
        row.checks["removed"] = anatomy(model) == was and all(map(torch.equal, before, after))
    row.seconds = time.perf_counter() - begin
    return row


def table(rows: list[Row]) -> str:
    cells = [list(HEADER), ["---"] * len(HEADER), *(row.cells() for row in rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def summary(rows: list[Row]) -> str:
    lines = []
    for library in ("timm", "torchvision"):
        own = [row for row in rows if row.library == library]
        reached = [row for row in own if row.reached]
        maps = sum("w) c" not in row.layout for row in reached)
        lines.append(
            f"{library}: {len(reached)} of {len(own)} families take attention at every stage, {maps} on maps and "
            f"{len(reached) - maps} on tokens; of the others, {len(own) - len(reached)}, each row says why not."
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="families to measure; the table is then printed, not written")
    only = parser.parse_args().only
    warnings.simplefilter("ignore")  # small maps
    rows = []
    for library, family, names in families():
        if only and family not in only:
            continue
        try:
            rows.append(measure(library, family, names))
        except Exception as error:
            raise RuntimeError(f"{library} {family}") from error
        print(*rows[-1].cells(), sep="  ", flush=True)
    print(summary(rows))
    if not only:
        text = HEAD.format(
            timm=timm.__version__,
            torchvision=torchvision.__version__.split("+")[0],
            torch=torch.__version__.split("+")[0],
            threads=torch.get_num_threads(),
            summary=summary(rows),
            table=table(rows),
        )
        TABLE.write_text(text)
    sys.exit(any(row.sites and not row.unharmed for row in rows))


if __name__ == "__main__":
    main()
