"""A swapped module: the object that it was, of a class whose forward hands the map to a block.

Its parameters, children and hooks stay, so that checkpoints, optimizers and wrappers know nothing of it. The block has
no weights: each forward lends it those that the module has then. What a block does not do, the module does as before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from vision_attn.attention.blocks import Attention
from vision_attn.attention.patterns import AnyPattern, Grid, Grouping, Window, resolve_pattern
from vision_attn.networks.convert.proof import HOOKS
from vision_attn.networks.convert.row import OWN, Row, parameters_of
from vision_attn.networks.convert.table import TABLE
from vision_attn.networks.insertion.record import token_grid

#: The attribute of a swapped module that holds its :class:`Swap`.
SWAPPED = "swapped"


@dataclass
class Swap:
    """What a swapped module keeps, beside what it had."""

    #: the path of the class that it is known by
    family: str
    #: without weights
    block: Attention
    #: what the block was made by, of the module as it was
    traits: tuple[Any, ...]
    #: how the network cuts its map before the module sees it; None where it does not
    cut: Window | Grid | None = None
    #: class and register tokens before those of the map, if it takes tokens; None where that is not known
    prefix: int | None = None
    #: the greatest difference of the two in the proof
    difference: float = 0.0

    @property
    def row(self) -> Row:
        return TABLE[self.family]

    def __str__(self) -> str:
        how = f"pattern={self.block.pattern!r}" if self.cut is None else f"on a map cut by {self.cut!r}"
        proof = "" if self.row.dtype == torch.float64 else f", proven in {self.row.dtype}"
        return f"{type(self.block).__name__}, {how}{proof}"

    def attend(self, module: nn.Module, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None) -> Any:
        weights = parameters_of(self.row.weights(module), self.block.rank)
        return torch.func.functional_call(self.block, weights, (x, mask, context), tie_weights=False)

    @property
    def sees(self) -> str:
        """What the block is given: ``"maps"``, ``"groups"`` of maps that are cut, ``"tokens"``, or ``"unknown"``."""
        if self.cut is not None:
            return "groups"
        return "maps" if self.block.rank == 2 else "unknown" if self.prefix is None else "tokens"

    def placed(self, x: Tensor, images: int, image_size: tuple[int, int]) -> tuple[Grouping, int] | None:
        """How the groups or tokens that the block is given lie on the maps of so many images of a size.

        With it comes how many tokens there are before those of the map. None: they lie on no map of that aspect.
        """
        window, prefix = tuple(x.shape[2:]), self.prefix or 0
        if self.cut is None:
            size = token_grid(window[0] - prefix, *image_size)
            pattern: AnyPattern = resolve_pattern("full")
        else:
            # The windows may be others than when it was swapped.
            window = window if len(window) == 2 else pair(self.cut.size)
            pattern = replace(self.cut, size=window)
            groups, (rows, columns) = len(x) // images, image_size
            tiles = (1, 1) if groups == 1 else token_grid(groups, rows * window[1], columns * window[0])
            size = None if tiles is None else (tiles[0] * window[0], tiles[1] * window[1])
        if size is None:
            return None
        return Grouping(pattern.for_rank(2), size, size, x.device), prefix


class Swapped(nn.Module):
    """What the class of a swapped module has before its own."""

    @property
    def running_block(self) -> Attention:
        """The block that runs for the module; it is not a child of it."""
        swap: Swap = vars(self)[SWAPPED]
        return swap.block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        proxy: Any = next((x for x in (*args, *kwargs.values()) if isinstance(x, Proxy)), None)
        if proxy is not None:  # one node of the graph, as of a block
            return proxy.tracer.create_proxy("call_module", proxy.tracer.path_of_module(self), args, kwargs)
        swap: Swap = vars(self)[SWAPPED]
        if traits_of(self, swap.traits[-1]) == swap.traits and not torch.jit.is_tracing():  # type: ignore[attr-defined]
            y = swap.row.forward(self, partial(swap.attend, self), *args, **kwargs)
            if y is not OWN:
                return y
        return super().forward(*args, **kwargs)

    def train(self, mode: bool = True) -> Any:
        vars(self)[SWAPPED].block.train(mode)
        return super().train(mode)

    def __reduce_ex__(self, protocol: Any) -> Any:  # its class is made here, and is in no module
        _, _, *rest = tuple(super().__reduce_ex__(2))
        return (empty, (original_class(self),), *rest)


@cache
def swapped_class(kind: Any) -> Any:
    return type(f"Swapped{kind.__name__}", (Swapped, kind), {"__module__": __name__})


def original_class(module: nn.Module) -> type[nn.Module]:
    return type(module).__bases__[1] if isinstance(module, Swapped) else type(module)


def empty(kind: Any) -> Any:
    """For copies and pickles: a swapped module of this class, before it has anything."""
    made = swapped_class(kind)
    return made.__new__(made)


def traits_of(module: nn.Module, names: Iterable[str] = ()) -> tuple[Any, ...]:
    """What a block was made by: parts and their hooks, dropouts and their modes, and settings, of these names or all.

    A compiler of an older torch can ask for an attribute, and not look through all of them.
    """
    parts = [*module.modules()][1:]
    hooked = any(getattr(part, hooks) for part in parts for hooks in HOOKS)
    drops = [(part.p, part.training == module.training) for part in parts if isinstance(part, nn.Dropout)]
    if not names:
        public = (item for item in vars(module).items() if not item[0].startswith("_") and item[0] != "training")
        names = [name for name, x in public if isinstance(x, (int, float, list, tuple))]
    return parts, hooked, drops, {name: getattr(module, name, None) for name in names}


# --- where a module's groups or tokens lie on the map -----------------------------------------------------------------


#: What transformers calls the tokens before those of the map.
BEFORE = ("cls_token", "class_embedding", "distillation_token", "register_tokens")


def note_place(swap: Swap, module: nn.Module, outers: list[nn.Module]) -> None:
    """Note how what the module is given lies on the map, as the modules around it say, the innermost last."""
    for outer in outers:
        if type(outer).__module__ in CUTS:
            swap.cut = cut_of(outer, module) or swap.cut
        count = getattr(outer, "num_prefix_tokens", None)  # of timm's; torchvision's have one
        if isinstance(count, int):
            swap.prefix = count
        elif isinstance(getattr(outer, "class_token", None), nn.Parameter):
            swap.prefix = 1
        embeddings = getattr(outer, "embeddings", None)  # of transformers
        before = [x for name in BEFORE if isinstance(x := getattr(embeddings, name, None), nn.Parameter)]
        if before:
            swap.prefix = sum(1 if x.dim() == 1 else x.shape[1] for x in before)


def pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def cut_of(outer: Any, module: Any) -> Window | Grid | None:
    """How a module around cuts the map, if it does."""
    if any(size := pair(getattr(outer, "window_size", 0))):
        return Window(size, pair(getattr(outer, "shift_size", 0)))
    if hasattr(outer, "partition_type"):
        windows, size = outer.partition_type == "window", module.size
    elif type(outer).__name__.startswith(("PartitionAttention", "ParallelPartition")):
        windows = module is outer.attn_block if hasattr(outer, "attn_block") else outer.partition_block
        size = outer.partition_size
    else:
        return None
    return Window(pair(size)) if windows else Grid(pair(size))


#: Where the modules are that cut a map, each in words of its own.
CUTS = {
    *(f"timm.models.{name}" for name in ("davit", "gcvit", "hieradet_sam2", "maxxvit")),
    *(f"timm.models.{name}" for name in ("swin_transformer", "swin_transformer_v2")),
    "torchvision.models.maxvit",
    "transformers.models.maskformer.modeling_maskformer_swin",
    "transformers.models.swin.modeling_swin",
}
