"""Blocks in the places that timm's own networks keep for attention."""

import copy
import pickle
from functools import partial

import pytest
import timm
import torch
from reach import as_after_training
from timm.models._efficientnet_builder import decode_arch_def
from timm.models.byobnet import ByoBlockCfg, ByobNet, ByoModelCfg
from timm.models.mobilenetv3 import MobileNetV3
from torch import nn

import vision_attn as va
from vision_attn.attention.blocks import StridedAttention2d
from vision_attn.networks.insertion import timm_layer


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def blocks_of(model, kind):
    return [module for module in model.modules() if isinstance(module, kind)]


@pytest.mark.parametrize(
    ("name", "options", "layer"),
    [
        ("resnet18", lambda layer: {"block_args": {"attn_layer": layer}}, timm_layer(num_heads=4)),
        ("resnet18", lambda layer: {"block_args": {"attn_layer": layer}}, va.AttentionBlock2d),  # the class itself
        ("regnetz_b16", lambda layer: {"attn_layer": layer or "", "attn_kwargs": {}}, timm_layer(num_heads=4)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_network_with_the_layer_computes_what_it_does_without(name, options, layer):
    plain = timm.create_model(name, num_classes=3, **options(None)).eval()
    as_after_training(plain)
    model = timm.create_model(name, num_classes=3, **options(layer)).eval()
    missing, unexpected = model.load_state_dict(plain.state_dict(), strict=False)
    blocks = blocks_of(model, va.AttentionBlock2d)
    assert len(blocks) > 3
    assert not unexpected
    assert len(missing) == len(blocks) * len(blocks[0].state_dict())
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
        nn.init.normal_(blocks[0].attn.proj.weight, std=0.1)
        assert not torch.equal(model(x), plain(x))


def test_models_with_it_are_copied_and_pickled():
    layer = pickle.loads(pickle.dumps(timm_layer(va.AttentionBlock2d, num_heads=4, position=va.Rope2d())))
    model = timm.create_model("resnet18", num_classes=3, block_args={"attn_layer": layer}).eval()
    x = torch.randn(1, 3, 32, 32)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(x), model(x))


# --- in the place of a convolution ------------------------------------------------------------------------------------


def small_botnet(layer, **options):
    return ByoModelCfg(
        blocks=(
            ByoBlockCfg(type="bottle", d=1, c=32, s=1, gs=0, br=0.5),
            ByoBlockCfg(type="self_attn", d=2, c=64, s=2, gs=0, br=0.5),
        ),
        stem_chs=16,
        stem_type="3x3",
        fixed_input_size=True,
        self_attn_layer=layer,
        self_attn_kwargs=options,
    )


@pytest.mark.parametrize(
    ("layer", "options"),
    [(timm_layer(StridedAttention2d, num_heads=4), {}), (timm_layer(StridedAttention2d), {"num_heads": 4})],
)
def test_it_takes_the_place_of_bottleneck_attention(layer, options):
    model = ByobNet(small_botnet(layer, **options), num_classes=3, img_size=(16, 32)).eval()
    theirs = ByobNet(small_botnet("bottleneck"), num_classes=3, img_size=(16, 32)).eval()
    first, second = blocks_of(model, StridedAttention2d)
    assert (first.stride, second.stride) == (2, 1)
    assert first.attn.position.config == va.RelPosDecomposed((4, 8))
    assert second.attn.position.config == va.RelPosDecomposed((2, 4))
    state = theirs.state_dict()
    for name in [name for name in state if ".self_attn." in name]:
        ours = name.replace("self_attn.", "self_attn.attn.").replace("pos_embed", "position")
        state[ours] = state.pop(name)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert {name.rsplit(".", 2)[1] for name in missing} == {"qkv", "proj"}  # the biases, and a projection
    for block in (first, second):
        nn.init.zeros_(block.attn.qkv.bias)
        nn.init.zeros_(block.attn.proj.bias)
        nn.init.dirac_(block.attn.proj.weight)
    x = torch.randn(2, 3, 16, 32)
    with torch.no_grad():
        torch.testing.assert_close(model(x), theirs(x))


# --- in the place of squeeze-and-excitation ---------------------------------------------------------------------------


@pytest.mark.parametrize("num_heads", [4, 16])  # 16 does not divide the 8 channels that timm tries a layer with
def test_it_takes_the_place_of_squeeze_and_excitation(num_heads):
    layer = timm_layer(num_heads=num_heads)
    model = timm.create_model("efficientnet_b0", num_classes=3, se_layer=layer).eval()
    blocks = blocks_of(model, va.AttentionBlock2d)
    assert len(blocks) == 16
    assert not any("conv_reduce" in name for name in model.state_dict())
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 3)

    blocks = decode_arch_def([["ds_r1_k3_s1_e1_c16_se0.25_nre"], ["ir_r2_k3_s2_e4_c32_se0.25"]])
    model = MobileNetV3(blocks, num_classes=3, se_layer=layer).eval()
    assert len(blocks_of(model, va.AttentionBlock2d)) == 3
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 3)


# --- what it is told --------------------------------------------------------------------------------------------------


class Recorder(nn.Module):
    def __init__(self, channels, **words):
        super().__init__()
        self.words = {"channels": channels, **words}


class StridedRecorder(Recorder):
    def __init__(self, channels, *, stride=1, feat_size=None, **words):
        super().__init__(channels, stride=stride, feat_size=feat_size, **words)


def test_a_block_is_told_what_it_can_use():
    told = {"act_layer": nn.ReLU, "rd_ratio": 0.25, "rd_divisor": 8, "rd_channels": 4, "feat_size": (7, 7)}
    made = timm_layer(Recorder, num_heads=4)(16, device="cpu", dtype=torch.float64, stride=1, **told)
    assert made.words == {"channels": 16, "num_heads": 4, "device": "cpu", "dtype": torch.float64}
    words = timm_layer(partial(StridedRecorder, qkv_bias=False))(16, stride=2, **told, block_size=8).words
    new = {"device": None, "dtype": None}
    assert words == {"channels": 16, "stride": 2, "feat_size": (7, 7), "block_size": 8, "qkv_bias": False, **new}
    with pytest.raises(ValueError, match=r"block must take stride, as timm_layer\(StridedAttention2d, …\) does"):
        timm_layer()(16, stride=2)
