"""Blocks in networks that other code changes: aliases, hooks, conversions, optimizers, other axes, shared modules.

Each test stands for a public bug report or a framework's behavior, named in a comment. The outcome is the same output
and a block that still runs, or an error that names the site and the remedy.
"""

import copy
import io
import warnings

import pytest
import timm
import torch
import torchvision
from timm.layers import freeze_batch_norm_2d
from torch import nn
from torchvision.models.feature_extraction import create_feature_extractor

import vision_attn as va
from vision_attn.networks.insertion import untrained
from vision_attn.networks.insertion.hooks import HELD, keep_block

pytestmark = pytest.mark.filterwarnings("ignore:little to attend")

IMAGE = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """A residual block that is built from a branch and a function of input and branch."""

    def __init__(self, branch, add=lambda x, y: x + y):
        super().__init__()
        self.stem, self.branch, self.add = nn.Conv2d(3, 8, 3, padding=1), branch, add

    def forward(self, x):
        x = self.stem(x)
        return self.add(x, self.branch(x))


def resnet(seed=0):
    """A ResNet-18 in evaluation mode, with running statistics that matter."""
    torch.manual_seed(seed)
    model = torchvision.models.resnet18().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_var, 0.5, 2)
    return model


def with_block(names, at="after", **options):
    model = resnet()
    va.insert_(model, names=names, at=at, gate_init=1.0, example_input=IMAGE, **options)
    return model, model(IMAGE)


# --- aliasing and unused outputs -------------------------------------------------------------------------------------


def in_place(x):
    x += 1
    return x


class Aliased(nn.Module):
    """A module whose output may be its input, which is then changed in place."""

    def __init__(self, module):
        super().__init__()
        self.stem, self.same = nn.Conv2d(3, 8, 3, padding=1), module

    def forward(self, x):
        x = self.stem(x)
        return x + in_place(self.same(x))


@pytest.mark.parametrize(
    ("model", "options"),
    [
        # a pre-activation residual block whose first ReLU works in place (torchvision's DenseNet, timm's PreAct blocks)
        (
            Block(nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1))),
            {"names": "branch", "at": "before"},
        ),
        (Block(nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(8, 8, 1))), {"names": "branch.0", "at": "before"}),
        (Aliased(nn.Dropout()), {"names": "same"}),
        (Aliased(nn.Identity()), {"names": "same"}),
        (Aliased(nn.Unflatten(1, (8,))), {"names": "same"}),
    ],
)
@pytest.mark.parametrize("block", [None, "cbam"])
def test_a_block_that_would_separate_a_tensor_from_its_alias_is_refused(model, options, block):
    model = copy.deepcopy(model).eval()
    before = model(IMAGE)
    with pytest.raises(va.SiteError, match=f"'{options['names']}.*in place"):
        va.insert_(model, block, example_input=IMAGE, **options)
    assert torch.equal(model(IMAGE), before)


def test_only_the_sites_that_alias_are_named():
    model = Block(nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(8, 8, 1))).eval()
    with pytest.raises(va.SiteError) as error:
        va.insert_(model, names=["branch.0", "branch.1"], at="before", example_input=IMAGE)
    assert "'branch.0'" in str(error.value)
    assert "'branch.1'" not in str(error.value)


class Ignoring(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.relu, self.head = nn.Conv2d(3, 8, 1), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        x = self.stem(x)
        self.relu(x)
        return self.head(x)


def test_a_module_whose_output_is_ignored_takes_no_block():
    with pytest.raises(va.SiteError, match="'relu': the network ignores the output"):
        va.insert_(Ignoring().eval(), names="relu", example_input=IMAGE)


# --- hooks that are older than the block -----------------------------------------------------------------------------


def test_older_hooks_see_the_map_with_the_block():
    # U-Net skip connections by hooks, as fastai's DynamicUnet and timm's FeatureHookNet take them
    seen = []
    model = resnet()
    model.layer2.register_forward_hook(lambda module, args, output: seen.append(output))
    model.layer2[1].register_forward_hook(lambda module, args, output: seen.append(output))
    va.insert_(model, names="layer2", gate_init=1.0, example_input=IMAGE)
    model(IMAGE)
    outer, inner = seen[-2:]
    assert torch.equal(outer, inner)
    with torch.no_grad():
        next(iter(va.inserted_blocks(model).values())).gate.zero_()
        model(IMAGE)
    assert not torch.equal(seen[-1], inner)


def test_an_older_hook_on_the_input_sees_the_block_that_runs_before_the_module():
    seen = []
    model = resnet()
    model.layer2[1].conv1.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    va.insert_(model, names="layer2.1.conv1", at="before", gate_init=1.0, example_input=IMAGE)
    output = model(IMAGE)
    va.remove_(model)
    assert not torch.equal(model(IMAGE), output)
    assert not torch.equal(seen[-1], seen[-2])


@pytest.mark.parametrize(
    ("name", "options", "size"),
    [
        ("resnet10t", {}, 32),  # FeatureListNet
        ("vit_tiny_patch16_224", {"img_size": 32, "depth": 3}, 32),  # FeatureGetterNet
        ("selecsls42", {}, 64),  # FeatureListNet, which cuts off the last declared module
        ("selecsls42", {"feature_cls": "getter"}, 64),
        ("pit_ti_224", {}, 224),  # FeatureHookNet
        ("resnet10t", {"feature_cfg": {"feature_cls": "fx"}}, 32),  # FeatureGraphNet
    ],
)
def test_stages_of_a_features_only_network_are_those_that_stage_names_lists(name, options, size):
    # timm's own tests of features_only networks
    torch.manual_seed(0)
    model, image = timm.create_model(name, features_only=True, **options).eval(), torch.rand(1, 3, size, size)
    before = model(image)
    stages = va.stage_names(model, image)
    assert [model.get_submodule(stage) for stage in stages]
    va.insert_(model, stages=-1, num_heads=1, gate_init=1.0, example_input=image)
    assert not torch.equal(model(image)[-1], before[-1])
    va.remove_(model)
    assert all(map(torch.equal, model(image), before))


# --- modules that other code replaces --------------------------------------------------------------------------------


def freeze(model):
    return freeze_batch_norm_2d(model)


def synchronize(model):
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


def replace_norm(model):
    model.layer2[1].bn2 = copy.deepcopy(model.layer2[1].bn2)
    return model


def compile_norm(model):
    model.layer2[1].bn2 = torch.compile(model.layer2[1].bn2, backend="eager")
    return model


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch.compile
@pytest.mark.parametrize("convert", [freeze, synchronize, replace_norm, compile_norm])
@pytest.mark.parametrize("at", ["branch", "after"])
def test_a_block_at_a_norm_survives_its_conversion(convert, at):
    # timm#1254: freezing batch norms after a module was added
    model, before = with_block("layer2.1" if at == "branch" else "layer2.1.bn2", at)
    keys = {key for key in model.state_dict() if "inserted" in key}
    block = va.inserted_blocks(model)["layer2.1.bn2"]
    model = convert(model)
    torch.testing.assert_close(model(IMAGE), before)
    assert [*va.inserted_blocks(model).values()] == [block]
    assert {key for key in model.state_dict() if "inserted" in key} == keys
    va.remove_(model)
    assert not any(HELD in vars(module) or "__module__" in vars(module) for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def fuse(model, names):
    return torch.ao.quantization.fuse_modules(model, names)


def replace_conv(model):
    model.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3)
    return model


def replace_stage(model):
    model.layer2 = copy.deepcopy(torchvision.models.resnet18().layer2)
    return model


@pytest.mark.parametrize(
    ("names", "convert"),
    [
        ("layer2.1.bn2", lambda model: fuse(model, [["layer2.1.conv2", "layer2.1.bn2"]])),
        ("bn1", lambda model: fuse(model, [["conv1", "bn1", "relu"]])),
        ("conv1", lambda model: fuse(model, [["conv1", "bn1"]])),
        ("conv1", lambda model: fuse(model, [["conv1", "bn1", "relu"]])),
        ("relu", lambda model: fuse(model, [["conv1", "bn1", "relu"]])),
        ("conv1", replace_conv),
        ("layer2.1.conv1", replace_stage),
    ],
)
@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_a_block_whose_module_was_replaced_is_an_error_that_names_the_remedy(names, convert):
    # pytorch#187298: fuse_modules and hooks; ultralytics' fuse(); LoRA-like replacements by hand
    model, _ = with_block(["layer3.1", names])
    model = convert(model)
    for use in (model, va.inserted_blocks):
        with pytest.raises(va.SiteError, match=f"'{names}' is no longer run.*before inserting.*va.remove_"):
            use(IMAGE if use is model else model)
    assert "layer3.1" in [block.site for block in va.remove_(model).blocks]
    assert not [key for key in model.state_dict() if "inserted" in key]
    model(IMAGE)
    assert not any(
        getattr(hook, "func", None) is keep_block for one in model.modules() for hook in one._forward_pre_hooks.values()
    )


def test_reparameterized_branches_with_a_block_in_them_are_an_error():
    # timm.utils.reparameterize_model deletes the branches of RepVGG
    model = timm.create_model("repvgg_a0").eval()
    va.insert_(model, names="stages.0.0.conv_kxk.bn", example_input=IMAGE)
    with pytest.raises(va.SiteError, match=r"'stages.0.0.conv_kxk.bn' is no longer run: the module there was removed"):
        timm.utils.reparameterize_model(model)(IMAGE)


@pytest.mark.parametrize("names", ["layer2.1", "relu", "maxpool", "conv1"])
def test_a_traced_graph_runs_each_block_as_a_node_whatever_is_fused(names):
    from torch.fx.experimental.optimization import fuse

    model, before = with_block(names)
    fused = fuse(model)
    torch.testing.assert_close(fused(IMAGE), before)
    assert {key for key in fused.state_dict() if "inserted" in key} == {
        key for key in model.state_dict() if "inserted" in key
    }
    taps = create_feature_extractor(model, {"layer3": "tap"})(IMAGE)["tap"]
    va.remove_(model)
    assert not torch.equal(create_feature_extractor(model, {"layer3": "tap"})(IMAGE)["tap"], taps)


class Untraceable(nn.Module):
    """A block whose forward depends on its input, which torch.fx cannot trace."""

    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        return self.conv(x) if x.shape[1] > 1 else x


def test_a_block_that_torch_fx_cannot_trace_is_a_node_too():
    model = resnet()
    va.insert_(model, Untraceable, names="layer2.1", exact=False, example_input=IMAGE)
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(IMAGE), model(IMAGE))


@pytest.mark.parametrize(("names", "at"), [("layer2.1", "branch"), ("bn1", "after")])
def test_a_block_at_a_norm_is_not_traced_into_a_graph_that_would_lose_it(names, at):
    model, _ = with_block(names, at)
    with pytest.raises(va.SiteError, match=r"cannot be traced by torch.fx: fusing or dropping the BatchNorm2d"):
        torch.fx.symbolic_trace(model)


def test_the_report_says_to_fuse_first_where_a_block_is_at_a_norm():
    report = va.insert_(resnet(), names="layer2.1", at="branch", example_input=IMAGE)
    assert "'layer2.1.bn2': freeze, fuse and quantize this network before" in str(report)
    assert "freeze, fuse" not in str(va.insert_(resnet(), names="layer2.1", example_input=IMAGE))


def test_copies_pickles_and_replicas_of_a_block_that_its_parent_holds_run_their_own():
    model, before = with_block("layer2.1", "branch")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(other(IMAGE), before)
        with torch.no_grad():
            va.inserted_blocks(other)["layer2.1.bn2"].gate.zero_()
        assert not torch.equal(other(IMAGE), before)
        assert torch.equal(model(IMAGE), before)
    # As nn.DataParallel makes replicas: shallow copies whose children are replicas, and whose hooks are shared.
    replicas = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, other in replicas.items():
        other._parameters = dict(module._parameters)
        other._modules = {name: replicas[child] for name, child in module._modules.items()}
    assert torch.equal(replicas[model](IMAGE), before)
    assert vars(replicas[model.layer2[1].bn2])[HELD] is replicas[va.inserted_blocks(model)["layer2.1.bn2"]]


@pytest.mark.filterwarnings("ignore:.*deprecated", "ignore::torch.jit.TracerWarning")
def test_a_block_that_its_parent_holds_compiles_whole_and_exports():
    torch.manual_seed(0)
    model = nn.Sequential(Block(nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)))).eval()
    va.insert_(model, names="0", at="branch", num_heads=2, gate_init=1.0, example_input=IMAGE)
    assert "0.inserted_branch_1.gate" in model.state_dict()
    before = model(IMAGE)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(IMAGE), before)
        for strict in (False, True):
            torch.testing.assert_close(torch.export.export(model, (IMAGE,), strict=strict).module()(IMAGE), before)
        torch.testing.assert_close(torch.jit.trace(model, IMAGE)(IMAGE), before)


# --- normalized weights ----------------------------------------------------------------------------------------------

NORMALIZATIONS = {
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "spectral_norm, by hooks": nn.utils.spectral_norm,
}


@pytest.mark.parametrize("kind", NORMALIZATIONS)
@pytest.mark.parametrize(("block", "layer"), [(None, "attn.proj"), ("cbam", None), ("se", None), ("gc", None)])
def test_a_normalized_weight_of_zeros_is_an_error_that_names_the_remedy(kind, block, layer):
    # Self-Attention-GAN#31: spectral normalization of every layer
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU()).eval()
    va.insert_(model, block, names="1", example_input=IMAGE)
    (inserted,) = va.inserted_blocks(model).values()
    zeros = [x for x in inserted.modules() if isinstance(x, nn.modules.conv._ConvNd) and not x.weight.any()]
    assert zeros
    for module in zeros:
        NORMALIZATIONS[kind](module)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"spectral_norm and weight_norm turn into NaN.*gate_init=0"):
            model(IMAGE)


@pytest.mark.parametrize("kind", NORMALIZATIONS)
def test_a_normalized_weight_behind_a_gate_of_zero_is_finite_and_learns(kind):
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU())
    va.insert_(model, names="1", gate_init=0.0, example_input=IMAGE)
    (block,) = va.inserted_blocks(model).values()
    NORMALIZATIONS[kind](block.attn.proj)
    model(IMAGE).square().sum().backward()
    assert block.gate.grad.isfinite().all()
    assert block.gate.grad.any()


# --- optimizers that are older than the block ------------------------------------------------------------------------


def train(model, optimizer, steps=12, step=None):
    for _ in range(steps):
        optimizer.zero_grad()
        model(IMAGE).square().sum().backward()
        (step or optimizer.step)()


def classifier():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))


def late(optimizer_class=torch.optim.SGD, **options):
    model = classifier()
    model(IMAGE)
    optimizer = optimizer_class(model.parameters(), lr=1e-3, **options)
    va.insert_(model, names="0", num_heads=2, example_input=IMAGE)
    return model, optimizer


def test_check_optimizer_lists_the_blocks_that_an_optimizer_lacks():
    model, optimizer = late()
    with pytest.raises(ValueError, match="lacks parameters of the blocks at '0'"):
        va.check_optimizer(model, optimizer)
    own = torch.optim.SGD(next(iter(va.inserted_blocks(model).values())).parameters(), 0.1)
    va.check_optimizer(model, [optimizer, own])
    va.check_optimizer(model, torch.optim.SGD(va.parameter_groups(model, lr=0.1)))
    va.freeze_backbone_(model)
    next(iter(va.inserted_blocks(model).values())).requires_grad_(False)
    va.check_optimizer(model, optimizer)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_block_that_an_older_optimizer_does_not_update_is_warned_of_once(kind, options):
    # fastai's Learner and mmengine's runner create the optimizer before callbacks and hooks run
    model, optimizer = late(kind, **options)
    with pytest.warns(UserWarning, match="'0' gets gradients and is not updated.*va.check_optimizer") as found:
        train(model, optimizer)
    assert len(found) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer)


def test_a_custom_optimizer_and_a_compiled_network_are_warned_of_too():
    model, optimizer = late()

    def step():  # as fastai's optimizers, which are not torch's
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter -= 1e-3 * parameter.grad

    with pytest.warns(UserWarning, match="is not updated"):
        train(torch.compile(model, backend="eager"), optimizer, step=step)


@pytest.mark.parametrize("scheme", ["after", "accumulated", "frozen", "in turn"])
def test_a_block_that_is_trained_or_frozen_is_not_warned_of(scheme):
    model, optimizer = late()
    block = next(iter(va.inserted_blocks(model).values()))
    own = torch.optim.SGD(block.parameters(), 1e-3)
    if scheme == "frozen":
        block.requires_grad_(False)
    steps = iter(range(1000))

    def step():
        number = next(steps)
        if scheme != "accumulated" or number % 8 == 7:
            optimizer.step()
            if scheme != "frozen" and (scheme != "in turn" or number % 3 == 2):
                own.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, steps=30, step=step)


def test_copies_of_a_network_are_not_watched_and_the_watch_keeps_no_network_alive():
    import weakref

    model, optimizer = late()
    copied = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(copied, torch.optim.SGD(copied.parameters(), 1e-3))
    seen = [weakref.ref(part) for part in (model, *model.parameters())]
    del model, optimizer
    import gc

    gc.collect()
    assert [part() for part in seen] == [None] * len(seen)
    assert untrained.PATIENCE < 12


# --- axes, inputs and shared modules ---------------------------------------------------------------------------------


class Folded(nn.Module):
    """Frames or slices of ``(b, t, c, h, w)`` in the batch of a network for images (audioset_tagging_cnn#32)."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)

    def forward(self, x):
        return self.conv(x.flatten(0, 1)).unflatten(0, x.shape[:2]).mean((1, 3, 4))


class Spectrogram(nn.Module):
    """``(b, t, mel)`` as an image of one channel."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3)

    def forward(self, x):
        return self.conv(x[:, None]).mean((2, 3))


class Stacked(nn.Module):
    """Slices ``(d, c, h, w)`` of one volume."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(1, 16, 3)

    def forward(self, x):
        return self.conv(x.transpose(0, 1)[None]).mean((2, 3, 4))


@pytest.mark.parametrize(
    ("model", "shape", "layout"),
    [
        (Spectrogram, (2, 20, 12), "b c h w"),
        (Folded, (2, 3, 3, 8, 8), "b c h w"),
        (Stacked, (6, 1, 8, 8), "b c t h w"),
    ],
)
def test_layout_decides_what_the_axes_of_a_map_are(model, shape, layout):
    model, x = model().eval(), torch.randn(shape)
    before = model(x)
    with pytest.raises(va.SiteError, match="layout="):
        va.insert_(model, names="conv", example_input=x)
    report = va.insert_(model, names="conv", layout=layout, example_input=x)
    assert report.blocks[0].layout == layout
    assert torch.equal(model(x), before)
    with torch.no_grad():
        next(iter(va.inserted_blocks(model).values())).attn.proj.weight.normal_()
    assert not torch.equal(model(x), before)


def test_a_layout_that_is_none_is_refused_by_name():
    with pytest.raises(ValueError, match=r"layout must be like 'b c w'.*got 'b h w'"):
        va.insert_(Spectrogram(), names="conv", layout="b h w", example_input=torch.rand(1, 20, 12))


class Pathways(nn.Module):
    """Two clips of different length in a list (SlowFast; VidSitu#18), which the forward overwrites."""

    def __init__(self):
        super().__init__()
        self.slow, self.fast = nn.Conv3d(3, 8, 1), nn.Conv3d(3, 8, 1)

    def forward(self, clips):
        clips[0], clips[1] = self.slow(clips[0]), self.fast(clips[1])
        return sum(clip.mean((2, 3, 4)) for clip in clips)


class Popping(nn.Module):
    """Takes the images out of a dictionary, and normalizes them in place."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 1)

    def forward(self, batch):
        return self.conv(batch.pop("images").sub_(0.5))


@pytest.mark.parametrize(
    ("model", "names", "example"),
    [
        (Pathways, "fast", ([torch.rand(1, 3, 2, 8, 8), torch.rand(1, 3, 8, 8, 8)],)),
        (Popping, "conv", ({"images": torch.rand(1, 3, 8, 8)},)),
    ],
)
def test_the_example_of_the_user_is_left_as_it_is(model, names, example):
    before = copy.deepcopy(example)
    report = va.insert_(model().eval(), names=names, num_heads=2, example_input=example)
    assert len(report) == 1
    torch.testing.assert_close(example, before, rtol=0, atol=0)


class Bytes(nn.Module):
    """Takes images in whole numbers, and numbers alone."""

    def __init__(self):
        super().__init__()
        self.conv, self.attention = nn.Conv2d(3, 8, 1), va.AttentionBlock2d(8, 2)

    def forward(self, x):
        x = x if isinstance(x, torch.Tensor) else torch.zeros(1, 3, 8, 8)
        return self.attention(self.conv(x / 255))


def test_maps_of_images_in_whole_numbers_are_captured_and_a_call_without_images_is_refused_by_name():
    model = Bytes()
    with va.capture(model, queries=[(0, 0)]) as maps:
        model(torch.zeros(1, 3, 8, 8, dtype=torch.uint8))
    assert maps["attention.attn"].image_size == (8, 8)
    with pytest.raises(ValueError, match="called with images as tensors"), va.capture(model):
        model("nothing")


def scaled_in_place(x, y):
    y.mul_(0.2).add_(x)
    return y


@pytest.mark.parametrize(
    ("branch", "add", "end"),
    [
        # nnU-Net's ResEnc: a norm whose output is a view, and an addition in place
        ([nn.Conv2d(8, 8, 3, padding=1), nn.InstanceNorm2d(8)], lambda x, y: y.add_(x), "branch.1"),
        # EDSR and timm's inception_resnet_v2: a scaled branch
        ([nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)], lambda x, y: y * 0.2 + x, "branch.1"),
        ([nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()], lambda x, y: x + y / 2, "branch.1"),
        # timm's nf_regnet and dm_nfnet: a scale in place
        ([nn.Conv2d(8, 8, 3, padding=1)], scaled_in_place, "branch.0"),
        ([nn.Conv2d(8, 8, 3, padding=1)], lambda x, y: torch.add(x, y, alpha=0.2), "branch.0"),
    ],
)
def test_the_branch_of_a_residual_block_is_found_however_it_is_added(branch, add, end):
    torch.manual_seed(0)
    model = nn.Sequential(Block(nn.Sequential(*branch), add)).eval()
    before = model(IMAGE)
    report = va.insert_(model, names="0", at="branch", num_heads=1, example_input=IMAGE)
    assert [block.site for block in report.blocks] == [f"0.{end}"]
    assert torch.equal(model(IMAGE), before)


@pytest.mark.parametrize("name", ["nf_regnet_b0", "dm_nfnet_f0", "inception_resnet_v2"])
@pytest.mark.slow
def test_the_branches_of_timms_scaled_residual_networks_are_found(name):
    model, image = timm.create_model(name).eval(), torch.rand(1, 3, 96, 96)
    before = model(image)
    site = "repeat.0" if "inception" in name else "stages.1.0"
    va.insert_(model, names=site, at="branch", example_input=image)
    assert torch.equal(model(image), before)


class Siamese(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, a, b):
        return self.encoder(a) - self.encoder(b)


@pytest.mark.parametrize("sizes", [(32, 32), (32, 48)])
def test_a_shared_encoder_takes_a_block_that_runs_in_each_call(sizes):
    model = Siamese(nn.Sequential(resnet(), nn.Flatten())).eval()
    images = tuple(torch.rand(1, 3, size, size) for size in sizes)
    before = model(*images)
    report = va.insert_(model, names="encoder.0.layer2", example_input=images)
    assert torch.equal(model(*images), before)
    once = va.insert_(resnet(), names="layer2", example_input=images[0])
    assert report.multiply_adds >= 2 * once.multiply_adds
    assert len(va.inspect_model(model, example_input=images).sites) == 5
    with pytest.raises(ValueError, match=r"batch must be a batch of images.*does not run on it"):
        va.contribution(model, images)


def test_a_token_grid_of_a_shared_encoder_has_one_size():
    encoder = timm.create_model("test_vit", dynamic_img_size=True)
    same = (torch.rand(1, 3, 64, 64), torch.rand(1, 3, 64, 64))
    model = Siamese(encoder).eval()
    before = model(*same)
    va.insert_(model, names="encoder.blocks.0", num_heads=1, example_input=same)
    assert torch.equal(model(*same), before)
    va.remove_(model)
    with pytest.raises(va.SiteError, match=r"'encoder.blocks.0' is called 2 times.*va.insert_\(model.encoder"):
        va.insert_(model, names="encoder.blocks.0", example_input=(same[0], torch.rand(1, 3, 96, 96)))


def test_two_blocks_at_one_place_are_one_class():
    # mmdetection#9786
    class Both(nn.Sequential):
        def __init__(self, channels, **options):
            super().__init__(
                va.AttentionBlock2d(channels, **options), va.AttentionBlock2d(channels, pattern="rows", **options)
            )

    model, before = resnet(), resnet()(IMAGE)
    va.insert_(model, names="layer2.1", example_input=IMAGE)
    with pytest.raises(va.SiteError, match=r"already has a block.*one class that holds both.*va.remove_"):
        va.insert_(model, "cbam", names="layer2.1", example_input=IMAGE)
    va.remove_(model)
    va.insert_(model, Both, names="layer2.1", example_input=IMAGE)
    assert torch.equal(model(IMAGE), before)


# --- smaller ones ----------------------------------------------------------------------------------------------------


def test_blocks_that_are_inserted_in_inference_mode_can_be_trained():
    model = resnet()
    with torch.inference_mode():
        va.insert_(model, names="layer2", example_input=torch.rand(1, 3, 32, 32))
    model(IMAGE).sum().backward()
    assert all(p.grad is not None for block in va.inserted_blocks(model).values() for p in block.parameters())


@pytest.mark.parametrize(
    ("block", "options", "message"),
    [
        (None, {"stage": -1}, r"insert_\(\) got an unexpected argument 'stage'. Did you mean 'stages'"),
        (None, {"name": "layer2"}, "unexpected argument 'name'. Did you mean 'names'"),
        (None, {"stages": -1, "exmaple_input": IMAGE}, "did you mean 'example_input'"),
        (None, {"stages": -1, "number_heads": 2}, "did you mean 'num_heads'"),
        ("se", {"stages": -1, "gate_init": 0.1}, "gate_init(?!.*did you mean 'gate_init')"),
    ],
)
def test_a_misspelled_argument_is_named_with_the_nearest_one(block, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        va.insert_(resnet(), block, **options)


@pytest.mark.parametrize(
    ("make", "head"),
    [
        (lambda: timm.create_model("convnext_atto", num_classes=3), "head.fc"),
        (lambda: timm.create_model("densenet121", num_classes=3), "classifier"),
        (lambda: timm.create_model("vit_tiny_patch16_224", num_classes=3, depth=2), "head"),
        (lambda: timm.create_model("levit_128s", num_classes=3), "head"),
        (torchvision.models.mobilenet_v3_small, "classifier"),
        (torchvision.models.resnet18, "fc"),
    ],
)
def test_head_is_the_classifier_that_the_model_declares(make, head):
    model = make()
    va.freeze_backbone_(model, also_train="head")
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all(name.startswith(head) for name in trained)
    with pytest.raises(
        ValueError, match=f"also_train='nothing.*' matches no parameter.*classifier of this model is '{head}"
    ):
        va.freeze_backbone_(model, also_train="nothing.*")


def test_the_children_of_a_network_with_a_block_at_its_stem_run_in_a_row_as_before():
    # nn.Sequential(*list(model.children())[:-2]), the common way to cut off a head
    model, _ = with_block(["conv1", "layer2.1"])
    rows = nn.Sequential(*list(model.children())[:-2])
    assert torch.equal(model.fc(model.avgpool(rows(IMAGE)).flatten(1)), model(IMAGE))


def test_an_adapter_finds_a_block_that_its_parent_holds_and_a_checkpoint_names_its_site(tmp_path):
    model, before = with_block(["layer2.1"], "branch")
    va.save_adapter(model, tmp_path / "adapter.safetensors")
    other = resnet()
    va.load_adapter_(other, tmp_path / "adapter.safetensors")
    assert torch.equal(other(IMAGE), before)
    torch.save(model.state_dict(), tmp_path / "whole.pth")
    with pytest.raises(va.CheckpointError, match=r"insert_\(model, names=\[.layer2.1.bn2"):
        va.load_checkpoint(resnet(), tmp_path / "whole.pth")


class Labels(nn.Module):
    """Returns labels, which have no gradient."""

    def __init__(self, ignore):
        super().__init__()
        self.stem, self.side, self.ignore = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), ignore

    def forward(self, x):
        x = self.stem(x)
        y = self.side(x)
        return (x if self.ignore else y).argmax(1)


@pytest.mark.parametrize("ignore", [False, True])
def test_a_network_without_gradients_is_checked_by_other_values(ignore):
    torch.manual_seed(0)
    model = Labels(ignore).eval()
    if ignore:
        with pytest.raises(va.SiteError, match="'side': the network ignores the output"):
            va.insert_(model, names="side", example_input=IMAGE)
    else:
        assert va.insert_(model, names="side", example_input=IMAGE).warnings == ()
    assert all(p.requires_grad for p in model.parameters())
