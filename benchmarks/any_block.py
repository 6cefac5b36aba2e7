"""Compatibility of `va.insert_` with 15 blocks in 20 networks: how each block is made an identity at initialization.

python benchmarks/any_block.py      # writes a section of docs/performance.md
"""

import functools
import sys
import warnings

import timm
import torch
import torchvision
from page_sections import PERFORMANCE, collapsed, markdown, write_section
from reach import anatomy, as_after_training, outputs, tensors
from torch import nn
from torchvision.models import detection, segmentation
from torchvision.ops import SqueezeExcitation

import vision_attn as va
from vision_attn.networks.insertion.record import CHILD

#: The meaning of each result.
RESULTS = {
    "zeros": "The last layers of the block are initialized with zeros, and an output halved by sigmoid(0) = 0.5 is "
    "multiplied by 2. The block trains from the first step.",
    "gate": "The output of the block is multiplied by a gate that is initialized with zero. The gate trains first.",
    "identity": "The block is an identity at initialization without any change.",
    "error": "The block returns NaN for this feature map, and `insert_` raises an error.",
}


class OwnSE(nn.Module):
    """Squeeze-and-excitation with linear layers and ``view``, as found in many repositories."""

    def __init__(self, c, ratio=4):
        super().__init__()
        self.down, self.up = nn.Linear(c, c // ratio), nn.Linear(c // ratio, c)

    def forward(self, x):
        b, c, h, w = x.shape
        weights = self.up(torch.relu(self.down(x.view(b, c, h * w).mean(2))))
        return x * torch.sigmoid(weights).view(b, c, 1, 1)


class SimAM(nn.Module):
    """SimAM, a block without parameters that divides by zero on a feature map of 1×1."""

    def __init__(self, channels=None, e_lambda=1e-4):
        super().__init__()
        self.e_lambda = e_lambda

    def forward(self, x):
        squares = (x - x.mean(dim=[2, 3], keepdim=True)).pow(2)
        variance = squares.sum(dim=[2, 3], keepdim=True) / (x.shape[2] * x.shape[3] - 1)
        return x * torch.sigmoid(squares / (4 * (variance + self.e_lambda)) + 0.5)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Conv2d(3, 16, 3, 2, 1), nn.ConvTranspose2d(16, 3, 2, 2)
        self.middle = nn.Sequential(nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.ConvTranspose2d(32, 16, 2, 2))

    def forward(self, x):
        x = self.encode(x).relu()
        return self.decode(x + self.middle(x))


TIMM_BLOCKS = ("se", "ese", "eca", "ceca", "gc", "gca", "cbam", "coord", "ela", "strip", "splat", "nl")
BLOCKS = {
    **{name: name for name in TIMM_BLOCKS},
    "SqueezeExcitation": functools.partial(SqueezeExcitation, squeeze_channels=8), "OwnSE": OwnSE, "SimAM": SimAM,
}  # fmt: skip
SMALL = ("resnet18", "resnet50", "convnext_atto", "efficientnet_b0", "mobilenetv3_small_100", "regnety_002")
SMALL += ("densenet121", "repvgg_a0", "mobilevit_xxs", "pvt_v2_b0", "edgenext_xx_small", "ghostnet_100")
LARGE = ("swin_tiny_patch4_window7_224", "vit_tiny_patch16_224")
NO_WEIGHTS = {"weights": None, "weights_backbone": None}
#: By name: a function that builds the network, the side of its images, and the position of the block.
NETWORKS = {
    **{name: (functools.partial(timm.create_model, name), 64, {"stages": -1}) for name in SMALL},
    **{name: (functools.partial(timm.create_model, name), 224, {"stages": -2}) for name in LARGE},
    "torchvision resnet18": (torchvision.models.resnet18, 32, {"stages": -1}),
    "torchvision mobilenet_v2": (torchvision.models.mobilenet_v2, 32, {"names": "features.18"}),
    "torchvision shufflenet": (torchvision.models.shufflenet_v2_x0_5, 64, {"names": "conv5"}),
    "torchvision DeepLab": (
        functools.partial(segmentation.deeplabv3_mobilenet_v3_large, **NO_WEIGHTS), 64, {"names": "backbone.16"},
    ),
    "torchvision Faster R-CNN": (
        functools.partial(detection.fasterrcnn_mobilenet_v3_large_320_fpn, **NO_WEIGHTS), 64,
        {"names": "backbone.body.13"},
    ),
    "a U-Net": (UNet, 64, {"names": "middle"}),
}  # fmt: skip


@functools.cache
def network(name):
    make, side, _ = NETWORKS[name]
    torch.manual_seed(0)
    model = make().eval()
    as_after_training(model)
    images = torch.rand(1, 3, side, side)
    return model, list(images) if "R-CNN" in name else images


def check(block, name):
    """Test a block in a network, and return one of `RESULTS`."""
    model, images = network(name)
    expected, before, keys = outputs(model, images), anatomy(model), list(model.state_dict())
    try:
        report = va.insert_(model, BLOCKS[block], **NETWORKS[name][2], example_input=images)
    except va.errors.SiteError as error:
        if "NaN" not in str(error):
            raise
        result = "error"
    else:
        output = tensors(model(images))
        assert all(map(torch.equal, output, expected))
        assert report.output_change == 0
        assert [key for key in model.state_dict() if CHILD not in key] == keys
        # An untrained detector finds no boxes, so gradients are computed from the output of its backbone.
        output = tensors(model.backbone(torch.stack(images))) if "R-CNN" in name else output
        parameters = [p for block in va.inserted_blocks(model).values() for p in block.parameters()]
        loss = sum((torch.randn_like(x) * x).sum() for x in output if x.requires_grad)
        gradients = [x for x in torch.autograd.grad(loss, parameters, allow_unused=True) if x is not None]
        assert all(x.isfinite().all() for x in gradients)
        assert any(x.any() for x in gradients)
        (record,) = report.blocks
        result = "gate" if record.identity[1].get("gated") else "zeros" if record.identity[0] else "identity"
        va.remove_(model)
    assert anatomy(model) == before
    assert all(map(torch.equal, outputs(model, images), expected))
    return result


def format_section(header, rows):
    """Format a table of results with their meanings, and the collapsed results of all networks."""
    summary = [("result", "meaning", "blocks")]
    for result, meaning in RESULTS.items():
        counts = {block: column.count(result) for block, *column in zip(*([header, *rows]), strict=True)}
        blocks = [
            f"`{block}`" if count == len(rows) else f"`{block}` in {count} of {len(rows)} networks"
            for block, count in counts.items()
            if count
        ]
        summary.append((result, meaning, ", ".join(blocks)))
    results = markdown([header, *rows], left=range(len(header)))
    title = f"Results of {len(header) - 2} blocks in {len(rows)} networks"
    return f"{markdown(summary, left=range(3))}\n\n{collapsed(title, results)}"


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    header, rows = ("network", "feature map", *BLOCKS), []
    for name in NETWORKS:
        model, images = network(name)
        size = va.insert_(model, "se", **NETWORKS[name][2], example_input=images).blocks[0].size
        va.remove_(model)
        rows.append((name, size, *(check(block, name) for block in BLOCKS)))
        print(*rows[-1], file=sys.stderr, flush=True)
        network.cache_clear()
    versions = ", ".join(
        f"{module.__name__} {module.__version__.split('+')[0]}" for module in (torch, timm, torchvision)
    )
    write_section(PERFORMANCE, "any_block", f"Measured with {versions}.\n\n{format_section(header, rows)}")


if __name__ == "__main__":
    main()
