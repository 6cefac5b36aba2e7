"""The blocks agree with attention of torch and timm after copying the weights.

They cover masks, contexts and strides in float64. The tests of the converters compare complete layers.
"""

import pytest
import torch
from small_networks import assert_same_function
from timm.layers.bottleneck_attn import BottleneckAttn
from torch import nn

import vision_attn as va


def randomized(module):
    """Return the module in float64, with random numbers in all parameters."""
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=parameter[0].numel() ** -0.5)
    return module


def random_map(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def make_block(state, *arguments, block=va.Attention2d, **options):
    """Return a block of the library in float64 that loads `state`, with linear weights reshaped to 1×1 kernels."""
    block = block(*arguments, dtype=torch.float64, **options)
    shapes = {key: value.shape for key, value in block.state_dict().items()}
    linear = {key for key, value in state.items() if value.dim() == 2 and len(shapes[key]) == 4}
    state = {key: x.detach()[..., None, None] if key in linear else x.detach() for key, x in state.items()}
    block.load_state_dict(state, strict=True)
    return block


def to_tokens(x):
    return x.flatten(2).mT


def to_map(tokens, size):
    return tokens.mT.unflatten(2, size)


@pytest.mark.parametrize("kind", ["none", "bool", "additive"])
@pytest.mark.parametrize("context_channels", [None, 24, 10])
def test_torchs_multihead_attention_and_its_weights(context_channels, kind):
    width = context_channels or 24
    theirs = randomized(nn.MultiheadAttention(24, 3, kdim=width, vdim=width, batch_first=True))
    bias, proj = theirs.in_proj_bias, {f"proj.{key}": value for key, value in theirs.out_proj.state_dict().items()}
    if width == 24:
        block = make_block({"qkv.weight": theirs.in_proj_weight, "qkv.bias": bias, **proj}, 24, 3)
    else:  # if keys and queries differ in width, torch has three weight matrices, but one bias
        kv = {"kv.weight": torch.cat([theirs.k_proj_weight, theirs.v_proj_weight]), "kv.bias": bias[24:]}
        q = {"q.weight": theirs.q_proj_weight, "q.bias": bias[:24]}
        block = make_block({**q, **kv, **proj}, 24, 3, context_channels=width)
    maps = [random_map(2, 24, 3, 5)] + ([] if context_channels is None else [random_map(2, width, 4, 2)])
    allowed = torch.rand(2, 3, 15, maps[-1][0, 0].numel()) < 0.6
    allowed[..., 0] = True  # torch returns NaN for a query without keys
    added = random_map(*allowed.shape).masked_fill(~allowed, -torch.inf)
    mask = {"none": None, "bool": allowed, "additive": added}[kind]
    # In torch, True means blocked, and masks per head have one axis for batch and heads.
    their_mask = {"none": None, "bool": ~allowed.flatten(0, 1), "additive": added.flatten(0, 1)}[kind]

    def attend(x, context=None, **options):
        source = to_tokens(x if context is None else context)
        return theirs(to_tokens(x), source, source, attn_mask=their_mask, **options)

    def ours(x, context=None):
        return block(x, mask, context)

    assert_same_function(ours, lambda *maps: to_map(attend(*maps, need_weights=False)[0], (3, 5)), *maps)
    found = block.attention_weights(maps[0], mask, context=None if context_channels is None else maps[1])
    torch.testing.assert_close(found, attend(*maps, average_attn_weights=False)[1], rtol=0, atol=1e-12)


def test_timms_bottleneck_attention_with_a_stride():
    size = (2, 6)  # even sides: timm's average pooling drops the border of odd sides
    theirs = randomized(BottleneckAttn(24, feat_size=size, stride=2, num_heads=3, qkv_bias=True))
    tables = {f"position.{name}_rel": getattr(theirs.pos_embed, f"{name}_rel") for name in ("height", "width")}
    state = {"qkv.weight": theirs.qkv.weight, "qkv.bias": theirs.qkv.bias, **tables}
    state["proj.weight"] = torch.eye(24, dtype=torch.float64)  # timm's layer has no output projection
    state = {f"attn.{key}": value for key, value in state.items()}
    block = make_block(state, 24, 3, block=va.blocks.StridedAttention2d, stride=2, feat_size=size, proj_bias=False)
    assert_same_function(block, theirs, random_map(2, 24, *size))
