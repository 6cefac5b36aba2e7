"""Requirements of timm for registered networks, adapted from timm's tests/test_models.py."""

import copy
from math import ceil

import pytest
import timm
import torch

import vision_attn as va
from vision_attn.networks import models
from vision_attn.networks.insertion.registry import keys_by_site


def image(model, batch=1):
    """Return random images of the network's size, but at most 64 pixels per side."""
    channels, *size = model.pretrained_cfg["input_size"]
    return torch.randn(batch, channels, *(min(side, 64) for side in size))


def make(name, **options):
    torch.manual_seed(0)
    return timm.create_model(name, **options).eval()


def backward(name):
    model = make(name, num_classes=42, drop_path_rate=0.1).train()
    y = model(image(model, 2))
    y.mean().backward()
    assert y.shape == (2, 42)
    assert y.isfinite().all()
    assert [key for key, parameter in model.named_parameters() if parameter.grad is None] == []


@torch.no_grad()
def heads(name):
    model = make(name)
    x, reduction = image(model), model.feature_info[-1]["reduction"]
    assert model.get_classifier() is model.get_submodule(model.pretrained_cfg["classifier"])
    y = model.forward_features(x)
    assert y.shape[:2] == (1, model.num_features)
    sizes = model.pretrained_cfg["input_size"][1:]
    assert model.pretrained_cfg["pool_size"] == tuple(ceil(side / reduction) for side in sizes)
    assert model.forward_head(y, pre_logits=True).shape == (1, model.head_hidden_size)
    for pool, width in (("max", 1), ("avgmax", 1), ("catavgmax", 2), ("avg", 1)):
        model.reset_classifier(5, pool)
        assert model(x).shape == (1, 5), pool
        model.reset_classifier(0)
        assert model(x).shape == (1, model.num_features * width), pool
    pooled = model(x)
    for unpooled in (model, make(name, num_classes=0, global_pool="")):
        unpooled.reset_classifier(0, "")
        assert unpooled(x).shape == y.shape
    torch.testing.assert_close(model(x).mean((2, 3)), pooled)


def features(name):
    plain, model = (make(each, features_only=True) for each in (name.removesuffix("_attention"), name))
    new = {key for key in model.state_dict() if ".inserted." in key}
    assert ({*model.state_dict()} - new, bool(new)) == ({*plain.state_dict()}, name.endswith("_attention"))
    x = torch.randn(1, *model.pretrained_cfg["input_size"])[..., :64, :64]
    maps, info = model(x), model.feature_info
    assert [y.shape[1] for y in maps] == info.channels()
    assert [y.shape[-1] for y in maps] == [ceil(x.shape[-1] / side) for side in info.reduction()]


def checkpointing(name):
    model = make(name).train()
    for block in va.inserted_blocks(model).values():
        torch.nn.init.normal_(block.attn.proj.weight, std=0.1)
    x, again = image(model, 2), copy.deepcopy(model)
    again.set_grad_checkpointing()
    for each in (model, again):
        each(x).square().sum().backward()
    for (key, one), other in zip(model.named_parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-3 * float(one.grad.abs().max()), msg=key)


def layers(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    for coarse in (False, True):
        layer_of = timm.models.group_parameters(model, model.group_matcher(coarse), reverse=True)
        last = max(layer_of.values())
        assert layer_of[f"{model.pretrained_cfg['first_conv']}.weight"] == 0
        assert layer_of[f"{model.pretrained_cfg['classifier']}.weight"] == last >= len(model.feature_info) - coarse
        for site, keys in keys_by_site(model).items():
            beside = [key for key in layer_of if key.startswith(f"{site}.") and key not in keys]
            assert {layer_of[key] for key in keys} == {layer_of[beside[-1]]}, site
            assert layer_of[beside[-1]] < last


CHECKS = [backward, heads, features, checkpointing, layers]
#: Small networks of this library, with and without a block. The classifier of the last one has another name.
CASES = [*((name, check) for name in ("resnet20_attention", "resnet20") for check in CHECKS), ("resnet20_a", heads)]


@pytest.mark.parametrize(("name", "check"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_networks_of_this_library_meet_the_requirements_of_timm(name, check):
    check(name)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in models.__all__ if timm.is_model(name)])
def test_every_registered_network_meets_the_requirements_of_timm(name):
    for check in CHECKS:
        check(name)
