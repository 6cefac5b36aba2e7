"""Entry points for ``torch.hub.load(REPOSITORY, NAME)``: the networks that this library registers with timm."""

dependencies = ["torch", "torchvision", "timm", "einx", "safetensors"]

from vision_attn.models import (  # noqa: E402, F401
    digit_pairs,
    digit_pairs_attention,
    resnet20,
    resnet20_a,
    resnet32,
    resnet32_a,
    resnet44,
    resnet44_a,
    resnet56,
    resnet56_a,
)
