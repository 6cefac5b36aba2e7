"""What runs beside what: modules of ours and of other libraries that compute the same, on random maps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
from vision_attn.attention.implementations import IMPLS
from vision_attn.attention.patterns import Neighborhood, Window
from vision_attn.attention.position import ConditionalPos, RelPosDecomposed, RelPosTable, Rope2d
from vision_attn.networks.convert import (
    from_timm_attention2d,
    from_timm_bottleneck_attn,
    from_timm_maxxvit_attention,
    from_torch_mha,
    from_torchvision_swin,
)
from vision_attn.networks.convert.swap import swap_
from vision_attn.networks.insertion import insert_
from vision_attn.networks.inspection import network_of
from vision_attn.tools.benchmark.plan import LAYOUTS, Shape

__all__ = ["CASES", "Case", "Contestant", "Step", "contestant", "make_map", "swap"]


@dataclass(frozen=True)
class Step:
    """One call that is measured by itself: forward, or with the gradients of its inputs and parameters."""

    call: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    parameters: tuple[Tensor, ...] = ()

    @torch.no_grad()
    def forward(self) -> Tensor:
        return self.call(*self.inputs)

    def gradients(self) -> Callable[[], object]:
        """A function that runs forward and backward."""
        of_output, leaves = torch.randn_like(self.forward()), (*self.inputs, *self.parameters)
        return lambda: torch.autograd.grad(self.call(*self.inputs), leaves, of_output, allow_unused=True)


@dataclass(frozen=True)
class Contestant:
    """Its time is the sum of its steps'; the map that comes out of the last one must be that of its twin."""

    steps: tuple[Step, ...]
    twin: Callable[[Tensor], Tensor] | None = None
    as_map: Callable[[Tensor], Tensor] = lambda y: y


@dataclass(frozen=True)
class Case:
    """The contestants of one table; the first is compared with each of the others."""

    title: str
    contestants: dict[str, Contestant]
    #: among whom the best is looked for
    rivals: tuple[str, ...] = ()
    #: whether it is timed with gradients too
    gradients: bool = True
    #: the contestant that the others add to: ratios are of what they add
    base: str | None = None


def make_map(shape: Shape, layout: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(device, dtype).to(memory_format=LAYOUTS[layout]).requires_grad_()


def contestant(module: nn.Module, x: Tensor, twin: nn.Module | None = None) -> Contestant:
    """A module on maps, and the module of ours with the same weights, if it is another."""
    module = module.to(x.device, x.dtype)
    twin = None if twin is None else twin.to(x.device, x.dtype)
    return Contestant((Step(module, (x,), tuple(p for p in module.parameters() if p.requires_grad)),), twin)


class OnMaps(nn.Module):
    """A layer that takes ``(b, h, w, c)``, on maps; they go out in the layout that they came in."""

    def __init__(
        self, layer: nn.Module, run: Callable[[nn.Module, Tensor], Tensor] = lambda layer, y: layer(y)
    ) -> None:
        super().__init__()
        self.layer, self.run = layer, run

    def forward(self, x: Tensor) -> Tensor:
        layout = "channels-last" if x.is_contiguous(memory_format=torch.channels_last) else "nchw"
        return self.run(self.layer, x.movedim(1, -1)).movedim(-1, 1).contiguous(memory_format=LAYOUTS[layout])


# --- attention between all positions ----------------------------------------------------------------------------------


def run_mha(layer: nn.Module, y: Tensor) -> Tensor:
    tokens = y.flatten(1, 2)
    return layer(tokens, tokens, tokens, need_weights=False)[0].unflatten(1, y.shape[1:3])


def libraries(x: Tensor, heads: int) -> dict[str, Contestant]:
    """Attention of timm and torch.

    torch's layer has two ways: in evaluation mode and without gradients a kernel of its own that makes all weights, and
    else (here in training mode, without dropout) the fused one. Both run, so that ours is compared with the better.
    """
    channels = x.shape[1]
    layers = TimmAttention2d(channels, num_heads=heads).eval()
    maxxvit = MaxxVitAttention2d(channels, dim_head=channels // heads).eval()
    mha = nn.MultiheadAttention(channels, heads, batch_first=True).eval()
    mha_twin = from_torch_mha(mha)
    return {
        "timm layers Attention2d": contestant(layers, x, from_timm_attention2d(layers)),
        "timm maxxvit Attention2d": contestant(maxxvit, x, from_timm_maxxvit_attention(maxxvit)),
        "torch MHA": contestant(OnMaps(mha, run_mha), x, mha_twin),
        "torch MHA, training mode": contestant(OnMaps(copy.deepcopy(mha).train(), run_mha), x, mha_twin),
    }


def floor(ours: Attention2d, x: Tensor) -> Contestant:
    """What any attention has to do: project, attend, project, each on contiguous inputs, nothing between them."""

    def leaf(values: Tensor) -> Tensor:
        return values.detach().to(x.device, x.dtype).clone(memory_format=torch.contiguous_format).requires_grad_()

    weights = {key: leaf(value.flatten(1) if value.dim() > 1 else value) for key, value in ours.state_dict().items()}
    project_in = Step(F.linear, (leaf(x.flatten(2).mT), weights["qkv.weight"], weights["qkv.bias"]))
    qkv = project_in.forward().unflatten(2, (3, ours.num_heads, -1)).permute(2, 0, 3, 1, 4)
    attend = Step(F.scaled_dot_product_attention, tuple(map(leaf, qkv)))
    joined = leaf(attend.forward().transpose(1, 2).flatten(2))
    project_out = Step(F.linear, (joined, weights["proj.weight"], weights["proj.bias"]))
    return Contestant((project_in, attend, project_out), ours, as_map=lambda y: y.mT.unflatten(2, x.shape[2:]))


class WrittenOut(nn.Module):
    """Attention as it is usually written by hand, with the projections of a block of ours."""

    def __init__(self, ours: Attention2d) -> None:
        super().__init__()
        c = ours.channels
        self.num_heads = ours.num_heads
        self.qkv, self.proj = nn.Conv2d(c, 3 * c, 1), nn.Conv2d(c, c, 1)
        self.load_state_dict(ours.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        n, tokens, d = self.num_heads, h * w, c // self.num_heads
        qkv = self.qkv(x).view(b, 3, n, d, tokens).permute(1, 0, 2, 4, 3).contiguous()
        q, k, v = qkv.view(3, b * n, tokens, d).unbind()
        weights = torch.softmax(torch.bmm(q, k.transpose(1, 2)) * d**-0.5, dim=-1)
        y = torch.bmm(weights, v).view(b, n, tokens, d).permute(0, 1, 3, 2).contiguous()
        return self.proj(y.view(b, c, h, w))


def with_impls(x: Tensor, heads: int, *impls: str) -> dict[str, Attention2d]:
    """A block of ours in several implementations, with the same weights."""
    blocks = {impl: Attention2d(x.shape[1], heads, impl=impl).eval() for impl in impls}
    for block in blocks.values():
        block.load_state_dict(blocks[impls[0]].state_dict())
    return blocks


def attention(x: Tensor, heads: int, impls: tuple[str, ...] = ()) -> Iterator[Case]:
    ours, *blocks = with_impls(x, heads, "sdpa", *impls).items()
    others = libraries(x, heads)
    rows = {"ours sdpa": contestant(ours[1], x), "floor": floor(ours[1], x)}
    rows |= {f"ours {impl}": contestant(block, x, ours[1]) for impl, block in blocks}
    if impls:
        rows["written out, bmm"] = contestant(WrittenOut(ours[1]), x, ours[1])
    yield Case("attention", rows | others, rivals=tuple(others))


def implementations(x: Tensor, heads: int) -> Iterator[Case]:
    return attention(x, heads, tuple(impl for impl in IMPLS if impl != "sdpa"))


def einx(x: Tensor, heads: int) -> Iterator[Case]:
    blocks = with_impls(x, heads, "einx", "bmm")
    yield Case("einx", {f"ours {impl}": contestant(block, x, blocks["bmm"]) for impl, block in blocks.items()})


def compiled(x: Tensor, heads: int) -> Iterator[Case]:
    torch.compiler.reset()  # so that no shape is compiled as one more of the last one's
    for case in einx(x, heads):
        for name, one in case.contestants.items():
            step = replace(one.steps[0], call=torch.compile(one.steps[0].call, fullgraph=True, dynamic=False))
            case.contestants[name] = replace(one, steps=(step,))
        yield replace(case, title="compiled")


# --- positions, windows, a backbone -----------------------------------------------------------------------------------


def positions(x: Tensor, heads: int) -> Iterator[Case]:
    c, h, w = x.shape[1:]
    theirs = BottleneckAttn(c, feat_size=(h, w), num_heads=heads, dim_head=c // heads).eval()
    for table in (theirs.pos_embed.height_rel, theirs.pos_embed.width_rel):
        nn.init.normal_(table, std=0.5)  # large enough that who leaves them out is found
    ours: nn.Module = from_timm_bottleneck_attn(theirs)
    ours.proj = nn.Identity()  # theirs projects no output
    rows = {"ours RelPosDecomposed": contestant(ours, x), "timm BottleneckAttn": contestant(theirs, x, ours)}
    yield Case("relative positions", rows)


def windows(x: Tensor, heads: int) -> Iterator[Case]:
    if x.shape[2] % 7 or x.shape[3] % 7:
        raise ValueError(f"shapes of windows must have sides that are multiples of 7; got {tuple(x.shape[2:])}")
    for shift, title in ((0, "windows 7×7 with a table"), (3, "windows 7×7 with a table, shifted")):
        theirs = ShiftedWindowAttention(x.shape[1], [7, 7], [shift, shift], heads).eval()
        nn.init.normal_(theirs.relative_position_bias_table, std=0.5)
        ours = from_torchvision_swin(theirs)
        yield Case(title, {"ours": contestant(ours, x), "torchvision": contestant(OnMaps(theirs), x, ours)})


class ByHand(nn.Module):
    """What a person writes to put timm's attention into a network."""

    def __init__(self, channels: int, num_heads: int) -> None:
        super().__init__()
        self.norm = LayerNorm2d(channels, eps=1e-5)  # as ours
        self.attn = TimmAttention2d(channels, num_heads=num_heads)
        self.gate = nn.Parameter(torch.full((channels, 1, 1), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.attn(self.norm(x))


def backbone(x: Tensor, heads: int) -> Iterator[Case]:
    if x.shape[1] != 3:
        raise ValueError(f"shapes of backbone must be of images, with 3 channels; got {x.shape[1]} channels")
    plain = timm.create_model("resnet50").eval()
    ours, by_hand = copy.deepcopy(plain), copy.deepcopy(plain)
    insert_(ours, stages=(-2, -1), num_heads=heads, gate_init=0.1)
    inserted = [module for module in ours.modules() if isinstance(module, AttentionBlock2d)]
    block: Any
    for block, stage in zip(inserted, (by_hand.layer3, by_hand.layer4), strict=True):
        stage.append(ByHand(block.attn.channels, heads).eval())
        block.attn = from_timm_attention2d(stage[-1].attn)
    rows = {"ours inserted": contestant(ours, x), "timm by hand": contestant(by_hand, x, ours)}
    rows["plain network"] = contestant(plain, x)
    yield Case("blocks at the last two stages of resnet50", rows, gradients=False, base="plain network")


def swap(x: Tensor, names: Sequence[str]) -> Iterator[Case]:
    """Networks as they were, with what of their attention is exchanged and not slower, and with all of it."""
    for name in names:
        plain = network_of(name).to(x.device, x.dtype).eval()
        ours = copy.deepcopy(plain)
        report = swap_(ours, example_input=x.detach())
        rows = {"exchanged": contestant(ours, x), "as it was": contestant(plain, x, ours)}
        if any(module.time is not None for module in report.left):
            swap_(forced := copy.deepcopy(plain), example_input=x.detach(), slower=True)
            rows["with slower ones"] = contestant(forced, x, ours)
        elif not report.swapped:
            raise ValueError(f"swap: nothing of {name} can be exchanged:\n{report}")
        yield Case(f"{name}, {len(report)} of {len(report.modules)} modules exchanged", rows)


def variants(x: Tensor, heads: int) -> Iterator[Case]:
    c, size = x.shape[1], (x.shape[2], x.shape[3])
    blocks = {
        "full": Attention2d(c, heads),
        "RelPosDecomposed": Attention2d(c, heads, position=RelPosDecomposed(feat_size=size)),
        "RelPosTable": Attention2d(c, heads, position=RelPosTable(feat_size=size)),
        "Rope2d": Attention2d(c, heads, position=Rope2d()),
        "ConditionalPos": Attention2d(c, heads, position=ConditionalPos(3)),
        "window with a table": Attention2d(c, heads, pattern=Window(7), position=RelPosTable()),
        "shifted window with a table": Attention2d(c, heads, pattern=Window(7, shift=3), position=RelPosTable()),
        "neighbourhood": Attention2d(c, heads, pattern=Neighborhood(7)),
    }
    yield Case("positions and patterns", {name: contestant(block.eval(), x) for name, block in blocks.items()})


#: The cases of each comparison, from a map and the number of heads.
CASES: dict[str, Callable[[Tensor, int], Iterator[Case]]] = {
    "implementations": implementations,
    "attention": attention,
    "backbone": backbone,
    "positions": positions,
    "windows": windows,
    "einx": einx,
    "compiled": compiled,
    "memory": variants,
    "calls": variants,
}
