"""``swap_`` of complete models: outputs, gradients, parameters and hooks do not change."""

import copy
import inspect
import re
import warnings
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import families
import pytest
import timm
import torch
from small_networks import assert_same, captured, results
from stand_ins import diffusers_attention, layer_of, transformers_layer
from timm.layers import Attention as TimmAttention, AttentionPool2d, MultiQueryAttention2d
from timm.layers.bottleneck_attn import BottleneckAttn
from timm.models.convit import GPSA
from timm.models.mobilenetv3 import _gen_mobilenet_v4
from torch import nn
from torchvision.models import MaxVit, SwinTransformer, VisionTransformer

import vision_attn as va
from vision_attn.networks.convert.swapped import Swapped
from vision_attn.networks.inspection.costs import count_macs


def maxxvit(name, size=64, **options):
    cfg = timm.models.maxxvit.model_cfgs[name]
    types = cfg.block_type if cfg.block_type[-1] == "M" else ("C", "C", "T", "T")
    small = {"embed_dim": (8, 8, 16, 16), "depths": (1, 1, 1, 1), "stem_width": (8, 8), "head_hidden_size": None}
    heads = replace(cfg.transformer_cfg, dim_head=4, rel_pos_dim=8, **options)
    cfg = replace(cfg, **small, block_type=types, transformer_cfg=heads)
    return timm.models.MaxxVit(cfg, img_size=size, num_classes=5)


def small(name, **options):
    return timm.create_model(name, num_classes=5, **{"img_size": 32, "embed_dim": 16, "num_heads": 4, **options})


def timm_swin(size=32, **options):
    options = {"window_size": 4, "embed_dim": 8, "depths": (2, 2), "num_heads": (2, 4), **options}
    return small("swin_tiny_patch4_window7_224", img_size=size, strict_img_size=False, **options)


#: Name -> model, image sizes, number of swapped modules, number of modules that are not swapped.
MODELS = {
    "vit": (lambda: small("test_vit", depth=2, dynamic_img_size=True), [(32, 32), (32, 64)], 2, 0),
    "deit": (lambda: timm.create_model("deit_tiny_distilled_patch16_224", img_size=32, depth=1), [(32, 32)], 1, 0),
    "coatnet": (lambda: maxxvit("coatnet_nano_rw"), [(64, 64)], 2, 0),
    "maxvit, tf": (lambda: maxxvit("maxvit_tiny_tf"), [(64, 64)], 8, 0),
    "mobilenetv4": (lambda: _gen_mobilenet_v4("mobilenetv4_hybrid_medium", 0.25, num_classes=5), [(64, 32)], 4, 4),
    "swin": (lambda: SwinTransformer([4, 4], 8, [2, 2], [2, 4], [4, 4], 4, 0, 0, 0, 5), [(64, 64), (68, 40)], 4, 0),
    "timm swin": (timm_swin, [(32, 32), (40, 52)], 4, 0),
    "torchvision maxvit": (lambda: MaxVit((48, 48), 8, 3, [8, 16], [1, 1], 4, 0.0, num_classes=5), [(48, 48)], 4, 0),
    "torchvision vit": (lambda: VisionTransformer(32, 16, 2, 4, 16, 32, num_classes=5), [(32, 32)], 2, 0),
}


randn = partial(torch.randn, dtype=torch.float64)


def perturbed(model, scale=0.1):
    """Return the model in evaluation mode with perturbed weights, because layers of zeros would hide differences."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=scale)
    return model.eval()


def create(name):
    torch.manual_seed(0)
    return perturbed(MODELS[name][0]().double())


def swapped_modules(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, Swapped)}


@contextmanager
def calls_counted(model):
    """Yield a list with one entry per call of a block, because the original forward would have the same output."""
    calls, blocks = [], [module.running_block for module in swapped_modules(model).values()]
    hooks = [block.register_forward_hook(lambda *_: calls.append(1)) for block in blocks]
    yield calls
    for hook in hooks:
        hook.remove()


def all_results(model, x):
    return results(model, x, parameters=model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_swapped_models_have_the_same_outputs_and_gradients(name):
    _, sizes, swapped, left = MODELS[name]
    model, images = create(name), [randn(2, 3, *size) for size in sizes]
    before = [all_results(model, x) for x in images]
    state, parameters = copy.deepcopy(model.state_dict()), [*map(id, model.parameters())]

    def parts():
        objects = [*model.named_modules(), *model.state_dict(keep_vars=True).items()]
        return [(name, id(x), type(x)) for name, x in objects]

    objects, report = parts(), va.swap_(model)
    assert (len(report.swapped), len(report.skipped)) == (swapped, left)
    assert [*map(id, model.parameters())] == parameters  # existing optimizers still update them
    model.load_state_dict(state, strict=True)
    with calls_counted(model) as calls:
        for x, expected in zip(images, before, strict=True):
            for got, wanted in zip(all_results(model, x), expected, strict=True):
                torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-10 * max(1, wanted.abs().max().item()))
        assert len(calls) == swapped * len(images)
    assert_same(model.state_dict(), state)
    assert (len(va.unswap_(model).swapped), parts()) == (swapped, objects)
    assert not any("swapped" in vars(module) for module in model.modules())
    assert torch.equal(model(images[0]), before[0][0])


def test_the_model_follows_its_mode_type_and_hooks():
    model, x = create("torchvision vit"), torch.randn(1, 3, 32, 32, dtype=torch.bfloat16)
    attention, seen = model.encoder.layers[0].self_attention, []
    attention.register_forward_hook(lambda module, args, output: seen.append(output[0].dtype))
    va.swap_(model)
    attention.register_forward_pre_hook(lambda module, args: seen.append("before"))
    model.to(torch.bfloat16).train()
    assert all(module.running_block.training for module in swapped_modules(model).values())
    with calls_counted(model) as calls:
        model(x)
    assert len(calls) == 2
    va.unswap_(model)
    assert (type(attention), attention.training) == (nn.MultiheadAttention, True)
    model(x)
    assert seen == ["before", torch.bfloat16] * 2


def test_the_mode_of_each_module_may_be_set_without_a_method():
    attention, x = TimmAttention(8, 2, attn_drop=0.5).train(), torch.randn(2, 5, 8)
    va.swap_(attention)
    for module in attention.modules():
        module.training = False
    with calls_counted(attention) as calls:
        assert torch.equal(attention(x), attention(x))
    assert len(calls) == 2
    assert torch.equal(torch.compile(attention, backend="eager", fullgraph=True)(x), attention(x))


def test_a_module_that_was_replaced_is_restored_with_its_class():
    model = nn.Sequential(nn.Conv2d(3, 8, 1), BottleneckAttn(8, feat_size=(4, 4), num_heads=2))
    va.swap_(model)
    va.replace_(model, names="1", example_input=(1, 3, 4, 4))
    assert len(va.unswap_(model).swapped) == 1
    va.remove_(model)
    assert type(model[1]) is BottleneckAttn


@pytest.mark.slow
def test_a_swapped_model_can_be_compiled_exported_and_traced():
    model, x = nn.Sequential(nn.Linear(8, 8), TimmAttention(8, 2)).eval(), torch.randn(2, 5, 8)
    y = model(x)
    va.swap_(model)
    with calls_counted(model) as calls, torch.no_grad():
        torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), y)
    assert calls
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), y)
    traced = torch.fx.symbolic_trace(model)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["0", "1"]
    torch.testing.assert_close(traced(x), y)
    with warnings.catch_warnings(action="ignore"):  # torch.jit.trace is deprecated
        torch.testing.assert_close(torch.jit.trace(model, x)(x), y)


def test_swapped_modules_support_implementations_and_capture():
    model, x = create("swin"), randn(1, 3, 36, 40)
    y = model(x)
    va.swap_(model)
    assert va.set_impl_(model, "bmm") == 4
    with va.use_impl(model, "einsum"):
        torch.testing.assert_close(model(x), y)
    with va.capture(model) as maps:
        torch.testing.assert_close(model(x), y)
    # Feature maps of 9×10 (padded to 12×12) and 5×5 (padded to 8×8); attention to the padding is not included.
    assert [tuple(one.weights.shape) for one in maps.values()] == [(1, 2, 90, 9, 10)] * 2 + [(1, 4, 25, 5, 5)] * 2
    total = maps["features.1.0.attn"].weights.sum((-2, -1)).unflatten(2, (9, 10))
    torch.testing.assert_close(total[:, :, :8, :8], torch.ones_like(total[:, :, :8, :8]))
    assert (total[:, :, 8:] < 0.9).all()


def test_attention_that_an_implementation_does_not_reach_is_named():
    model = timm.create_model("test_vit").eval()
    count_macs(model, (1, 3, 160, 160))  # internal uses do not warn
    library = r"^impl='bmm' has no effect on .* another library \(blocks\.0\.attn, .*Call va\.swap_\(model\) first$"
    with pytest.warns(UserWarning, match=library) as found:
        assert va.set_impl_(model, "bmm") == 0
    with pytest.warns(UserWarning, match=library) as others, va.use_impl(model, "bmm"):
        pass
    assert [warning.filename for warning in (*found, *others)] == [__file__] * 2
    va.swap_(model)
    assert va.set_impl_(model, "bmm") == 6
    hook = model.blocks[1].attn.qkv.register_forward_hook(lambda *_: None)
    reason = (
        r"^impl='einx' has no effect on blocks\.1\.attn, which runs its original code, because a submodule was replaced"
    )
    with pytest.warns(UserWarning, match=reason):
        assert va.set_impl_(model, "einx") == 6
    with pytest.warns(UserWarning, match=reason), va.use_impl(model, "einx"):
        pass
    count_macs(model, (1, 3, 160, 160))
    hook.remove()
    with va.use_impl(model, "bmm"):
        assert va.set_impl_(nn.Sequential(model, nn.MultiheadAttention(8, 2)), "bmm") == 6
    assert va.set_impl_(timm.create_model("resnet10t"), "bmm") == 0  # no attention


@pytest.mark.slow
@pytest.mark.parametrize("block", ["0", "1"])
def test_windows_of_volumes_are_captured_at_their_positions(block):
    """The second block shifts its windows; both pad a volume of 16×8×8 to 18×9×9."""
    unetr = pytest.importorskip("monai.networks.nets.swin_unetr")
    torch.manual_seed(0)
    model = unetr.SwinUNETR(1, 2, depths=(2, 2, 2, 2), feature_size=12, window_size=3)
    model, images, seen = perturbed(model).double(), randn(1, 1, 64, 32, 32), []
    layer = getattr(model.swinViT.layers2[0].blocks, block)
    hook = layer.attn.softmax.register_forward_hook(lambda module, args, y: seen.append(y))
    with torch.no_grad():
        expected = model(images)
    hook.remove()
    assert len(va.swap_(model).swapped) == 8
    with torch.no_grad(), va.capture(model, names=f"swinViT.layers2.0.blocks.{block}.attn") as maps:
        torch.testing.assert_close(model(images), expected)
    number = torch.full((1, 18, 9, 9, 1), 1024)
    number[:, :16, :8, :8, 0] = torch.arange(1024).view(16, 8, 8)
    if any(layer.shift_size):
        number = number.roll([-1] * 3, (1, 2, 3))
    index = unetr.window_partition(number, (3, 3, 3))[..., 0]
    weights = torch.zeros(6, 1025, 1025, dtype=torch.float64)
    for tokens, part in zip(index, seen[0], strict=True):
        weights[:, tokens[:, None], tokens] = part
    (attention,) = maps.values()
    torch.testing.assert_close(attention.weights[0].flatten(2), weights[:, :1024, :1024])


ROTARY = [
    ("vit_small_patch16_dinov3", {}),
    ("vit_small_patch16_dinov3", {"qk_norm": True, "norm_layer": partial(timm.layers.RmsNorm, eps=0.1)}),
    ("eva02_tiny_patch14_224", {}),
    ("eva02_tiny_patch14_224", {"scale_attn_inner": True, "use_rot_pos_emb": False}),
    ("vit_small_patch16_rope_224", {}),
    ("vit_small_patch16_rope_mixed_224", {}),
]


def rotary(name, **options):
    """Return a network with a rotary embedding, and images."""
    torch.manual_seed(0)
    side = 70 if "eva02" in name else 64
    if "qk_norm" in options and "qk_norm" not in inspect.signature(timm.models.eva.Eva).parameters:
        pytest.skip("timm 1.0.26 has no norms of queries and keys in eva.py")
    options = {"depth": 2, "embed_dim": 48, "num_heads": 3, **options}
    model = timm.create_model(name, img_size=side, num_classes=3, **options)
    return perturbed(model, 0.02).double(), torch.randn(2, 3, side, side, dtype=torch.float64)


@pytest.mark.parametrize(("name", "options"), ROTARY)
def test_rotary_attention_of_timm(name, options):
    theirs, images = rotary(name, **options)
    ours = copy.deepcopy(theirs)
    if "mixed" in name and not hasattr(theirs.blocks[0].attn, "num_kv_heads"):
        pytest.skip("timm 1.0.26 does not run mixed rotary embeddings in float64")
    assert len(va.swap_(ours).swapped) == 2
    (y, *grads), (expected, *expected_grads) = (all_results(model, images) for model in (ours, theirs))
    torch.testing.assert_close(y, expected, atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(grads, expected_grads, atol=1e-10, rtol=1e-8)
    for impl in ("bmm", "einx", "einsum", "sdpa"):
        with va.use_impl(ours, impl), torch.no_grad():
            torch.testing.assert_close(ours(images), expected, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("impl", ["bmm", pytest.param("sdpa", marks=pytest.mark.slow)])
def test_rotary_attention_is_compiled_in_its_block(impl):
    (model, images), functions = rotary("eva02_tiny_patch14_224", depth=1, scale_attn_inner=True), set()
    expected = model(images).detach()
    va.swap_(model)
    va.set_impl_(model, impl)

    def keep(graph, _):
        functions.update(getattr(node.target, "__name__", "") for node in graph.graph.nodes)
        return graph

    y = torch.compile(model, backend=keep, fullgraph=True)(images)
    torch.testing.assert_close(y, expected, atol=1e-12, rtol=1e-10)
    # The original layer would use the fused kernel with both implementations.
    assert ("bmm" in functions, "scaled_dot_product_attention" in functions) == (impl == "bmm", impl == "sdpa")


@pytest.mark.parametrize("kind", ["maxvit", "swin"])
def test_maps_of_windows_and_grids_of_timm(kind):
    """The attention map times the values on the feature map is the output of the attention."""
    if kind == "maxvit":
        model, path, names = maxxvit("maxvit_nano_rw", (64, 96)), "stages.0.blocks.0", ("attn_block", "attn_grid")
        end, layout, axis = "ls1", (2, 3, -1), 4
    else:
        model, path, names = timm_swin((64, 96), depths=(2,), num_heads=(2,)), "layers.0.blocks", ("0", "1")  # shifted
        end, layout, axis = "drop_path1", (3, 2, -1), 3
    model, given, expected = perturbed(model.double(), 0.3), {}, {}
    va.swap_(model)
    parts = {f"{path}.{name}.attn": model.get_submodule(f"{path}.{name}") for name in names}
    for name, part in parts.items():
        part.norm1.register_forward_hook(lambda module, args, y, name=name: given.update({name: y}))
        last = part.get_submodule(end)
        last.register_forward_pre_hook(lambda module, args, name=name: expected.update({name: args[0]}))
    maps = captured(model, randn(2, 3, 64, 96))
    assert len(maps) == len(swapped_modules(model))
    for name, part in parts.items():
        v = part.attn.qkv(given[name]).unflatten(3, layout).select(axis, 2).flatten(1, 2).transpose(1, 2)
        got = part.attn.proj((maps[name].weights.flatten(3) @ v).transpose(1, 2).flatten(2))
        torch.testing.assert_close(got.view_as(expected[name]), expected[name])


def test_maps_of_windows_and_grids_of_torchvision():
    va.swap_(model := create("torchvision maxvit"))
    maps = captured(model, randn(1, 3, 48, 48), queries=[(0, 47)])
    window, grid = ((one.weights[0, 0, 0] > 0).nonzero().tolist() for one in list(maps.values())[:2])
    assert window == [[row, column] for row in range(3) for column in (9, 10, 11)]
    assert grid == [[row, column] for row in (0, 4, 8) for column in (3, 7, 11)]


def test_the_innermost_module_declares_the_tokens():
    outer = nn.Sequential(create("vit"))
    outer.reg_token = nn.Parameter(torch.zeros(1, 4, 16))
    va.swap_(outer)
    assert {one.prefix.shape[2] for one in captured(outer, randn(1, 3, 32, 32)).values()} == {1}
    va.swap_(attention := TimmAttention(8, 2))
    with pytest.raises(ValueError, match="the model: the positions of its 5 tokens on the image are unknown"):
        captured(attention, torch.randn(1, 5, 8))


TRANSFORMER = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 8}


#: A class, its options, the number of tokens before the feature map, the width of an image, and the tolerance of maps.
TRANSFORMERS = [
    ("Dinov2WithRegistersModel", TRANSFORMER, 5, 48, 1e-12),
    ("DINOv3ViTModel", {**TRANSFORMER, "num_register_tokens": 4, "intermediate_size": 8}, 5, 48, 1e-12),
    ("CLIPVisionModel", TRANSFORMER, 1, 32, 1e-6),  # a softmax in float32
    ("SwinModel", {"embed_dim": 8, "depths": [1], "num_heads": [2], "window_size": 4, "patch_size": 4}, 0, 32, 1e-6),
]


@pytest.mark.parametrize(("kind", "options", "prefix", "width", "rounding"), TRANSFORMERS)
def test_outputs_and_attention_maps_equal_those_of_transformers(kind, options, prefix, width, rounding):
    kind = getattr(pytest.importorskip("transformers", "4.56"), kind)
    configs = (kind.config_class(**options, image_size=32, attn_implementation=how) for how in ("sdpa", "eager"))
    model, other = (kind(config).double().eval() for config in configs)
    other.load_state_dict(perturbed(model, 0.3).state_dict())
    image = randn(1, 3, 32, width)
    with torch.no_grad():
        before, expected = model(image).last_hidden_state, other(image, output_attentions=True).attentions[0]
    va.swap_(model)
    (found,) = captured(model, image).values()
    torch.testing.assert_close(model(image).last_hidden_state, before, atol=1e-12, rtol=1e-10)
    if prefix:
        weights, expected = found.weights.flatten(3), expected[:, :, prefix:, prefix:]
    else:  # compare the last of four windows
        weights = found.weights.unflatten(2, (8, 8))[0, :, 4:, 4:, 4:, 4:].flatten(1, 2).flatten(2)
        expected = expected[3]
    torch.testing.assert_close(weights, expected, atol=rounding, rtol=1e-10)


def unet():
    options = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1, "cross_attention_dim": 6}
    options |= {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "attention_head_dim": 4}
    options |= {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "sample_size": 8}
    return layer_of("diffusers.UNet2DConditionModel", **options), (torch.randn(2, 4, 8, 12), 1, torch.randn(2, 3, 6))


def from_timm(name, *size, **options):
    return lambda: (timm.create_model(name, num_classes=5, **options), (torch.randn(2, 3, *size),))


def of_table(name):
    make, sizes, *_ = MODELS[name]
    return lambda: (perturbed(make(), 0.3), (torch.randn(2, 3, *sizes[-1]),))


def from_library(path, *size, **options):
    return lambda: (layer_of(path, **options), (torch.randn(1, 3, *size),))


def segformer():
    config = layer_of("transformers.SegformerConfig", depths=[1] * 4)
    return layer_of("transformers.SegformerModel", config), (torch.randn(1, 3, 96, 64),)


YOLO = {"cfg": "yolo12n.yaml", "verbose": False}
VOLUME = {"in_channels": 3, "num_layers": 1, "img_size": (16, 16, 8), "patch_size": (4, 4, 4), "mlp_dim": 12}
VOLUME |= {"num_heads": 3, "hidden_size": 12, "classification": True}
#: A network, a layer, the sizes of its feature map and of its keys (None if equal), and the number of tokens before.
WITH_MAPS = [
    (of_table("vit"), "blocks.0.attn", (2, 4), None, 1),
    (of_table("deit"), "blocks.0.attn", (2, 2), None, 2),
    (of_table("torchvision vit"), "encoder.layers.encoder_layer_0.self_attention", (2, 2), None, 1),
    (unet, "mid_block.attentions.0.transformer_blocks.0.attn1", (4, 6), None, 0),
    (from_timm("pvt_v2_b0", 64, 96, depths=(1, 1, 1, 1)), "stages.0.blocks.0.attn", (16, 24), (2, 3), 0),
    (from_timm("twins_svt_small", 64, 96, depths=(2, 1, 1, 1)), "blocks.0.1.attn", (16, 24), (2, 3), 0),
    (from_timm("efficientformer_l1", 224, 224, depths=(1,) * 4), "stages.3.blocks.1.token_mixer", (7, 7), (7, 7), 0),
    (from_timm("crossvit_tiny_240", 240, 240, depth=((1, 1, 0),)), "blocks.0.blocks.1.0.attn", (14, 14), (14, 14), 1),
    (from_timm("tiny_vit_5m_224", 224, 224, depths=(1, 1, 1, 1)), "stages.3.blocks.0.attn", (7, 7), None, 0),
    (from_timm("test_vit", 32, 32, img_size=32, patch_size=(4, 16), depth=1), "blocks.0.attn", (8, 2), None, 1),
    (from_timm("vit_small_patch16_dinov3", 64, 64, img_size=64, depth=1), "blocks.0.attn", (4, 4), None, 5),
    (from_timm("eva02_tiny_patch14_224", 70, 70, img_size=70, depth=1), "blocks.0.attn", (5, 5), None, 1),
    (from_timm("vit_small_patch16_rope_mixed_224", 64, 64, img_size=64, depth=1), "blocks.0.attn", (4, 4), None, 1),
    (from_library("vit_pytorch.ViT", 64, 64, **families.PYTORCH), "transformer.layers.0.0", (4, 4), None, 1),
    (from_library("vit_pytorch.SimpleViT", 64, 64, **families.PYTORCH), "transformer.layers.0.0", (4, 4), None, 0),
    (segformer, "stages.1.blocks.0.attention", (12, 8), (3, 2), 0),
    (from_library("ultralytics.nn.tasks.DetectionModel", 128, 160, **YOLO), "model.8.m.0.0.attn", (4, 5), None, 0),
    (from_library("monai.networks.nets.ViT", 16, 16, 8, **VOLUME), "blocks.0.attn", (4, 4, 2), None, 1),
]


@pytest.mark.parametrize(("make", "path", "size", "keys", "prefix"), WITH_MAPS)
@pytest.mark.filterwarnings("ignore")  # warnings of the libraries
def test_maps_are_the_weights_of_the_network(make, path, size, keys, prefix, monkeypatch):
    """The expected weights are recorded in torch's kernel while the original network runs."""
    torch.manual_seed(0)
    model, inputs = make()
    perturbed(model, 0.03)
    kernel, weights = torch.nn.functional.scaled_dot_product_attention, []

    def recorded(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
        logits = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        weights.append(torch.softmax(logits + (0.0 if attn_mask is None else attn_mask), -1))
        return kernel(q, k, v, attn_mask, dropout_p, is_causal, scale=scale)

    def recorded_softmax(x, dim, softmax=torch.Tensor.softmax):  # for EfficientFormer
        weights.append(softmax(x, dim))
        return weights[-1]

    with monkeypatch.context() as patch:  # with gradients, because nn.MultiheadAttention has another kernel without
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
        patch.setattr(torch.Tensor, "softmax", recorded_softmax)
        copy.deepcopy(model)(*inputs)
    va.swap_(model)
    found = captured(model, *inputs)[path]
    assert (found.map_size, tuple(found.weights.shape[3:])) == (size, keys or size)
    assert prefix == (0 if found.prefix is None else found.prefix.shape[2])
    flat = (torch.cat([found.prefix, found.weights], 2) if prefix else found.weights).flatten(3)
    same = [w[..., prefix:] for w in weights if w.shape[:3] == flat.shape[:3]]
    assert any(torch.allclose(w, flat, atol=1e-5) for w in same if w.shape == flat.shape)


def test_an_area_of_yolo12_consists_of_rows_of_the_feature_map():
    layer = layer_of("ultralytics.nn.modules.block.AAttn", 32, num_heads=1, area=2).eval()
    model = nn.Sequential(nn.Conv2d(3, 32, 1), layer)
    va.swap_(model)
    first, last = captured(model, torch.randn(2, 3, 6, 4), queries=[(0, 0), (5, 3)])["1"].weights[1, 0] > 0
    inside = (torch.arange(6) < 3)[:, None].expand(6, 4)
    assert torch.equal(first, inside)
    assert torch.equal(last, ~inside)
    with pytest.raises(ValueError, match="1: the positions of its 10 tokens on the image are unknown"):
        captured(model, torch.randn(2, 3, 5, 4))


def test_errors_name_attention_that_is_not_captured():
    attention = type("SelfAttn", (nn.Conv2d,), {})(8, 8, 1)
    x, mixed = torch.randn(1, 3, 8, 8), nn.Sequential(nn.Conv2d(3, 8, 1), attention, va.AttentionBlock2d(8, 2))
    with pytest.raises(KeyError, match=r"captured: '2.attn'\): it belongs to another library"):
        captured(mixed, x)["1"]
    for model, sites in ((mixed, "1"), (mixed[:2], None)):
        with pytest.raises(ValueError, match=r"1 \(SelfAttn\): it belongs to another library"):
            captured(model, x, names=sites)
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval()
    va.swap_(layer)
    with torch.no_grad():  # in its fast path, torch does not call the attention
        assert "was not called" in captured(layer, torch.randn(1, 4, 8)).reasons["self_attn"]
    cait = timm.create_model("cait_xxs24_224", img_size=32, depth=1).eval()
    va.swap_(cait)
    with pytest.raises(ValueError, match=r"blocks.0.attn \(TalkingHeadAttn\)"):
        captured(cait, torch.randn(1, 3, 32, 32))


@pytest.mark.parametrize("first", [va.swap_, partial(va.freeze_backbone_, also_train="*layer_norm.bias")])
def test_a_frozen_network_runs_its_swapped_attention(first):
    model, _ = segformer()
    first(model)
    assert len(va.swap_(model).swapped) == (0 if first is va.swap_ else 4)
    va.freeze_backbone_(model, also_train="*layer_norm.bias")
    assert not any(getattr(module, "bypass_reason", "") for module in model.modules())


def test_a_dry_run_reports_and_changes_nothing():
    model = nn.Sequential(*(MultiQueryAttention2d(8, num_heads=2, kv_stride=stride) for stride in (1, 2, 2)))
    report = va.swap_(model, dry_run=True)
    assert {type(module) for module in model} == {MultiQueryAttention2d}
    _, _, row, left = str(report).splitlines()
    assert row.startswith("0     MultiQueryAttention2d  Attention2d, pattern='full'  ")
    assert left.startswith("not swapped: 2 MultiQueryAttention2d (1, 2): MultiQueryAttention2d.kv_stride ")


class Other(TimmAttention):
    def forward(self, x):
        return x


def gpsa():
    return nn.Sequential(GPSA(8, 2), nn.ModuleDict({"pool": AttentionPool2d(8, 4, num_heads=2), "gpsa": GPSA(8, 2)}))


GPSAS = r"2 GPSA \(0, 1.gpsa\): timm.models.convit.GPSA is not supported: it adds two softmaxes.*"
POOL = r"1 AttentionPool2d \(1.pool\): .*AttentionPool2d is not supported: it pools.*"
MULTIHEAD = partial(nn.MultiheadAttention, 8, 2)
BIASED, ONE, ALONE = partial(MULTIHEAD, add_bias_kv=True), "1 attention module", r"1 MultiheadAttention \(the model\): "
WITH_BLOCK = lambda: nn.Sequential(nn.Conv2d(3, 8, 1), va.AttentionBlock2d(8, 2))  # noqa: E731
#: A network, the number of its attention modules, and the reasons why they are not swapped.
NOT_SWAPPED = [
    (lambda: nn.Conv2d(3, 8, 1), "no attention modules", []),
    (gpsa, "3 attention modules", [GPSAS, POOL]),
    (BIASED, ONE, [rf"{ALONE}MultiheadAttention.bias_k is not supported \(got .*\): .*"]),
    (partial(MULTIHEAD, kdim=5, vdim=3), ONE, [f"{ALONE}MultiheadAttention: kdim must equal vdim, got 5 and 3.*"]),
    (partial(MULTIHEAD, device="meta"), ONE, [f"{ALONE}.*cannot be compared.*"]),
    (partial(Other, 8, 2), ONE, [r"1 Other \(the model\): .*subclass of Attention.*"]),
    (WITH_BLOCK, ONE, [r"1 Attention2d \(1.attn\): already a vision_attn block"]),
]


@pytest.mark.parametrize(("make", "number", "reasons"), NOT_SWAPPED)
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_report_states_why_nothing_was_swapped(make, number, reasons, dry_run):
    model = make()
    kinds = [type(module) for module in model.modules()]
    first, *lines, last = str(va.swap_(model, dry_run=dry_run)).splitlines()
    assert first == f"0 modules {'would be ' * dry_run}swapped; {number} found"
    assert last == "See docs/convert.md for the supported layers, or call va.insert_ to add attention blocks."
    for line, reason in zip(lines, reasons, strict=True):
        assert re.fullmatch(f"not swapped: {reason}", line)
    assert [type(module) for module in model.modules()] == kinds


def test_modules_are_chosen_by_name_or_by_a_function():
    model = create("swin")
    assert str(va.unswap_(model)) == "0 modules unswapped"
    chosen = va.swap_(model, names="features.3")
    assert [one.site for one in chosen.swapped] == ["features.3.0.attn", "features.3.1.attn"]
    (chosen,) = va.swap_(model, names="features.1.**", where=lambda name, _: name.endswith("1.attn")).modules
    assert chosen.site == "features.1.1.attn"
    report = va.swap_(model)
    assert [one.site for one in report.swapped] == ["features.1.0.attn"]
    assert {one.reason for one in report.skipped} == {"already swapped"}
    assert str(va.swap_(model)).startswith("0 modules swapped; 4 attention modules found\nnot swapped: 4 Shifted")
    with pytest.raises(va.errors.SiteError, match=r"^names: .* matches. Attention modules .*: features\.1\.0\.attn"):
        va.swap_(model, names="head")


def assert_same_calls(layer, calls):
    expected = [layer(*args, **options) for args, options, _ in calls]
    assert len(va.swap_(layer).swapped) == 1
    for (args, options, runs), wanted in zip(calls, expected, strict=True):
        with calls_counted(layer) as counted:
            got = layer(*args, **options)
        assert len(counted) == runs
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention_runs_calls_that_the_block_does_not_support(batch_first):
    attention = nn.MultiheadAttention(8, 2, batch_first=batch_first, dtype=torch.float64)
    query, key = randn(2, 5, 5, 8)
    hidden, causal = torch.arange(25).view(5, 5) == 1, torch.ones(5, 5, dtype=torch.bool).triu(1)
    alone = {"need_weights": False}
    calls = [
        ((query, key, key), alone, 1),
        ((query, query, query, None, False, None, True), {}, 1),
        ((query, query, query), {**alone, "attn_mask": causal, "is_causal": True}, 0),
        ((query, key, key, hidden), alone, 0),
        ((query, key, key), {}, 0),
        ((query, key, key.clone()), alone, 0),
        ((query[:, 0], key[:, 0], key[:, 0]), alone, 0),
    ]
    assert_same_calls(attention, calls)


VIT, SWIN = "vit.modeling_vit.ViTAttention", "swin.modeling_swin.SwinAttention"


@pytest.mark.parametrize(("path", "given", "tokens"), [(VIT, (), 5), (SWIN, (8, 2, 2), 4)])
def test_layers_of_transformers_run_calls_that_the_block_does_not_support(path, given, tokens):
    layer = transformers_layer(path, *given, hidden_size=8, num_attention_heads=2).double().eval()
    x, hidden = randn(4, tokens, 8), torch.rand(4, tokens, tokens) < 0.5
    hidden.diagonal(dim1=1, dim2=2).fill_(False)
    bias = torch.zeros(4, tokens, tokens, dtype=torch.float64).masked_fill(hidden, -100.0)
    masks = [bias[:2]] if given else [bias[:, None], ~hidden[:, None], hidden[:1, None].double()]
    original = copy.deepcopy(layer)
    options = [{}, {"output_attentions": False}, *({"attention_mask": mask} for mask in masks)]
    calls = [*((one, 1) for one in options), ({"output_attentions": True}, 0), ({"is_causal": True}, 0)]
    assert_same_calls(layer, [((), {"hidden_states": x, **one}, runs) for one, runs in calls])
    for each in (layer, original):  # the eager implementation returns weights
        each.config._attn_implementation = "eager"
    for got, wanted in zip(layer(x), original(x), strict=True):
        assert torch.equal(got, wanted)
    (left,) = va.swap_(original).skipped
    assert f"{left.kind}.config._attn_implementation is not supported (got 'eager')" in left.reason


def test_masks_of_monai_causal_calls_and_later_processors_of_diffusers_run_the_layer():
    x, mask = torch.randn(2, 5, 8), torch.tensor([[1, 1, 0, 1, 1], [1, 0, 1, 1, 0]])
    assert_same_calls(TimmAttention(8, 2), [((x,), {}, 1), ((x,), {"is_causal": True}, 0)])
    layer = diffusers_attention(8, heads=2, dim_head=4)
    va.swap_(layer)
    layer.set_processor(lambda attn, hidden_states, **others: 2 * hidden_states)
    torch.testing.assert_close(layer(x), 2 * x)
    layer = layer_of("monai.networks.blocks.selfattention.SABlock", 8, 2).eval()
    assert_same_calls(layer, [((x,), {}, 1), ((x,), {"attn_mask": mask}, 0), ((x, mask), {}, 0)])


def test_a_parametrized_module_is_not_unswapped_and_a_block_at_a_swapped_module_keeps_it_swapped():
    layer, x = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval(), torch.randn(1, 16, 8)
    va.swap_(layer)
    nn.utils.parametrize.register_parametrization(layer.self_attn, "in_proj_weight", nn.Identity())
    expected = layer(x)
    with pytest.raises(va.errors.SiteError, match=r"'self_attn' cannot be unswapped.*remove_parametrizations"):
        va.unswap_(layer)
    assert torch.equal(layer(x), expected)
    vit = timm.create_model("test_vit", img_size=64).eval()
    va.swap_(vit)
    va.insert_(vit, names="blocks.0.attn", num_heads=2, example_input=(1, 3, 64, 64))
    assert "blocks.0.attn" in captured(vit, torch.randn(1, 3, 64, 64))


#: Changes of a layer after the swap.
LATER_CHANGES = [
    lambda layer: setattr(layer, "qkv", nn.Sequential(layer.qkv, nn.ReLU())),  # similar to LoRA
    lambda layer: layer.qkv.register_forward_hook(lambda module, args, output: 2 * output),
    lambda layer: setattr(layer.proj, "forward", lambda x: 2 * nn.Linear.forward(layer.proj, x)),  # accelerate
    lambda layer: setattr(layer.train().attn_drop, "p", 0.5),
    lambda layer: setattr(layer.proj_drop.train(), "p", 0.5),
    lambda layer: vars(layer).update(num_heads=4, head_dim=2),
]


@pytest.mark.parametrize("change", LATER_CHANGES)
def test_a_module_that_was_changed_after_the_swap_runs_its_original_forward(change):
    attention = TimmAttention(8, 2).double().eval()
    original, x, results = copy.deepcopy(attention), randn(2, 5, 8), []
    va.swap_(attention)
    with calls_counted(attention) as calls:
        for each in (attention, original):
            change(each)
            torch.manual_seed(0)
            results.append(each(x))
    assert not calls
    assert torch.equal(*results)


def test_a_forward_uses_the_current_weights():
    attention, x = timm.models.maxxvit.AttentionCl(8, dim_head=4), torch.randn(2, 3, 4, 8)  # its rows are reordered
    original = copy.deepcopy(attention)
    va.swap_(attention)
    state = {key: torch.randn_like(value) for key, value in attention.state_dict().items()}
    for change in (
        lambda module: module.qkv.weight.data.mul_(2),  # does not change the version of the tensor
        lambda module: setattr(module.qkv, "weight", nn.Parameter(module.qkv.weight.detach().flip(1))),
        lambda module: module.load_state_dict({k: 2 * v for k, v in state.items()}, assign=True),
        lambda module: module.double(),
    ):
        change(attention)
        change(original)
        like = x.to(attention.qkv.weight.dtype)
        with torch.inference_mode(), calls_counted(attention) as calls:
            torch.testing.assert_close(attention(like), original(like))
        assert calls
    other = {key: 2 * value for key, value in attention.state_dict().items()}
    with torch.no_grad():
        torch.testing.assert_close(*(torch.func.functional_call(each, other, like) for each in (attention, original)))
