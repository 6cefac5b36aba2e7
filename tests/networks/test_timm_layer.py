"""Blocks as attention layers in timm's networks."""

import re
from functools import partial

import pytest
import timm
import torch
from reach import as_after_training
from small_networks import copies
from timm.models.byobnet import ByoBlockCfg, ByobNet, ByoModelCfg
from torch import nn

import vision_attn as va


def find_blocks(model, kind=va.AttentionBlock2d):
    return [module for module in model.modules() if isinstance(module, kind)]


NARROW = {"channels": (16, 16, 32, 64)}
#: A network, a function that returns its options for a layer, and the layer. The class can be passed directly.
LAYERS = [
    ("resnet18", lambda layer: {"block_args": {"attn_layer": layer}, **NARROW}, va.AttentionBlock2d),
    ("test_byobnet", lambda layer: {"attn_layer": layer or "", "attn_kwargs": {}}, va.timm_layer(num_heads=4)),
]


@pytest.mark.parametrize(("name", "options", "layer"), LAYERS)
@torch.no_grad()
def test_the_layer_does_not_change_the_output_of_the_network(name, options, layer):
    plain = timm.create_model(name, num_classes=3, **options(None)).eval()
    as_after_training(plain)
    model, x = timm.create_model(name, num_classes=3, **options(layer)).eval(), torch.randn(1, 3, 64, 64)
    missing, unexpected = model.load_state_dict(plain.state_dict(), strict=False)
    blocks = find_blocks(model)
    assert len(blocks) > 3
    assert not unexpected
    assert len(missing) == len(blocks) * len(blocks[0].state_dict())
    assert torch.equal(model(x), plain(x))
    nn.init.normal_(blocks[0].attn.proj.weight, std=0.1)
    assert not torch.equal(model(x), plain(x))
    assert all(torch.equal(again(x), model(x)) for again in copies(model))


def small_botnet(layer, **options):
    config = {"stem_chs": 16, "stem_type": "3x3", "fixed_input_size": True}
    kinds = (("bottle", 1, 32, 1), ("self_attn", 2, 64, 2))
    blocks = tuple(ByoBlockCfg(type=kind, d=d, c=c, s=s, gs=0, br=0.5) for kind, d, c, s in kinds)
    config = ByoModelCfg(blocks=blocks, self_attn_layer=layer, self_attn_kwargs=options, **config)
    return ByobNet(config, num_classes=3, img_size=(16, 32)).eval()


@pytest.mark.parametrize(("options", "kwargs"), [({"num_heads": 4}, {}), ({}, {"num_heads": 4})])
@torch.no_grad()
def test_it_replaces_bottleneck_attention(options, kwargs):
    layer = va.timm_layer(va.blocks.StridedAttention2d, **options)
    model, theirs = small_botnet(layer, **kwargs), small_botnet("bottleneck")
    blocks = find_blocks(model, va.blocks.StridedAttention2d)
    found = [(block.stride, block.attn.position.config) for block in blocks]
    assert found == [(2, va.RelPosDecomposed((4, 8))), (1, va.RelPosDecomposed((2, 4)))]
    names = {"self_attn.": "self_attn.attn.", "pos_embed": "position"}
    state = {re.sub("|".join(names), lambda x: names[x[0]], key): x for key, x in theirs.state_dict().items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert {name.rsplit(".", 2)[1] for name in missing} == {"qkv", "proj"}  # These are the biases and a projection.
    for block in blocks:
        nn.init.zeros_(block.attn.qkv.bias)
        nn.init.zeros_(block.attn.proj.bias)
        nn.init.dirac_(block.attn.proj.weight)
    x = torch.randn(2, 3, 16, 32)
    torch.testing.assert_close(model(x), theirs(x))


@pytest.mark.parametrize("num_heads", [4, 16])  # timm tests layers with 8 channels, which 16 heads do not divide.
def test_it_replaces_squeeze_and_excitation(num_heads):
    layer = va.timm_layer(num_heads=num_heads)
    for kind in (timm.models.EfficientNet, timm.models.MobileNetV3):
        arch = [["ds_r1_k3_s1_e1_c16_se0.25_nre"], ["ir_r2_k3_s2_e4_c32_se0.25"]]
        model = kind(timm.models._efficientnet_builder.decode_arch_def(arch), 3, se_layer=layer)
        assert len(find_blocks(model)) == 3
        assert not any("conv_reduce" in name for name in model.state_dict())
        assert model.eval()(torch.randn(1, 3, 32, 32)).shape == (1, 3)


def strided(channels, *, stride=1, feat_size=None, **options):
    return {"channels": channels, "stride": stride, "feat_size": feat_size, **options}


def test_a_block_receives_the_arguments_that_it_accepts():
    options = {"act_layer": nn.ReLU, "rd_ratio": 0.25, "rd_divisor": 8, "rd_channels": 4, "feat_size": (7, 7)}
    made = va.timm_layer(lambda channels, **options: options, num_heads=4)(16, device="cpu", stride=1, **options)
    assert made == {"num_heads": 4, "device": "cpu"}
    made = va.timm_layer(partial(strided, qkv_bias=False))(16, stride=2, **options, block_size=8)
    assert made == {"channels": 16, "stride": 2, "feat_size": (7, 7), "block_size": 8, "qkv_bias": False}
    with pytest.raises(ValueError, match=r"must have the argument stride.*stride=2"):
        va.timm_layer()(16, stride=2)
