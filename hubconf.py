"""Entry points for ``torch.hub.load(REPOSITORY, NAME)``: the networks that this library registers with timm."""

dependencies = ["torch", "torchvision", "timm", "einx", "lazy_loader", "safetensors"]

from vision_attn.networks.models import (  # noqa: E402, F401
    aa_resnet50,
    botnet50,
    convnext_atto_attention,
    convnext_tiny_attention,
    efficientnet_b0_attention,
    recall,
    recall_attention,
    resnet18_attention,
    resnet20,
    resnet20_a,
    resnet20_attention,
    resnet32,
    resnet32_a,
    resnet32_attention,
    resnet44,
    resnet44_a,
    resnet44_attention,
    resnet50_attention,
    resnet56,
    resnet56_a,
    resnet56_attention,
    wrn16_4,
    wrn16_4_attention,
    wrn28_10,
    wrn28_10_attention,
    wrn40_2,
    wrn40_2_attention,
)
