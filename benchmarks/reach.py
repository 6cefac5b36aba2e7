"""Compatibility of `va.insert_` with networks: a block at every stage of the smallest model of each family.

python benchmarks/reach.py                # writes a section of docs/performance.md, in about 15 minutes on two cores
python benchmarks/reach.py convnext swin  # prints the rows of these families
"""

import sys
import time
import warnings
from dataclasses import dataclass, field

import timm
import torch
import torchvision
from page_sections import PERFORMANCE, collapsed, markdown, write_section
from timm.models import list_models, list_modules
from torch import Tensor, nn

import vision_attn as va
from vision_attn.networks.insertion.registry import inserted_keys, records
from vision_attn.networks.models import create_model
from vision_attn.text import did_you_mean

#: Side of the images for models that accept any size: 2×2 positions at a stride of 32.
SMALL = 64

#: Checks and their meaning.
CHECKS = {
    "identical": "The output on random images is bitwise identical after the insertion.",
    "keys kept": "The state-dict keys of the network and their order do not change.",
    "output gradients": "In the first training step, the output projection of every block that affects the output of "
    "the network has gradients.",
    "attention gradients": "In the second step, the other parameters of these blocks have gradients.",
    "removed": "`remove_` restores every module, hook and tensor, and the output is bitwise identical.",
}
#: Columns of the table and their meaning.
COLUMNS = {
    "library": "",
    "family": "",
    "model": "The smallest model of the family.",
    "size": "Height and width of the images.",
    "layout": "Order of the axes, as an einx expression: `b c h w` is a feature map, and `b (1 + h w) c` are tokens "
    "with one class token.",
    "stages": "Stages with a block, and all stages.",
    **CHECKS,
    "seconds": "Time of the test.",
    "notes": "Reasons for stages without a block. At an unused stage, the output of the network does not depend on the "
    "feature map, as in the last block of a ViT whose head uses only the class token.",
}
HEADER = tuple(COLUMNS)


@dataclass
class Row:
    """Results of the smallest model of a family."""

    library: str
    family: str
    model: str
    #: Side of the images.
    size: int = 0
    layout: str = ""
    #: Number of stages, of stages with a block, and of blocks that affect the output of the network.
    stages: int = 0
    sites: int = 0
    used: int = 0
    #: Results by their names in `CHECKS`.
    checks: dict = field(default_factory=dict)
    seconds: float = 0.0
    #: Reasons for stages without a block, and stages that do not affect the output.
    notes: list = field(default_factory=list)

    @property
    def passed(self):
        return all(self.checks.values())

    def cells(self):
        checks = ("yes" if self.checks.get(name) else "**no**" if self.sites else "" for name in CHECKS)
        where = f"`{self.model}`", str(self.size), self.layout, f"{self.sites} of {self.stages}"
        return [self.library, self.family, *where, *checks, f"{self.seconds:.0f}", "; ".join(self.notes)]


def create_network(name: str) -> nn.Module:
    """Create a network with random weights from a timm name, or from a torchvision name after ``torchvision:``."""
    from torchvision.models import get_model, list_models

    library, _, wanted = name.rpartition(":")
    if library != "torchvision":
        return create_model(name)
    if wanted not in list_models():
        raise ValueError(f"model: {name!r} does not exist.{did_you_mean(wanted, list_models())}")
    # Without this option, some of torchvision's networks issue a warning about their initialization.
    options = {"init_weights": False} if wanted in ("googlenet", "inception_v3") else {}
    return get_model(wanted, weights=None, **options)


def parameters(library, name):
    if library == "torchvision":
        return int(torchvision.models.get_model_weights(name).DEFAULT.meta["num_params"])
    try:
        with torch.device("meta"):
            return sum(p.numel() for p in make(library, name).parameters())
    except Exception:  # some models need another package or an argument
        return float("inf")


def make(library, name):
    if library == "timm":
        return timm.create_model(name)
    # Without this option, some of torchvision's networks issue a warning about their initialization.
    options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    return torchvision.models.get_model(name, weights=None, **options)


def families():
    """Yield the library, the family and the names of its models."""
    for module in list_modules():
        # Small models for the tests of timm, and models registered by other packages, are excluded.
        names = [name for name in list_models(module=module) if not name.startswith("test_")]
        if timm.model_entrypoint(names[0]).__module__.startswith("timm."):
            yield "timm", module, names
    by_module = {}
    for name in torchvision.models.list_models(module=torchvision.models):
        builder = torchvision.models.get_model_builder(name)
        by_module.setdefault(builder.__module__.rpartition(".")[2], []).append(name)
    yield from (("torchvision", module, names) for module, names in by_module.items())


def as_after_training(model):
    """Add noise to parameters that are zero or constant at initialization, such as biases, scales and zeroed heads."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() < 2 or not tensor.any():
                tensor += 0.1 * torch.randn(tensor.shape, generator=generator)


def block(channels, **options):
    heads = max(count for count in range(1, 9) if channels % count == 0)
    return va.AttentionBlock2d(channels, heads, pattern=va.Window(8), **options)


def tensors(value):
    """Return the tensors in an output, which may be nested."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for item in items for tensor in tensors(item)]


def anatomy(model: nn.Module):
    """Return the identity, children, mode and hooks of each module, and the identity and version of each tensor."""
    modules = {
        name: (id(x), list(x._modules), x.training, list(x._forward_hooks), list(x._forward_pre_hooks))
        for name, x in model.named_modules()
    }
    return modules, [(key, id(x), x._version) for key, x in model.state_dict(keep_vars=True).items()]


def insert_everywhere(model, row, shape):
    stages = list(dict.fromkeys(va.stage_names(model, shape)))
    row.stages = len(stages)
    try:
        row.sites = len(va.insert_(model, block, names=stages, example_input=shape).blocks)
        return
    except va.errors.SiteError:
        pass  # insert at each stage separately to find those without a feature map
    for stage in stages:
        try:
            row.sites += len(va.insert_(model, block, names=[stage], example_input=shape).blocks)
        except va.errors.SiteError as error:
            row.notes.append(str(error).partition(". Choose")[0])


@torch.no_grad()
def outputs(model, images):
    return tensors(model(images))


def measure(library, family, names):
    start = time.perf_counter()
    row = Row(library, family, min(names, key=lambda name: parameters(library, name)))
    torch.manual_seed(0)
    model = make(library, row.model).eval().requires_grad_(False)  # only the blocks have gradients
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
            failure = f"does not run with images as its only input ({type(error).__name__})"
    else:
        row.notes.append(failure)
        return row
    original = anatomy(model)
    try:
        insert_everywhere(model, row, shape)
    except va.errors.SiteError as error:
        row.notes.append(str(error))
    if row.sites:
        row.layout = " and ".join(sorted({record.target.layout for record in records(model)}))
        row.checks["identical"] = all(map(torch.equal, before, outputs(model, images)))
        kept = [key for key in model.state_dict() if key not in inserted_keys(model)]
        row.checks["keys kept"] = kept == [key for key, *_ in original[1]]
        row.notes += [f"{record.site}: unused" for record in records(model) if not record.target.used]
        inserted = va.inserted_blocks(model).values()
        blocks = [block for block in inserted if block.insertion.target.used]
        row.used = len(blocks)
        optimizer = torch.optim.Adam([p for block in inserted for p in block.parameters()], lr=1e-3)
        for step in range(2 * bool(blocks)):
            optimizer.zero_grad()
            sum(tensor.abs().mean() for tensor in tensors(model(images[:1]))).backward()
            if step == 0:
                row.checks["output gradients"] = all(bool(block.attn.proj.weight.grad.any()) for block in blocks)
            row.checks["attention gradients"] = all(bool(block.attn.qkv.weight.grad.any()) for block in blocks)
            optimizer.step()
        va.remove_(model)
        row.checks["removed"] = anatomy(model) == original and all(map(torch.equal, before, outputs(model, images)))
    row.seconds = time.perf_counter() - start
    return row


def format_section(rows):
    """Format the numbers of families by library, and the collapsed rows of all families."""
    summary = [("library", "families", "supported at every stage", "on feature maps", "on tokens")]
    for library in (timm, torchvision):
        name, version = library.__name__, library.__version__.split("+")[0]
        of_library = [row for row in rows if row.library == name]
        supported = [row for row in of_library if 0 < row.stages == row.sites and row.used and row.passed]
        maps = sum("w) c" not in row.layout for row in supported)
        counts = len(of_library), len(supported), maps, len(supported) - maps
        summary.append((f"{name} {version}", *map(str, counts)))
    columns = markdown([("column", "meaning"), *((name, text) for name, text in COLUMNS.items() if text)], left=(0, 1))
    results = markdown([HEADER, *(row.cells() for row in rows)], left=range(len(HEADER)))
    details = collapsed("Results of all families", f"{columns}\n\n{results}")
    return f"{markdown(summary)}\n\n{details}"


def main():
    warnings.simplefilter("ignore")  # warnings about small feature maps
    rows = []
    for library, family, names in families():
        if family in sys.argv[1:] or len(sys.argv) == 1:
            rows.append(measure(library, family, names))
            print(*rows[-1].cells(), sep="  ", flush=True)
    if len(sys.argv) == 1:
        torch_version, threads = torch.__version__.split("+")[0], torch.get_num_threads()
        conditions = f"Measured with torch {torch_version} on a CPU (threads: {threads})."
        write_section(PERFORMANCE, "reach", f"{conditions}\n\n{format_section(rows)}")
    sys.exit(any(row.sites and not row.passed for row in rows))


if __name__ == "__main__":
    main()
