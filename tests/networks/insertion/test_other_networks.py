"""Networks of other libraries and users: segmentation, detection, U-Nets, generators, diffusion, video and audio."""

import pytest
import torch
from any_block import UNet
from reach import tensors
from small_networks import Net
from torch import nn
from torchvision.models import detection

import vision_attn as va

#: Options for networks without pretrained weights.
PLAIN = {"weights": None, "weights_backbone": None, "num_classes": 5}


def conditioned():
    """Return a network with the inputs of a diffusion model: an image, a time and a context."""

    def run(net, x, t, context):
        vectors = net.time(t.to(x)[:, None]) + net.context(context).mean(1)
        return net.up(net.down(x) + vectors[:, :, None, None])

    down, up = nn.Conv2d(4, 32, 3, 2, 1), nn.ConvTranspose2d(32, 4, 2, 2)
    return Net(run, down=down, time=nn.Linear(1, 32), context=nn.Linear(7, 32), up=up)


def generator():
    layers = nn.Unflatten(1, (16, 4, 4)), nn.Upsample(scale_factor=2), nn.Conv2d(16, 8, 3, padding=1)
    return nn.Sequential(nn.Linear(9, 256), *layers)


def sound():
    layers = nn.Conv1d(1, 16, 80, 4), nn.ReLU(), nn.MaxPool1d(4), nn.Conv1d(16, 32, 3), nn.ReLU(), nn.MaxPool1d(4)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, 5))


def small_video():
    layers = nn.Conv3d(3, 8, 3, (1, 2, 2), 1), nn.ReLU(), nn.Conv3d(8, 16, 3, 2, 1), nn.ReLU()
    return nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(16, 5))


CONDITIONS = {"t": torch.tensor([3]), "context": torch.rand(1, 5, 7), "x": torch.rand(1, 4, 16, 16)}
#: Constructor of a network, example input, shape of its images, sites, and stages (None if it has no stages)
SMALL = {
    "a U-Net": (UNet, (1, 3, 32, 32), (1, 3, 32, 32), ["encode", "middle.0", "middle"], None),
    "arguments with names": (conditioned, CONDITIONS, (1, 4, 16, 16), ["down", "up"], None),
    "vectors that become images": (generator, (2, 9), (2, 9), ["1", "3"], None),
    "sound": (sound, (1, 1, 4_000), (1, 1, 4_000), ["1", "5"], ["1", "2", "4", "5"]),
    "video": (small_video, (1, 3, 8, 16, 16), (1, 3, 8, 16, 16), ["1", "3"], ["1", "3"]),
    "a list of images": (
        lambda: detection.fasterrcnn_mobilenet_v3_large_320_fpn(**PLAIN, min_size=96, max_size=128),
        [torch.rand(3, 48, 64), torch.rand(3, 64, 48)], (2, 3, 48, 64),
        ["backbone.body.12", "backbone.fpn.layer_blocks.0"], [f"backbone.body.{index}" for index in (1, 3, 6, 12, 16)],
    ),
}  # fmt: skip
KINDS = {"sound": "AttentionBlock1d", "video": "AttentionBlock3d"}


def run(model, example):
    if isinstance(example, dict):
        return tensors(model(**example))
    if isinstance(example, tuple) and all(isinstance(side, int) for side in example):
        example = (torch.rand(example, generator=torch.Generator().manual_seed(1)),)
    return tensors(model(*example) if isinstance(example, tuple) else [x["scores"] for x in model(example)])


@pytest.mark.filterwarnings("ignore:the model pads images")
@pytest.mark.parametrize("case", [pytest.param(x, marks=[pytest.mark.slow] * (x == "a list of images")) for x in SMALL])
def test_blocks_at_every_selected_module_preserve_the_output_and_train(case, tmp_path):
    make, example, shape, names, stages = SMALL[case]
    model = make().eval()
    if stages:
        assert va.stage_names(model, example) == stages
    else:
        with pytest.raises(va.errors.SiteError, match="larger again"):
            va.insert_(model, stages=-1, example_input=example)
    before, report = run(model, example), va.insert_(model, names=names, example_input=example)
    assert {(x.block, x.target.input_shape) for x in report.blocks} == {(KINDS.get(case, "AttentionBlock2d"), shape)}
    assert all(map(torch.equal, run(model, example), before))
    blocks = va.inserted_blocks(model).values()
    for block in blocks:
        nn.init.normal_(block.attn.proj.weight, std=1.0 if case == "a list of images" else 0.1)
    after = run(model, example)
    sum(x.sum() for x in after).backward()
    assert not all(map(torch.equal, after, before))
    assert all(block.attn.qkv.weight.grad.any() for block in blocks)
    path = va.save_adapter(model, tmp_path / "blocks.safetensors")
    va.remove_(model)
    assert all(map(torch.equal, run(model, example), before))
    va.load_adapter_(model, path)
    assert all(map(torch.equal, run(model, example), after))


@pytest.mark.parametrize("block", [va.AttentionBlock2d, va.blocks.LinearAttention2d])
def test_heads_fit_the_channels_unless_they_are_explicit(block):
    model, options = nn.Sequential(nn.Conv2d(3, 10, 1)), {"names": "0", "example_input": (1, 3, 8, 8)}
    with pytest.raises(ValueError, match="num_heads"):
        va.insert_(model, block, num_heads=8, **options)
    assert va.insert_(model, block, **options).blocks[0].options == {"num_heads": 5}


#: A network, options of va.insert_, and the message of the error.
WRONG_OPTIONS = [
    (conditioned, {"example_input": {"y": CONDITIONS["x"]}}, r"\(y=\(1, 4, 16, 16\)\).*unexpected"),
    (UNet, {"example_input": {"x": 3}}, r"example_input must be .* got \{'x': 3\}"),
    (UNet, {"stages": torch.rand(9)}, "stages"),
    (small_video, {"block": va.AttentionBlock2d}, r"\(1, 16, 8, 28, 28\) at '3'; AttentionBlock2d"),
]


@pytest.mark.parametrize(("make", "options", "message"), WRONG_OPTIONS)
def test_errors_contain_no_tensors_and_name_the_remedy(make, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        va.insert_(make(), **{"stages": -1, **options})
    assert "tensor(" not in str(caught.value)
