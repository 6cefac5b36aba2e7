"""What a network attends to: the attention maps of a forward pass, whatever implementation runs it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vision_attn.blocks import EXCHANGED, Attention, Attention2d, attention_modules

__all__ = ["AttentionMap", "capture"]


@dataclass(frozen=True)
class AttentionMap:
    """Where the queries of one attention module looked, in its last forward pass.

    >>> seen = AttentionMap(torch.full((1, 8, 1, 3, 4), 1 / 12), cells=((2, 0),), image_size=(48, 64))
    >>> seen.weights.shape
    torch.Size([1, 8, 1, 3, 4])
    """

    #: ``(b, heads, queries, h, w)``: for each query the weights over the map, which sum to one
    weights: Tensor
    #: row and column of each query, in cells of the map
    cells: tuple[tuple[int, int], ...]
    #: rows and columns of the image
    image_size: tuple[int, int]
    #: ``(b, heads, tokens, h, w)``: likewise for class and register tokens, where the network has any. What goes from a
    #: position to these is missing in its sum
    prefix: Tensor | None = None


@contextmanager
def capture(
    model: nn.Module, queries: Sequence[tuple[float, float]] | None = None
) -> Iterator[dict[str, AttentionMap]]:
    """Record the attention maps of every forward pass inside a ``with`` block.

    The network computes what it always does; the weights of the chosen queries are computed beside it from the same
    input, so that a fused kernel can be looked into as well. Of full attention only the chosen queries take memory,
    ``heads · queries · tokens`` a module and image; of another pattern all groups are looked at first.

    Args:
        model: a network with :class:`vision_attn.Attention2d` modules in it, or with attention of its own after
            :func:`vision_attn.swap_`, on maps, in windows that it cuts itself, or on the tokens of a ViT.
        queries: points ``(y, x)`` in pixels of the image to look from; every cell of the map when None.

    Yields:
        A dictionary from module path to :class:`AttentionMap`, filled by the forward pass, in the order of running.

    Raises:
        ValueError: the model is compiled or has no attention module, or a point lies outside the image.
        RuntimeError: a part of the model was called, not the model.

    >>> from vision_attn.blocks import AttentionBlock2d
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), AttentionBlock2d(8, 2))
    >>> with capture(model, queries=[(0, 0), (15, 8)]) as maps:
    ...     _ = model(torch.randn(1, 3, 16, 16))
    >>> maps["1.attn"].weights.shape
    torch.Size([1, 2, 2, 8, 8])
    """
    if hasattr(model, "_orig_mod"):
        raise ValueError(
            "model is compiled, and a compiled graph keeps its weights to itself: capture the model it is of"
        )
    if queries is not None and not len(queries):
        raise ValueError("queries must be points (y, x) of the image, or None for every cell; got none")
    exchanged = {path: kept for path, x in model.named_modules() if (kept := vars(x).get(EXCHANGED)) is not None}
    modules = {
        path: module
        for path, module in attention_modules(model).items()
        if (exchanged[path].sees != "unknown" if path in exchanged else isinstance(module, Attention2d))
    }
    if not modules:
        raise ValueError(
            f"model has no Attention2d to capture: {type(model).__name__} holds none; insert one with insert_(model, …)"
        )
    maps: dict[str, AttentionMap] = {}
    paths = {module: path for path, module in modules.items()}
    image_size: tuple[int, int] | None = None
    images = 0

    def remember_image(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        nonlocal image_size, images
        image = args[0] if args else next(iter(kwargs.values()))
        images = len(image)
        image_size = (image.shape[-2], image.shape[-1])
        rows, columns = image_size
        for y, x in () if queries is None else queries:
            if not (0 <= y < rows and 0 <= x < columns):
                raise ValueError(
                    f"queries must be points (y, x) in pixels of an image of {rows}×{columns}; got {(y, x)}"
                )

    def record(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor) -> None:
        assert isinstance(module, Attention)
        if image_size is None:
            raise RuntimeError("capture needs the image, so call the model itself: model(image), not a part of it")
        x = args[0] if args else kwargs["x"]
        mask = args[1] if len(args) > 1 else kwargs.get("mask")
        context = args[2] if len(args) > 2 else kwargs.get("context")
        kept, placed = exchanged.get(paths[module]), None
        if kept is not None and kept.sees != "maps" and (placed := kept.placed(x, images, image_size)) is None:
            return  # they are of no map of this image
        rows, columns = placed[0].size if placed else x.shape[-2:]
        if queries is None:
            cells = [(row, column) for row in range(rows) for column in range(columns)]
        else:
            cells = [(int(y * rows / image_size[0]), int(x * columns / image_size[1])) for y, x in queries]
        tokens = torch.tensor([row * columns + column for row, column in cells], device=x.device)
        with torch.no_grad():
            if placed is None:
                weights = module.attention_weights(x, mask, tokens, context)
                weights = weights.unflatten(-1, module.keys_size(x, context))
                maps[paths[module]] = AttentionMap(weights, tuple(cells), image_size)
                return
            part, count = placed
            weights = module.attention_weights(x, mask)[..., count:]
            ours = part.weights_on_map(weights[:, :, count:], tokens).unflatten(-1, part.size)
            first = weights[:, :, :count].unflatten(-1, part.size) if count else None
        maps[paths[module]] = AttentionMap(ours, tuple(cells), image_size, first)

    handles = [model.register_forward_pre_hook(remember_image, with_kwargs=True)]
    handles += [module.register_forward_hook(record, with_kwargs=True) for module in paths]
    try:
        yield maps
    finally:
        for handle in handles:
            handle.remove()
