"""Compatibility table: every family of timm and torchvision, at its smallest model, with a block at all of its stages.

python benchmarks/reach.py                # writes docs/reach.md, in about a quarter of an hour on two cores
python benchmarks/reach.py convnext swin  # prints these families' rows
"""

import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import timm
import torch
import torchvision
from timm.models import list_models, list_modules
from torch import Tensor, nn

import vision_attn as va
from vision_attn.networks.insertion import inserted_keys, records
from vision_attn.networks.inspection import create_network

#: The file that this script writes.
TABLE = Path(__file__).resolve().parents[1] / "docs" / "reach.md"

#: Side of the images where a model takes any: 2×2 positions at a stride of 32.
SMALL = 64

HEAD = """# `insert_` compatibility: networks

{summary}

The table lists the smallest model of every model module of timm {timm} and of every classification family of
torchvision {torchvision}. The results are from test runs with torch {torch} on a CPU (threads: {threads}).
`python benchmarks/reach.py` repeats the tests and writes this page.

Each test inserts an attention block at every stage, with windows of 8×8 to limit the cost on the largest feature maps,
and checks that

- *identical*: the output on random images is bitwise identical;
- *keys kept*: the state-dict keys of the network are the same, in the same order;
- *output learns*: in the first training step, gradients reach the output projection of every block that affects the
  output of the network;
- *attention learns*: after one step, gradients reach the other parameters of these blocks;
- *removed*: after `remove_`, every module, hook and tensor is the same object, and the output is bitwise identical.

*Layout* is the order of the axes, as an einx expression: `b c h w` is a feature map, and `b (1 + h w) c` are tokens
with one class token. *Refused* gives the reason for a stage without a block. At a stage that is *not read*, the output
of the network does not depend on the feature map, as in the last block of a ViT whose head uses the class token only.

<details markdown="1">
<summary>Results by family</summary>

{table}

</details>
"""

CHECKS = ("identical", "keys kept", "output learns", "attention learns", "removed")
HEADER = ("library", "family", "model", "size", "layout", "sites", *CHECKS, "seconds", "refused")


@dataclass
class Row:
    library: str
    family: str
    model: str
    size: int = 0
    layout: str = ""
    stages: int = 0
    sites: int = 0
    read: int = 0
    #: results by name in CHECKS
    checks: dict = field(default_factory=dict)
    seconds: float = 0.0
    refusals: list = field(default_factory=list)

    @property
    def unharmed(self):
        return all(self.checks.values())

    def cells(self):
        checks = ("yes" if self.checks.get(name) else "**no**" if self.sites else "" for name in CHECKS)
        where = f"`{self.model}`", str(self.size), self.layout, f"{self.sites} of {self.stages}"
        return [self.library, self.family, *where, *checks, f"{self.seconds:.0f}", "; ".join(self.refusals)]


def parameters(library, name):
    if library == "torchvision":
        return int(torchvision.models.get_model_weights(name).DEFAULT.meta["num_params"])
    try:
        with torch.device("meta"):
            return sum(p.numel() for p in make(library, name).parameters())
    except Exception:  # some need more than their name: another package, an argument
        return float("inf")


def make(library, name):
    return timm.create_model(name) if library == "timm" else create_network(f"torchvision:{name}")


def families():
    """Library, family and the names of its models."""
    for module in list_modules():
        # Without the small models of timm's own tests, and the models that other packages register.
        names = [name for name in list_models(module=module) if not name.startswith("test_")]
        if timm.model_entrypoint(names[0]).__module__.startswith("timm."):
            yield "timm", module, names
    by_module = {}
    for name in torchvision.models.list_models(module=torchvision.models):
        builder = torchvision.models.get_model_builder(name)
        by_module.setdefault(builder.__module__.rpartition(".")[2], []).append(name)
    yield from (("torchvision", module, names) for module, names in by_module.items())


def as_after_training(model):
    """Change parameters that are zero or constant at initialization, as branches, scales and heads of many networks."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() < 2 or not tensor.any():
                tensor += 0.1 * torch.randn(tensor.shape, generator=generator)


def block(channels, **options):
    heads = max(count for count in range(1, 9) if channels % count == 0)
    return va.AttentionBlock2d(channels, heads, pattern=va.Window(8), **options)


def tensors(value):
    """The tensors in an output, however nested."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for item in items for tensor in tensors(item)]


def anatomy(model: nn.Module):
    """Every module and tensor by identity; and each one's hooks, children and mode, or how often it was changed."""
    modules = {
        name: (id(x), list(x._modules), x.training, list(x._forward_hooks), list(x._forward_pre_hooks))
        for name, x in model.named_modules()
    }
    return modules, [(key, id(x), x._version) for key, x in model.state_dict(keep_vars=True).items()]


def insert_everywhere(model, row, shape):
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


@torch.no_grad()
def outputs(model, images):
    return tensors(model(images))


def measure(library, family, names):
    begin = time.perf_counter()
    row = Row(library, family, min(names, key=lambda name: parameters(library, name)))
    torch.manual_seed(0)
    model = make(library, row.model).eval().requires_grad_(False)  # gradients pass through it, to the blocks
    as_after_training(model)
    config = getattr(model, "pretrained_cfg", None) or {}
    default = config.get("input_size", (3, 224, 224))[-1]
    for row.size in [default] if config.get("fixed_input_size") else sorted({min(SMALL, default), default}):
        shape = (1, 3, row.size, row.size)
        images = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        try:
            before = outputs(model, images)
            break
        except Exception as error:
            failure = f"does not run on images alone ({type(error).__name__})"
    else:
        row.refusals.append(failure)
        return row
    original = anatomy(model)
    try:
        insert_everywhere(model, row, shape)
    except va.SiteError as error:
        row.refusals.append(str(error))
    if row.sites:
        row.layout = " and ".join(sorted({record.layout for record in records(model)}))
        row.checks["identical"] = all(map(torch.equal, before, outputs(model, images)))
        own = [key for key in model.state_dict() if key not in inserted_keys(model)]
        row.checks["keys kept"] = own == [key for key, *_ in original[1]]
        row.refusals += [f"{record.site}: not read" for record in records(model) if not record.read]
        inserted = va.inserted_blocks(model).values()
        blocks = [block for block in inserted if block.insertion.read]
        row.read = len(blocks)
        optimizer = torch.optim.Adam([p for block in inserted for p in block.parameters()], lr=1e-3)
        for step in range(2 * bool(blocks)):
            optimizer.zero_grad()
            sum(tensor.abs().mean() for tensor in tensors(model(images[:1]))).backward()
            if step == 0:
                row.checks["output learns"] = all(bool(block.attn.proj.weight.grad.any()) for block in blocks)
            row.checks["attention learns"] = all(bool(block.attn.qkv.weight.grad.any()) for block in blocks)
            optimizer.step()
        va.remove_(model)
        row.checks["removed"] = anatomy(model) == original and all(map(torch.equal, before, outputs(model, images)))
    row.seconds = time.perf_counter() - begin
    return row


def summary(rows):
    lines = []
    for library in ("timm", "torchvision"):
        own = [row for row in rows if row.library == library]
        reached = [row for row in own if 0 < row.stages == row.sites and row.read and row.unharmed]
        maps = sum("w) c" not in row.layout for row in reached)
        lines.append(
            f"- {library}: {len(reached)} of {len(own)} families support attention at every stage, {maps} on feature "
            f"maps and {len(reached) - maps} on tokens."
        )
    return "\n".join(lines)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # small maps
    rows = []
    for library, family, names in families():
        if family in sys.argv[1:] or len(sys.argv) == 1:
            rows.append(measure(library, family, names))
            print(*rows[-1].cells(), sep="  ", flush=True)
    print(summary(rows))
    if len(sys.argv) == 1:
        lines = [HEADER, ["---"] * len(HEADER), *(row.cells() for row in rows)]
        text = HEAD.format(
            timm=timm.__version__,
            torchvision=torchvision.__version__.split("+")[0],
            torch=torch.__version__.split("+")[0],
            threads=torch.get_num_threads(),
            summary=summary(rows),
            table="\n".join(f"| {' | '.join(line)} |" for line in lines),
        )
        TABLE.write_text(text)
    sys.exit(any(row.sites and not row.unharmed for row in rows))
