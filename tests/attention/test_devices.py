"""Devices without a GPU: forward passes on fake CUDA tensors, forward and backward passes on meta tensors.

Both raise an error if a value is read, which would synchronize with a GPU. Operations must not mix devices.
"""

import itertools
from contextlib import nullcontext

import pytest
import timm
import torch
from impls import CPU_IMPLS, PATTERNS, POSITIONS, make_position
from launches import Operations
from torch._subclasses import FakeTensorMode

import vision_attn as va

pytestmark = pytest.mark.slow

SIZE = (6, 7)
#: Blocks, their options, and the shapes of additional inputs.
BLOCKS = (
    (va.Attention2d, {"num_kv_heads": 1, "qk_norm": True}, {}),
    (va.Attention2d, {"qk_norm": "match", "output_gate": True}, {}),
    (va.AttentionBlock2d, {"kv_stride": 2, "key_dim": 4}, {}),
    (va.AttentionBlock2d, {"causal": True, "attn_drop": 0.1, "proj_drop": 0.1}, {}),
    (va.Attention2d, {}, {"mask": (2, 1, 42, 42)}),
    (va.Attention2d, {"context_channels": 8}, {"context": (2, 8, 3, 5)}),
    (va.blocks.TransformerBlock2d, {"position": va.RelPosDecomposed(SIZE)}, {}),
    (va.blocks.StridedAttention2d, {"stride": 2}, {}),
    (va.blocks.AugmentedConv2d, {"out_channels": 24, "key_channels": 8, "value_channels": 8}, {}),
    (va.blocks.AttentionBlock1d, {}, {}),
    (va.blocks.AttentionBlock3d, {"pattern": va.Window(2)}, {}),
)


MODES = {"cuda": FakeTensorMode, "meta": nullcontext}


def one_device(device):
    """Raise an error for operations on tensors of another device."""

    def check(func, inputs, outputs):
        assert {x.device.type for x in inputs + outputs if x.dim()} <= {device}, func

    return Operations(check)


@pytest.mark.parametrize("device", ["cuda", "meta"])
@pytest.mark.parametrize("impl", ["auto", *CPU_IMPLS])
def test_blocks_keep_to_one_device(device, impl):
    crossed = [*itertools.product(["full"], POSITIONS), *zip(PATTERNS, itertools.cycle(POSITIONS), strict=False)]
    # test_gpu_budget.py has all pairs for meta.
    cases = [{"pattern": pattern, "position": make_position(position, pattern, SIZE)} for pattern, position in crossed]
    for block, options, further in (*BLOCKS, *((va.AttentionBlock2d, options, {}) for options in cases)):
        with MODES[device]():
            made = block(16, num_heads=2, impl=impl, device=device, **options)
            rank = {va.blocks.AttentionBlock1d: 1, va.blocks.AttentionBlock3d: 3}.get(block, 2)
            x = torch.empty(2, 16, *(4, *SIZE)[-rank:], device=device, requires_grad=True)
            with one_device(device):
                y = made(x, **{name: torch.ones(shape, device=device) for name, shape in further.items()})
                if device == "meta":  # backward passes require a stream, which a fake GPU does not have
                    y.sum().backward()
                    assert None not in [x.grad, *(p.grad for p in made.parameters())], options


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_blocks_can_be_inserted_into_and_removed_from_networks_without_values(device):
    with MODES[device](), torch.device(device):
        model = timm.create_model("resnet18", layers=(1,) * 4, channels=(8, 8, 8, 16), num_classes=3)
        x, keys = torch.empty(2, 3, 64, 64), list(model.state_dict())
        options = {"num_heads": 2, "example_input": x}
        report = va.insert_(model, stages=[1, 2], position=va.RelPosTable((8, 8)), **options)
        assert {p.device.type for block in va.inserted_blocks(model).values() for p in block.parameters()} == {device}
        assert model(x).shape == (2, 3)
        assert report.model_cost.macs > 0
        va.remove_(model)
        assert list(model.state_dict()) == keys
        va.replace_(model, names="layer2.0.conv2", **options)
        assert model(x).shape == (2, 3)


#: Patterns with other layouts: identities, rearrangements, padding, overlapping keys, and gathered positions.
LAYOUTS = ["full", *PATTERNS[3:8]]


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_capture_copies_nothing_from_one_device_to_another(pattern):
    with FakeTensorMode(), torch.device("cuda"):
        model, x = torch.nn.Sequential(va.AttentionBlock2d(16, 4, pattern=pattern)), torch.empty(2, 16, *SIZE)
        selected = ([(1, 1)], [3, 0], "max") if pattern in LAYOUTS[::2] else ([(0, 0), (3, 4)], [0, 2], None)
        for queries, heads, reduction in ((None, None, None), selected):
            options = {"heads": heads, "reduction": reduction}
            with va.capture(model, queries, **options) as maps, torch.no_grad(), one_device("cuda"):
                model(x)
            count = 1 if reduction else len(heads or range(4))
            assert maps["0.attn"].weights.shape == (2, count, len(queries or range(42)), *SIZE)
