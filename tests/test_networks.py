"""Networks that people have: segmentation, detection, U-Nets, GANs, diffusion, optical flow, video and sound."""

import pytest
import timm
import torch
import torchvision
from torch import nn
from torchvision.models import detection, segmentation, video

import vision_attn as va

#: No weights are fetched.
PLAIN = {"weights": None, "weights_backbone": None, "num_classes": 5}


class Block(nn.Sequential):
    def __init__(self, channels, out):
        super().__init__(nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU())


class UNet(nn.Module):
    """Encoder, decoder and output, each module by hand."""

    def __init__(self, c=8, classes=10):
        super().__init__()
        self.pool = nn.MaxPool2d(2)
        self.enc1, self.enc2, self.enc3, self.mid = Block(3, c), Block(c, 2 * c), Block(2 * c, 4 * c), Block(4 * c, c)
        self.up3, self.dec3 = nn.ConvTranspose2d(c, 4 * c, 2, 2), Block(8 * c, 4 * c)
        self.up2, self.dec2 = nn.ConvTranspose2d(4 * c, 2 * c, 2, 2), Block(4 * c, 2 * c)
        self.up1, self.dec1 = nn.ConvTranspose2d(2 * c, c, 2, 2), Block(2 * c, c)
        self.out = nn.Conv2d(c, classes, 1)

    def forward(self, x):
        a = self.enc1(x)
        b = self.enc2(self.pool(a))
        c = self.enc3(self.pool(b))
        x = self.dec3(torch.cat([self.up3(self.mid(self.pool(c))), c], 1))
        x = self.dec2(torch.cat([self.up2(x), b], 1))
        return self.out(self.dec1(torch.cat([self.up1(x), a], 1))).sigmoid()


class Conditioned(nn.Module):
    """As a diffusion model: an image, a time and a context."""

    def __init__(self):
        super().__init__()
        self.first, self.time, self.down = Block(4, 16), nn.Linear(1, 16), Block(16, 32)
        self.context, self.up, self.out = nn.Linear(7, 32), nn.ConvTranspose2d(32, 16, 2, 2), nn.Conv2d(16, 4, 1)

    def forward(self, x, t, context):
        x = self.first(x) + self.time(t.to(x)[:, None])[:, :, None, None]
        x = self.down(nn.functional.max_pool2d(x, 2)) + self.context(context).mean(1)[:, :, None, None]
        return self.out(self.up(x))


def sound():
    layers = []
    for channels, out, kernel in ((1, 16, 80), (16, 32, 3), (32, 64, 3)):
        layers += [nn.Conv1d(channels, out, kernel, 4 if kernel > 3 else 1), nn.ReLU(), nn.MaxPool1d(4)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(64, 5))


def small_video():
    layers = []
    for channels, out, stride in ((3, 8, (1, 2, 2)), (8, 16, 2)):
        layers += [nn.Conv3d(channels, out, 3, stride, 1), nn.BatchNorm3d(out), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(16, 5))


LAYERS = ["layer1", "layer2", "layer3", "layer4"]

#: Networks of torchvision and timm with the stages they have; on no device, for they are large.
LARGE = {
    "fcn": (lambda: segmentation.fcn_resnet50(**PLAIN), [f"backbone.{name}" for name in LAYERS]),
    "deeplab, an auxiliary head": (
        lambda: segmentation.deeplabv3_resnet50(**PLAIN, aux_loss=True),
        [f"backbone.{name}" for name in LAYERS],
    ),
    "lraspp": (
        lambda: segmentation.lraspp_mobilenet_v3_large(**PLAIN),
        [f"backbone.{name}" for name in (1, 3, 6, 16)],
    ),
    "a pyramid": (
        lambda: detection.backbone_utils.resnet_fpn_backbone(backbone_name="resnet18", weights=None),
        [f"body.{name}" for name in LAYERS],
    ),
    "timm, dilated": (lambda: timm.create_model("resnet50", output_stride=8), ["act1", *LAYERS]),
    "logits of a convolution": (
        lambda: torchvision.models.squeezenet1_1(),
        ["features.1", "features.4", "features.7", "features.12"],
    ),
    "video": (lambda: video.r3d_18(), LAYERS),
}


@pytest.mark.parametrize("case", LARGE)
def test_a_head_is_no_stage_and_a_dilated_stage_is_one(case):
    make, stages = LARGE[case]
    with torch.device("meta"):
        found = va.stage_names(make(), (1, 3, 8, 32, 32) if case == "video" else (1, 3, 128, 128))
    assert [name for name in found if not name.endswith("relu")] == stages


SMALL = {
    "a U-Net": (UNet, (1, 3, 32, 32), ["enc1", "enc2", "enc3", "mid", "dec3", "dec1"], "AttentionBlock2d"),
    "a diffusion model": (
        Conditioned,
        (torch.rand(1, 4, 16, 16), torch.tensor([3]), torch.rand(1, 5, 7)),
        ["first", "down", "up"],
        "AttentionBlock2d",
    ),
    "vectors that become images": (
        lambda: nn.Sequential(
            nn.Linear(9, 256), nn.Unflatten(1, (16, 4, 4)), nn.Upsample(scale_factor=2), Block(16, 8)
        ),
        (2, 9),
        ["1", "3"],
        "AttentionBlock2d",
    ),
    "sound": (sound, (1, 1, 4_000), ["1", "2", "4", "5", "7", "8"], "AttentionBlock1d"),
    "video": (small_video, (1, 3, 8, 16, 16), ["2", "5"], "AttentionBlock3d"),
}


def inputs(example):
    """What a network is called with."""
    torch.manual_seed(1)
    return (torch.rand(example),) if all(isinstance(side, int) for side in example) else example


@pytest.mark.parametrize("case", SMALL)
def test_every_chosen_module_takes_a_block_that_changes_nothing_and_learns(case):
    make, example, names, kind = SMALL[case]
    torch.manual_seed(0)
    model, arguments = make().eval(), inputs(example)
    if case in ("sound", "video"):
        assert va.stage_names(model, example) == names
    else:
        with pytest.raises(va.SiteError, match="its maps become larger again"):
            va.insert_(model, stages=-1, example_input=example)
    before = model(*arguments)
    report = va.insert_(model, names=names, example_input=example)
    assert {block.block for block in report.blocks} == {kind}
    assert torch.equal(model(*arguments), before)
    for block in va.inserted_blocks(model).values():
        nn.init.normal_(block.attn.proj.weight, std=0.1)
    after = model(*arguments)
    after.sum().backward()
    assert not torch.equal(after, before)
    assert all(block.attn.qkv.weight.grad.any() for block in va.inserted_blocks(model).values())
    va.remove_(model)
    assert torch.equal(model(*arguments), before)


def test_arguments_may_have_names():
    torch.manual_seed(0)
    model = Conditioned().eval()
    words = {"t": torch.tensor([3]), "context": torch.rand(1, 5, 7), "x": torch.rand(1, 4, 16, 16)}
    before = model(**words)
    report = va.insert_(model, names="up", example_input=words)
    assert (report.blocks[0].site, report.blocks[0].input_shape) == ("up", (1, 4, 16, 16))
    assert torch.equal(model(**words), before)


def test_a_detection_model_takes_a_list_of_images():
    torch.manual_seed(0)
    model = detection.fasterrcnn_mobilenet_v3_large_320_fpn(**PLAIN, min_size=96, max_size=128).eval()
    images = [torch.rand(3, 48, 64), torch.rand(3, 64, 48)]
    assert va.stage_names(model, images) == [f"backbone.body.{name}" for name in (1, 3, 6, 12, 16)]
    with torch.no_grad():
        before = model(images)
        report = va.insert_(model, names=["backbone.body.12", "backbone.fpn.layer_blocks.0"], example_input=images)
        assert report.blocks[0].input_shape == (2, 3, 48, 64)
        after = model(images)
        assert all(torch.equal(one[key], other[key]) for one, other in zip(before, after, strict=True) for key in one)
        nn.init.normal_(va.inserted_blocks(model)["backbone.body.12"].attn.proj.weight)
        assert not torch.equal(model(images)[0]["scores"], before[0]["scores"])


@pytest.mark.parametrize("block", [va.AttentionBlock2d, va.TransformerBlock2d, va.LinearAttention2d])
def test_heads_fit_the_channels_where_none_are_asked_for(block):
    model = nn.Sequential(nn.Conv2d(3, 10, 1))
    (record,) = va.insert_(model, block, names="0", example_input=(1, 3, 8, 8)).blocks
    assert record.options == {"num_heads": 5}
    va.remove_(model)
    # What is asked for is not changed.
    with pytest.raises(ValueError, match="num_heads must divide channels"):
        va.insert_(model, block, names="0", num_heads=8, example_input=(1, 3, 8, 8))


@pytest.mark.parametrize(("make", "example"), [(sound, (1, 1, 16_000)), (small_video, (1, 3, 8, 16, 16))])
def test_blocks_for_one_and_three_axes_are_saved_and_loaded_as_adapters(make, example, tmp_path):
    torch.manual_seed(0)
    model, (x,) = make().eval(), inputs(example)
    state = model.state_dict()
    va.insert_(model, stages=[-2, -1], example_input=example, gate_init=0.5)
    file = va.save_adapter(model, tmp_path / "blocks.safetensors")
    other = make().eval()
    other.load_state_dict({key: state[key] for key in other.state_dict()})
    va.load_adapter_(other, file)
    assert torch.equal(other(x), model(x))


REFUSED = {
    "too few arguments": (
        lambda: va.insert_(Conditioned(), stages=-1, example_input=(1, 4, 16, 16)),
        r"missing 2 required positional arguments.* a tuple or dictionary",
    ),
    "another name": (
        lambda: va.insert_(Conditioned(), stages=-1, example_input={"y": torch.rand(1, 4, 16, 16)}),
        r"example \(y=\(1, 4, 16, 16\)\).*unexpected keyword",
    ),
    "no images": (
        lambda: va.insert_(UNet(), stages=-1, example_input={"x": 3}),
        r"example_input must be .* got \{'x': 3\}",
    ),
    "a tensor for stages": (lambda: va.insert_(UNet(), stages=torch.rand(9)), r"stages must .* got "),
    "a block for another map": (
        lambda: va.insert_(small_video(), va.AttentionBlock2d, stages=-1),
        r"block must take the map \(1, 16, 8, 28, 28\) at '5'; AttentionBlock2d does not",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_errors_print_no_tensors_and_name_the_way_out(case):
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "tensor(" not in str(caught.value)
