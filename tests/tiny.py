"""A network with two stages, registered with timm as ``tiny``, which makes training tests faster."""

from timm.layers import DropPath
from timm.models import generate_default_cfgs
from torch import nn

from vision_attn.networks.insertion import insert_
from vision_attn.networks.models.registry import StagedNetwork, register_network


def stage(in_channels, channels):
    convolution = nn.Conv2d(in_channels, channels, 3, stride=2, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels), nn.ReLU())


class Tiny(StagedNetwork):
    def __init__(self, num_classes=3, in_chans=3, drop_rate=0.0, drop_path_rate=0.0, global_pool="avg"):
        super().__init__((8, 16), (2, 4), "layer")
        self.layer1, self.layer2 = stage(in_chans, 8), stage(8, 16)
        if drop_path_rate:
            self.layer1.append(DropPath(drop_path_rate))
        self.add_head(num_classes, drop_rate, global_pool)

    def group_matcher(self, coarse=False):
        return {"stem": r"^layer1", "blocks": r"^layer(\d+)"}


class TinyAttention(Tiny):
    def __init__(self, num_classes=3, in_chans=3, **options):
        super().__init__(num_classes, in_chans, **options)
        insert_(self, names="layer2", num_heads=4, example_input=(1, in_chans, 32, 32))


cfg = {"num_classes": 3, "input_size": (3, 32, 32), "first_conv": "layer1.0", "classifier": "fc"}
default_cfgs = generate_default_cfgs({"tiny": cfg, "tiny_attention": cfg})
tiny = register_network("tiny", "Network with two stages.", Tiny, (0, 1))
tiny_attention = register_network("tiny_attention", "Network with a block.", TinyAttention, (0, 1))
