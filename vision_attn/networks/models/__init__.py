"""Networks of our own, registered with timm: importing this room makes ``timm.create_model`` know them.

Each is a function of ``pretrained``, whether the weights that come with the name are loaded, and of further keyword
arguments: those of the network, ``num_classes`` and ``in_chans`` among them, and those that timm takes for any, such as
``pretrained_cfg``.

>>> import timm
>>> timm.create_model("resnet20", num_classes=100).num_features
64
"""

from vision_attn.networks.models import attention_networks, cifar_resnet
from vision_attn.networks.models.attention_networks import *  # noqa: F403
from vision_attn.networks.models.cifar_resnet import *  # noqa: F403
from vision_attn.networks.models.recall_net import RecallNet, recall, recall_attention
from vision_attn.networks.models.registry import create_model

# The classes, and what timm adds when it registers a network.
__all__ = ["RecallNet", "create_model", "recall", "recall_attention"]
__all__ += attention_networks.__all__ + cifar_resnet.__all__
