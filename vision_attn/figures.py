"""Pictures of what a network attends to. matplotlib is loaded when one is drawn."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from vision_attn.capture import AttentionMap
from vision_attn.checkpoints import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["attention_figure", "save_figure"]


def attention_figure(
    images: Tensor, attention: AttentionMap, *, query: int = 0, titles: Sequence[str] = (), width: float = 7.0
) -> Figure:
    """One row an image: the image with the query marked, and where each image's query looks, averaged over heads.

    Args:
        images: what the network was given, ``(b, 1 or 3, height, width)``, in 0…1.
        attention: the map of one module, from :func:`vision_attn.capture`.
        query: which of its queries.
        titles: a line above each image.
        width: of the figure, in inches.

    Returns:
        The figure, for :func:`save_figure`.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there are not as many maps, or titles, as images.

    >>> import torch
    >>> seen = AttentionMap(torch.rand(2, 8, 1, 7, 7), cells=((3, 3),), image_size=(28, 28))
    >>> figure = attention_figure(torch.rand(2, 3, 28, 28), seen)
    >>> len(figure.axes)  # two for each image, and the scale
    5
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'vision-attn[viz]'") from error
    if len(attention.weights) != len(images) or (titles and len(titles) != len(images)):
        raise ValueError(
            f"images, maps and titles must be as many; got {len(images)}, {len(attention.weights)} and {len(titles)}"
        )
    rows, columns = images.shape[2:]
    weights = attention.weights[:, :, query].mean(dim=1).float().cpu().numpy()
    row, column = attention.cells[query]
    cell = rows / weights.shape[1], columns / weights.shape[2]

    panel = width / 2 * rows / columns
    figure = Figure(figsize=(width, len(images) * (panel + 0.3) + 0.3), layout="constrained")
    axes = figure.subplots(len(images), 2, squeeze=False)
    highest = float(weights.max()) or 1.0  # a query that may attend to nothing has no weights
    for index, (left, right) in enumerate(axes):
        picture = images[index].permute(1, 2, 0).float().cpu().numpy()
        for axis in (left, right):
            axis.imshow(picture.mean(axis=2), cmap="gray", vmin=0, vmax=1, extent=(0, columns, rows, 0))
            axis.set_xticks([])
            axis.set_yticks([])
        if picture.shape[2] == 3:
            left.imshow(picture, vmin=0, vmax=1, extent=(0, columns, rows, 0))
        shown = right.imshow(
            weights[index],
            cmap="magma",
            alpha=0.25 + 0.6 * weights[index] / highest,
            vmin=0,
            vmax=highest,
            extent=(0, columns, rows, 0),
        )
        corner = column * cell[1], row * cell[0]
        for axis in (left, right):
            axis.add_patch(square(corner, cell))
        left.set_title(titles[index] if titles else "", fontsize=9, loc="left")
        right.set_title("where the marked cell looks" if index == 0 else "", fontsize=9, loc="left")
    figure.colorbar(shown, ax=axes[:, 1].tolist(), label="attention weight", fraction=0.05, pad=0.02)
    return figure


def square(corner: tuple[float, float], cell: tuple[float, float]) -> object:
    from matplotlib.patches import Rectangle

    return Rectangle(corner, cell[1], cell[0], fill=False, edgecolor="tab:cyan", linewidth=2)


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write a figure as PNG, whole or not at all.

    Args:
        figure: what to write.
        path: the file, ``.png``.

    Raises:
        ValueError: the path has another ending.
        OSError: the file cannot be written.

    >>> import tempfile
    >>> from matplotlib.figure import Figure
    >>> path = Path(tempfile.mkdtemp()) / "empty.png"
    >>> save_figure(Figure(), path)
    >>> path.read_bytes()[1:4]
    b'PNG'
    """
    path = Path(path)
    if path.suffix != ".png":
        raise ValueError(f"path must end in .png; got {path.name!r}")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    write_atomically(path, buffer.getvalue())
