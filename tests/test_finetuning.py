"""Training a network with blocks in it: gates to open, a backbone that stays as it is, and rates by layer."""

import copy
import pickle

import pytest
import timm
import torch
import torchvision
from reach import anatomy, as_after_training
from timm.layers import BatchNormAct2d
from timm.optim import create_optimizer_v2
from timm.optim._param_groups import param_groups_layer_decay, param_groups_weight_decay
from torch import nn

import vision_attn as va
import vision_attn.networks.models
from vision_attn.networks.insertion import (
    freeze_backbone_,
    gates,
    inserted_blocks,
    inserted_keys,
    parameter_groups,
    unfreeze_backbone_,
)

ATTENTION = {"num_heads": 4}


def network(name="resnet20", stages=None, **options):
    """A backbone that has learned something, and blocks in it."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5)
    as_after_training(model)
    stages = stages or ((-2, -1) if name == "resnet20" else (-3, -2))
    va.insert_(model, stages=list(stages), example_input=(1, 3, 64, 64), **{**ATTENTION, **options})
    return model


def images(batch=4):
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def learn(model, epochs=2, steps=1, lr=0.1):
    """A few epochs as people write them: ``model.train()`` at the start of each, evaluation at its end."""
    optimizer = torch.optim.SGD(parameter_groups(model, lr, weight_decay=0.1), momentum=0.9)
    for epoch in range(epochs):
        model.train()
        for step in range(steps):
            x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(10 * epoch + step))
            loss = nn.functional.cross_entropy(model(x), torch.arange(4))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()


def backbone(model):
    return {key: value.clone() for key, value in model.state_dict().items() if key not in inserted_keys(model)}


def changed(model, before):
    now = model.state_dict()
    return {key for key, value in before.items() if not torch.equal(now[key], value)}


# Gates


def test_blocks_without_a_gate_are_passed_over_and_none_at_all_is_refused():
    model = network(stages=(-1,))
    va.insert_(
        model, nn.Conv2d, names="layer1", exact=False, example_input=(1, 3, 64, 64), out_channels=16, kernel_size=1
    )
    assert (len(inserted_blocks(model)), len(gates(model))) == (2, 1)
    # The output gate of plain attention is a convolution, or None: no gate of a residual.
    plain = network(block=va.Attention2d, stages=(-1,), output_gate=True, exact=False)
    with pytest.raises(ValueError, match=r"no gate \(the blocks at 'layer3\.2' have none\)"):
        gates(plain)


def test_a_block_is_closed_and_opened_by_its_gate():
    model = network()
    with torch.no_grad():
        for block in inserted_blocks(model).values():
            block.attn.proj.weight.normal_(std=0.1)
        x = torch.randn(1, 3, 32, 32)
        opened = model.eval()(x)
        for gate in gates(model).values():
            gate.zero_()
        closed = model(x)
        for gate in gates(model).values():
            gate.fill_(1)
        assert torch.equal(model(x), opened)
        va.remove_(model)
        assert torch.equal(model(x), closed)
        assert not torch.equal(opened, closed)


# Freezing


@pytest.mark.parametrize("name", ["resnet20", "regnetx_002"])
def test_a_frozen_backbone_keeps_every_bit_while_its_blocks_learn(name):
    model = network(name)
    sites = set(inserted_blocks(model))
    freeze_backbone_(model)
    before, x = backbone(model), images()
    blocks = {key: value.clone() for key, value in model.state_dict().items() if key in inserted_keys(model)}
    plain = copy.deepcopy(model)
    va.remove_(plain)
    expected = plain.eval()(x)

    model.train()  # a frozen norm in training is torch's in evaluation; what else there is goes with the mode
    assert torch.equal(model(x), copy.deepcopy(model).eval()(x))
    assert all(block.training for block in inserted_blocks(model).values())
    learn(model)
    assert changed(model, before) == set()
    assert changed(model, blocks)
    assert not torch.equal(model.eval()(x), expected)
    assert set(va.inserted_blocks(model)) == sites
    va.remove_(model)
    unfreeze_backbone_(model)
    assert torch.equal(model.eval()(x), expected)


@pytest.mark.parametrize(
    "make", [lambda: nn.InstanceNorm2d(8, track_running_stats=True), lambda: BatchNormAct2d(8, drop_layer=nn.Dropout)]
)
def test_every_norm_with_running_statistics_is_frozen(make):
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), make(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    va.insert_(model, names="0", example_input=(1, 3, 64, 64), **ATTENTION)
    freeze_backbone_(model)
    before = backbone(model)
    learn(model, epochs=1)
    assert changed(model, before) == set()
    model.train()
    assert (model[1].training, getattr(model[1], "drop", model[0]).training) == (False, True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:torch")
def test_a_frozen_model_is_copied_pickled_and_compiled():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
    va.insert_(model, names="2", example_input=(1, 3, 32, 32), **ATTENTION)
    keys = list(model.state_dict())
    freeze_backbone_(model)
    assert list(model.state_dict()) == keys
    x, before = images(), backbone(model)
    expected = copy.deepcopy(model).eval()(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.train()
        assert torch.equal(other(x), expected)
        assert changed(other, before) == set()
        # A copy is thawed by itself, and the model that it is of stays frozen.
        unfreeze_backbone_(other)
        assert other.train()[1].training
        assert not model.train()[1].training
        assert other[0].weight.requires_grad
        assert not model[0].weight.requires_grad
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    compiled.train()
    y = compiled(x)
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    assert changed(model, before) == set()
    assert {key for key, p in model.named_parameters() if p.grad is not None} == inserted_keys(model)


def test_thawing_puts_everything_back():
    model = network().train()
    model.conv1.weight.requires_grad_(False)

    def state():
        attributes = {name: sorted(vars(module)) for name, module in model.named_modules()}
        return anatomy(model), attributes, [p.requires_grad for p in model.parameters()]

    before = state()
    freeze_backbone_(model)
    freeze_backbone_(model, also_train="fc.*")
    freeze_backbone_(model)
    assert state() != before
    unfreeze_backbone_(model)
    assert state() == before
    unfreeze_backbone_(model)
    assert state() == before
    # The mode that was asked for meanwhile is the one it comes back in.
    freeze_backbone_(model)
    model.eval()
    unfreeze_backbone_(model)
    assert not any(module.training for module in model.modules())


def test_what_else_is_trained_is_chosen_by_globs():
    model = network()
    blocks = sum(p.numel() for block in inserted_blocks(model).values() for p in block.parameters())
    assert freeze_backbone_(model) == blocks
    assert freeze_backbone_(model, also_train="fc.*") == blocks + 5 * 65
    before = backbone(model)
    learn(model)
    assert changed(model, before) == {"fc.weight", "fc.bias"}
    # The statistics of a norm are keys like others: they go with a stage that is trained, not with its scales.
    freeze_backbone_(model, also_train=["layer3.*"])
    assert model.train().layer3[0].bn1.training
    freeze_backbone_(model, also_train=["layer3.0.bn1.weight", "layer3.0.bn1.bias"])
    assert not model.train().layer3[0].bn1.training
    assert model.layer3[0].bn1.weight.requires_grad
    everything = sum(p.numel() for p in model.parameters())
    assert unfreeze_backbone_(model) == everything
    with pytest.raises(ValueError, match=r"also_train='head\.\*' matches no parameter"):
        freeze_backbone_(model, also_train=("fc.*", "head.*"))
    va.remove_(model)
    with pytest.raises(ValueError, match="nothing to train when frozen: insert a block"):
        freeze_backbone_(model)
    assert all(p.requires_grad for p in model.parameters())


# Parameter groups


def by_parameter(model, groups, lr=1.0):
    """What each parameter gets: rate and decay."""
    keys = {id(parameter): key for key, parameter in model.named_parameters()}
    found = [
        (keys[id(parameter)], (group.get("lr_scale", 1.0) * group.get("lr", lr), group["weight_decay"]))
        for group in groups
        for parameter in group["params"]
    ]
    assert len(dict(found)) == len(found), "each parameter once"
    return dict(found)


@pytest.mark.parametrize(
    "name", ["resnet18", "convnext_atto", "vit_tiny_patch16_224", "resnet20", "swin_tiny_patch4_window7_224"]
)
def test_groups_are_those_of_timm(name):
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=5)
    found = by_parameter(model, parameter_groups(model, 0.3, weight_decay=0.05))
    names = getattr(model, "no_weight_decay", set)()
    theirs = param_groups_weight_decay(model, 0.05, no_weight_decay_list=names)
    assert found == {key: (0.3, decay) for key, (_, decay) in by_parameter(model, theirs).items()}

    found = by_parameter(model, parameter_groups(model, 0.3, weight_decay=0.05, layer_decay=0.75))
    theirs = by_parameter(model, param_groups_layer_decay(model, 0.05, names, layer_decay=0.75), lr=0.3)
    assert found.keys() == theirs.keys()
    for key, (rate, decay) in theirs.items():
        assert found[key] == (pytest.approx(rate), decay), key


@pytest.mark.parametrize("name", ["resnet18", "convnext_atto"])
def test_blocks_have_a_rate_of_their_own_and_leave_the_backbones_as_they_were(name):
    model = timm.create_model(name, num_classes=5)
    options = {"weight_decay": 0.05, "layer_decay": 0.75}
    before = by_parameter(model, parameter_groups(model, 0.3, **options))
    position = va.RelPosDecomposed(feat_size=8)
    va.insert_(model, stages=[0, 1, 2], example_input=(1, 3, 64, 64), **ATTENTION, position=position)
    found = by_parameter(model, parameter_groups(model, 0.3, attention_lr=2.0, **options))
    blocks = inserted_keys(model)
    assert {key: value for key, value in found.items() if key not in blocks} == before
    assert {key for key in found if key in blocks} == blocks
    assert all(found[key][0] == 2.0 for key in blocks)
    # Of a block, the two projections decay: not its norm, its gate, its biases and its tables of positions.
    decayed = {key.partition("attn.")[2] for key in blocks if found[key][1]}
    assert decayed == {"qkv.weight", "proj.weight"}
    found = by_parameter(model, parameter_groups(model, 0.3, **options))
    assert all(found[key][0] == 0.3 for key in blocks)


def test_scales_and_positions_do_not_decay_whatever_their_shape():
    # LayerScale of torchvision's ConvNeXt is (c, 1, 1), a norm over maps (c, h, w); positions may be convolutions.
    with torch.device("meta"):
        model = torchvision.models.convnext_tiny(num_classes=5)
    found = by_parameter(model, parameter_groups(model, 1.0, weight_decay=0.1))
    assert {decay for key, (_, decay) in found.items() if "layer_scale" in key} == {0.0}
    model = nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.LayerNorm([8, 4, 4]), va.Attention2d(8, 2, position=va.ConditionalPos(3))
    )
    found = by_parameter(model, parameter_groups(model, 1.0, weight_decay=0.1))
    assert {key for key, (_, decay) in found.items() if decay} == {"0.weight", "2.qkv.weight", "2.proj.weight"}
    assert any("position" in key for key in found)


@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda groups: create_optimizer_v2(groups, "lamb")])
def test_optimisers_and_schedules_of_torch_and_timm_take_them(make):
    model = network()
    optimizer = make(parameter_groups(model, 0.1, weight_decay=0.01, attention_lr=0.3, layer_decay=0.5))
    first = [group["lr"] for group in optimizer.param_groups]
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2)
    model(images()).sum().backward()
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([rate / 2 for rate in first])
    # The saved state fits the groups of the same model made anew.
    other = make(parameter_groups(network(), 0.1, weight_decay=0.01, attention_lr=0.3, layer_decay=0.5))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [group["name"] for group in other.param_groups] == [group["name"] for group in optimizer.param_groups]


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (network, {"lr": 0.0}, "lr must be a finite number above 0; got 0.0"),
        (network, {"layer_decay": 0.0}, "layer_decay must be a finite number above 0; got 0.0"),
        (lambda: network().requires_grad_(False), {}, "no parameter to train, all are frozen: call unfreeze_backbone_"),
        (
            lambda: nn.Linear(3, 3),
            {"attention_lr": 0.2},
            "attention_lr applies to inserted blocks, and none is trained",
        ),
        (lambda: nn.Linear(3, 3), {"layer_decay": 0.5}, "layer_decay needs layers, which timm's networks declare"),
    ],
)
def test_groups_that_cannot_be_made_are_refused(model, options, message):
    with pytest.raises(ValueError, match=message):
        parameter_groups(model(), **{"lr": 0.1, **options})
