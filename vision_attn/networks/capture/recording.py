"""Capture the attention maps of a forward pass, with any implementation of attention."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial, reduce as fold
from itertools import product as pairs
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import debug_unwrap

from vision_attn.attention.blocks import Attention
from vision_attn.attention.blocks.attention_maps import weights_on_map
from vision_attn.attention.padding import can_show
from vision_attn.attention.plan import AttentionInputs
from vision_attn.attention.recomputation import backward_pass
from vision_attn.attention.scopes import scope
from vision_attn.checks import as_list, check_choice, product
from vision_attn.networks.capture.maps import AttentionMap, AttentionMaps
from vision_attn.networks.capture.token_positions import TokenPositions, locate_tokens
from vision_attn.networks.convert.swap import chosen_attention, outer_paths
from vision_attn.networks.convert.swapped import Swapped
from vision_attn.networks.convert.window_layers import PaddedAttention
from vision_attn.networks.impl_choice import attention_modules
from vision_attn.networks.inspection.example import Example, float_tensors
from vision_attn.networks.inspection.network import CONVS, Call, running_calls
from vision_attn.networks.inspection.selection import Globs, Where, select_inside
from vision_attn.networks.inspection.wrappers import unwrap_model
from vision_attn.text import shorten

#: Size in bytes of the maps of one forward pass above which ``allow_large=True`` is required.
MAX_BYTES = 2**30
REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"mean": torch.add, "max": torch.maximum}

#: A point in the image, ``(y, x)`` in pixels.
Point = Sequence[float]
#: Reason why attention of another library is not captured.
NOT_CONVERTED = "it belongs to another library. va.swap_(model) converts supported layers; its report lists the others"
#: Reason why other attention is not captured.
NOT_SELECTED = "names= and where= do not select it"
#: Coordinates of a point by the number of axes of the image.
POINT = {1: "(x)", 2: "(y, x)", 3: "(t, y, x)"}


@contextmanager
def capture(
    model: nn.Module,
    queries: Iterable[Point] | str | None = None,
    *,
    names: Globs = None,
    where: Where = None,
    heads: int | Iterable[int] | None = None,
    reduction: str | None = None,
    allow_large: bool = False,
) -> Iterator[AttentionMaps]:
    """Record the attention maps of the last forward pass inside a ``with`` block.

    The weights of the selected queries are computed in at least float32 from the inputs of the attention kernel:
    queries and keys, position encodings, masks and windows. The output of the network does not change, and every
    implementation is supported, including fused kernels. Memory grows with ``heads · queries · tokens`` per image and
    module.

    Each forward pass replaces the maps of the pass before. Forward passes are recorded only in the thread or task that
    entered the ``with`` block, and not in threads that are started inside it. Nothing is stored on the model: other
    threads can run it at the same time. A compiled model runs in eager mode inside the ``with`` block.

    Args:
        model: a network with :class:`Attention1d`, :class:`Attention2d` or :class:`Attention3d` modules.
            The modules may be inserted blocks, replacements of other modules, results of :func:`vision_attn.swap_`, or
            part of the network.
        queries: query points ``(y, x)`` in pixels of the image, or ``(t, y, x)`` for a video; ``"all"`` or None for
            every position of each feature map.
        names: globs on module paths, as in :func:`vision_attn.insert_`: capture only attention at or in these modules.
        where: function of path and module that returns True for these modules. If ``names`` is also given, both must
            match.
        heads: capture only the heads with these indices.
        reduction: combine the heads into one map, ``"mean"`` or ``"max"``.
        allow_large: allow more than 1 GiB for the maps of a forward pass.

    Yields:
        A dictionary from module path to :class:`AttentionMap`, filled by the forward pass, in the order in which the
        modules run. The second call of a module in one forward pass has the key ``path:2``. ``maps.reasons`` contains
        the reasons for missing maps.

    Raises:
        ValueError: the model has no such attention, a head or reduction does not exist, a point is outside the image,
            the maps would exceed 1 GiB without ``allow_large``, the forward pass runs no attention on a feature map, or
            runs in ``torch.vmap``.
        SiteError: no module matches ``names``.
        RuntimeError: a part of the model was called instead of the model.

    >>> from vision_attn.attention.blocks import AttentionBlock2d
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), AttentionBlock2d(8, 2))
    >>> with capture(model, queries=[(0, 0), (15, 8)]) as maps:
    ...     _ = model(torch.randn(1, 3, 16, 16))
    >>> maps["1.attn"].weights.shape
    torch.Size([1, 2, 2, 8, 8])
    """
    if reduction is not None:
        check_choice("reduction", reduction, REDUCTIONS, " or None")
    points, network = parse_points(queries), unwrap_model(model)
    modules, others = select_modules(network, names, where)
    named, hooks = dict(network.named_modules()), dict[nn.Module, Any]()
    ranks = [block.rank for path, block in modules.items() if block.rank > 1 or not isinstance(named[path], Swapped)]
    kernels = [len(layer.kernel_size) for layer in network.modules() if isinstance(layer, CONVS)]
    limit = math.inf if allow_large else MAX_BYTES
    recording = Recording(network, points, max(ranks or kernels or [0]), reduction, limit, others)
    for path, block in modules.items():
        parents = [named[outer] for outer in (path, *reversed(outer_paths(path)))]
        indices = check_indices("heads", heads, block.num_heads)
        hooks[block] = partial(recording.record, path, block, parents, indices)
        if isinstance(named[path], Swapped):
            hooks[named[path]] = partial(recording.explain, path)
    with scope(model, "attention", hooks):
        yield recording.maps
    reasons = {path or "the model": why for path, why in recording.maps.reasons.items() if path not in recording.others}
    # They are no reason for an error: the forward pass may be outside the with block.
    for path in modules.keys() - {known.partition(":")[0] for known in recording.maps}:
        recording.maps.reasons.setdefault(path, "it was not called inside the with block")
    if reasons and not recording.maps:
        listed = shorten(sorted(f"{path}: {why}" for path, why in reasons.items()), 3)
        raise ValueError(f"model has no attention on feature maps to capture. {listed}")


@dataclass
class Recording:
    """Attention maps of one forward pass."""

    model: nn.Module
    points: list[Point] | None
    #: number of axes of the image; 0 for all axes of the input
    axes: int
    reduction: str | None
    #: maximum size of the maps in bytes
    limit: float
    #: reasons why other attention is not captured, by path
    others: Mapping[str, str]
    maps: AttentionMaps = field(default_factory=AttentionMaps)
    used: int = 0
    image_size: tuple[int, ...] = ()
    images: int = 0
    #: keyword arguments of the current forward pass; each forward pass has a new dictionary
    kwargs: Mapping[str, Any] | None = None

    def start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Start the recording of a forward pass with these inputs."""
        self.maps.clear()
        self.maps.reasons = dict(self.others)
        self.used, self.kwargs, example = 0, kwargs, Example(args, kwargs)
        self.images = example.shape[0]
        shapes = [tuple(x.shape) for x in float_tensors((args, kwargs)) if x.dim() == example.image.dim()]
        if example.count and len({*shapes}) > 1:  # the network pads them, so that a map shows more than its image
            what = f"model must be called with images of one size inside va.capture, got {shorten(map(str, shapes))}"
            raise ValueError(f"{what}. Call it with one image at a time")
        self.image_size = tuple(example.image.shape[-self.axes :]) if self.axes else example.size
        for point in self.points or ():
            inside = (0 <= at < length for at, length in zip(point, self.image_size, strict=False))
            if len(point) != len(self.image_size) or not all(inside):
                expected = f"points {POINT[len(self.image_size)]}, in pixels of an image of {self.image_size}"
                raise ValueError(f"queries must be {expected}, got {tuple(point)}")

    def running_calls(self) -> list[Call]:
        """Return the running calls up to the model, innermost first; start the recording of a new forward pass."""
        calls = list(running_calls())
        depth = next((number for number, (caller, *_) in enumerate(calls) if caller is self.model), None)
        if depth is not None:
            *_, (_, args, kwargs) = calls = calls[: depth + 1]
            if kwargs is not self.kwargs:
                self.start(args, kwargs)
        if not self.image_size:
            raise RuntimeError("a part of the model was called inside va.capture. Call the model itself: model(images)")
        return calls

    def can_show_image(self, size: Sequence[int]) -> bool:
        """Return True if a feature map can show the image, or has another number of axes."""
        return len(size) != len(self.image_size) or can_show(size, self.image_size)

    def explain(self, path: str, reason: str) -> None:
        """Record the reason why a swapped module ran its original code."""
        if backward_pass() == -1:
            self.running_calls()
            self.maps.reasons[path] = f"it ran its original code, because {reason}"

    def record(
        self, path: str, module: Attention, parents: Sequence[nn.Module], heads: list[int], inputs: AttentionInputs
    ) -> None:
        """Compute the attention maps of a module from the inputs of its kernel."""
        if backward_pass() != -1:  # activation checkpointing computes the forward pass again
            return
        calls = self.running_calls()
        own = inputs.grouping
        queries, keys = own.query_layout.size, own.key_layout.size
        location: TokenPositions | str = TokenPositions(queries, keys)
        lengths: tuple[float, ...] = ()
        if isinstance(parents[0], Swapped):
            location = locate_tokens(inputs, parents, calls, self.images, self.image_size)
        elif isinstance(module, PaddedAttention):
            _, args, kwargs = calls[0]
            unpadded = tuple((args[0] if args else kwargs["x"]).shape[-module.rank :])
            location = TokenPositions(unpadded, unpadded)
        else:
            called, args, kwargs = calls[0]
            given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs} if called is module else {}
            context = given.get(2, given.get("context"))  # the third argument of the layer
            source = keys if module.kv_stride == 1 else queries
            source = source if context is None else tuple(context.shape[-module.rank :])
            if self.can_show_image(queries) and not self.can_show_image(source):
                remedy = "The method attention_weights(x, context=…) of the layer returns the weights"  # of words
                location = f"its keys, of size {tuple(source)}, are not a feature map of the image. {remedy}"
            elif module.kv_stride > 1:
                lengths = tuple(module.kv_stride / length for length in source)
        if isinstance(location, str):
            self.maps.reasons[path] = location
            return
        size, keys, outer, prefix = location
        grouping = outer or own
        padded = grouping.query_layout.size
        positions = find_positions(self.points, size, self.image_size)
        heads_at_once = 1 if self.reduction else len(heads)
        elements = len(inputs.q) // grouping.groups * heads_at_once * len(positions) * product(keys)
        self.used += elements * max(4, inputs.q.element_size())
        if self.used > self.limit:
            needed = f"the attention maps up to {path!r} need {self.used / 2**30:.2f} GiB"
            raise ValueError(f"{needed}. Pass queries, names, heads or reduction to capture less, or allow_large=True")
        merged = self.reduction and len(heads) > 1
        names = [f"{self.reduction} of {len(heads)} heads"] if merged else [f"head {head}" for head in heads]

        def compute_weights(inputs: AttentionInputs, tokens: Tensor | None) -> Tensor:
            each = (weights_on_map(inputs, tokens, group, grouping=outer)[..., prefix:] for group in groups)
            weights = fold(REDUCTIONS[self.reduction or "mean"], each)
            weights = weights / len(heads) if self.reduction == "mean" else weights
            return weights.unflatten(-1, grouping.key_layout.size)[(..., *map(slice, keys))]

        # The indices are created on the device of the network, because a copy from the CPU would synchronize the GPU.
        grid = torch.arange(prefix, prefix + product(padded), device=inputs.q.device).view(padded)
        tokens = grid[(*map(slice, size),)].flatten() if self.points is None else gather(grid, positions)
        groups = gather(torch.arange(module.num_heads, device=inputs.q.device), heads).split(heads_at_once)
        every = self.points is None and padded == size and not prefix
        with torch.no_grad():
            weights = compute_weights(inputs, None if every else tokens)
            first = compute_weights(inputs, torch.arange(prefix, device=inputs.q.device)) if prefix else None
            allowed = None
            if outer is not None or inputs.mask is not None or not (own.is_global and own.is_dense):
                uniform = inputs._replace(q=torch.zeros_like(inputs.q), bias=None)
                allowed = (compute_weights(uniform, None if every else tokens) > 0).flatten(3).sum(3)
        if debug_unwrap(weights).dim() > weights.dim():  # cannot be read outside
            raise ValueError("va.capture is not available inside torch.vmap. Call the model with a batch of images")
        weights = debug_unwrap(weights)  # of torch.func.grad
        first, allowed = (None if x is None else debug_unwrap(x) for x in (first, allowed))
        earlier = sum(path in (known, known.rpartition(":")[0]) for known in self.maps)
        key = f"{path}:{earlier + 1}" if earlier else path
        self.maps[key] = AttentionMap(
            weights, tuple(positions), self.image_size, size, tuple(names), first, lengths, allowed
        )


def gather(x: Tensor, indices: Iterable[Any]) -> Tensor:
    return torch.stack([x[index] for index in indices])


def select_modules(model: nn.Module, names: Any, where: Any) -> tuple[dict[str, Attention], dict[str, str]]:
    """Return the selected attention, and the reasons for all other attention."""
    named, modules = dict(model.named_modules()), attention_modules(model)
    attention = chosen_attention(named, None, None)
    others = {path: f"{path} ({type(module).__name__})" for path, module in attention.items() if path not in modules}
    if not (selected := select_inside(named, modules, names, where)):
        unconverted = shorten(others[path] for path in select_inside(named, others, names, where))
        reason = f". {unconverted}: {NOT_CONVERTED}" if unconverted else ""
        what, remedy = "model has no Attention2d to capture", "" if unconverted else ". Call va.insert_ to add a block"
        if modules:
            what, remedy = "names and where must select an Attention2d", f". Available: {', '.join(modules)}"
        raise ValueError(f"{what}{remedy}{reason}")
    reasons = dict.fromkeys(others, NOT_CONVERTED) | dict.fromkeys(modules.keys() - {*selected}, NOT_SELECTED)
    return {path: modules[path] for path in selected}, reasons


def parse_points(queries: Iterable[Point] | str | None) -> list[Point] | None:
    """Return the query points, or None for all positions."""
    if queries is None or (isinstance(queries, str) and queries == "all"):
        return None
    with suppress(TypeError):  # a single point
        if points := [] if isinstance(queries, str) else [tuple(map(float, point)) for point in queries]:
            return points  # type: ignore[return-value]
    raise ValueError(f"queries must be a list of points (y, x), or 'all' or None for all positions, got {queries!r}")


def check_indices(name: str, value: int | Iterable[int] | None, count: int) -> list[int]:
    """Return indices of heads or queries as a list; all indices when None. Raise for indices out of range."""
    indices = list(range(count)) if value is None else as_list(name, value, "integers", single=Integral)
    if not indices or not all(isinstance(index, Integral) and 0 <= int(index) < count for index in indices):
        raise ValueError(f"{name} must be between 0 and {count - 1}, got {value}")
    return [int(index) for index in indices]  # torch would interpret True and False as masks.


def find_positions(points: list[Point] | None, size: Sequence[int], image_size: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the positions of a feature map that contain the points of the image; all positions when None."""
    if points is None:
        return list(pairs(*map(range, size)))
    axes_by_point = [zip(point, size, image_size, strict=True) for point in points]
    return [tuple(int(at * n / pixels) for at, n, pixels in axes) for axes in axes_by_point]
