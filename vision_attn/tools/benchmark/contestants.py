"""What runs beside what: modules of ours and of other libraries on random maps, in one table."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
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

from vision_attn.attention.blocks import Attention2d, AttentionBlock2d
from vision_attn.attention.blocks.attention_maps import attn_hook
from vision_attn.attention.dispatch import AttentionInputs
from vision_attn.attention.implementations import IMPLS
from vision_attn.attention.kernels import with_four_axes
from vision_attn.attention.patterns import Neighborhood, Window
from vision_attn.attention.position import ConditionalPos, RelPosDecomposed, RelPosTable, Rope2d
from vision_attn.attention.position.rel_pos_decomposed import DecomposedBias
from vision_attn.networks.convert import from_layer
from vision_attn.networks.insertion import insert_

#: Batch, channels, height and width of maps.
Shape = tuple[int, int, int, int]
#: Makes a module for a map and a number of heads; beside it, if it is not ours, one of ours with the same weights.
Maker = Callable[[Tensor, int], nn.Module | tuple[nn.Module, nn.Module]]
#: As wide as the map, which an inserted block is not where that has many channels.
ALL_CHANNELS: dict[str, Any] = {"key_dim": None, "value_dim": None}
LAYOUTS = {"nchw": torch.contiguous_format, "channels-last": torch.channels_last}


class OnMaps(nn.Module):
    """A layer that takes ``(b, h, w, c)``, on maps; they go out in the layout that they came in."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def run(self, y: Tensor) -> Tensor:
        return self.layer(y)

    def forward(self, x: Tensor) -> Tensor:
        layout = "channels-last" if x.is_contiguous(memory_format=torch.channels_last) else "nchw"
        return self.run(x.movedim(1, -1)).movedim(-1, 1).contiguous(memory_format=LAYOUTS[layout])


class TorchOnMaps(OnMaps):
    """torch's layer: in evaluation mode and without gradients it runs a kernel of its own that makes all weights."""

    training_mode = False

    def run(self, y: Tensor) -> Tensor:
        self.layer.train(self.training_mode)
        tokens = y.flatten(1, 2)
        return self.layer(tokens, tokens, tokens, need_weights=False)[0].unflatten(1, y.shape[1:3])


class FusedTorchOnMaps(TorchOnMaps):
    """The same in training mode, which here has no dropout and runs the fused kernel."""

    training_mode = True


class Floor(nn.Module):
    """What attention of a block has to do, projection, fused kernel, projection: each on contiguous inputs of its own.

    The kernel is given queries, keys, values and the mask that the block gives its own, but no positions folded into
    them.
    """

    def __init__(self, ours: Attention2d, x: Tensor) -> None:
        super().__init__()
        seen: list[AttentionInputs] = []
        with torch.no_grad(), attn_hook(ours, seen.append):
            ours(x)
        q, k, v, self.scale, _, bias = seen[0][:6]
        mask = seen[0].grouping.build_attn_mask(None, False, bias is not None)[0]
        if bias is not None and not bias.is_sum_over_axes:
            mask = bias.apply(q, k, self.scale, mask)[3]
        if mask is not None:
            q, k, v, mask = with_four_axes(q, k, v, mask)
        state = {key: value.detach() for key, value in ours.state_dict().items()}
        maps = x.detach().movedim(1, -1), torch.randn_like(x).movedim(1, -1)
        weights = [state[key] for key in ("qkv.weight", "qkv.bias", "proj.weight", "proj.bias")]
        leaves = (*maps, q, k, v, *(weight.flatten(1) if weight.dim() > 1 else weight for weight in weights))
        self.leaves: nn.ParameterList = nn.ParameterList(leaf.contiguous() for leaf in leaves)
        self.mask = mask if mask is None or mask.dtype == torch.bool else mask.detach().to(q.dtype).contiguous()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y, joined, q, k, v, weight, bias, proj_weight, proj_bias = self.leaves
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, scale=self.scale)
        return F.linear(y, weight, bias), attended, F.linear(joined, proj_weight, proj_bias)


class ByHand(nn.Module):
    """What a person writes to put timm's attention into a network."""

    def __init__(self, channels: int, num_heads: int) -> None:
        super().__init__()
        self.norm = LayerNorm2d(channels, eps=1e-5)  # as ours
        self.attn = TimmAttention2d(channels, num_heads=num_heads)
        self.gate = nn.Parameter(torch.full((channels, 1, 1), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.attn(self.norm(x))


def ours(**options: Any) -> Maker:
    return lambda x, n: Attention2d(x.shape[1], n, **options)


def with_position(kind: Callable[..., Any]) -> Maker:
    """A position that is made for the size of the map."""
    return lambda x, n: Attention2d(x.shape[1], n, position=kind(feat_size=tuple(x.shape[2:])))


def floor(make: Maker) -> Maker:
    """The floor of a block of ours."""

    def made(x: Tensor, n: int) -> nn.Module:
        block: Any = make(x, n)
        return Floor(block.to(x.device, x.dtype), x)

    return made


class Folded(nn.Module):
    """Relative positions of each axis folded into queries and keys, as on a GPU."""

    def __init__(self, x: Tensor, n: int) -> None:
        super().__init__()
        self.block: Any = with_position(RelPosDecomposed)(x, n)

    def forward(self, x: Tensor) -> Tensor:
        with patch.object(DecomposedBias, "is_sum_over_axes", False):
            return self.block(x)


def compiled(make: Maker) -> Maker:
    """What torch makes of a module without a break in its graph; its twin is the module itself."""

    def made(x: Tensor, n: int) -> tuple[nn.Module, nn.Module]:
        given = make(x, n)
        module: nn.Module = (given[0] if isinstance(given, tuple) else given).to(x.device, x.dtype).eval()
        compiled_one: Any = torch.compile(module, fullgraph=True)
        return compiled_one, module

    return made


def theirs(make_layer: Callable[[int, int], nn.Module], wrapped: Callable[..., nn.Module] = lambda y: y) -> Maker:
    """A layer of another library by channels and heads, and what makes it one on maps."""

    def make(x: Tensor, n: int) -> tuple[nn.Module, nn.Module]:
        layer = make_layer(x.shape[1], n)
        return wrapped(layer), from_layer(layer)

    return make


def torch_layer(c: int, n: int) -> nn.Module:
    return nn.MultiheadAttention(c, n, batch_first=True)


def windows(shift: int) -> Callable[[int, int], nn.Module]:
    def make(c: int, n: int) -> nn.Module:
        layer = ShiftedWindowAttention(c, [7, 7], [shift, shift], n)
        nn.init.normal_(layer.relative_position_bias_table, std=0.5)  # so large that leaving it out shows
        return layer

    return make


def bottleneck(x: Tensor, n: int) -> tuple[nn.Module, nn.Module]:
    """timm's has no projection at its end: here one follows it."""
    c, h, w = x.shape[1:]
    layer, proj = BottleneckAttn(c, feat_size=(h, w), num_heads=n, dim_head=c // n), nn.Conv2d(c, c, 1)
    for table in (layer.pos_embed.height_rel, layer.pos_embed.width_rel):
        nn.init.normal_(table, std=0.5)
    twin: Any = from_layer(layer)
    twin.proj = copy.deepcopy(proj)
    return nn.Sequential(layer, proj), twin


def resnet(x: Tensor, n: int) -> nn.Module:
    return timm.create_model("resnet50")


def resnet_with(**options: Any) -> Maker:
    """With our blocks after its last two stages."""

    def made(x: Tensor, n: int) -> nn.Module:
        network = resnet(x, n)
        insert_(network, stages=(-2, -1), num_heads=n, gate_init=0.1, **options)
        return network

    return made


def resnet_by_hand(x: Tensor, n: int) -> tuple[nn.Module, nn.Module]:
    network: Any = resnet(x, n)
    twin = copy.deepcopy(network)
    insert_(twin, stages=(-2, -1), num_heads=n, gate_init=0.1, **ALL_CHANNELS)
    blocks: list[Any] = [module for module in twin.modules() if isinstance(module, AttentionBlock2d)]
    for block, stage in zip(blocks, (network.layer3, network.layer4), strict=True):
        stage.append(ByHand(block.attn.channels, n))
        block.attn = from_layer(stage[-1].attn)
    return network, twin


#: Everybody, by name.
CONTESTANTS: dict[str, Maker] = {
    "ours": ours(),
    **{f"ours {impl}": ours(impl=impl) for impl in IMPLS},
    "timm layers Attention2d": theirs(lambda c, n: TimmAttention2d(c, num_heads=n)),
    "timm maxxvit Attention2d": theirs(lambda c, n: MaxxVitAttention2d(c, dim_head=c // n)),
    "torch MHA": theirs(torch_layer, TorchOnMaps),
    "torch MHA, training mode": theirs(torch_layer, FusedTorchOnMaps),
    "ours RelPosDecomposed": with_position(RelPosDecomposed),
    "ours RelPosDecomposed, folded": Folded,
    "timm BottleneckAttn": bottleneck,
    "ours window": ours(pattern=Window(7), position=RelPosTable()),
    "torchvision window": theirs(windows(0), OnMaps),
    "ours shifted window": ours(pattern=Window(7, shift=3), position=RelPosTable()),
    "torchvision shifted window": theirs(windows(3), OnMaps),
    "ours RelPosTable": with_position(RelPosTable),
    "ours Rope2d": ours(position=Rope2d()),
    "ours ConditionalPos": ours(position=ConditionalPos(3)),
    "ours neighbourhood": ours(pattern=Neighborhood(7)),
    "resnet50": resnet,
    "resnet50, ours inserted": resnet_with(),
    "resnet50, ours in all channels": resnet_with(**ALL_CHANNELS),
    "resnet50, timm's by hand": resnet_by_hand,
}


@dataclass(frozen=True)
class Row:
    """What ``--rows`` names: who runs, the first of whom is compared with the others, and on which maps."""

    contestants: Mapping[str, Maker]
    #: where neither is given: heads by shape
    shapes: Mapping[Shape, int]
    layouts: tuple[str, ...] = ("nchw",)


def among(*names: str) -> dict[str, Maker]:
    return {name: CONTESTANTS[name] for name in names}


def beside_floor(*names: str) -> dict[str, Maker]:
    """The first of them with its floor."""
    return {**among(names[0]), "floor": floor(CONTESTANTS[names[0]]), **among(*names[1:])}


def also_compiled(*names: str) -> dict[str, Maker]:
    """Each of them compiled, then as it is."""
    return {**{f"{name}, compiled": compiled(CONTESTANTS[name]) for name in names}, **among(*names)}


SIZES: dict[Shape, int] = {(8, 256, 14, 14): 8, (2, 256, 32, 32): 8, (1, 128, 64, 64): 4}
BACKBONES: dict[Shape, int] = {(4, 3, 224, 224): 8, (16, 3, 224, 224): 8}
POSITIONED: dict[Shape, int] = {(8, 256, 14, 14): 4, (2, 256, 28, 28): 4, (1, 256, 56, 56): 4}
WINDOWED: dict[Shape, int] = {(8, 96, 56, 56): 3}
LIBRARIES = ("timm layers Attention2d", "timm maxxvit Attention2d", "torch MHA", "torch MHA, training mode")
# FlexAttention has no gradients on a CPU.
OURS = ("ours", *(f"ours {impl}" for impl in IMPLS if impl != "flex"))
VARIANTS = ("RelPosDecomposed", "RelPosTable", "Rope2d", "ConditionalPos", "window", "shifted window", "neighbourhood")
BOTH = tuple(LAYOUTS)

ROWS = {
    "implementations": Row(
        {**among(*OURS), **beside_floor("ours", *LIBRARIES)}, {(1, 128, side, side): 4 for side in (8, 16, 32, 64)}
    ),
    "attention": Row(
        beside_floor("ours", *LIBRARIES), {(8, 64, 8, 8): 8, (32, 512, 7, 7): 8, **SIZES, (1, 256, 56, 56): 8}, BOTH
    ),
    "backbone": Row(
        among("resnet50, ours in all channels", "resnet50, timm's by hand", "resnet50, ours inserted", "resnet50"),
        BACKBONES,
    ),
    "positions": Row(beside_floor("ours RelPosDecomposed", "timm BottleneckAttn"), POSITIONED),
    "windows": Row(beside_floor("ours window", "torchvision window"), WINDOWED, BOTH),
    "shifted-windows": Row(beside_floor("ours shifted window", "torchvision shifted window"), WINDOWED, BOTH),
    "einx": Row(among("ours einx", "ours bmm"), SIZES),
    # what impl="auto" and relative positions choose among
    "choices": Row(
        among("ours", "ours sdpa", "ours bmm"),
        {(2048 // side**2 or 1, channels, side, side): 8 for channels in (64, 256, 512) for side in (4, 7, 10, 14, 24)},
    ),
    "position-choices": Row(among("ours RelPosDecomposed", "ours RelPosDecomposed, folded"), POSITIONED),
    "compiled": Row(also_compiled("ours", "ours einx", "ours bmm"), {(8, 256, 14, 14): 8, (2, 256, 32, 32): 8}),
    "compiled-backbone": Row(also_compiled("resnet50, ours inserted"), {(4, 3, 224, 224): 8}),
    # with four times the tokens
    "memory": Row(among("ours", *(f"ours {name}" for name in VARIANTS)), {(1, 64, 28, 28): 4, (1, 64, 56, 56): 4}),
}
