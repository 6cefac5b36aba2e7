"""What ``swap_`` knows of each attention layer: swapped, it gives the same numbers and gradients, in float64."""

import importlib
from dataclasses import replace
from functools import partial

import pytest
import timm.models as tm
import torch
from stand_ins import diffusers_attention, natten
from timm.layers import Attention as TimmAttention
from timm.layers import RelPosBias, RelPosMlp
from timm.layers.attention2d import MultiQueryAttentionV2
from timm.layers.attention_pool2d import AttentionPool2d
from timm.layers.halo_attn import HaloAttn
from timm.layers.non_local_attn import NonLocalAttn
from timm.models.beit import Attention as BeitAttention
from timm.models.efficientformer_v2 import Attention2d as TalkingHeads
from timm.models.eva import EvaAttention
from timm.models.nextvit import EfficientAttention
from timm.models.vision_transformer_relpos import RelPosAttention
from torch import nn
from torchvision.models.swin_transformer import ShiftedWindowAttentionV2

import vision_attn as va
from vision_attn.attention.blocks import EXCHANGED
from vision_attn.networks import convert
from vision_attn.networks.convert.table import NO_BLOCK, TABLE, row_of

WINDOW = (2, 3)
N = WINDOW[0] * WINDOW[1]


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def randomised(module):
    """In float64 with random numbers for every parameter, in training mode, in which nothing is kept for later."""
    module = module.double()
    module.train()
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(0.4 * randn(*parameter.shape, seed=seed))
    return module


def results(module, arguments):
    """What it gives, and the slopes of that by the arguments and parameters."""
    arguments = [x.clone().requires_grad_() if isinstance(x, torch.Tensor) else x for x in arguments]
    torch.manual_seed(0)  # the network of a relative position may drop
    y = module(*arguments)
    y = y[0] if isinstance(y, tuple) else y
    inputs = [x for x in (*arguments, *module.parameters()) if isinstance(x, torch.Tensor) and x.requires_grad]
    return [y, *torch.autograd.grad(y, inputs, randn(*y.shape, seed=9), allow_unused=True)]


def assert_swapped(module, *calls, atol=1e-10):
    """By a block that runs once in each call, and gives what the module gave."""
    module = randomised(module)
    expected = [results(module, arguments) for arguments in calls]
    report = va.swap_(module)
    assert len(report) == 1, report
    assert report.swapped[0].difference < 1e-10
    ran = []
    vars(module)[EXCHANGED].block.register_forward_hook(lambda *_: ran.append(1))
    for arguments, before in zip(calls, expected, strict=True):
        for ours, theirs in zip(results(module, arguments), before, strict=True):
            assert (ours is None) == (theirs is None)
            if theirs is not None:
                torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)
    assert len(ran) == len(calls)


swin, swin_v2 = tm.swin_transformer.WindowAttention, tm.swin_transformer_v2.WindowAttention
mask = randn(2, N, N, seed=5)
#: A module, and calls of it.
MODULES = {
    "vit, masked": (lambda: TimmAttention(8, 2), [(randn(2, 5, 8), randn(5, 5, seed=1))]),
    "torch, values of their own width": (
        lambda: nn.MultiheadAttention(8, 2, kdim=5, vdim=3, batch_first=True),
        [(randn(2, 4, 8), randn(2, 6, 5, seed=1), randn(2, 6, 3, seed=2), None, False)],
    ),
    "swin": (lambda: swin(8, 2, window_size=WINDOW), [(randn(4, N, 8),), (randn(4, N, 8), mask)]),
    "swin, head width": (lambda: swin(8, 2, head_dim=3, window_size=WINDOW), [(randn(4, N, 8), mask)]),
    "swin v2": (lambda: swin_v2(8, WINDOW, 2), [(randn(4, N, 8),), (randn(4, N, 8), mask)]),
    "swin v2, pretrained": (
        lambda: swin_v2(8, WINDOW, 2, qkv_bias=False, pretrained_window_size=(4, 4)),
        [(randn(2, N, 8),)],
    ),
    "torchvision swin v2": (
        lambda: ShiftedWindowAttentionV2(8, [2, 3], [1, 1], 2),
        [(randn(2, 4, 6, 8),), (randn(2, 5, 7, 8),)],
    ),
    "beit": (lambda: BeitAttention(8, 2, qkv_bias=True, window_size=WINDOW), [(randn(2, N + 1, 8),)]),
    "beit, shared bias": (
        lambda: BeitAttention(8, 2, qkv_bias=True),
        [(randn(2, 5, 8),), (randn(2, 5, 8), randn(1, 2, 5, 5, seed=2))],
    ),
    "vit_srelpos": (
        lambda: RelPosAttention(8, 2, qk_norm=True, rel_pos_cls=partial(RelPosMlp, window_size=WINDOW)),
        [(randn(2, N, 8),)],
    ),
    "vit_relpos, class token": (
        lambda: RelPosAttention(8, 2, rel_pos_cls=partial(RelPosBias, window_size=WINDOW, prefix_tokens=1)),
        [(randn(2, N + 1, 8),)],
    ),
    "vit_srelpos, shared": (
        lambda: RelPosAttention(8, 2),
        [(randn(2, N, 8),), (randn(2, N, 8), randn(1, 2, N, N, seed=2))],
    ),
    "efficientformer": (lambda: tm.efficientformer.Attention(8, 3, 2, 1.5, resolution=(2, 3)), [(randn(2, 6, 8),)]),
    "caformer": (lambda: tm.metaformer.Attention(8, head_dim=4), [(randn(2, 5, 8),)]),
    "nextvit": (lambda: EfficientAttention(8, head_dim=4), [(randn(2, 8, 8),)]),
    "nextvit, strided": (lambda: EfficientAttention(8, head_dim=4, sr_ratio=2), [(randn(2, 8, 8),)]),
    "visformer": (lambda: tm.visformer.Attention(8, 2, head_dim_ratio=0.5), [(randn(2, 8, 3, 4),)]),
    "fastvit": (lambda: tm.fastvit.Attention(8, 4, qkv_bias=True), [(randn(2, 8, 3, 4),)]),
    "halo": (
        lambda: HaloAttn(12, num_heads=3, dim_head=5, block_size=2, halo_size=1, qkv_bias=True),
        [(randn(2, 12, 4, 6),)],
    ),
    "halo, strided": (
        lambda: HaloAttn(8, num_heads=2, block_size=4, stride=2, avg_down=True, scale_pos_embed=True),
        [(randn(2, 8, 4, 8),)],
    ),
    "multi-query v2": (
        lambda: MultiQueryAttentionV2(8, 6, 3, key_dim=5, value_dim=4),
        [(randn(2, 8, 3, 4),), (randn(2, 8, 3, 4), randn(2, 8, 2, 2, seed=1))],
    ),
    "attention pool": (lambda: AttentionPool2d(8, (3, 4), num_heads=2), [(randn(2, 8, 3, 4),)]),
    "attention pool, map": (
        lambda: AttentionPool2d(8, (3, 4), 5, num_heads=2, qkv_separate=True, pool_type="", class_token=True),
        [(randn(2, 8, 3, 4),)],
    ),
    "non-local": (lambda: NonLocalAttn(16), [(randn(2, 16, 3, 4),)]),
    "diffusers": (lambda: diffusers_attention(8, heads=2, dim_head=3), [(randn(2, 5, 8),)]),
    "diffusers, crossing": (
        lambda: diffusers_attention(8, 6, heads=2, dim_head=4, bias=True, scale_qk=False),
        [(randn(2, 5, 8), randn(2, 4, 6, seed=1))],
    ),
    "diffusers, of its VAE": (
        lambda: diffusers_attention(
            8, heads=2, dim_head=4, bias=True, norm_num_groups=4, residual_connection=True, rescale_output_factor=2.0
        ),
        [(randn(2, 8, 3, 4),), (randn(2, 5, 8),)],
    ),
    "natten 1D": (lambda: natten(8, 2, (3,)), [(randn(2, 7, 8),)]),
    "natten 2D": (
        lambda: natten(8, 2, (3, 4), (1, 2), (2, 1), (True, False)),
        [(randn(2, 7, 6, 8),)],
    ),
    "natten 3D": (lambda: natten(8, 2, (2, 2, 3), (2, 1, 1)), [(randn(2, 4, 3, 5, 8),)]),
}


@pytest.mark.parametrize("name", MODULES)
def test_an_swapped_module_gives_the_same(name):
    make, calls = MODULES[name]
    torch.manual_seed(0)
    assert_swapped(make(), *calls)


def test_a_processor_that_is_set_later_serves_itself():
    layer = diffusers_attention(8, heads=2, dim_head=4)
    va.swap_(layer)
    x = torch.randn(1, 3, 8)
    layer.set_processor(lambda attn, hidden_states, **others: 2 * hidden_states)
    torch.testing.assert_close(layer(x), 2 * x)


REFUSALS = {
    "timm.models.levit.Attention": lambda: tm.levit.Attention(8, 4, 2, resolution=3),
    "timm.models.efficientformer_v2.Attention2d": lambda: TalkingHeads(8, 4, 2, resolution=3),
    "timm.models.edgenext.CrossCovarianceAttn": lambda: tm.edgenext.CrossCovarianceAttn(8, 2),
    "timm.models.eva.EvaAttention": lambda: EvaAttention(8, 2, scale_norm=False),
}


@pytest.mark.parametrize("path", REFUSALS)
def test_what_no_block_stands_for_is_left_with_a_reason(path):
    report = va.swap_(nn.Sequential(REFUSALS[path]()))
    assert [one.reason for one in report.left] == [NO_BLOCK[path]]
    with pytest.raises(ValueError, match=NO_BLOCK[path][:40]):
        convert.from_layer(REFUSALS[path]())


def test_every_path_is_that_of_a_class():
    for path in {*TABLE, *NO_BLOCK} - {"timm.models.vision_transformer.Attention"}:  # of earlier versions
        module, _, name = path.rpartition(".")
        if module.startswith(("timm.", "torch", "diffusers.")):
            assert isinstance(getattr(importlib.import_module(module), name), type), path


@pytest.mark.parametrize("name", MODULES)
def test_rows_in_a_wrong_order_are_found_out(name, monkeypatch):
    torch.manual_seed(0)
    module = nn.Sequential(MODULES[name][0]())
    path, _, row = row_of(module[0])

    def wrong(module):
        return {name: backwards(x) if name in ("qkv", "kv") else x for name, x in row.weights(module).items()}

    monkeypatch.setitem(TABLE, path, replace(row, weights=wrong))
    (left,) = va.swap_(module).left
    assert "does not compute what it does, outputs have a difference of" in left.reason


def backwards(rows):
    return rows._replace(weight=rows.weight.flip(0), bias=None if rows.bias is None else rows.bias.flip(0))
