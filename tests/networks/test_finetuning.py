"""Fine-tuning a network with blocks: gates, a frozen backbone, and learning rates by layer."""

import copy
from functools import cache, partial

import pytest
import timm
import torch
from impls import OPTIONS
from reach import anatomy, as_after_training
from small_networks import Net, copied
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, update_bn

import vision_attn as va
from vision_attn.attention.position import PositionEncoding
from vision_attn.networks.insertion.registry import inserted_keys
from vision_attn.networks.inspection.wrappers import unwrap_key

BLOCK = {"num_heads": 4, "example_input": (1, 3, 64, 64)}
SMALL = {"num_heads": 4, "example_input": (1, 3, 32, 32)}
DECAYS = {"weight_decay": 0.05, "layer_decay": 0.75}


def network(name="resnet20"):
    """Return a copy of a backbone with random statistics and inserted blocks, which is created only once."""
    return copy.deepcopy(create_network(name))


@cache
def create_network(name):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5)
    as_after_training(model)
    va.insert_(model, stages=[-2, -1] if name == "resnet20" else [-3, -2], **BLOCK)
    return model


def images(seed=1):
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def learn(model, epochs=2):
    """Train for a few epochs, with ``model.train()`` at the start of each epoch and evaluation at the end."""
    optimizer = torch.optim.SGD(va.parameter_groups(model, 0.1, weight_decay=0.1), momentum=0.9)
    for epoch in range(epochs):
        model.train()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images(epoch)), torch.arange(4)).backward()
        optimizer.step()
        model.eval()


def changed(model, before, blocks=False):
    """Return the keys of the backbone, or of the blocks, whose values have changed."""
    now, own = model.state_dict(), inserted_keys(model)
    return {key for key, value in before.items() if (key in own) == blocks and not torch.equal(now[key], value)}


def test_blocks_and_heads_in_wrappers_are_trained():
    model = network()
    expected = {id(p) for key, p in model.named_parameters() if "inserted" in key or key.startswith("fc.")}
    for path, module in [*model.named_modules()]:
        if path == "fc" or path.endswith(".inserted"):
            model.set_submodule(path, checkpoint_wrapper(module))
    va.freeze_backbone_(model, also_train="fc.*")
    assert {id(p) for p in model.parameters() if p.requires_grad} == expected
    groups = va.parameter_groups(model, 0.1, attention_lr=0.2)
    blocks = {id(p) for block in va.inserted_blocks(model).values() for p in block.parameters()}
    assert {id(p) for group in groups if group["lr"] == 0.2 for p in group["params"]} == blocks


@pytest.mark.parametrize("name", ["resnet20", "regnetx_002"])
def test_a_frozen_backbone_is_bitwise_unchanged_while_its_blocks_train(name):
    model, x = network(name), images()
    sites = list(va.inserted_blocks(model))
    va.freeze_backbone_(model)
    before, plain = copied(model), copy.deepcopy(model)
    va.remove_(plain)
    expected = plain.eval()(x)
    model.train()  # A frozen norm in training equals torch's norm in evaluation; all other modules follow the mode.
    assert torch.equal(model(x), copy.deepcopy(model).eval()(x))
    assert all(block.training for block in va.inserted_blocks(model).values())
    learn(model)
    assert changed(model, before) == set()
    assert changed(model, before, blocks=True)
    assert not torch.equal(model.eval()(x), expected)
    assert list(va.inserted_blocks(model)) == sites
    va.remove_(model)
    va.unfreeze_backbone_(model)
    assert torch.equal(model.eval()(x), expected)


NORMS = [
    lambda: nn.InstanceNorm2d(8, track_running_stats=True),
    lambda: timm.layers.BatchNormAct2d(8, drop_layer=nn.Dropout),
    lambda: nn.BatchNorm2d(8, momentum=None),
    lambda: timm.layers.EvoNorm2dB0(8),
    lambda: nn.utils.parametrizations.spectral_norm(nn.Conv2d(8, 8, 1)),
]


@pytest.mark.parametrize("make", NORMS)
def test_every_norm_with_running_statistics_is_frozen(make):
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), make(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    va.insert_(model, names="0", **SMALL)
    va.insert_(model, nn.BatchNorm2d, names="1", example_input=SMALL["example_input"])  # in the norm, and trained
    va.freeze_backbone_(model)
    before = copied(model)
    learn(model, epochs=1)
    assert changed(model, before) == set()
    model.train()(images())
    assert getattr(model[1], "drop", model[0]).training


def test_names_of_shared_norms_and_statistics_that_are_no_norms():
    run = lambda net, x: net.again(nn.functional.dropout(net.norm(net.conv(x - net.running_mean)), 0.5, net.training))  # noqa: E731
    norm = nn.BatchNorm2d(8)
    model = Net(run, conv=nn.Conv2d(3, 8, 3), norm=norm, again=norm)
    model.register_buffer("running_mean", torch.zeros(1))
    va.insert_(model, names="conv", **SMALL)
    for glob in ("norm.*", "again.*"):
        va.freeze_backbone_(model, also_train=glob)
        assert model.norm.training
        assert not torch.equal(model(images()), model(images()))  # dropout


def test_parameters_that_were_frozen_before_are_not_reported_as_trained():
    model = network().requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        va.freeze_backbone_(model)
    for block in va.inserted_blocks(model).values():
        block.requires_grad_()
    with pytest.raises(ValueError, match=r"also_train='head' matches only .* omit model\.requires_grad_\(False\)"):
        va.freeze_backbone_(model, also_train="head")
    model.fc.requires_grad_()
    va.freeze_backbone_(model, also_train="head")
    assert model.fc.weight.requires_grad


def test_replaced_and_compiled_modules_are_frozen_and_unfrozen_in_copies():
    model = timm.create_model("resnet20", num_classes=5)
    model.conv1 = torch.compile(model.conv1, backend="eager")  # copies of this wrapper have no hooks
    va.replace_(model, names=["layer2.1", "layer3.*.conv2"], example_input=(1, 3, 32, 32))
    va.freeze_backbone_(model, also_train="layer3.1.*")
    va.unfreeze_backbone_(unfrozen := copy.deepcopy(model))
    va.remove_(model)
    assert all(p.requires_grad == key.startswith("layer3.1.") for key, p in model.named_parameters())
    before = copy.deepcopy(model.state_dict())
    model.train()(images())
    updated = changed(model, before)
    assert updated
    assert all(key.startswith("layer3.1.") for key in updated)
    va.unfreeze_backbone_(model)
    va.remove_(unfrozen)
    assert all(p.requires_grad for p in (*model.parameters(), *unfrozen.parameters()))


@pytest.mark.parametrize("momentum", [0.1, None])
def test_update_bn_of_torch_is_refused_because_it_resets_frozen_statistics(momentum):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, momentum=momentum))
    model(images())
    va.insert_(model, names="0", **SMALL)
    va.freeze_backbone_(model)
    with pytest.raises(RuntimeError, match="update_bn"):
        update_bn([images()], AveragedModel(model))
    va.freeze_backbone_(model, also_train="1.*")
    update_bn([images()], AveragedModel(model))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:torch")
def test_a_frozen_model_is_compiled():
    """``test_networks.py`` copies and pickles frozen networks."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
    va.insert_(model, names="2", **SMALL)
    before, x = copied(model), images()
    va.freeze_backbone_(model)
    expected = copy.deepcopy(model).eval()(x)
    torch.compiler.reset()
    y = torch.compile(model, fullgraph=True, backend="eager").train()(x)
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    assert changed(model, before) == set()
    assert {key for key, p in model.named_parameters() if p.grad is not None} == inserted_keys(model)


def test_unfreezing_restores_the_model():
    model = network().train()
    model.conv1.weight.requires_grad_(False)

    def state():
        attributes = {name: sorted(vars(module)) for name, module in model.named_modules()}
        return anatomy(model), attributes, [p.requires_grad for p in model.parameters()]

    before = state()
    for also_train in ((), "fc.*", ()):
        va.freeze_backbone_(model, also_train=also_train)
    assert state() != before
    for _ in range(2):
        va.unfreeze_backbone_(model)
        assert state() == before
    # A norm is restored in the mode that was set most recently.
    va.freeze_backbone_(model)
    model.eval()
    va.unfreeze_backbone_(model)
    assert not any(module.training for module in model.modules())


def test_norms_that_other_code_converts_stay_frozen_in_parts_of_a_network():
    """Lightning converts batch norms at the start of ``fit``; detectors call the stages of their backbone."""
    model = network().train()
    va.freeze_backbone_(model)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model).train()
    before = copied(model)
    model.layer2(model.layer1(torch.randn(1, 16, 8, 8)))
    assert changed(model, before) == set()
    va.unfreeze_backbone_(model)
    model.train()(images())
    assert "layer1.0.bn1.running_mean" in changed(model, before)
    assert all(p.requires_grad for p in model.parameters())


#: Functions that rename the weight of a layer of a residual block.
RENAMES = [
    lambda block: prune.l1_unstructured(block.conv1, "weight", 0.5),
    lambda block: prune.remove(prune.l1_unstructured(block.conv1, "weight", 0.5), "weight"),
    lambda block: nn.utils.weight_norm(block.conv1),
    lambda block: nn.utils.parametrizations.weight_norm(block.conv1),
    lambda block: delattr(block.conv1, "weight"),
    lambda block: setattr(block, "conv1", torch.compile(block.conv1, backend="eager")),
]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("change", RENAMES)
@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_parameters_that_other_code_renames_are_unfrozen(change, again):
    model = network()
    model.conv1.weight.requires_grad_(False)
    model.layer1[0].bn1.weight.requires_grad_(False)
    va.freeze_backbone_(model)
    change(model.layer2[0])
    if again:
        va.freeze_backbone_(model, also_train="fc.*")
    va.unfreeze_backbone_(model)
    frozen = {key for key, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {"conv1.weight", "layer1.0.bn1.weight"}


def test_additional_trained_parameters_are_selected_by_globs():
    model = network()
    blocks = sum(p.numel() for block in va.inserted_blocks(model).values() for p in block.parameters())
    assert va.freeze_backbone_(model) == blocks
    assert va.freeze_backbone_(model, also_train="fc.*") == blocks + 5 * 65
    before = copied(model)
    learn(model)
    assert changed(model, before) == {"fc.weight", "fc.bias"}
    # The statistics of a norm are trained only if their keys match, not with the scales of the norm.
    va.freeze_backbone_(model, also_train=["layer3.*"])
    model.train()(images())
    assert model.layer3[0].bn1.training
    va.freeze_backbone_(model, also_train=["layer3.0.bn1.weight", "layer3.0.bn1.bias"])
    model.train()(images())
    assert not model.layer3[0].bn1.training
    assert model.layer3[0].bn1.weight.requires_grad
    assert va.unfreeze_backbone_(model) == sum(p.numel() for p in model.parameters())
    with pytest.raises(ValueError, match=r"also_train='head\.\*' matches no parameter"):
        va.freeze_backbone_(model, also_train=("fc.*", "head.*"))
    va.remove_(model)
    with pytest.raises(ValueError, match="nothing to train"):
        va.freeze_backbone_(model)
    assert all(p.requires_grad for p in model.parameters())


def by_parameter(model, groups, lr=1.0):
    """Return the learning rate and weight decay of each parameter."""
    keys, found = {id(parameter): key for key, parameter in model.named_parameters()}, {}
    for group in groups:
        rate = group.get("lr_scale", 1.0) * group.get("lr", lr)
        found |= {keys[id(parameter)]: (rate, group["weight_decay"]) for parameter in group["params"]}
    assert len(found) == sum(len(group["params"]) for group in groups), "each parameter once"
    return found


@pytest.mark.parametrize("name", ["resnet20", "convnext_atto", "swin_tiny_patch4_window7_224"])
def test_parameter_groups_equal_those_of_timm(name):
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=5)
    names = getattr(model, "no_weight_decay", set)()
    theirs = by_parameter(model, param_groups_weight_decay(model, 0.05, no_weight_decay_list=names), lr=0.3)
    assert by_parameter(model, va.parameter_groups(model, 0.3, weight_decay=0.05)) == theirs
    theirs = by_parameter(model, param_groups_layer_decay(model, 0.05, names, layer_decay=0.75), lr=0.3)
    found = by_parameter(model, va.parameter_groups(model, 0.3, **DECAYS))
    assert found == {key: (pytest.approx(rate), decay) for key, (rate, decay) in theirs.items()}


def test_blocks_have_a_separate_learning_rate_and_the_backbone_keeps_its_rates():
    model = timm.create_model("convnext_atto", num_classes=5)
    before = by_parameter(model, va.parameter_groups(model, 0.3, **DECAYS))
    va.insert_(model, stages=[0, 1, 2], **BLOCK, position=va.RelPosDecomposed(feat_size=8))
    groups, blocks = va.parameter_groups(model, 0.3, attention_lr=2.0, **DECAYS), inserted_keys(model)
    found = by_parameter(model, groups)
    assert {key: value for key, value in found.items() if key not in blocks} == before
    assert {key: rate for key, (rate, _) in found.items() if key in blocks} == dict.fromkeys(blocks, 2.0)
    found = by_parameter(model, va.parameter_groups(model, 0.3, **DECAYS))
    assert all(found[key][0] == 0.3 for key in blocks)
    # The order is from the stem to the head, followed by the blocks.
    rates = [group["lr"] for group in groups]
    assert rates == sorted(rates)
    assert [group["name"] for group in groups[-2:]] == ["attention, decay", "attention, no decay"]


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, partial(torch.compile, backend="eager")])
def test_parameters_in_wrapped_stages_keep_their_groups(wrap):
    model = timm.create_model("convnext_atto", num_classes=5)
    va.insert_(model, stages=1, num_heads=2, position=va.RelPosTable(feat_size=8))
    before = by_parameter(model, va.parameter_groups(model, 0.3, **DECAYS))
    model.stages[1] = wrap(model.stages[1])
    found = by_parameter(model, va.parameter_groups(model, 0.3, **DECAYS))
    assert {unwrap_key(key): group for key, group in found.items()} == before


def test_scales_and_positions_of_any_shape_have_no_weight_decay():
    # torchvision's LayerScale is (c, 1, 1), a norm may have the shape (c, h, w), and positions may be convolutions.
    attention = va.Attention2d(8, 2, position=va.ConditionalPos(3))
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.LayerNorm([8, 4, 4]), attention)
    model.gamma_1, model.gamma_net = nn.Parameter(torch.ones(1, 8, 1)), nn.Linear(2, 2)
    model.layer_scale, model.weights = nn.Parameter(torch.ones(8, 1, 1)), nn.Parameter(torch.ones(8))
    model.class_token, model.pos_embedding = (nn.Parameter(torch.ones(1, n, 8)) for n in (1, 5))  # of torchvision
    found = by_parameter(model, va.parameter_groups(model, 1.0, weight_decay=0.1))
    decayed = {"0.weight", "2.qkv.weight", "2.proj.weight", "gamma_net.weight"}
    assert {key for key, (_, decay) in found.items() if decay} == decayed
    assert any("position" in key for key in found)


#: A block and its options.
BLOCKS = [
    *(("attention", {**options, "num_heads": 2}) for options in OPTIONS.values()),
    ("attention", {"gate_init": 0.1, "output_gate": True, "groups": 2}),
    *((name, {}) for name in ("LinearAttention2d", "se", "gc", "eca", "cbam")),
    ("TransformerBlock2d", {"qk_norm": "cosine", "position": va.RelPosTable(8)}),
]


@pytest.mark.parametrize(("block", "options"), BLOCKS)
def test_only_weights_of_projections_are_decayed_in_every_block(block, options):
    model = nn.Sequential(nn.Conv2d(3, 16, 1))
    va.insert_(model, block, names="0", example_input=(1, 3, 8, 8), **options)
    found = by_parameter(model, va.parameter_groups(model, 1.0, weight_decay=0.1))
    positions = [path for path, part in model.named_modules() if isinstance(part, PositionEncoding)]
    layers = [path for path, part in model.named_modules() if isinstance(part, nn.Linear | nn.modules.conv._ConvNd)]
    decayed = {f"{path}.weight" for path in layers if not path.startswith(tuple(positions) or ("no position",))}
    assert {key for key, (_, decay) in found.items() if decay} == decayed & found.keys()
    assert found.keys() == dict(model.named_parameters()).keys()


#: Options of va.parameter_groups, and the message of the error.
WRONG_GROUPS = [
    ({"lr": 0.0}, "lr .* above 0, got 0.0"),
    ({"lr": 1.0, "weight_decay": -1}, "weight_decay must be a number, at least 0, got -1"),
    ({"attention_lr": 0.2}, "attention_lr"),
    ({"layer_decay": 0.5}, "layer_decay .*Linear"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_GROUPS)
def test_invalid_parameter_groups_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        va.parameter_groups(nn.Linear(3, 3), **{"lr": 0.1, **options})
