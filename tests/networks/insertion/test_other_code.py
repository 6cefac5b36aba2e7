"""Blocks in networks that other code changes: aliases, hooks, conversions, optimizers, other axes, shared modules.

Each test stands for a public bug report or a framework's behavior, named in a comment. The outcome is the same output
and a block that still runs, or an error that names the site and the remedy.
"""

import copy
import gc
import warnings
import weakref
from functools import partial

import pytest
import timm
import torch
import torchvision
from reach import anatomy
from small_networks import NarrowResNet, Net, randomize_, residual
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.fx.experimental.optimization import fuse as fuse_graph
from torch.nn.utils import parametrizations, spectral_norm
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models.feature_extraction import create_feature_extractor

import vision_attn as va
from vision_attn.networks import untrained
from vision_attn.networks.insertion.registry import records
from vision_attn.networks.inspection.wrappers import unwrap_key

#: Warnings of this library about small feature maps, and of torch.compile.
pytestmark = pytest.mark.filterwarnings("ignore:attention has little effect", "ignore:The .grad attribute")

IMAGE = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def resnet():
    """Return a narrow ResNet-18 with random values."""
    torch.manual_seed(0)
    return randomize_(NarrowResNet()).eval()


def with_block(names, at="after", **options):
    model = resnet()
    va.insert_(model, names=names, at=at, example_input=IMAGE, **(options or {"gate_init": 1.0}))
    return model, model(IMAGE)


def only_block(model):
    (block,) = va.inserted_blocks(model).values()
    return block


def keys_of_blocks(model):
    return {key for key in model.state_dict() if "inserted" in key}


def aliased(module):
    """Return a network with a module whose output may be its input, which is then changed in place."""

    def run(net, x):
        x = net.stem(x)
        y = net.side(x)
        y += 1
        return x + y

    return Net(run, stem=nn.Conv2d(3, 8, 3), side=module)


def siamese(encoder):
    return Net(lambda net, a, b: net.encoder(a) - net.encoder(b), encoder=encoder).eval()


def sized(*sizes):
    return tuple(torch.rand(1, 3, size, size, generator=torch.Generator().manual_seed(size)) for size in sizes)


#: A pre-activation residual block with an in-place ReLU at the start (torchvision's DenseNet, timm's PreAct blocks).
PRE_ACTIVATION = residual(nn.ReLU(inplace=True), nn.Conv2d(8, 8, 1))
TWO_GRIDS = siamese(timm.create_model("test_vit", dynamic_img_size=True))
AT_GRID = {"names": "encoder.blocks.0", "num_heads": 1, "example_input": sized(64, 96)}
REFUSED = [
    (PRE_ACTIVATION, {"names": "branch.?", "at": "before"}, "^'branch.0' .*in place"),
    (PRE_ACTIVATION, {"block": "cbam", "names": "branch", "at": "before"}, "^'branch.0' .*in place"),
    (aliased(nn.Dropout()), {"names": "side"}, "^'side' .*in place"),
    (aliased(nn.Unflatten(1, (8,))), {"block": "cbam", "names": "side"}, "^'side' .*in place"),
    (nn.Conv2d(3, 8, 1), {"names": "", "layout": "b h w"}, "layout .*got 'b h w'"),
    (TWO_GRIDS, AT_GRID, "'encoder.blocks.0' returns .*17, .* and .*37, .*no feature map of one layout and token grid"),
    (resnet(), {"stage": -1}, "got an unexpected argument .stage.. Did you mean .stages."),
    (resnet(), {"block": "layer3", "stages": -1}, "a class or function .*got 'layer3'"),
    (resnet(), {"stages": -1, "exmaple_input": IMAGE}, "unexpected keyword argument 'exmaple_input'"),
    # mmdetection#9786
    (with_block("layer2.1")[0], {"block": "se", "names": "layer2.1"}, "'layer2.1' already has an inserted block"),
]


@pytest.mark.parametrize(("model", "options", "message"), REFUSED)
def test_unsupported_sites_are_rejected_by_name_without_changes(model, options, message):
    model = copy.deepcopy(model).eval()
    before = anatomy(model)
    with pytest.raises((ValueError, TypeError), match=message):
        va.insert_(model, **{"example_input": IMAGE, **options})
    assert anatomy(model) == before


def test_networks_without_gradients_are_supported():
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), Net(lambda net, x: x.argmax(1))).eval()
    assert va.insert_(model, names="1", example_input=IMAGE).warnings == ()
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(("at", "names"), [("after", "layer2"), ("before", "layer2.1.conv1")])
def test_existing_hooks_receive_the_output_of_the_block(at, names):
    # U-Net skip connections by hooks, as in fastai's DynamicUnet and timm's FeatureHookNet
    model, seen = resnet(), []
    if at == "after":
        for module in (model.layer2, model.layer2[1]):
            module.register_forward_hook(lambda module, args, output: seen.append(output))
    else:
        model.layer2[1].conv1.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    va.insert_(model, names=names, at=at, gate_init=1.0, example_input=IMAGE)
    seen.clear()
    output, taps = model(IMAGE), [*seen]
    assert torch.equal(taps[0], taps[-1])
    va.remove_(model)
    assert not torch.equal(model(IMAGE), output)
    assert not torch.equal(seen[-1], taps[-1])


#: A network of timm, its options, and the size of its images.
FEATURES_ONLY = [
    ("vit_tiny_patch16_224", {"img_size": 32, "depth": 3}, 32),  # FeatureGetterNet
    pytest.param("selecsls42", {}, 64, marks=pytest.mark.slow),  # FeatureListNet, cuts off the last declared module
    ("pit_ti_224", {"img_size": 64}, 64),  # FeatureHookNet
    pytest.param("xception41p", {}, 64, marks=pytest.mark.slow),  # FeatureHookNet, which renames blocks.11 to blocks_11
    ("resnet10t", {"feature_cfg": {"feature_cls": "fx"}}, 32),  # FeatureGraphNet
]


@pytest.mark.parametrize(("name", "options", "size"), FEATURES_ONLY)
def test_features_only_networks_have_the_stages_of_stage_names(name, options, size):
    # timm's own tests of features_only networks
    model, image = timm.create_model(name, features_only=True, **options).eval(), torch.rand(1, 3, size, size)
    before, modules = model(image), [model.get_submodule(path) for path in va.stage_names(model, image)]
    assert len(modules) == len(before)
    if name.startswith("xception"):
        assert modules == [module for module in model.modules() if module._forward_hooks]
    va.insert_(model, stages=-1, num_heads=1, gate_init=1.0, example_input=image)
    assert not torch.equal(model(image)[-1], before[-1])
    va.remove_(model)
    assert all(map(torch.equal, model(image), before))


def exchanging(path, make):
    """Replace a module by a converted module."""
    return lambda model: model.set_submodule(path, make(model.get_submodule(path))) or model


#: Conversions of the norms of a network.
NORM_CONVERSIONS = [
    timm.layers.freeze_batch_norm_2d,
    nn.SyncBatchNorm.convert_sync_batchnorm,
    exchanging("layer2.1.bn2", copy.deepcopy),
    exchanging("layer2.1.bn2", partial(torch.compile, backend="eager")),
]


@pytest.mark.parametrize("convert", NORM_CONVERSIONS)
def test_a_block_at_a_norm_is_kept_when_the_norm_is_converted(convert):
    # timm#1254: freezing batch norms after a module was added
    model, before = with_block("layer2.1.bn2")
    keys, block = keys_of_blocks(model), va.inserted_blocks(model)["layer2.1.bn2"]
    model = convert(model)
    torch.testing.assert_close(model(IMAGE), before)
    assert (only_block(model), keys_of_blocks(model)) == (block, keys)
    va.remove_(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


#: Layers and stages; those in the slow tests are wrapped like the others.
WRAPPED = ["layer2.1.bn2", "layer2"]
WRAPPED += [pytest.param(path, marks=pytest.mark.slow) for path in ("layer2.1.conv1", "layer2.1", "conv1")]


@pytest.mark.parametrize("path", WRAPPED)
@pytest.mark.parametrize("wrap", [partial(torch.compile, backend="eager"), checkpoint_wrapper])
def test_a_block_at_a_wrapped_layer_has_the_keys_of_the_layer_alone(wrap, path, tmp_path):
    model, plain = NarrowResNet().eval(), NarrowResNet().eval()
    plain.load_state_dict(model.state_dict())
    before = model(IMAGE)
    model.set_submodule(path, wrap(model.get_submodule(path)))
    va.insert_(model, names=path, num_heads=2, gate_init=1.0, example_input=IMAGE)
    va.load_adapter_(plain, va.save_adapter(model, tmp_path / "adapter.safetensors"))
    assert {unwrap_key(key) for key in model.state_dict()} == set(plain.state_dict())
    after = model(IMAGE)
    torch.testing.assert_close(plain(IMAGE), after)
    assert not torch.equal(after, before)
    va.remove_(model)
    torch.testing.assert_close(model(IMAGE), before)


def fusing(*names):
    return lambda model: torch.ao.quantization.fuse_modules(model, [[*names]])


#: A site, and a function that replaces its module.
REPLACEMENTS = [
    ("layer2.1.bn2", fusing("layer2.1.conv2", "layer2.1.bn2")),
    ("conv1", fusing("conv1", "bn1")),
    ("relu", fusing("conv1", "bn1", "relu")),
    ("conv1", exchanging("conv1", lambda old: nn.Conv2d(3, 64, 7, stride=2, padding=3))),
    ("layer2.1.conv1", exchanging("layer2", lambda old: NarrowResNet().layer2)),
]


@pytest.mark.parametrize(("names", "convert"), REPLACEMENTS)
@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_replacing_a_module_with_a_block_raises_an_error_with_a_remedy(names, convert):
    # pytorch#187298: fuse_modules and hooks; ultralytics' fuse(); manual replacements as in LoRA
    model = convert(with_block(["layer3.1", names])[0])
    for use in (va.inserted_blocks, va.unfreeze_backbone_, va.freeze_backbone_, lambda model: model(IMAGE)):
        with pytest.raises(va.errors.SiteError, match=f"'{names}' no longer runs.*va.remove_.*before inserting"):
            use(model)
    assert "layer3.1" in [block.site for block in va.remove_(model).blocks]
    assert not keys_of_blocks(model)
    model(IMAGE)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_reparameterized_branches_with_a_block_raise_an_error():
    # timm.utils.reparameterize_model deletes the branches of RepVGG
    model = timm.create_model("repvgg_a0").eval()
    va.insert_(model, names="stages.0.0.conv_kxk.bn", example_input=IMAGE)
    with pytest.raises(va.errors.SiteError, match=r"'stages.0.0.conv_kxk.bn' no longer runs.* removed"):
        timm.utils.reparameterize_model(model)(IMAGE)


def untraceable(channels):
    """A block that torch.fx cannot trace."""
    return Net(lambda net, x: net.conv(x) if x.shape[1] > 1 else x, conv=nn.Conv2d(channels, channels, 1))


UNTRACEABLE = {"block": untraceable, "exact": False}


@pytest.mark.parametrize(("names", "options"), [("layer2.1", {}), ("relu", {}), ("layer2.1", UNTRACEABLE)])
def test_traced_graphs_run_each_block_after_fusion(names, options):
    model, before = with_block(names, **options)
    fused = fuse_graph(model)
    torch.testing.assert_close(fused(IMAGE), before)
    assert keys_of_blocks(fused) == keys_of_blocks(model)
    taps = create_feature_extractor(model, {"layer3": "tap"})(IMAGE)["tap"]
    va.remove_(model)
    assert not torch.equal(create_feature_extractor(model, {"layer3": "tap"})(IMAGE)["tap"], taps)


def test_a_block_is_not_removed_from_a_traced_graph_that_calls_it():
    model, before = with_block("layer2.1")
    traced = torch.fx.symbolic_trace(model)
    with pytest.raises(ValueError, match="no inserted block"):
        va.remove_(traced)
    for network in (traced, model):
        torch.testing.assert_close(network(IMAGE), before)


def test_tracing_a_block_at_a_fused_norm_raises_an_error():
    with pytest.raises(va.errors.SiteError, match=r"cannot be traced by torch.fx.* BatchNorm2d"):
        torch.fx.symbolic_trace(with_block("layer2.1.bn2")[0])


@pytest.mark.parametrize("names", ["conv1", "bn1"])
def test_a_traced_layer_at_the_top_level_contains_its_block(names):
    # torch.fx calls such a layer as one node, without its hooks, so no error can be raised when it is traced.
    model, before = with_block(names)
    graph = torch.fx.symbolic_trace(model)
    assert torch.equal(graph(IMAGE), before)
    assert keys_of_blocks(graph) == keys_of_blocks(model)


@pytest.mark.parametrize("names", ["layer2.1", "layer2.1.bn2"])
def test_blocks_that_were_removed_from_a_part_of_a_network_are_gone(names):
    model = resnet()
    va.insert_(model, names=names, context="conv1", gate_init=0.5)
    assert va.remove_(model.layer2).blocks
    assert torch.equal(model(IMAGE), resnet()(IMAGE))
    assert not va.inserted_blocks(model)
    assert va.freeze_backbone_(model, also_train="fc.*") == sum(p.numel() for p in model.fc.parameters())
    with pytest.raises(ValueError, match="no inserted block"):
        va.remove_(model)


def replicate(model):
    """Return the replica of each module, as in nn.DataParallel: a shallow copy with shared hooks and copied tensors."""
    replicas = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, replica in replicas.items():
        for name, child in module._modules.items():
            replica._modules[name] = replicas.get(child)
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            setattr(replica, name, tensor.clone() if isinstance(tensor, torch.Tensor) else tensor)
    return replicas


@pytest.mark.parametrize("names", ["layer2.1", "layer2.1.bn2", "layer2.1.conv1"])
@pytest.mark.parametrize("at", ["after", "before"])
def test_replicas_of_data_parallel_run_the_block_with_their_tensors(names, at):
    model, before = with_block(names, at)
    replicas = replicate(model)
    assert torch.equal(replicas[model](IMAGE), before)
    replicas[only_block(model)].gate.data.zero_()  # the block of the replica, not of the model
    assert not torch.equal(replicas[model](IMAGE), before)
    assert torch.equal(model(IMAGE), before)


@pytest.mark.parametrize("names", ["layer2.1", "layer2.1.bn2"])
def test_a_module_in_place_of_a_block_runs_instead(names):
    # PEFT and FSDP put a wrapper in place of a module; after merging, PEFT puts a trained copy there.
    model, before = with_block(names)
    record = records(model)[0]
    owner, _, child = record.block_path.rpartition(".")
    block = only_block(model)
    other = copy.deepcopy(block)
    nn.init.zeros_(other.gate)
    setattr(model.get_submodule(owner), child, other)
    assert not torch.equal(model(IMAGE), before)
    assert (only_block(model), records(model)) == (other, (record,))
    setattr(model.get_submodule(owner), child, block)
    assert torch.equal(model(IMAGE), before)
    assert only_block(model) is block
    setattr(model.get_submodule(owner), child, other)
    va.remove_(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not keys_of_blocks(model)


@pytest.mark.parametrize("make", [resnet, lambda: nn.Sequential(nn.Conv2d(3, 8, 3, stride=4), nn.ReLU())])
def test_a_wrapper_that_still_calls_the_layer_of_a_block_keeps_the_block(make):
    """PEFT wraps a layer at the top level, which contains its block."""
    peft, model = pytest.importorskip("peft"), make().eval()
    site = next(name for name, module in model.named_modules() if isinstance(module, nn.Conv2d))
    va.insert_(model, names=site, num_heads=1, gate_init=1.0, example_input=IMAGE)
    block, expected = only_block(model), model(IMAGE)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=[site])).eval()
    torch.testing.assert_close(adapted(IMAGE), expected)
    assert va.inserted_blocks(model) == {f"{site}.base_layer": block}
    nn.init.zeros_(block.gate)
    assert not torch.allclose(adapted(IMAGE), expected)
    assert (adapted.merge_and_unload(), va.inserted_blocks(model)) == (model, {site: block})
    va.remove_(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_code_that_calls_parts_of_a_network_has_the_documented_effects():
    """The table of calls in docs/insert.md: promptable segmentation models and detectors call parts of a network."""
    model, _ = with_block("layer2.1")
    x = model.layer1(model.maxpool(model.relu(model.bn1(model.conv1(IMAGE)))))
    with va.disabled(model):
        without = model.layer2(x)
    assert not torch.equal(model.layer2(x), without)
    assert torch.equal(model.layer2[1].forward(model.layer2[0](x)), without)  # no hooks
    model.layer2[1] = resnet().layer2[1]
    assert torch.equal(model.layer2[1](model.layer2[0](x)), without)  # neither the network nor layer2 is called
    for call in (lambda: model(IMAGE), lambda: model.layer2(x), lambda: va.inserted_blocks(model)):
        with pytest.raises(va.errors.SiteError, match=r"'layer2.1' no longer runs"):
            call()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*deprecated", "ignore::torch.jit.TracerWarning", "ignore:.*side effects happened")
@pytest.mark.parametrize("options", [{}, {"context": "0.stem"}])
def test_blocks_stored_in_the_parent_are_compiled_and_exported(options):
    model = nn.Sequential(residual(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))).eval()
    va.insert_(model, names="0.branch.1", num_heads=2, gate_init=1.0, example_input=IMAGE, **options)
    assert "0.inserted_branch_1.gate" in model.state_dict()
    before = model(IMAGE)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(IMAGE), before)
        for strict in (False, True):
            torch.testing.assert_close(torch.export.export(model, (IMAGE,), strict=strict).module()(IMAGE), before)
        torch.testing.assert_close(torch.jit.trace(model, IMAGE)(IMAGE), before)


@pytest.mark.parametrize("normalize", [parametrizations.spectral_norm, parametrizations.weight_norm, spectral_norm])
@pytest.mark.parametrize("block", [None, "se", "gc"])
def test_normalized_zero_weights_raise_an_error_with_a_remedy(normalize, block):
    # Self-Attention-GAN#31: spectral normalization of every layer
    model = nn.Sequential(nn.Conv2d(3, 16, 3, stride=3), nn.ReLU()).eval()
    va.insert_(model, block, names="1", example_input=IMAGE)
    layers = [x for x in only_block(model).modules() if isinstance(x, nn.modules.conv._ConvNd)]
    assert [normalize(layer) for layer in layers if not layer.weight.any()]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"spectral_norm or weight_norm.*gate_init=0"):
            model(IMAGE)
    va.remove_(model)
    # The remedy is gate_init=0: the gate learns first.
    va.insert_(model, names="1", gate_init=0.0, example_input=IMAGE)
    normalize(only_block(model).attn.proj)
    model(IMAGE).square().sum().backward()
    gate = only_block(model).gate
    assert gate.grad.isfinite().all()
    assert gate.grad.any()


def train(model, optimizer, steps=12, step=None):
    for _ in range(steps):
        optimizer.zero_grad()
        model(IMAGE).square().sum().backward()
        (step or optimizer.step)()


def train_without_a_warning(*args, **options):
    with warnings.catch_warnings(action="error"):
        train(*args, **options)


def late(optimizer_class=torch.optim.SGD, names="0", **options):
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=3), nn.ReLU(), nn.Flatten(), nn.Linear(800, 2))
    optimizer = optimizer_class(model.parameters(), lr=1e-3, **options)
    va.insert_(model, names=names, num_heads=2, example_input=IMAGE)
    return model, optimizer


def test_check_optimizer_lists_the_blocks_that_an_optimizer_lacks():
    model, optimizer = late()
    with pytest.raises(ValueError, match="blocks at '0'"):
        va.check_optimizer(model, optimizer)
    va.check_optimizer(model, [optimizer, torch.optim.SGD(only_block(model).parameters(), 0.1)])
    va.check_optimizer(model, torch.optim.SGD(va.parameter_groups(model, lr=0.1)))
    va.freeze_backbone_(model)
    only_block(model).requires_grad_(False)
    va.check_optimizer(model, optimizer)


@pytest.mark.parametrize(("names", "sites", "fused"), [("0", "'0'", True), ("[01]", "'0', '1'", None)])
def test_one_warning_lists_the_blocks_that_an_existing_optimizer_does_not_update(names, sites, fused):
    # fastai's Learner and mmengine's runner create the optimizer before callbacks and hooks run
    model, optimizer = late(torch.optim.AdamW, names, fused=fused)
    with pytest.warns(UserWarning, match=f"does not contain the blocks at {sites}: .*va.check_optimizer") as found:
        train(model, optimizer)
    assert len(found) == 1
    train_without_a_warning(model, optimizer)


#: Number of steps between updates of the network, and of the block: together, accumulated, frozen, rare.
@pytest.mark.parametrize(("network", "block"), [(1, 1), (8, 8), (1, None), (1, 8)])
def test_trained_and_frozen_blocks_raise_no_warning(network, block):
    model, optimizer = late()
    own, steps = torch.optim.SGD(only_block(model).parameters(), 1e-3), iter(range(1, 1000))
    if block is None:
        only_block(model).requires_grad_(False)

    def step():
        number = next(steps)
        for every, one in ((network, optimizer), (block, own)):
            if every and number % every == 0:
                one.step()

    train_without_a_warning(model, optimizer, steps=30, step=step)


def test_optimizer_checks_ignore_copies_and_keep_no_network_alive():
    model, optimizer = late()
    assert not _global_optimizer_post_hooks
    copied = copy.deepcopy(model)
    train_without_a_warning(copied, torch.optim.SGD(copied.parameters(), 1e-3))
    seen = [weakref.ref(part) for part in (model, *model.parameters())]
    del model, optimizer
    gc.collect()
    assert [part() for part in seen] == [None] * len(seen)
    assert untrained.MAX_MISSED_UPDATES < 12


#: A forward pass, its convolution, the shape of its images, and the layout of the feature map.
AXES = [
    # frames or slices (b, t, c, h, w) in the batch of a network for images: audioset_tagging_cnn#32
    (lambda net, x: net.conv(x.flatten(0, 1)).mean((2, 3)), nn.Conv2d(3, 16, 3), (2, 3, 3, 8, 8), "b c h w"),
    # slices (d, c, h, w) of one volume
    (lambda net, x: net.conv(x.transpose(0, 1)[None]).mean(2), nn.Conv3d(1, 16, 3), (6, 1, 8, 8), "b c t h w"),
]


@pytest.mark.parametrize(("run", "conv", "shape", "layout"), AXES)
def test_layout_determines_the_axes_of_a_feature_map(run, conv, shape, layout):
    model, x = Net(run, conv=conv).eval(), torch.randn(shape)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        before = model(x)
    with pytest.raises(va.errors.SiteError, match="layout="):
        va.insert_(model, names="conv", example_input=x)
    (block,) = va.insert_(model, names="conv", layout=layout, impl="bmm", example_input=x).blocks
    assert block.target.layout == layout
    with FlopCounterMode(display=False) as with_block, torch.no_grad():
        assert torch.equal(model(x), before)
    assert block.cost.macs == (with_block.get_total_flops() - counter.get_total_flops()) // 2 // len(x)
    nn.init.normal_(only_block(model).attn.proj.weight)
    assert not torch.equal(model(x), before)
    va.remove_(model)


#: Two clips of different length in a list (SlowFast; VidSitu#18), the last of which the forward removes; a dictionary.
CLIPS = [
    (lambda net, x: net.conv(x.pop()).mean() + x[0].mean(), [torch.rand(1, 3, 2, 8, 8), torch.rand(1, 3, 8, 8, 8)]),
    (lambda net, x: net.conv(x.pop("x").sub_(0.5)), {"x": torch.rand(1, 3, 8, 8, 8)}),
]


@pytest.mark.parametrize(("take", "example"), CLIPS)
def test_the_example_input_is_not_changed(take, example):
    before, model = copy.deepcopy(example), Net(take, conv=nn.Conv3d(3, 8, 1)).eval()
    assert len(va.insert_(model, names="conv", num_heads=2, example_input=(example,)).blocks) == 1
    torch.testing.assert_close(example, before, rtol=0, atol=0)


def test_integer_images_are_captured_and_calls_without_images_are_rejected():
    def run(net, x, state=None):
        return net.attention(net.conv((x if isinstance(x, torch.Tensor) else torch.zeros(1, 3, 8, 8)) / 255))

    model = Net(run, conv=nn.Conv2d(3, 8, 1), attention=va.AttentionBlock2d(8, 2))
    with va.capture(model, queries=[(0, 0)]) as maps:
        model(torch.zeros(1, 3, 8, 8, dtype=torch.uint8), torch.ones(1, 5))  # a vector of numbers is not an image
    assert maps["attention.attn"].image_size == (8, 8)
    with pytest.raises(ValueError, match="images as tensors"), va.capture(model):
        model("nothing")


#: An encoder, a site, and the sizes of both images.
ENCODERS = [
    (lambda: nn.Sequential(resnet(), nn.Flatten()), "0.layer2", (32, 48)),
    (lambda: timm.create_model("test_vit", dynamic_img_size=True), "blocks.0", (64, 64)),
]


@pytest.mark.parametrize(("make", "site", "sizes"), ENCODERS)
def test_a_block_in_a_shared_encoder_runs_in_each_call(make, site, sizes):
    model, images = siamese(make()), sized(*sizes)
    before = model(*images)
    report = va.insert_(model, names=f"encoder.{site}", num_heads=1, example_input=images)
    assert torch.equal(model(*images), before)
    assert report.macs >= 2 * va.insert_(make(), names=site, num_heads=1, example_input=images[0]).macs
    if "layer2" in site:
        assert len(va.insert_(model, dry_run=True, example_input=images).blocks) == 5


#: A network, and the prefix of the keys of its classifier.
CLASSIFIERS = [
    (lambda: timm.create_model("convnext_atto"), "head.fc"),
    (lambda: timm.create_model("levit_128s"), "head"),  # two classifiers
    (torchvision.models.resnet18, "fc"),
]


@pytest.mark.parametrize(("make", "head"), CLASSIFIERS)
def test_head_is_the_classifier_that_the_model_declares(make, head):
    with torch.device("meta"):
        model = make()
    va.freeze_backbone_(model, also_train="head")
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all(name.startswith(head) for name in trained)
    with pytest.raises(ValueError, match=f"also_train='nothing.*'.* classifier .*'{head}"):
        va.freeze_backbone_(model, also_train="nothing.*")
