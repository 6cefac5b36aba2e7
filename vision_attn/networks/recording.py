"""The attention maps of a forward pass, whatever implementation runs it."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, reduce as fold
from itertools import product as pairs
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention.blocks import Attention, attention_modules
from vision_attn.attention.blocks.attention_maps import attn_hook, weights_on_map
from vision_attn.attention.dispatch import AttentionInputs
from vision_attn.checks import as_list, product
from vision_attn.networks.convert.swapped import SWAPPED
from vision_attn.networks.insertion import plain_network
from vision_attn.networks.insertion.backbone import Example, uncompiled
from vision_attn.networks.insertion.sites import Names, match_names, several
from vision_attn.networks.maps import AttentionMap, Maps
from vision_attn.text import shorten

#: Bytes of the maps of one forward pass, above which ``allow_large=True`` is asked for.
LARGEST = 2**30
REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"mean": torch.add, "max": torch.maximum}

#: A point of the image, ``(y, x)`` in pixels.
Point = Sequence[float]


@contextmanager
def capture(
    model: nn.Module,
    queries: Iterable[Point] | str | None = None,
    *,
    sites: Names | Iterable[Names] | None = None,
    heads: int | Iterable[int] | None = None,
    reduce: str | None = None,
    allow_large: bool = False,
) -> Iterator[Maps]:
    """Record the attention maps of every forward pass inside a ``with`` block.

    The network computes what it always does. Of the queries and keys that the kernel gets, with their position terms,
    masks, windows and type, the weights of the chosen queries are computed beside it, in float32 at least: any
    implementation can be looked into, the fused ones included. Memory grows with ``heads · queries · tokens``, an image
    and module. A compiled model runs in eager meanwhile. Afterwards, also after an error, the model is as it was.

    Args:
        model: a network with :class:`vision_attn.Attention2d` modules in it, or those for one axis or three: inserted,
            put in the place of others, swapped in by :func:`vision_attn.swap_`, or its own.
        queries: points ``(y, x)`` in pixels of the image to look from; ``"all"`` or None for every cell of each map.
        sites: only attention at or in these modules: a path, glob or compiled regular expression, or several.
        heads: only these heads, by number.
        reduce: one map for all of these heads, their ``"mean"`` or ``"max"``.
        allow_large: take more than 1 GiB for the maps of a forward pass.

    Yields:
        A dictionary from module path to :class:`AttentionMap`, filled by the forward pass, in the order of running. The
        second call of a module in one pass has a map at ``path:2``.

    Raises:
        ValueError: the model has no such attention, there is no such head or reduction, a point lies outside the image,
            or the maps would be larger than 1 GiB without ``allow_large``; the message says how large.
        SiteError: a site matches no module.
        RuntimeError: a part of the model was called, not the model.

    >>> from vision_attn.attention.blocks import AttentionBlock2d
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), AttentionBlock2d(8, 2))
    >>> with capture(model, queries=[(0, 0), (15, 8)]) as maps:
    ...     _ = model(torch.randn(1, 3, 16, 16))
    >>> maps["1.attn"].weights.shape
    torch.Size([1, 2, 2, 8, 8])
    """
    if reduce is not None and (not isinstance(reduce, str) or reduce not in REDUCTIONS):
        raise ValueError(f"reduce must be None or among {', '.join(map(repr, REDUCTIONS))}; got {reduce!r}")
    points, model = points_of(queries), plain_network(model)
    modules = modules_at(model, sites)
    axes = max(2 if swap else module.rank for module, swap in modules.values())
    recording = Recording(points, axes, reduce, math.inf if allow_large else LARGEST)
    with ExitStack() as stack:
        stack.enter_context(uncompiled())
        stack.callback(model.register_forward_pre_hook(recording.begin, with_kwargs=True).remove)
        for path, (module, swap) in modules.items():
            seen: deque[AttentionInputs] = deque(maxlen=1)
            stack.enter_context(attn_hook(module, seen.append))
            wanted = numbers("heads", heads, module.num_heads)
            hook = partial(recording.record, path, swap, wanted, seen)
            stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        yield recording.maps


@dataclass
class Recording:
    """What is captured of one forward pass."""

    points: list[Point] | None
    #: of the image
    axes: int
    reduce: str | None
    #: bytes that the maps may take
    limit: float
    maps: Maps = field(default_factory=Maps)
    taken: int = 0
    image_size: tuple[int, ...] = ()
    images: int = 0

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is given images."""
        self.maps.clear()
        self.taken = 0
        example = Example(args, kwargs)
        self.images, self.image_size = example.shape[0], tuple(example.image.shape[-self.axes :])
        for point in self.points or ():
            inside = (0 <= at < length for at, length in zip(point, self.image_size, strict=False))
            if len(point) != self.axes or not all(inside):
                pixels = f"in pixels of an image of {self.image_size}"
                raise ValueError(f"queries must be points, as (y, x), {pixels}; got {tuple(point)}")

    def record(self, path: str, kept: Any, heads: list[int], seen: deque[AttentionInputs], *called: Any) -> None:
        """Compute the attention maps of a module after its forward pass."""
        module, args, kwargs, _ = called
        if not self.image_size:
            raise RuntimeError("capture needs the image, so call the model itself: model(image), not a part of it")
        if not seen:
            return  # an empty batch
        inputs, prefix, outer = seen.pop(), 0, None
        x = args[0] if args else kwargs["x"]
        if kept is None or kept.sees == "maps":
            size = tuple(x.shape[-module.rank :])
            keys = module.keys_size(x, args[2] if len(args) > 2 else kwargs.get("context"))
        else:
            placed = kept.placed(x, self.images, self.image_size)
            if placed is None:
                return  # they are of no map of this image
            outer, prefix = placed
            size = keys = outer.query_layout.size
        grouping = outer or inputs.grouping
        whole = grouping.query_layout.size
        cells = cells_of(self.points, size, self.image_size)
        together = 1 if self.reduce else len(heads)
        elements = len(inputs.q) // grouping.groups * together * len(cells) * product(keys)
        self.taken += elements * max(4, inputs.q.element_size())
        if self.taken > self.limit:
            size_of = f"the maps up to that of {path!r} take {self.taken / 2**30:.2f} GiB"
            raise ValueError(f"queries: {size_of}: choose points, sites, heads, a reduction, or allow_large=True")
        merged = self.reduce and len(heads) > 1
        names = [f"{self.reduce} of {len(heads)} heads"] if merged else [f"head {head}" for head in heads]

        def looked(tokens: Tensor | None) -> Tensor:
            each = (weights_on_map(inputs, tokens, group, grouping=outer)[..., prefix:] for group in groups)
            weights = fold(REDUCTIONS[self.reduce or "mean"], each)
            weights = weights / len(heads) if self.reduce == "mean" else weights
            if whole == size:
                return weights.unflatten(-1, keys)
            # Where the block has padded its map, the queries stand on a wider one.
            return weights.unflatten(-1, whole)[(..., *map(slice, keys))]

        # Indices are made where the network is: one that is copied there waits for what it has to do.
        grid = torch.arange(prefix, prefix + product(whole), device=x.device).view(whole)
        tokens = grid[(*map(slice, size),)].flatten() if self.points is None else chosen(grid, cells)
        groups = chosen(torch.arange(module.num_heads, device=x.device), heads).split(together)
        every = self.points is None and whole == size and not prefix
        with torch.no_grad():
            weights = looked(None if every else tokens)
            first = looked(torch.arange(prefix, device=x.device)) if prefix else None
        earlier = sum(known.partition(":")[0] == path for known in self.maps)
        place = f"{path}:{earlier + 1}" if earlier else path
        self.maps[place] = AttentionMap(weights, tuple(cells), self.image_size, size, tuple(names), first)


def chosen(x: Tensor, places: Iterable[Any]) -> Tensor:
    return torch.stack([x[place] for place in places])


def modules_at(model: nn.Module, sites: Names | Iterable[Names] | None) -> dict[str, tuple[Attention, Any]]:
    """The attention on maps at some sites, and what the module that it was swapped into keeps; None where none was."""
    swaps = {path: vars(model.get_submodule(path)).get(SWAPPED) for path in attention_modules(model)}
    hidden = [path for path, swap in swaps.items() if swap is not None and swap.sees == "unknown"]
    modules = {path: (one, swaps[path]) for path, one in attention_modules(model).items() if path not in hidden}
    if hidden and not modules:
        where = shorten(path or "its root" for path in hidden)
        what = f"model attends at {where} to tokens in a row, of which nobody says where they lie on an image"
        raise ValueError(f"{what}: capture is for attention on maps")
    if not modules:
        raise ValueError("model has no Attention2d to capture: insert_ one, or let swap_ run the attention it has")
    if sites is None:
        return modules
    chosen = match_names(dict(model.named_modules()), several("sites", sites, (str, re.Pattern)))
    found = {p: module for p, module in modules.items() if any(f"{p}.".startswith(f"{site}.") for site in chosen)}
    if not found:
        raise ValueError(f"sites must have attention at or in them; got {sites!r}, and there is {', '.join(modules)}")
    return found


def points_of(queries: Iterable[Point] | str | None) -> list[Point] | None:
    """Points of the image; None for every cell."""
    if queries is None or (isinstance(queries, str) and queries == "all"):
        return None
    given: Any = queries
    try:
        points: list[Point] = [tuple(float(at + 0.0) for at in point) for point in given]  # texts have no sum
    except (TypeError, ValueError, OverflowError):
        points = []
    if not points or not all(math.isfinite(at) for point in points for at in point):
        raise ValueError(f"queries must be points (y, x), or 'all' or None for every cell; got {queries!r}")
    return points


def numbers(name: str, value: int | Iterable[int] | None, count: int) -> list[int]:
    """Numbers below a count, of heads or queries; all of them when None."""
    chosen = list(range(count)) if value is None else as_list(name, value, "whole numbers", single=Integral)
    if not chosen or not all(isinstance(one, Integral) and 0 <= int(one) < count for one in chosen):
        raise ValueError(f"{name} must be from 0 to {count - 1}; got {value}")
    return [int(one) for one in chosen]  # which True and False are not to torch


def cells_of(points: list[Point] | None, size: Sequence[int], image_size: Sequence[int]) -> list[tuple[int, ...]]:
    """The cells of a map that points of the image lie in; all of them when None."""
    if points is None:
        return list(pairs(*map(range, size)))
    return [
        tuple(int(at * n / whole) for at, n, whole in zip(point, size, image_size, strict=True)) for point in points
    ]
