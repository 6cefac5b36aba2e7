"""Host time of a forward pass, counted: all Python frames and ATen operations, relative to timm's layer.

On a GPU and on small feature maps, a forward pass takes as long as Python and the dispatcher of torch need. Counts do
not depend on the machine; ``benchmarks/speed.py`` and ``benchmarks/gpu_session.py`` measure times.
"""

import sys
import traceback

import pytest
import torch
from launches import Operations, Record, fake_attention
from timm import layers as timm_layers
from torchvision.models.swin_transformer import ShiftedWindowAttention

import vision_attn as va

#: Modules of torch that replace a kernel on the meta device. Their frames do not run on a GPU.
META = ("_meta_registrations", "_prims", "_refs", "_decomp", "_python_dispatch", "launches.py", "_library")
SIDE = 4


def layers():
    """Return for each row a layer, its peer, and the number of frames and operations that the layer may have more."""
    table, timm = va.RelPosTable(), timm_layers.Attention2d(64, num_heads=4)
    relative = timm_layers.bottleneck_attn.BottleneckAttn(64, feat_size=(SIDE, SIDE), num_heads=4, dim_head=16)
    relative = torch.nn.Sequential(relative, torch.nn.Conv2d(64, 64, 1))  # BottleneckAttn has no output projection
    return {
        "full": (va.Attention2d(64, 4), timm, 10, 13),
        "decomposed": (va.Attention2d(64, 4, position=va.RelPosDecomposed((SIDE, SIDE))), relative, 1, -2),
        "window": (va.Attention2d(64, 4, pattern=va.Window(2), position=table), swin(0), 34, 5),
        "shifted window": (va.Attention2d(64, 4, pattern=va.Window(2, shift=1), position=table), swin(1), 36, -49),
        "rotary": (va.Attention2d(64, 4, position=va.Rope()), timm, 23, 22),
        "neighborhood": (va.Attention2d(64, 4, pattern=va.Neighborhood(3)), timm, 31, 46),
        "block": (va.AttentionBlock2d(64, 4), timm, 33, 16),
    }


def swin(shift):
    layer = ShiftedWindowAttention(64, [2, 2], [shift, shift], 4)
    return lambda x: layer(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def count_frames(function):
    """Count the Python frames of a call, except those that replace kernels on the meta device."""
    frames = -1  # the call of the function itself

    def profiler(frame, event, _):
        nonlocal frames
        if event == "call":
            files = [caller.f_code.co_filename for caller, _ in traceback.walk_stack(frame)]
            frames += not any(name in file for file in files for name in META)

    sys.setprofile(profiler)
    try:
        function()
    finally:
        sys.setprofile(None)
    return frames


def count_operations(function):
    names = []
    with Operations(lambda func, inputs, outputs: names.append(func._schema.name)):
        function()
    return len(names)


def counts(layer, x):
    """Return the frames and ATen operations of a forward pass after the first ones, which fill the caches."""
    for _ in range(2):
        layer(x)
    return count_frames(lambda: layer(x)), count_operations(lambda: layer(x))


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", layers())
def test_a_forward_pass_has_few_frames_and_operations(name, grad):
    layer, peer, more_frames, more_operations = layers()[name]
    x = torch.randn(2, 64, SIDE, SIDE, requires_grad=grad)
    with torch.set_grad_enabled(grad):
        (frames, operations), (peer_frames, peer_operations) = counts(layer, x), counts(peer, x)
    assert frames <= peer_frames + more_frames, (frames, peer_frames)
    assert operations <= peer_operations + more_operations, (operations, peer_operations)


def test_a_forward_pass_on_a_gpu_has_few_frames():
    """On the meta device, the layer runs as on a GPU: without the rules for CPUs, and with aligned inputs."""
    x = torch.empty(2, 64, SIDE, SIDE, device="meta", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    found = {}
    for name, (layer, *_) in layers().items():
        with torch.no_grad(), fake_attention(Record()):
            found[name], _ = counts(layer.to("meta", torch.bfloat16), x)
    limits = {"full": 35, "decomposed": 53, "window": 65, "shifted window": 71, "block": 55}
    assert all(found[name] <= limit for name, limit in limits.items()), found
