"""Plans of a block: what they depend on, and inputs for which no plan exists."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from impls import CASES, CPU_IMPLS, make_position
from small_networks import results

import vision_attn as va
from vision_attn.attention.position import PositionBias, PositionEncoding


def layer(**options):
    torch.manual_seed(0)
    return va.Attention2d(16, 2, **options).double().eval()


def images(*shape, seed=0):
    return torch.randn(*(shape or (2, 16, 5, 7)), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def outputs(block, x, *inputs):
    """Return the output, and the gradients of the input and the parameters."""
    return results(lambda x: block(x, *inputs), x, parameters=block.parameters())


def test_a_gate_can_be_added_to_a_block_that_has_a_plan():
    """``test_changes.py`` changes the options that are not modules."""
    used, new = layer(), layer()
    outputs(used, images())
    used.gate = new.gate = torch.nn.Conv2d(16, 16, 1).double()
    torch.testing.assert_close(outputs(used, images()), outputs(new, images()))


def test_the_number_of_plans_is_limited(monkeypatch):
    monkeypatch.setattr("vision_attn.attention.plan.CACHED_PLANS", 3)
    block, kept = layer(), []
    for batch in range(1, 6):
        block(images(batch, 16, 2, 3))
        kept.append(len(block.plans.recent))
    assert kept == [1, 2, 3, 1, 2]


@pytest.mark.parametrize("position", [None, va.Rope(), va.AbsPos(4)], ids=str)
@pytest.mark.parametrize("impl", CPU_IMPLS)
def test_contexts_of_two_sizes_in_one_block(impl, position):
    options = {"context_channels": 16, "impl": impl, "position": position}
    used = layer(**options)
    for size in ((4, 6), (9, 3), (4, 6)):
        inputs = images(), None, images(2, 16, *size)
        torch.testing.assert_close(outputs(used, *inputs), outputs(layer(**options), *inputs))
        with pytest.raises(ValueError, match="mask must broadcast"):
            used(images(), torch.ones(35, 2, dtype=torch.bool), inputs[2])


@dataclass(frozen=True)
class Custom:
    """The configuration of a custom encoding."""

    encoding: type

    def build(self, block, device=None, dtype=None):
        return self.encoding(self)


class Scaled(PositionEncoding):
    """A custom encoding that changes queries and returns no bias."""

    def forward(self, q, k, grouping):
        return 2 * q, k, None


class Distance(PositionBias):
    """A custom bias: minus the distance of query and key in their group."""

    def __init__(self, grouping):
        self.grouping = grouping

    def attn_mask(self, mask):
        query = torch.arange(self.grouping.query_layout.tokens, dtype=torch.float64)
        key = torch.arange(self.grouping.key_layout.tokens, dtype=torch.float64)
        bias = -(query[:, None] - key).abs()[None, None, None]
        return bias if mask is None else torch.where(mask, bias, -torch.inf)


class Alibi(PositionEncoding):
    def forward(self, q, k, grouping):
        return q, k, Distance(grouping)


@pytest.mark.parametrize("name", ["full", "shifted window", "halo", "neighborhood"])
@pytest.mark.parametrize("impl", CPU_IMPLS)
def test_custom_encodings_keep_the_pattern(name, impl):
    options, x = {"pattern": CASES[name].pattern, "impl": impl}, images()
    block = layer(**options)
    weights = block.attention_weights(x)
    doubled = layer(**options, position=Custom(Scaled)).attention_weights(x)
    block.scale = 2 * block.scale
    torch.testing.assert_close(doubled, block.attention_weights(x))
    block = layer(**options, position=Custom(Alibi))
    biased, found = block.attention_weights(x), block(x)
    assert not torch.allclose(biased, weights)
    assert torch.equal(biased > 0, weights > 0)
    v = block.qkv(x)[:, 32:].unflatten(1, (2, 8)).flatten(3).mT
    torch.testing.assert_close(found, block.proj((biased @ v).mT.flatten(1, 2).unflatten(2, (5, 7))))


@pytest.mark.parametrize("scale", [-0.7, 0.0, 1e-8])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"pattern": va.Window(3, shift=1)}], ids=str)
@pytest.mark.parametrize("position", [None, va.RelPosDecomposed, va.RelPosTable], ids=str)
def test_scales_that_are_not_positive(position, options, scale, monkeypatch):
    """The fused kernels multiply their -inf by the scale, so such a scale is multiplied with the queries."""
    position = make_position(position, options.get("pattern", "full"), (5, 7))
    make = partial(layer, scale=scale, position=position, **options)
    expected = outputs(make(impl="bmm"), images())
    for impl in ("sdpa", "einx"):
        torch.testing.assert_close(outputs(make(impl=impl), images()), expected)
    monkeypatch.setattr("vision_attn.attention.dispatch.CHUNKED_DEVICES", ())  # as on a GPU
    torch.testing.assert_close(outputs(make(impl="sdpa"), images()), expected)


@pytest.mark.parametrize("shape", [(0, 16, 5, 7), (2, 16, 0, 7)])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_empty_inputs(name, grad, shape):
    block = layer(pattern=CASES[name].pattern)
    with torch.set_grad_enabled(grad):
        for x in (images(*shape), images(*shape).to(memory_format=torch.channels_last)):
            assert (block(x).shape, va.AttentionBlock2d(16).double()(x).shape) == (shape, shape)
            assert va.blocks.LinearAttention2d(16, 2, impl="einx").double()(x).shape == shape
            with pytest.raises(ValueError, match=r"x must not be empty, got shape \("):
                block.attention_weights(x)
