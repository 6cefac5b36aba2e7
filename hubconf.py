"""Entry points for ``torch.hub.load(REPOSITORY, NAME)``: the networks of this library."""

dependencies = ["torch", "torchvision", "timm", "einx", "lazy_loader", "safetensors"]

from vision_attn.networks.models import *  # noqa: E402, F403
