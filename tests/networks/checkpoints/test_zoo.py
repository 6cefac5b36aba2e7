"""Weights of timm's networks with the keys of their authors or of an earlier timm, and for another image size."""

import re
import sys

import pytest
import timm
import torch
from small_networks import assert_rejected, copied, randomize_

import vision_attn as va


def make(name, **options):
    return randomize_(timm.create_model(name, num_classes=3, **options)).eval()


def swin_of_authors(state):
    """A stage ended with its downsampling; masks and indices were saved."""
    old = {re.sub(r"layers\.(\d)\.down", lambda m: f"layers.{int(m[1]) - 1}.down", k): x for k, x in state.items()}
    old = {key.replace("head.fc.", "head."): x for key, x in old.items()}
    old["layers.0.blocks.0.attn.relative_position_index"] = torch.zeros(49, 49, dtype=torch.long)
    return {**old, "layers.0.blocks.1.attn_mask": torch.zeros(64, 49, 49)}


def convnext_of_authors(state):
    pairs = (
        (r"^stem\.", "downsample_layers.0."), (r"^stages\.(\d)\.downsample\.", r"downsample_layers.\1."),
        (r"^stages\.(\d)\.blocks\.", r"stages.\1."), ("conv_dw", "dwconv"), (r"mlp\.fc(\d)", r"pwconv\1"),
        (r"^head\.norm\.", "norm."), (r"^head\.fc\.", "head."),
    )  # fmt: skip
    for pattern, replacement in pairs:
        state = {re.sub(pattern, replacement, key): x for key, x in state.items()}
    return state


def dinov2_of_authors(state):
    """The class token is not among the registers, and positions include it; blocks may be in chunks."""
    state = {key.replace("reg_token", "register_tokens"): x for key, x in state.items()}
    state["pos_embed"] = torch.cat([torch.zeros_like(state["pos_embed"][:, :1]), state["pos_embed"]], 1)
    return {**state, "mask_token": torch.zeros(1, 24)}


def sam_of_authors(state):
    """The image encoder is a part of the network that also has a prompt encoder."""
    state = {f"image_encoder.{key.replace('mlp.fc', 'mlp.lin')}": x for key, x in state.items()}
    return {**state, "prompt_encoder.no_mask_embed.weight": torch.zeros(1, 256)}


SWIN = {"depths": (2, 1, 1, 1), "embed_dim": 24, "num_heads": (1, 1, 2, 2)}
CONVNEXT = {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32), "conv_mlp": False}
VIT = {"depth": 2, "embed_dim": 24, "num_heads": 2}
#: An architecture of timm, its options, the conversion to the keys of the authors, and the size of images.
AUTHORS = {
    "Swin": ("swin_tiny_patch4_window7_224", SWIN, swin_of_authors, 224),
    "ConvNeXt": ("convnext_atto", CONVNEXT, convnext_of_authors, 96),
    "DINOv2": ("vit_small_patch14_reg4_dinov2", {**VIT, "reg_tokens": 4, "img_size": 56}, dinov2_of_authors, 56),
    "SAM": ("samvit_base_patch16", {**VIT, "global_attn_indexes": (1,), "img_size": 64}, sam_of_authors, 64),
}


@pytest.mark.parametrize("name", AUTHORS)
@pytest.mark.parametrize("inserted", [False, True])
def test_keys_of_the_authors_are_converted_by_timm(name, inserted, tmp_path):
    architecture, options, rename, side = AUTHORS[name]
    theirs, net = (make(architecture, **options) for _ in range(2))
    x = torch.rand(1, 3, side, side)
    torch.save({"model": rename(copied(theirs)), "epoch": 1}, tmp_path / "net.pth")
    if inserted and name == "ConvNeXt":
        va.insert_(net, stages=-2, num_heads=2, example_input=x)
    report = va.load_checkpoint_(net, tmp_path / "net.pth")
    torch.testing.assert_close(net(x), theirs(x), atol=1e-5, rtol=1e-4)
    assert (report.timm_filter, report.entry) == (f"{type(net).__module__}.checkpoint_filter_fn", "model")
    assert "converted by timm.models." in str(report)
    # A tensor under another key, such as the downsampling of Swin, was not resized.
    assert list(report.converted) == (["pos_embed"] if name == "DINOv2" else [])


SIZES = {
    "ViT": ("vit_tiny_patch16_224", {"depth": 1}, (96, 64), "pos_embed"),
    "DeiT": ("deit_tiny_distilled_patch16_224", {"depth": 1}, (96, 64), "pos_embed"),
    "EVA-02": ("eva02_tiny_patch14_224", {"depth": 1}, (84, 56), "pos_embed"),
    "BEiT": ("beit_base_patch16_224", {"depth": 1, "embed_dim": 24, "num_heads": 2}, (96, 64), "relative_position"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", SIZES)
def test_positions_for_another_image_size_are_resized_as_in_timm(name, tmp_path):
    architecture, options, (side, wanted), key = SIZES[name]
    theirs, net, reference = (make(architecture, img_size=n, **options) for n in (side, wanted, wanted))
    torch.save(theirs.state_dict(), tmp_path / "net.pth")
    filter_fn = sys.modules[type(net).__module__].checkpoint_filter_fn
    timm.models.load_checkpoint(reference, str(tmp_path / "net.pth"), filter_fn=filter_fn)
    report, x = va.load_checkpoint_(net, tmp_path / "net.pth"), torch.rand(1, 3, wanted, wanted)
    torch.testing.assert_close(net(x), reference(x))
    assert any(key in name for name in report.converted)
    assert "converted to the shape in the model" in str(report)


def test_a_filter_is_used_only_if_the_checkpoint_does_not_fit(tmp_path, monkeypatch):
    net = make("vit_tiny_patch16_224", img_size=64, depth=1)

    def fail(state, model):
        raise AssertionError("the filter was used")

    torch.save({"module." + key: x for key, x in net.state_dict().items()}, tmp_path / "net.pth")
    with monkeypatch.context() as patch:
        patch.setattr("timm.models.vision_transformer.checkpoint_filter_fn", fail)
        assert not va.load_checkpoint_(net, tmp_path / "net.pth").timm_filter
    # Another head is named with its remedy, and the filter does not hide that a checkpoint is for another network.
    other = make("vit_tiny_patch16_224", img_size=96, depth=1)
    other.reset_classifier(5)
    deeper = make("vit_tiny_patch16_224", img_size=96, depth=2)
    for model, message in ((other, "has 3 classes, the model has 5"), (deeper, r"blocks\.1\.")):
        assert_rejected(va.load_checkpoint_, message, model, tmp_path / "net.pth")
    assert va.load_checkpoint_(other, tmp_path / "net.pth", skip="head.*").timm_filter
