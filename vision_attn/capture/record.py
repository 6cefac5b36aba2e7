"""The attention maps of a forward pass, whatever implementation runs it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product as pairs
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.blocks import Attention, attention_modules
from vision_attn.blocks.attention import Prepared, weights_on_map
from vision_attn.capture.attention_map import AttentionMap
from vision_attn.checks import product
from vision_attn.insertion import plain_network
from vision_attn.insertion.backbone import Example
from vision_attn.insertion.sites import Names, match_names, several
from vision_attn.patterns import Partition

__all__ = ["LARGEST", "Maps", "capture", "chosen_heads"]

#: Bytes of the maps of one forward pass, above which ``allow_large=True`` is asked for.
LARGEST = 2**30
REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"mean": torch.add, "max": torch.maximum}

#: A point of the image, ``(y, x)`` in pixels.
Point = Sequence[float]


class Maps(dict[str, AttentionMap]):
    """The maps of a forward pass by module path, in the order of running.

    >>> Maps()["layer4"]
    Traceback (most recent call last):
    KeyError: "no map of 'layer4': captured are none. A module has none until the model ran, if ..."
    """

    def __missing__(self, path: str) -> AttentionMap:
        raise KeyError(
            f"no map of {path!r}: captured are {', '.join(map(repr, self)) or 'none'}. A module has none until the "
            "model ran, if the model did not call it, or if swap_'s module served the call by itself"
        )


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
            put in the place of others, exchanged by :func:`vision_attn.swap_`, or its own.
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

    >>> from vision_attn.blocks import AttentionBlock2d
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), AttentionBlock2d(8, 2))
    >>> with capture(model, queries=[(0, 0), (15, 8)]) as maps:
    ...     _ = model(torch.randn(1, 3, 16, 16))
    >>> maps["1.attn"].weights.shape
    torch.Size([1, 2, 2, 8, 8])
    """
    points = points_of(queries)
    if reduce is not None and reduce not in REDUCTIONS:
        raise ValueError(f"reduce must be None or among {', '.join(map(repr, REDUCTIONS))}; got {reduce!r}")
    model = plain_network(model)
    modules = modules_at(model, sites)
    of_heads = {path: chosen_heads(heads, module.num_heads) for path, module in modules.items()}
    maps = Maps()
    image_size: tuple[int, ...] = ()
    axes = max(module.rank for module in modules.values())
    taken = 0

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal image_size, taken
        maps.clear()
        taken = 0
        image_size = tuple(Example(args, kwargs).image.shape[-axes:])
        for point in points or ():
            if len(point) != axes or not all(0 <= at < length for at, length in zip(point, image_size, strict=True)):
                raise ValueError(
                    f"queries must be points {'(y, x)' if axes == 2 else f'of {axes} coordinates'} in pixels of an "
                    f"image of {'×'.join(map(str, image_size))}; got {tuple(point)}"
                )

    def record(path: str, seen: list[tuple[Partition, Prepared]], module: Any, args: Any, kwargs: Any, y: Any) -> None:
        nonlocal taken
        if not image_size:
            raise RuntimeError("capture needs the image, so call the model itself: model(image), not a part of it")
        if not seen:
            return  # an empty batch
        part, prepared = seen.pop()
        x = args[0] if args else kwargs["x"]
        context = args[2] if len(args) > 2 else kwargs.get("context")
        size, keys = tuple(x.shape[-module.rank :]), module.keys_size(x, context)
        cells = cells_of(points, size, image_size, path)
        names = [f"head {head}" for head in of_heads[path]]
        groups = [[head] for head in of_heads[path]] if reduce else [of_heads[path]]
        width = torch.promote_types(prepared[0].dtype, torch.float32).itemsize
        batch = len(prepared[0]) // part.groups
        needed = batch * len(groups[0]) * len(cells) * product(keys) * width
        if taken + needed > LARGEST and not allow_large:
            raise ValueError(
                f"queries: the maps of {path!r} take {needed / 2**30:.2f} GiB ({batch} images × {len(groups[0])} heads "
                f"× {len(cells)} queries × {product(keys)} cells), with {taken / 2**30:.2f} GiB of modules before it: "
                "choose points as queries, sites, heads or a reduction, or allow_large=True"
            )
        taken += needed
        # Where the block has padded its map, the queries stand on a wider one.
        tokens = torch.tensor([row_major(cell, part.size) for cell in cells], device=x.device)
        of_all = None if len(tokens) == product(part.size) else tokens
        weights: Tensor | None = None
        with torch.no_grad():
            for group in groups:
                some = weights_on_map(part, prepared, of_all, group)
                weights = some if weights is None or reduce is None else REDUCTIONS[reduce](weights, some)
        assert weights is not None
        if reduce == "mean":
            weights = weights / len(groups)
        if product(part.size) == product(size):
            weights = weights.unflatten(-1, keys)
        else:
            weights = weights.unflatten(-1, part.size)[(..., *map(slice, keys))]
        names = [f"{reduce} of {len(names)} heads"] if reduce and len(names) > 1 else names
        earlier = sum(known.partition(":")[0] == path for known in maps)
        place = f"{path}:{earlier + 1}" if earlier else path
        maps[place] = AttentionMap(weights, tuple(cells), image_size, size, tuple(names))

    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # without it nothing is compiled, and importing it takes a second
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.callback(model.register_forward_pre_hook(begin, with_kwargs=True).remove)
        for path, module in modules.items():
            seen: list[tuple[Partition, Prepared]] = []
            stack.enter_context(overheard(module, seen))
            hook = partial(record, path, seen)
            stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        yield maps


@contextmanager
def overheard(module: Attention, seen: list[tuple[Partition, Prepared]]) -> Iterator[None]:
    """Keep what a block hands to its kernel in the forward pass."""
    prepare = module.prepare

    def look(*args: Any) -> Prepared:
        found = prepare(*args)
        seen[:] = [(args[3], found)]
        return found

    vars(module)["prepare"] = look
    try:
        yield
    finally:
        del vars(module)["prepare"]


def modules_at(model: nn.Module, sites: Names | Iterable[Names] | None) -> dict[str, Attention]:
    modules = attention_modules(model)
    if not modules:
        raise ValueError(
            f"model has no Attention2d to capture, nor one of other rank: {type(model).__name__} holds none; insert "
            "one with insert_(model, …), or let swap_(model) exchange the attention that is there"
        )
    if sites is None:
        return modules
    chosen = match_names(dict(model.named_modules()), several("sites", sites, (str, re.Pattern)))
    found = {p: module for p, module in modules.items() if any(f"{p}.".startswith(f"{site}.") for site in chosen)}
    if not found:
        raise ValueError(f"sites must have attention at or in them; got {sites!r}, and there is {', '.join(modules)}")
    return found


def points_of(queries: Iterable[Point] | str | None) -> list[Point] | None:
    """Points of the image; None for every cell."""
    if queries is None or queries == "all":
        return None
    points = [] if isinstance(queries, str) else list(queries)
    if not points:
        raise ValueError(
            f"queries must be points (y, x) of the image, or 'all' or None for every cell; got {queries!r}"
        )
    return points


def chosen_heads(heads: int | Iterable[int] | None, count: int) -> list[int]:
    chosen = list(range(count) if heads is None else [heads] if isinstance(heads, int) else heads)
    if not chosen or not all(0 <= head < count for head in chosen):
        raise ValueError(f"heads must be from 0 to {count - 1}; got {chosen}")
    return chosen


def cells_of(
    points: Sequence[Point] | None, size: tuple[int, ...], image_size: tuple[int, ...], path: str
) -> list[tuple[int, ...]]:
    """The cells of a map that points of the image lie in; all of them when None."""
    if points is None:
        return list(pairs(*map(range, size)))
    if len(size) != len(image_size):
        raise ValueError(
            f"queries must be None for {path!r}, whose map has {len(size)} axes and the image {len(image_size)}: a "
            "point has no place on it; leave it out by sites="
        )
    return [
        tuple(int(at * n / length) for at, n, length in zip(point, size, image_size, strict=True)) for point in points
    ]


def row_major(cell: Sequence[int], size: Sequence[int]) -> int:
    index = 0
    for at, length in zip(cell, size, strict=True):
        index = index * length + at
    return index
