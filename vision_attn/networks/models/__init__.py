"""Networks of this library. Importing this package registers them with timm, for use in ``timm.create_model``.

Each function accepts ``pretrained=True`` to load the weights of the library, the arguments of the network, such as
``num_classes`` and ``in_chans``, and the common arguments of timm, such as ``pretrained_cfg``.

>>> import timm
>>> timm.create_model("resnet20", num_classes=100).num_features
64
"""

from vision_attn.networks.models import cifar_resnet
from vision_attn.networks.models.cifar_resnet import *  # noqa: F403
from vision_attn.networks.models.registry import create_model

# Classes, create_model, and the functions that timm adds when a network is registered.
__all__ = ["create_model", *cifar_resnet.__all__]
