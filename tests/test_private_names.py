"""Private names of other packages are in one list, imports register nothing, and modules of users get three names."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from private_names import USES
from small_networks import NarrowResNet
from timm.layers.attention2d import Attention2d
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._pytree import tree_leaves

import vision_attn as va
from vision_attn.networks.convert.swapped import Swapped
from vision_attn.networks.insertion import attributes
from vision_attn.networks.inspection.costs import count_flops
from vision_attn.networks.inspection.network import hook_dicts
from vision_attn.networks.inspection.wrappers import unwrap_model

PACKAGE = Path(va.__file__).parent
#: Documented names: named tuples, the protocol of notebooks, and the function of Python that ends a process.
DOCUMENTED = {"_replace", "_asdict", "_fields", "_make", "_repr_html_", "_repr_png_", "_exit"}
PRIVATE = re.compile(r"_[A-Za-z]\w*")


def private_part(path):
    """Return the part of a dotted name from the first to the last private name; None if it has none.

    >>> private_part("torch._C._functorch.peek"), private_part("torch.nn")
    ('_C._functorch', None)
    """
    parts = path.split(".")
    private = [index for index, part in enumerate(parts) if PRIVATE.fullmatch(part) and part not in DOCUMENTED]
    return ".".join(parts[private[0] : private[-1] + 1]) if private else None


def dotted(node):
    """Return the names of an attribute of an attribute … with dots; other expressions are empty."""
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def candidates(tree):
    """Yield the dotted names in attributes, imports, overridden methods, keyword arguments and strings."""
    inner = {node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    texts = (part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node))
    inner |= {part for part in texts if isinstance(part, ast.Constant)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node not in inner:
            yield dotted(node)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "x" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inner:
            yield node.value


def private_names(tree, own=frozenset()):
    """Return the private names of other packages, and classes that replace the comparison of a built-in class."""
    found = {private_part(path) for path in candidates(tree) if re.fullmatch(r"[\w.]+", path)} - {None}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(getattr(x, "name", "") == "__eq__" for x in node.body):
            bases = [base.id for base in node.bases if getattr(base, "id", "") in ("str", "int", "float")]
            found |= {f"{node.name}({base})" for base in bases}
    return found - own


def test_uses_of_private_names_are_exactly_those_in_the_list():
    trees = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    classes = (node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    own = {x.target.id for node in classes for x in node.body if isinstance(x, ast.AnnAssign)}
    found = {(file, name) for file, tree in trees.items() for name in private_names(tree, own)}
    known = [(use.file, use.name) for use in USES]
    assert sorted(found - {*known}) == [], "use a public name, or list it in private_names.py with a reason and a test"
    assert sorted({*known} - found) == [], "no longer used: remove it from private_names.py"
    assert len(known) == len({*known}) <= 25
    assert all(use.reason and re.search(r"\d", use.versions) for use in USES)
    for file, _, name in (use.test.partition("::") for use in USES):
        tests = ast.parse((Path(__file__).parent / file).read_text()).body
        assert name in [node.name for node in tests if isinstance(node, ast.FunctionDef)]


def test_private_names_of_torch_mean_what_the_package_expects():
    """The error names what a release of torch has changed, before the tests of a feature fail."""
    layer = nn.BatchNorm1d(1)
    handles = [layer.register_forward_pre_hook(print, with_kwargs=True)]
    handles += [layer.register_forward_hook(print, always_call=True)]
    handles += [layer.register_full_backward_pre_hook(print), layer.register_full_backward_hook(print)]
    assert [[*hooks.items()] for hooks in hook_dicts(layer)] == [[(handle.id, print)] for handle in handles]
    x = torch.zeros(1)
    before = x._version
    assert x.add_(1)._version == before + 1
    seen, y = [], torch.ones(1, requires_grad=True) * 2
    y.register_hook(lambda gradient: seen.append(torch._C._current_graph_task_id()))
    y.backward()
    assert seen[0] >= 0 > torch._C._current_graph_task_id()
    assert tree_leaves([x, {"y": (y, 1)}]) == [x, y, 1]
    assert unwrap_model(torch.compile(layer, backend="eager")) is layer
    encoder, tokens = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.ones(1, 5, 8)
    q = torch.ones(1, 2, 5, 4)
    projections, attention = 4 * 8 * 8 * 5, 2 * 8 * 5 * 5
    for run, expected in (
        (lambda: encoder(tokens), projections + attention + 2 * 8 * 16 * 5),
        (lambda: encoder.self_attn(tokens, tokens, tokens, need_weights=False), projections + attention),
        (lambda: nn.functional.scaled_dot_product_attention(q, q, q), attention),
    ):
        with torch.no_grad(), count_flops() as counter:
            run()
        assert counter.get_total_flops() == 2 * expected


GLOBAL_STATE = """
import os, pkgutil, random, signal, sys, threading, warnings
import numpy, timm, torch, torchvision
import torch.utils.flop_counter
from timm.data import auto_augment
from torch.nn.modules import module
from torch.optim import optimizer
from torch.utils.flop_counter import flop_registry
def state():
    tables = [vars(x) for x in (auto_augment, module, optimizer)]
    containers = [value for table in tables for value in table.values() if isinstance(value, dict | list)]
    containers += [flop_registry, warnings.filters, sys.meta_path, sys.path, dict(os.environ), signal.valid_signals()]
    return [
        *map(len, containers), *map(repr, containers), os.getcwd(), torch.get_default_dtype(), torch.get_num_threads(),
        torch.is_grad_enabled(), torch.initial_seed(), random.getstate(), numpy.random.get_state()[2], sys.excepthook,
        sys.displayhook, threading.excepthook, warnings.showwarning, *map(signal.getsignal, signal.valid_signals()),
        torch.autograd.graph.saved_tensors_hooks.__init__, torch.nn.Module.__call__, torch.compiler.set_stance,
    ]
for name in sys.argv[1:]:  # other packages register much
    pkgutil.resolve_name(name)
before = state()
import vision_attn as va
import vision_attn.cli
from vision_attn.recipes import compare, data, demo, explore, export, predict, train
for name in va.__all__:
    getattr(va, name)
changed = [(one, other) for one, other in zip(before, state()) if one != other]
print([(str(one)[:200], str(other)[:200]) for one, other in changed])
"""


@pytest.mark.slow
def test_imports_register_nothing_globally():
    """Tables of timm and torch, hooks, warning filters, the environment, signals and random states are unchanged."""
    nodes = [node for path in PACKAGE.rglob("*.py") for node in ast.parse(path.read_text()).body]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    nodes = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    names |= {f"{node.module}:{alias.name}" for node in nodes for alias in node.names}
    others = sorted(name for name in names if not name.startswith("vision_attn"))
    done = subprocess.run([sys.executable, "-c", GLOBAL_STATE, *others], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_at_most_three_attributes_are_written_on_modules_of_users():
    """Two of them are in one file. The third belongs to the class that a swapped module gets."""
    model = nn.ModuleDict({"attn": Attention2d(8, num_heads=2), "net": NarrowResNet()})
    before = {module: {*vars(module)} for module in model.modules()}
    va.swap_(model["attn"])
    va.insert_(model["net"], names="layer3.0.bn2", num_heads=2, example_input=(1, 3, 96, 96))
    va.replace_(model["net"], names="layer2.0.conv2", num_heads=2, example_input=(1, 3, 96, 96))
    va.freeze_backbone_(model["net"])
    blocks = va.inserted_blocks(model["net"])
    before |= {block: {*vars(type(block)(8, 2))} for block in blocks.values()}
    model["net"].layer3[0].inserted_bn2 = checkpoint_wrapper(blocks["layer3.0.bn2"])
    with va.disabled(model["net"]), va.capture(model["net"]):
        model["net"](torch.rand(1, 3, 96, 96))
    written = {name for module, names in before.items() for name in vars(module).keys() - names}
    assert written == {attributes.RECORD, attributes.SUBSTITUTE, "swapped"}
    assert "swapped" in Swapped.__annotations__
