"""Candidates of the speed benchmark: attention layers and networks of this library and of other libraries."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from unittest.mock import patch

import timm
import torch
import torch.nn.functional as F
from timm.layers.attention2d import Attention2d as TimmAttention2d
from timm.layers.bottleneck_attn import BottleneckAttn
from timm.layers.norm import LayerNorm2d
from timm.models.maxxvit import Attention2d as MaxxVitAttention2d
from torch import Tensor, nn
from torchvision.models.swin_transformer import ShiftedWindowAttention

import vision_attn as va
from vision_attn.attention.kernels import to_4d_mask
from vision_attn.attention.position.rel_pos_decomposed import DecomposedBias
from vision_attn.attention.scopes import scope
from vision_attn.convert import from_layer

#: Batch size, channels, height and width.
Shape = tuple[int, int, int, int]
#: Build a module for an input and a number of heads. A module of another library is returned with its reference, a
#: module of this library with the same weights.
Builder = Callable[[Tensor, int], nn.Module | tuple[nn.Module, nn.Module]]
#: Options of `insert_` for a block as wide as the feature map.
ALL_CHANNELS = {"key_dim": None, "value_dim": None}
LAYOUTS = {"nchw": torch.contiguous_format, "channels-last": torch.channels_last}


class OnFeatureMap(nn.Module):
    """Apply a layer with inputs ``(b, h, w, c)`` to ``(b, c, h, w)``. Keep the memory format."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def apply_layer(self, y):
        return self.layer(y)

    def forward(self, x):
        layout = "channels-last" if x.is_contiguous(memory_format=torch.channels_last) else "nchw"
        return self.apply_layer(x.movedim(1, -1)).movedim(-1, 1).contiguous(memory_format=LAYOUTS[layout])


class TorchOnFeatureMap(OnFeatureMap):
    """Apply `nn.MultiheadAttention` to a feature map.

    In evaluation mode without gradients, it runs a kernel that stores all attention weights. In training mode without
    dropout, it runs the fused kernel.
    """

    def __init__(self, layer, training_mode):
        super().__init__(layer)
        self.training_mode = training_mode

    def apply_layer(self, y):
        self.layer.train(self.training_mode)
        tokens = y.flatten(1, 2)
        return self.layer(tokens, tokens, tokens, need_weights=False)[0].unflatten(1, y.shape[1:3])


class LowerBound(nn.Module):
    """Run the steps that no attention layer can avoid: both projections and the fused kernel, on contiguous inputs.

    The kernel receives the queries, keys, values and mask of a block, before a position encoding is folded into them.
    """

    def __init__(self, block, x):
        super().__init__()
        recorded = []
        with torch.no_grad(), scope(block, "attention", {block: recorded.append}):
            block(x)
        q, k, v, self.scale, grouping, bias, _ = recorded[0]
        mask = grouping.attn_mask(q.dtype) if bias is None else bias.attn_mask(grouping.attn_mask(q.dtype))
        if mask is not None:
            q, k, v, mask = to_4d_mask(q, k, v, mask)
        state = {key: value.detach() for key, value in block.state_dict().items()}
        inputs = x.detach().movedim(1, -1), torch.randn_like(x).movedim(1, -1)
        weights = [state[key] for key in ("qkv.weight", "qkv.bias", "proj.weight", "proj.bias")]
        leaves = (*inputs, q, k, v, *(weight.flatten(1) if weight.dim() > 1 else weight for weight in weights))
        self.leaves = nn.ParameterList(leaf.contiguous() for leaf in leaves)
        self.mask = mask if mask is None or mask.dtype == torch.bool else mask.detach().to(q.dtype).contiguous()

    def forward(self, x):
        y, merged, q, k, v, weight, bias, proj_weight, proj_bias = self.leaves
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, scale=self.scale)
        return F.linear(y, weight, bias), attended, F.linear(merged, proj_weight, proj_bias)


class TimmBlock(nn.Module):
    """A hand-written residual block with timm's attention layer."""

    def __init__(self, channels, num_heads):
        super().__init__()
        self.norm = LayerNorm2d(channels, eps=1e-5)  # the default of AttentionBlock2d
        self.attn = TimmAttention2d(channels, num_heads=num_heads)
        self.gate = nn.Parameter(torch.full((channels, 1, 1), 0.1))

    def forward(self, x):
        return x + self.gate * self.attn(self.norm(x))


class FoldedPosition(nn.Module):
    """A block whose relative positions are folded into queries and keys on a CPU, as on a GPU."""

    def __init__(self, x, n):
        super().__init__()
        self.block = with_position(va.RelPosDecomposed)(x, n)

    def forward(self, x):
        with patch.object(DecomposedBias, "rel_logits", None):
            return self.block(x)


# --- builders ---------------------------------------------------------------------------------------------------------


def attention_layer(**options):
    return lambda x, n: va.Attention2d(x.shape[1], n, **options)


def with_position(kind):
    """Build a block with a position encoding for the size of the feature map."""
    return lambda x, n: va.Attention2d(x.shape[1], n, position=kind(feat_size=tuple(x.shape[2:])))


def lower_bound(build):
    return lambda x, n: LowerBound(build(x, n).to(x.device, x.dtype), x)


def compiled(build):
    """Compile a module without graph breaks. Its reference is the module itself."""

    def build_compiled(x, n):
        module = build(x, n).to(x.device, x.dtype).eval()
        return torch.compile(module, fullgraph=True), module

    return build_compiled


def other_layer(build_layer, wrap=lambda layer: layer):
    """Build a layer of another library, wrap it for feature maps, and convert it to a block as its reference."""

    def build(x, n):
        layer = build_layer(x.shape[1], n)
        return wrap(layer), from_layer(layer)

    return build


def torch_attention(training_mode):
    return other_layer(
        lambda c, n: nn.MultiheadAttention(c, n, batch_first=True), lambda y: TorchOnFeatureMap(y, training_mode)
    )


def torchvision_window(shift):
    def build_layer(c, n):
        layer = ShiftedWindowAttention(c, [7, 7], [shift, shift], n)
        nn.init.normal_(layer.relative_position_bias_table, std=0.5)  # large enough for the output to depend on it
        return layer

    return other_layer(build_layer, OnFeatureMap)


def bottleneck(x, n):
    """Build timm's layer, followed by the output projection that it lacks."""
    c, h, w = x.shape[1:]
    layer, proj = BottleneckAttn(c, feat_size=(h, w), num_heads=n, dim_head=c // n), nn.Conv2d(c, c, 1)
    for table in (layer.pos_embed.height_rel, layer.pos_embed.width_rel):
        nn.init.normal_(table, std=0.5)
    reference = from_layer(layer)
    reference.proj = copy.deepcopy(proj)
    return nn.Sequential(layer, proj), reference


def resnet(x, n):
    return timm.create_model("resnet50")


def resnet_with_blocks(**options):
    """Insert a block after each of the last two stages."""

    def build(x, n):
        network = resnet(x, n)
        va.insert_(network, stages=(-2, -1), num_heads=n, gate_init=0.1, **options)
        return network

    return build


def resnet_by_hand(x, n):
    network = resnet(x, n)
    reference = copy.deepcopy(network)
    va.insert_(reference, stages=(-2, -1), num_heads=n, gate_init=0.1, **ALL_CHANNELS)
    blocks = [module for module in reference.modules() if isinstance(module, va.AttentionBlock2d)]
    for block, stage in zip(blocks, (network.layer3, network.layer4), strict=True):
        stage.append(TimmBlock(block.attn.channels, n))
        block.attn = from_layer(stage[-1].attn)
    return network, reference


CANDIDATES: dict[str, Builder] = {
    "vision_attn": attention_layer(),
    **{f"vision_attn {impl}": attention_layer(impl=impl) for impl in va.implementations.IMPLS},
    "timm layers Attention2d": other_layer(lambda c, n: TimmAttention2d(c, num_heads=n)),
    "timm maxxvit Attention2d": other_layer(lambda c, n: MaxxVitAttention2d(c, dim_head=c // n)),
    "torch MHA": torch_attention(training_mode=False),
    "torch MHA, training mode": torch_attention(training_mode=True),
    "vision_attn RelPosDecomposed": with_position(va.RelPosDecomposed),
    "vision_attn RelPosDecomposed, folded": FoldedPosition,
    "timm BottleneckAttn": bottleneck,
    "vision_attn window": attention_layer(pattern=va.Window(7), position=va.RelPosTable()),
    "torchvision window": torchvision_window(0),
    "vision_attn shifted window": attention_layer(pattern=va.Window(7, shift=3), position=va.RelPosTable()),
    "torchvision shifted window": torchvision_window(3),
    "vision_attn RelPosTable": with_position(va.RelPosTable),
    "vision_attn Rope": attention_layer(position=va.Rope()),
    "vision_attn ConditionalPos": attention_layer(position=va.ConditionalPos(3)),
    "vision_attn neighborhood": attention_layer(pattern=va.Neighborhood(7)),
    "resnet50": resnet,
    "resnet50, vision_attn": resnet_with_blocks(),
    "resnet50, vision_attn in all channels": resnet_with_blocks(**ALL_CHANNELS),
    "resnet50, timm": resnet_by_hand,
}


# --- rows -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """Candidates and inputs of a comparison. The first candidate is compared with each of the others."""

    candidates: Mapping[str, Builder]
    #: Default shapes of the input, with the number of heads of each.
    shapes: Mapping[Shape, int]
    layouts: tuple[str, ...] = ("nchw",)


def select(*names):
    return {name: CANDIDATES[name] for name in names}


def with_lower_bound(*names):
    """Select candidates, and add the lower bound of the first one."""
    return {**select(names[0]), "lower bound": lower_bound(CANDIDATES[names[0]]), **select(*names[1:])}


def with_compiled(*names):
    return {**{f"{name}, compiled": compiled(CANDIDATES[name]) for name in names}, **select(*names)}


SIZES = {(8, 256, 14, 14): 8, (2, 256, 32, 32): 8, (1, 128, 64, 64): 4}
BACKBONES = {(4, 3, 224, 224): 8, (16, 3, 224, 224): 8}
POSITIONS = {(8, 256, 14, 14): 4, (2, 256, 28, 28): 4, (1, 256, 56, 56): 4}
WINDOWS = {(8, 96, 56, 56): 3}
LIBRARIES = ("timm layers Attention2d", "timm maxxvit Attention2d", "torch MHA", "torch MHA, training mode")
# FlexAttention has no gradients on a CPU.
IMPLEMENTATIONS = ("vision_attn", *(f"vision_attn {impl}" for impl in va.implementations.IMPLS if impl != "flex"))
VARIANTS = ("RelPosDecomposed", "RelPosTable", "Rope", "ConditionalPos", "window", "shifted window", "neighborhood")
BOTH = tuple(LAYOUTS)

ROWS = {
    "implementations": Row(
        {**select(*IMPLEMENTATIONS), **with_lower_bound("vision_attn", *LIBRARIES)},
        {(1, 128, side, side): 4 for side in (8, 16, 32, 64)},
    ),
    "attention": Row(
        with_lower_bound("vision_attn", *LIBRARIES),
        {(8, 64, 8, 8): 8, (32, 512, 7, 7): 8, **SIZES, (1, 256, 56, 56): 8},
        BOTH,
    ),
    "backbone": Row(
        select("resnet50, vision_attn in all channels", "resnet50, timm", "resnet50, vision_attn", "resnet50"),
        BACKBONES,
    ),
    "positions": Row(with_lower_bound("vision_attn RelPosDecomposed", "timm BottleneckAttn"), POSITIONS),
    "windows": Row(with_lower_bound("vision_attn window", "torchvision window"), WINDOWS, BOTH),
    "shifted-windows": Row(with_lower_bound("vision_attn shifted window", "torchvision shifted window"), WINDOWS, BOTH),
    "einx": Row(select("vision_attn einx", "vision_attn bmm"), SIZES),
    # Implementations that impl="auto" can select, and two implementations of relative positions.
    "choices": Row(
        select("vision_attn", "vision_attn sdpa", "vision_attn bmm"),
        {(2048 // side**2 or 1, channels, side, side): 8 for channels in (64, 256, 512) for side in (4, 7, 10, 14, 24)},
    ),
    "position-choices": Row(select("vision_attn RelPosDecomposed", "vision_attn RelPosDecomposed, folded"), POSITIONS),
    "compiled": Row(
        with_compiled("vision_attn", "vision_attn einx", "vision_attn bmm"), {(8, 256, 14, 14): 8, (2, 256, 32, 32): 8}
    ),
    "compiled-backbone": Row(with_compiled("resnet50, vision_attn"), {(4, 3, 224, 224): 8}),
    # The second feature map has four times the tokens.
    "memory": Row(
        select("vision_attn", *(f"vision_attn {name}" for name in VARIANTS)), {(1, 64, 28, 28): 4, (1, 64, 56, 56): 4}
    ),
}
