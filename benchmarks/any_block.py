"""Table of blocks: how `va.insert_` makes 15 blocks an identity at initialization in 20 networks.

python benchmarks/any_block.py      # writes docs/blocks.md
"""

import functools
import sys
import warnings
from pathlib import Path

import timm
import torch
import torchvision
from reach import anatomy, as_after_training, outputs, tensors
from torch import nn
from torchvision.models import detection, segmentation
from torchvision.ops import SqueezeExcitation

import vision_attn as va
from vision_attn.networks.insertion import CHILD

HEAD = """# `insert_` compatibility: blocks

The table shows how `va.insert_(model, block)` makes each of 15 blocks an identity at initialization, in 20 networks.
Every cell is the result of a test run with torch {torch}, timm {timm} and torchvision {torchvision}.
`python benchmarks/any_block.py` repeats the tests and writes this page.

Each test checks that

- the output of the network is bitwise identical after the insertion, and the existing state-dict keys keep their order;
- the block has finite, nonzero gradients in the first training step;
- `remove_` restores every module, as the same object.

Lowercase names are blocks of timm's `create_attn`. `SqueezeExcitation` is from torchvision. `SimAM` and `OwnSE` are
custom blocks without `device` and `dtype` arguments, as they are found in many repositories.

- **zeros**: the last layers of the block are initialized with zeros, and outputs halved by sigmoid(0) = 0.5 are
  multiplied by 2. The block trains from the first step.
- **gate**: the output of the block is multiplied by a gate that is initialized with zero. The gate trains first.
- **itself**: the block is already an identity at initialization.
- **refused**: the block returns NaN for a feature map of this size, and `insert_` raises an error.

<details markdown="1">
<summary>Results for 15 blocks in 20 networks</summary>

{table}

</details>
"""


class OwnSE(nn.Module):
    """As in hundreds of repositories: by linear layers, with ``view``."""

    def __init__(self, c, ratio=4):
        super().__init__()
        self.down, self.up = nn.Linear(c, c // ratio), nn.Linear(c // ratio, c)

    def forward(self, x):
        b, c, h, w = x.shape
        weights = self.up(torch.relu(self.down(x.view(b, c, h * w).mean(2))))
        return x * torch.sigmoid(weights).view(b, c, 1, 1)


class SimAM(nn.Module):
    """Without parameters, and with a division by zero where the map is 1×1."""

    def __init__(self, channels=None, e_lambda=1e-4):
        super().__init__()
        self.e_lambda = e_lambda

    def forward(self, x):
        apart = (x - x.mean(dim=[2, 3], keepdim=True)).pow(2)
        variance = apart.sum(dim=[2, 3], keepdim=True) / (x.shape[2] * x.shape[3] - 1)
        return x * torch.sigmoid(apart / (4 * (variance + self.e_lambda)) + 0.5)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Conv2d(3, 16, 3, 2, 1), nn.ConvTranspose2d(16, 3, 2, 2)
        self.middle = nn.Sequential(nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.ConvTranspose2d(32, 16, 2, 2))

    def forward(self, x):
        x = self.encode(x).relu()
        return self.decode(x + self.middle(x))


OF_TIMM = ("se", "ese", "eca", "ceca", "gc", "gca", "cbam", "coord", "ela", "strip", "splat", "nl")
BLOCKS = {
    **{name: name for name in OF_TIMM},
    "SqueezeExcitation": functools.partial(SqueezeExcitation, squeeze_channels=8), "OwnSE": OwnSE, "SimAM": SimAM,
}  # fmt: skip
SMALL = ("resnet18", "resnet50", "convnext_atto", "efficientnet_b0", "mobilenetv3_small_100", "regnety_002")
SMALL += ("densenet121", "repvgg_a0", "mobilevit_xxs", "pvt_v2_b0", "edgenext_xx_small", "ghostnet_100")
LARGE = ("swin_tiny_patch4_window7_224", "vit_tiny_patch16_224")
NO_WEIGHTS = {"weights": None, "weights_backbone": None}
#: name: what makes it, side of its images, where a block goes
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
    """Return how a block is an identity at initialization in a network; everything promised of it is asserted."""
    model, images = network(name)
    expected, before, keys = outputs(model, images), anatomy(model), list(model.state_dict())
    try:
        report = va.insert_(model, BLOCKS[block], **NETWORKS[name][2], example_input=images)
    except va.SiteError as error:
        if "returns NaN or infinity for the 1×1 feature map" not in str(error):
            raise
        found = "refused"
    else:
        output = tensors(model(images))
        assert all(map(torch.equal, output, expected))
        assert report.changed == 0
        assert [key for key in model.state_dict() if CHILD not in key] == keys
        # A detector without training finds no boxes: gradients come from its backbone.
        output = tensors(model.backbone(torch.stack(images))) if "R-CNN" in name else output
        parameters = [p for block in va.inserted_blocks(model).values() for p in block.parameters()]
        loss = sum((torch.randn_like(x) * x).sum() for x in output if x.requires_grad)
        gradients = [x for x in torch.autograd.grad(loss, parameters, allow_unused=True) if x is not None]
        assert all(x.isfinite().all() for x in gradients)
        assert any(x.any() for x in gradients)
        (record,) = report.blocks
        found = "gate" if record.around.get("gated") else "zeros" if record.begins else "itself"
        va.remove_(model)
    assert anatomy(model) == before
    assert all(map(torch.equal, outputs(model, images), expected))
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lines = [("network", "feature map", *BLOCKS)]
    for name in NETWORKS:
        model, images = network(name)
        size = va.insert_(model, "se", **NETWORKS[name][2], example_input=images).blocks[0].size
        va.remove_(model)
        lines.append((name, size, *(check(block, name) for block in BLOCKS)))
        print(*lines[-1], file=sys.stderr, flush=True)
        network.cache_clear()
    rows = [f"| {' | '.join(line)} |" for line in lines]
    table = "\n".join([rows[0], "|---" * len(lines[0]) + "|", *rows[1:]])
    versions = {module.__name__: module.__version__ for module in (torch, timm, torchvision)}
    Path(__file__).parents[1].joinpath("docs/blocks.md").write_text(HEAD.format(**versions, table=table))
