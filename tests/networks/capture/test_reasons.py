"""Each layer with attention has a map, or a true reason why it has none."""

import warnings
from functools import partial

import pytest
import timm
import torch
from small_networks import Net, captured
from stand_ins import layer_of
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import vision_attn as va
from vision_attn.networks.inspection.wrappers import unwrap_key

IMAGES = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def vit(**options):
    torch.manual_seed(0)
    options = {"img_size": 64, "depth": 2, "num_classes": 3, **options}
    return timm.create_model("vit_tiny_patch16_224", **options).eval()


def tuned_with_lora():
    peft, net = pytest.importorskip("peft"), vit()
    va.swap_(net)
    with warnings.catch_warnings(action="ignore"):
        return peft.get_peft_model(net, peft.LoraConfig(target_modules=["qkv"], r=2, init_lora_weights=False)).eval()


def with_training_dropout():
    net = vit(attn_drop_rate=0.1)
    va.swap_(net)
    for block in net.blocks:
        block.attn.attn_drop.train()
    return net


def eager():
    transformers = pytest.importorskip("transformers")
    options = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 64}
    net = transformers.ViTModel(transformers.ViTConfig(**options)).eval()
    va.swap_(net)
    net.set_attn_implementation("eager")
    return net


def with_weights(layer, x):
    return layer(x, x, x, need_weights=True)[0]


def plain(layer, x, query=None):
    query = x if query is None else query
    return layer(query, query, x, need_weights=False)[0]


def called(*calls):
    """Return a network of swapped layers of torch, with a function that calls each."""

    def run(net, x):
        x = net.stem(x).flatten(2).mT
        for layer, call in zip(net.layers, net.calls, strict=True):
            x = call(layer, x)
        return x

    layers = nn.ModuleList(nn.MultiheadAttention(16, 2, batch_first=True) for _ in calls)
    net = Net(run, stem=nn.Conv2d(3, 16, 8, 8), layers=layers, calls=calls, num_prefix_tokens=0).eval()
    va.swap_(net)
    return net


#: A function that creates a network, and the reason why it has no map.
WITHOUT_MAPS = [
    (tuned_with_lora, "a submodule was replaced"),
    (with_training_dropout, "or has hooks or another mode"),
    (eager, "does not support this call.*eager attention"),
    (lambda: called(with_weights), "such as need_weights=True"),
    (lambda: called(lambda layer, x: plain(layer, x, x + 1)), "positions that are added to queries and keys only"),
]


@pytest.mark.parametrize(("make", "reason"), WITHOUT_MAPS)
def test_without_any_map_the_error_lists_the_reasons(make, reason):
    with pytest.raises(ValueError, match=f"no attention on feature maps to capture.*original code, because.*{reason}"):
        captured(make(), IMAGES)


def test_a_layer_has_a_map_or_a_reason_of_the_last_pass():
    net = called(with_weights, plain)
    maps = captured(net, IMAGES)
    assert [*maps] == ["layers.1"]
    with pytest.raises(KeyError, match=r"'layers\.0'.*ran its original code"):
        maps["layers.0"]
    with torch.no_grad(), va.capture(net) as maps:
        net(IMAGES)
        net.calls = plain, with_weights
        net(IMAGES)
        assert ([*maps], [*maps.reasons]) == (["layers.0"], ["layers.1"])
        net.calls = plain, plain
        net(IMAGES)
        assert (len(maps), maps.reasons) == (2, {})


def test_layers_that_were_not_selected_are_not_said_to_belong_to_another_library():
    net = vit()
    va.swap_(net)
    maps = captured(net, IMAGES, names="blocks.0")
    assert [*maps] == ["blocks.0.attn"]
    with pytest.raises(KeyError, match="names= and where= do not select it"):
        maps["blocks.1.attn"]
    va.unswap_(net.blocks[1])
    with pytest.raises(KeyError, match="another library"):
        captured(net, IMAGES)["blocks.1.attn"]


def forward_features(net):
    return Net(lambda wrapper, x: wrapper.net.forward_features(x), net=net)


def in_transformers(net):
    transformers = pytest.importorskip("transformers")
    options = {"architecture": "vit_tiny_patch16_224", "model_args": {"depth": 2, "img_size": 64}}
    wrapped = transformers.TimmWrapperModel._from_config(transformers.TimmWrapperConfig(**options)).eval()
    wrapped.timm_model.load_state_dict(net.state_dict(), strict=False)
    return wrapped


def as_backbone(net):
    backbone = vit(features_only=True, out_indices=(0, 1), num_classes=0)
    backbone.model.load_state_dict(net.state_dict(), strict=False)
    return backbone


def in_place(net, path, wrap):
    """Wrap a module of a swapped network."""
    va.swap_(net)
    net.set_submodule(path, wrap(net.get_submodule(path)))
    return net


#: Functions that wrap a ViT, and two modules and wrappers around them.
WRAPPERS = [checkpoint_wrapper, partial(torch.compile, backend="eager")]
WRAPPED = [partial(in_place, path=path, wrap=wrap) for path in ("blocks.0", "blocks.0.attn") for wrap in WRAPPERS]


@pytest.mark.parametrize("wrap", [forward_features, in_transformers, as_backbone, *WRAPPED])
def test_a_vit_in_or_with_a_wrapper_has_the_same_maps(wrap):
    net, wrapped = vit(), wrap(vit())
    for model in (net, wrapped):
        va.swap_(model)
    expected, found = captured(net, IMAGES), captured(wrapped, IMAGES)
    assert len(expected) == len(found) == va.set_impl_(wrapped, "bmm") == 2
    for (path, one), (key, other) in zip(expected.items(), found.items(), strict=True):
        assert unwrap_key(key).endswith(path)
        assert (one.weights.shape[3:], one.prefix.shape[2]) == ((4, 4), 1)
        torch.testing.assert_close(other.weights, one.weights, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_wrapped_attention_of_this_library_does_not_belong_to_another_one(wrap):
    net = nn.Sequential(nn.Conv2d(3, 8, 4, 4), va.AttentionBlock2d(8, 2))
    net[1].attn = wrap(net[1].attn)
    maps = captured(net, IMAGES)
    assert [unwrap_key(key) for key in maps] == ["1.attn"]
    assert not maps.reasons


@pytest.mark.slow
def test_a_feature_pyramid_of_a_library_has_maps():
    encoder = "tu-vit_tiny_patch16_224.augreg_in21k"
    net = layer_of("segmentation_models_pytorch.DPT", encoder, encoder_weights=None).eval()
    va.swap_(net)
    maps = captured(net, torch.rand(1, 3, 224, 224), queries=[(8, 8)])
    assert {one.weights.shape for one in maps.values()} == {(1, 3, 1, 14, 14)}


# --- copies of timm's class -------------------------------------------------------------------------------------------


class Copied(nn.Module):
    def __init__(self, dim=24, heads=3, factor=1.0, drop=0.0, norm=nn.Identity):
        super().__init__()
        self.num_heads, self.scale, self.factor = heads, (dim // heads) ** -0.5, factor
        self.qkv, self.proj, self.attn_drop = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), nn.Dropout(drop)
        self.q_norm, self.k_norm = norm(dim // heads), norm(dim // heads)

    def forward(self, x, bias=None):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        logits = self.factor * self.scale * self.q_norm(q) @ self.k_norm(k).mT + (0 if bias is None else bias)
        return self.proj((self.attn_drop(logits.softmax(-1)) @ v).transpose(1, 2).reshape(b, n, c))


@pytest.mark.parametrize("options", [{}, {"norm": nn.LayerNorm}, {"drop": 0.5}])
def test_a_copy_of_the_usual_class_is_swapped_by_its_structure(options):
    layer, x = Copied(**options).eval(), torch.randn(2, 5, 24)
    expected, with_bias = layer(x), layer(x, torch.ones(5, 5).tril())
    assert len(va.swap_(layer).swapped) == 1
    torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(layer(x, torch.ones(5, 5).tril()), with_bias)  # the original code
    assert layer.running_block.attn_drop.p == options.get("drop", 0.0)
    va.unswap_(layer)
    assert type(layer) is Copied
    torch.testing.assert_close(va.convert.from_layer(layer, rank=1)(x.mT).mT, expected, atol=1e-5, rtol=1e-5)


#: A change of the layer, and the reason why it is not swapped.
OTHER_COMPUTATIONS = [
    (lambda layer: setattr(layer, "factor", 2.0), "has different outputs"),
    (lambda layer: setattr(layer, "final_drop", nn.Dropout(0.1)), "another dropout, 'final_drop'"),
    (lambda layer: setattr(layer, "drop_rate", 0.1), "another dropout, 'drop_rate'"),
    (lambda layer: setattr(layer, "proj", nn.Sequential(layer.proj)), "is not supported"),
]


@pytest.mark.parametrize(("change", "reason"), OTHER_COMPUTATIONS)
def test_a_class_that_computes_something_else_is_not_swapped(change, reason):
    layer = Copied().eval()
    change(layer)
    (line,) = va.swap_(layer).skipped
    assert reason in line.reason


@pytest.mark.parametrize("kv_stride", [1, 8])
def test_words_as_context_have_no_map_on_the_image(kv_stride):
    model = timm.create_model("resnet18", num_classes=2).eval()
    va.insert_(model, names="layer3", example_input=(1, 3, 64, 64))
    va.insert_(model, names="layer2", context_channels=6, kv_stride=kv_stride, example_input=(1, 3, 64, 64))
    x = torch.rand(1, 3, 64, 64)
    for features, shown in ((torch.randn(1, 6, 12, 1), False), (torch.randn(1, 6, 12, 12), True)):
        with torch.no_grad(), va.context(model, features), va.capture(model) as maps:
            model(x)
        assert ("layer2.1.inserted.attn" in maps, "layer3.1.inserted.attn" in maps) == (shown, True), list(maps)
        assert ("12, 1" in maps.reasons.get("layer2.1.inserted.attn", "")) != shown


def test_attention_on_one_axis_in_a_network_for_images_has_a_map():
    class Tokens(va.blocks.AttentionBlock1d):
        def forward(self, x):
            return super().forward(x.flatten(2)).view_as(x)

    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), va.AttentionBlock2d(8, 2), Tokens(8, 2))
    with va.capture(model) as maps:
        model(torch.rand(1, 3, 8, 8))
    assert [x.weights.shape[3:] for x in maps.values()] == [(8, 8), (64,)]
