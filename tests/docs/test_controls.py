"""Control blocks of comparisons, which have no attention."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from border_solver import BorderSolver
from controls import ConvBlock2d, CostVolumeBlock2d, NormBlock2d, SqueezeExciteBlock2d

import vision_attn as va


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


@pytest.mark.parametrize("separate", [False, True])
def test_a_cost_volume_averages_the_values_of_other_positions(separate):
    block, x = CostVolumeBlock2d(8, 2, separate=separate, gate_init=0.5), torch.randn(1, 8, 2, 3)
    y = block.norm(x)
    features, values = (layer(y).flatten(2)[0].T for layer in (block.features, block.value))  # (positions, channels)
    found = torch.zeros(6, 8)
    for head, i in ((head, i) for head in (slice(0, 4), slice(4, 8)) for i in range(6)):
        others = [j for j in range(6) if j != i]
        weights = torch.softmax(14 * F.cosine_similarity(features[i, head], features[:, -8:][others, head]), 0)
        found[i, head] = weights @ values[others, head]
    torch.testing.assert_close(block(x), x + 0.5 * block.proj(found.T.view(1, 8, 2, 3)))


def test_the_costs_of_the_solver_are_ratios_of_gaussian_likelihoods():
    borders = torch.randn(500, 3, dtype=torch.double)
    neighbors = borders @ torch.randn(3, 3, dtype=torch.double) + torch.randn(500, 3, dtype=torch.double) + 1
    solver = BorderSolver(borders, neighbors, ridge=0)
    residual = neighbors - neighbors.mean(0) - (borders - borders.mean(0)) @ solver.weight
    normal = torch.distributions.MultivariateNormal
    one, other = (normal(z.mean(0), z.T.cov(correction=0)) for z in (residual, neighbors))
    predicted = neighbors.mean(0) + (borders[:5] - borders.mean(0)) @ solver.weight
    ratio = one.log_prob(neighbors[None, :5] - predicted[:, None]) - other.log_prob(neighbors[:5])
    constant = one.log_prob(one.mean) - other.log_prob(other.mean)
    torch.testing.assert_close(solver.costs(borders[None, :5], neighbors[None, :5])[0], 2 * (constant - ratio))
