"""Without a GPU to hand: forwards on tensors that only say they are on one, and backwards on tensors without values.

Of a tensor that says it is on a GPU no value can be looked at, which is what would make the program wait for the GPU;
and nothing may be on another device than the map is, nor be copied from one to another.
"""

from contextlib import nullcontext

import pytest
import timm
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import vision_attn as va

SIZE = (6, 7)
IMPLS = ("auto", *va.IMPLS)
GLOBAL = ("full", "rows")
PATTERNS = (*GLOBAL, va.Window(3), va.Window(4, shift=2), va.Grid(3), va.Halo(3, 1), va.Neighborhood(3))
POSITIONS = (None, va.RelPosDecomposed, va.RelPosTable, va.AbsPos, va.Rope2d(), va.ConditionalPos(3), va.SinCos())
#: Options in which a block differs, and what its forward takes besides the map.
BLOCKS = {
    "attention, grouped heads": (va.Attention2d, {"num_kv_heads": 1, "qk_norm": True}, {}),
    "cosine logits, gated output": (va.Attention2d, {"qk_norm": "cosine", "output_gate": True}, {}),
    "pooled keys": (va.AttentionBlock2d, {"kv_stride": 2, "key_dim": 4}, {}),
    "causal, with dropout": (va.AttentionBlock2d, {"causal": True, "attn_drop": 0.1, "proj_drop": 0.1}, {}),
    "masked": (va.Attention2d, {}, {"mask": (2, 1, 42, 42)}),
    "another map": (va.Attention2d, {"context_channels": 8}, {"context": (2, 8, 3, 5)}),
    "transformer": (va.TransformerBlock2d, {"position": va.RelPosDecomposed(SIZE)}, {}),
    "strided": (va.StridedAttention2d, {"stride": 2}, {}),
    "augmented": (va.AugmentedConv2d, {"out_channels": 24, "key_channels": 8, "value_channels": 8, "num_heads": 2}, {}),
    "one axis": (va.AttentionBlock1d, {}, {}),
    "three axes": (va.AttentionBlock3d, {"pattern": va.Window(2)}, {}),
}


class Apart(TorchDispatchMode):
    """Refuses operations that bring a tensor from one device to another, or make one on a device that is not meant."""

    def __init__(self, device):
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        tensors = (x for x in tree_leaves((args, kwargs, output)) if isinstance(x, torch.Tensor) and x.dim())
        assert {x.device.type for x in tensors} <= {self.device}, func
        return output


def placed(position, pattern):
    """A position; of tables that of the map, or of the window where they are for that."""
    if not isinstance(position, type):
        return position
    return position(SIZE if pattern in GLOBAL or position is va.AbsPos else None)


def run(device, block, options, further):
    """A block is made and run on a device, and back where tensors have no values at all."""
    made = block(16, **{"num_heads": 2, **options}, device=device)
    rank = {va.AttentionBlock1d: 1, va.AttentionBlock3d: 3}.get(block, 2)
    x = torch.empty(2, 16, *(4, *SIZE)[-rank:], device=device, requires_grad=True)
    more = {name: torch.ones(shape, device=device) for name, shape in further.items()}
    with Apart(device):
        y = made(x, **more)
        if device == "meta":  # which the engine has no stream for on a GPU that is not there
            y.sum().backward()
            assert x.grad.shape == x.shape
            assert all(p.grad is not None for p in made.parameters())


def on(device):
    return FakeTensorMode() if device == "cuda" else nullcontext()


@pytest.mark.parametrize("device", ["cuda", "meta"])
@pytest.mark.parametrize("impl", IMPLS)
def test_patterns_positions_and_implementations_keep_to_one_device(device, impl):
    crossed = [(pattern, position) for pattern in PATTERNS for position in POSITIONS]
    if impl != "auto":  # each pattern and each position once
        crossed = [*((pattern, None) for pattern in PATTERNS), *(("full", position) for position in POSITIONS)]
    with on(device):
        for pattern, position in crossed:
            options = {"impl": impl, "pattern": pattern, "position": placed(position, pattern)}
            run(device, va.AttentionBlock2d, options, {})


@pytest.mark.parametrize("device", ["cuda", "meta"])
@pytest.mark.parametrize("case", BLOCKS)
def test_blocks_of_every_kind_keep_to_one_device(device, case):
    block, options, further = BLOCKS[case]
    with on(device):
        for impl in IMPLS:
            run(device, block, {**options, "impl": impl}, further)


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_blocks_go_into_networks_without_values_and_come_out(device):
    with on(device), torch.device(device):
        model = timm.create_model("resnet18")
        keys = list(model.state_dict())
        report = va.insert_(model, stages=[-2, -1], position=va.RelPosTable((14, 14)))
        assert {p.device.type for block in va.inserted(model).values() for p in block.parameters()} == {device}
        assert model(torch.empty(2, 3, 224, 224)).shape == (2, 1000)
        va.remove_(model)
        assert report.whole.multiply_adds == 1_814_073_344
        assert list(model.state_dict()) == keys
        va.replace_(model, names="layer4.1.conv2")
        assert model(torch.empty(2, 3, 224, 224)).shape == (2, 1000)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_capture_copies_nothing_from_one_device_to_another(pattern):
    with FakeTensorMode(), torch.device("cuda"):
        model, x = nn.Sequential(va.AttentionBlock2d(16, 4, pattern=pattern)), torch.empty(2, 16, *SIZE)
        for queries, heads, reduce in ((None, None, None), ([(0, 0), (3, 4)], [0, 2], None), ([(1, 1)], [3, 0], "max")):
            with va.capture(model, queries, heads=heads, reduce=reduce) as maps, torch.no_grad(), Apart("cuda"):
                model(x)
            (found,) = maps.values()
            count = 1 if reduce else len(heads or range(4))
            assert found.weights.shape == (2, count, len(queries or range(42)), *SIZE)
