"""ResNets for the 32×32 images of CIFAR: three stages (32×32, 16×16 and 8×8), average pooling and a linear classifier.

``resnet20_attention`` has an attention block after each residual block of its last stage, and weights for CIFAR-100.

The ResNets of He et al. have 16, 32 and 64 channels and depth 6n + 2. The paper has two options for the shortcut where
the width changes. Checkpoints exist for both options:

=========  ===========================================  ==========================  =================
option     shortcut where the width changes             keys                        models
=========  ===========================================  ==========================  =================
A          stride 2, channels padded with zeros         ``linear.*``                ``resnet20_a``, …
B          1×1 convolution and batch norm               ``downsample.*``, ``fc.*``  ``resnet20``, …
=========  ===========================================  ==========================  =================

Checkpoints for option A (akamaster/pytorch_resnet_cifar10) require the mean and standard deviation of ImageNet.
Checkpoints for option B (chenyaofo/pytorch-cifar-models) require the mean and standard deviation of their data set
(``resnet20.cifar10``, ``resnet20.cifar100``).
"""

from collections.abc import Callable
from typing import Any

from timm.models import generate_default_cfgs
from timm.models.resnet import BasicBlock, make_blocks
from torch import Tensor, nn

from vision_attn.networks.insertion import insert_
from vision_attn.networks.models.registry import StagedNetwork, register_network, weights_folder

__all__ = ["CifarResNet"]  # timm adds the names of the networks


class CifarResNet(StagedNetwork):
    """A ResNet for 32×32 images: a 3×3 convolution and the stages ``layer1``, ``layer2`` and ``layer3``.

    Args:
        depth: number of layers: 20, 32, 44, 56, … (6n + 2).
        option: shortcut ``"A"`` (padding, classifier ``linear``) or ``"B"`` (projection, classifier ``fc``).
        num_classes: number of classes; 0 returns the pooled features.
        in_chans: number of image channels.
        drop_path_rate: drop path rate of the last block; it increases linearly from 0 at the first block.
        **head: arguments of timm's networks for the classifier: ``global_pool`` and ``drop_rate``.

    Raises:
        ValueError: an argument is out of range.

    Source: He et al., *Deep Residual Learning for Image Recognition*, 2015, section 4.2,
    https://arxiv.org/abs/1512.03385

    >>> import torch
    >>> CifarResNet(20, num_classes=100)(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 100])
    >>> shortcut = CifarResNet(20, option="A").layer2[0].downsample
    >>> x, zeros = torch.randn(2, 16, 6, 6), torch.zeros(2, 8, 3, 3)
    >>> torch.equal(shortcut(x), torch.cat([zeros, x[:, :, ::2, ::2], zeros], dim=1))
    True
    """

    def __init__(
        self,
        depth: int,
        option: str = "B",
        *,
        num_classes: int = 10,
        in_chans: int = 3,
        drop_path_rate: float = 0.0,
        **head: Any,
    ) -> None:
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"depth must be 6n + 2: 20, 32, 44, 56, …, got {depth}")
        if option not in ("A", "B"):
            raise ValueError(f"option must be 'A' (padded shortcuts) or 'B' (projected shortcuts), got {option!r}")
        self.classifier_name = "linear" if option == "A" else "fc"
        super().__init__((16, 32, 64), (1, 2, 4), "layer")
        self.conv1: nn.Conv2d = nn.Conv2d(in_chans, 16, 3, padding=1, bias=False)
        self.bn1: nn.BatchNorm2d = nn.BatchNorm2d(16)
        self.relu: nn.ReLU = nn.ReLU(inplace=True)
        blocks = ((depth - 2) // 6,) * 3
        stages, _ = make_blocks((BasicBlock,) * 3, (16, 32, 64), blocks, inplanes=16, drop_path_rate=drop_path_rate)
        for (name, stage), added in zip(stages, (0, 16, 32), strict=True):
            self.add_module(name, stage)
            if added and option == "A":  # half of the new channels are padded with zeros on each side
                padding = nn.ConstantPad3d((0, 0, 0, 0, added // 2, added // 2), 0.0)
                stage[0].downsample = nn.Sequential(nn.MaxPool2d(1, 2), padding)
        self.add_head(num_classes, **head)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward_features(self, x: Tensor) -> Tensor:
        """Return features ``(b, 64, h / 4, w / 4)`` of images ``(b, in_chans, h, w)``."""
        return super().forward_features(self.relu(self.bn1(self.conv1(x))))

    def group_matcher(self, coarse: bool = False) -> dict[str, str]:
        """Return regular expressions on parameter names, which timm uses to group layers."""
        return {"stem": r"^conv1|bn1", "blocks": r"^layer(\d+)" if coarse else r"^layer(\d+)\.(\d+)"}


class CifarAttentionNet(CifarResNet):
    """:class:`CifarResNet` with an attention block after each residual block of the last stage."""

    def __init__(self, depth: int, in_chans: int = 3, **options: Any) -> None:
        super().__init__(depth, in_chans=in_chans, **options)
        insert_(self, names="layer3.*", num_heads=4, example_input=(1, in_chans, 32, 32))


# --- registration with timm -------------------------------------------------------------------------------------------
SIZES = {"input_size": (3, 32, 32), "pool_size": (8, 8), "crop_pct": 1.0, "interpolation": "bilinear"}
#: timm's configuration of a network for CIFAR-10, with the ``mean`` and ``std`` of ImageNet.
CIFAR10_A = {**SIZES, "num_classes": 10, "first_conv": "conv1", "classifier": "linear"}
CIFAR10 = CIFAR10_A | {"classifier": "fc", "mean": (0.4914, 0.4822, 0.4465), "std": (0.2023, 0.1994, 0.2010)}
CIFAR100 = CIFAR10 | {"num_classes": 100, "mean": (0.5070, 0.4865, 0.4409), "std": (0.2673, 0.2564, 0.2761)}
CONFIGURATIONS = {"resnet{}_a.cifar10": CIFAR10_A, "resnet{}.cifar10": CIFAR10, "resnet{}.cifar100": CIFAR100}
TRAINED = CIFAR100 | {"file": str(weights_folder() / "resnet20_attention_cifar100" / "model.safetensors")}

default_cfgs: dict[str, Any] = generate_default_cfgs(
    {name.format(depth): cfg for depth in (20, 32, 44, 56) for name, cfg in CONFIGURATIONS.items()}
    | {"resnet20_attention.cifar100": TRAINED, "resnet20_attention.cifar10": CIFAR10}
)


def register_resnet(depth: int, option: str, millions: str) -> Callable[..., CifarResNet]:
    name = f"resnet{depth}{'_a' * (option == 'A')}"
    doc = f"ResNet-{depth} for CIFAR with shortcuts of option {option}, {millions} M parameters."
    return register_network(name, doc, CifarResNet, depth=depth, option=option)


resnet20: Callable[..., CifarResNet] = register_resnet(20, "B", "0.27")
resnet32: Callable[..., CifarResNet] = register_resnet(32, "B", "0.47")
resnet44: Callable[..., CifarResNet] = register_resnet(44, "B", "0.66")
resnet56: Callable[..., CifarResNet] = register_resnet(56, "B", "0.86")
resnet20_a: Callable[..., CifarResNet] = register_resnet(20, "A", "0.27")
resnet32_a: Callable[..., CifarResNet] = register_resnet(32, "A", "0.46")
resnet44_a: Callable[..., CifarResNet] = register_resnet(44, "A", "0.66")
resnet56_a: Callable[..., CifarResNet] = register_resnet(56, "A", "0.85")

ATTENTION_DOC = "ResNet-20 for CIFAR with three attention blocks; ``pretrained=True`` loads weights for CIFAR-100."
resnet20_attention: Callable[..., CifarAttentionNet] = register_network(
    "resnet20_attention", ATTENTION_DOC, CifarAttentionNet, depth=20
)
