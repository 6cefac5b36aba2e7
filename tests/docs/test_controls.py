"""Control blocks of comparisons, which have no attention."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from controls import ConvBlock2d, NormBlock2d, SqueezeExciteBlock2d

import vision_attn as va

FIRST = {
    ConvBlock2d: {"project.weight", "project.bias"},
    NormBlock2d: {"gate"},
    SqueezeExciteBlock2d: {"gate"},
}


@pytest.mark.parametrize("block", FIRST)
def test_a_new_control_is_the_identity_and_its_gate_or_last_projection_learns_first(block):
    torch.manual_seed(0)
    x = torch.randn(2, 16, 4, 5)
    assert torch.equal(block(16)(x), x)
    assert not torch.equal(block(16, gate_init=0.1)(x), x)
    new = block(16)
    new(x).square().sum().backward()
    moved = {key for key, parameter in new.named_parameters() if parameter.grad is not None and parameter.grad.any()}
    assert moved == FIRST[block]


def test_the_controls_are_of_their_paper_and_have_as_many_parameters():
    for channels in (8, 16, 32, 64, 256, 1024):
        kernels = [partial(ConvBlock2d, kernel_size=side) for side in (None, 3, 13)]
        blocks = (va.AttentionBlock2d, SqueezeExciteBlock2d, *kernels)
        attention, *controls = (sum(p.numel() for p in block(channels).parameters()) for block in blocks)
        # One hidden channel has 2c + 11, 2c + 1 or 2c + 171 parameters.
        assert all(abs(attention - found) <= (2 * channels + 11) / 2 + 1 for found in controls[:-1])
        assert channels < 16 or abs(attention - controls[-1]) <= (2 * channels + 171) / 2 + 1
    block, x = SqueezeExciteBlock2d(8, gate_init=0.5), torch.randn(2, 8, 3, 4)
    y = torch.stack([F.layer_norm(x[:, :, i, j], (8,)) for i in range(3) for j in range(4)], dim=2).unflatten(2, (3, 4))
    hidden = torch.relu(y.mean((2, 3)) @ block.excite.fc1.weight.flatten(1).T + block.excite.fc1.bias)
    scale = torch.sigmoid(hidden @ block.excite.fc2.weight.flatten(1).T + block.excite.fc2.bias)
    torch.testing.assert_close(block(x), x + 0.5 * y * scale[:, :, None, None])
    torch.testing.assert_close(NormBlock2d(8, gate_init=0.5)(x), x + 0.5 * y)
    block = ConvBlock2d(8, kernel_size=None, gate_init=0.5)
    pooled = F.gelu(block.expand(block.norm(x).mean((2, 3), keepdim=True)))  # the global mean replaces the kernel
    torch.testing.assert_close(block(x) - x, (0.5 * block.project(pooled)).expand_as(x))


def test_even_kernels_are_rejected():
    with pytest.raises(ValueError, match=r"kernel_size .*4"):
        ConvBlock2d(8, kernel_size=4)
