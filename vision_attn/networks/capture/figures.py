"""Figures of attention maps. Importing this module loads matplotlib."""

import io
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor

from vision_attn.checks import check_above, check_choice
from vision_attn.networks.capture.maps import AttentionMap, scale_end
from vision_attn.networks.capture.recording import check_indices
from vision_attn.networks.safe import write_atomically
from vision_attn.text import INSTALL

try:
    from matplotlib import figure as matplotlib_figure, ticker
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Rectangle
except ImportError as error:
    raise ImportError(f"figures require matplotlib. Install it: {INSTALL.format('viz')}", name=error.name) from error

__all__ = ["Figure", "save_figure"]

#: Height of a line of text above the panels, and width of the color scale, in inches.
TEXT_HEIGHT, SCALE_WIDTH = 0.24, 0.95
#: Opacity of the overlay at weights of at least twice uniform attention.
OPAQUE = 0.8


class Figure(matplotlib_figure.Figure):
    """A matplotlib figure that is displayed in a notebook without pyplot.

    The arguments are those of ``matplotlib.figure.Figure``.

    >>> Figure(figsize=(1, 1))._repr_png_()[1:4]
    b'PNG'
    """

    def _repr_png_(self) -> bytes:
        return as_bytes(self, "png", dpi=100)


def draw_maps(
    attention: AttentionMap,
    images: Tensor,
    query: int | Iterable[int],
    reduction: str,
    vmax: float | None,
    titles: Sequence[str],
    width: float,
) -> Figure:
    """Draw a row for each image and query; :meth:`AttentionMap.figure` documents arguments and errors."""
    axes = len(attention.map_size)
    if images.dim() == 1 + axes and len(attention.weights) == 1:
        images = images[None]
    if len(attention.weights) != len(images) or (titles and len(titles) != len(images)):
        counts = f"{len(images)} images, {len(attention.weights)} maps and {len(titles)} titles"
        raise ValueError(f"images must have one map and at most one title each, got {counts}")
    if axes not in (2, 3) or images.dim() != 2 + axes:
        shape = "(b, channels, height, width), or (b, channels, t, height, width) for a map with three axes"
        raise ValueError(f"images must be {shape}, got {tuple(images.shape)} for a map with {axes} axes")
    if not (images.min() > -0.01 and images.max() < 1.01):
        extremes = f"{images.min():.1f}…{images.max():.1f}"
        raise ValueError(f"images must have values in 0…1, got {extremes}. Pass the images before normalization")
    check_above(1, vmax=vmax)
    queries = check_indices("query", query, len(attention.query_positions))
    allowed = None if attention.allowed is None else attention.allowed[:, :, queries]
    shown = replace(attention, weights=attention.weights[:, :, queries].detach().float().cpu(), allowed=allowed)
    weights = shown.spread() if attention.key_lengths else shown.weights  # (b, heads, queries, h, w)
    label, panels = reduce_heads(weights.transpose(1, 2).flatten(0, 1), attention.heads, reduction)
    panels = panels * panels[0, 0].numel()  # as multiples of uniform attention
    if axes == 2:  # An image becomes a volume with one frame.
        images, panels = images[:, :, None], panels[:, :, None]
    frames = [int((at + 0.5) * images.shape[2] / panels.shape[2]) for at in range(panels.shape[2])]
    if axes == 3:
        label = [f"frame {at}" if len(label) == 1 else f"{text}, frame {at}" for text in label for at in frames]
    panels = panels.flatten(1, 2)
    norm = LogNorm(1, scale_end(panels.max().item()) if vmax is None else vmax, clip=True)
    if not titles:
        titles = [f"image {number}" for number in range(len(images))] if len(images) > 1 else ["image"]
    if len(queries) > 1:
        marks = [f"query {number} {attention.query_positions[number]}" for number in queries]
        titles = [f"{title}, {mark}" for title in titles for mark in marks]
    images = images.repeat_interleave(len(queries), dim=0)

    size = tuple(images.shape[3:])
    cell = [n / m for n, m in zip(size, attention.map_size[-2:], strict=True)]
    columns = 1 + panels.shape[1]
    panel_height = (width - SCALE_WIDTH) / columns * size[0] / size[1] + TEXT_HEIGHT
    figure = Figure(figsize=(width, len(images) * panel_height + 2 * TEXT_HEIGHT), layout="compressed")
    axes_by_row = figure.subplots(len(images), columns, squeeze=False)
    for row, video in enumerate(images.detach().permute(0, 2, 3, 4, 1).float().cpu().numpy()):
        query_position = attention.query_positions[queries[row % len(queries)]]
        marked = int((query_position[0] + 0.5) * len(video) / attention.map_size[0]) if axes == 3 else 0
        for column, frame in enumerate([marked, *frames * ((columns - 1) // len(frames))]):
            axis, picture = axes_by_row[row, column], video[frame]
            plain = picture if column == 0 and picture.shape[2] == 3 else picture.mean(axis=2)
            extent = (0, size[1], size[0], 0)
            axis.imshow(plain, cmap="gray", vmin=0, vmax=1, extent=extent)
            if column:
                weight = panels[row, column - 1].numpy()
                opacity = OPAQUE * np.log2(weight.clip(1, 2))
                overlay = axis.imshow(weight, "plasma", norm, alpha=opacity, extent=extent)
                overlay.set_interpolation("nearest")
            axis.set_axis_off()
            if frame == marked:
                corner = query_position[-1] * cell[1], query_position[-2] * cell[0]
                axis.add_patch(Rectangle(corner, cell[1], cell[0], fill=False, edgecolor="tab:cyan", linewidth=2))
            above = titles[row] if column == 0 else label[column - 1] if row == 0 else ""
            axis.set_title(above, fontsize=9, loc="left", pad=3)
    scale = figure.colorbar(overlay, ax=axes_by_row, aspect=30, pad=0.02)
    scale.ax.yaxis.set(major_locator=ticker.LogLocator(2), major_formatter="{x:g}", minor_locator=ticker.NullLocator())
    scale.set_label("× uniform attention", fontsize=8)
    figure.supxlabel(shown.describe_width(), fontsize=8)
    return figure


def reduce_heads(weights: Tensor, heads: Sequence[str], reduction: str) -> tuple[Sequence[str], Tensor]:
    """Return the titles of the panels of a row, and their weights ``(b, panels, h, w)``."""
    check_choice("reduction", reduction, ("mean", "max", "none"))
    if reduction == "none":
        return heads, weights
    which = heads[0] if len(heads) == 1 else f"{reduction} of {len(heads)} heads"
    merged = weights.mean(1, keepdim=True) if reduction == "mean" else weights.amax(1, keepdim=True)
    return [f"attention, {which}"], merged


def save_figure(figure: matplotlib_figure.Figure, path: str | Path) -> None:
    """Save a figure as PNG, SVG or PDF. If saving fails, no partial file remains.

    Args:
        figure: the figure.
        path: path of the file, with the extension ``.png``, ``.svg`` or ``.pdf``.

    Raises:
        ValueError: matplotlib does not support the file extension.
        OSError: the file cannot be written.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "empty.png"
    >>> save_figure(Figure(), path)
    >>> path.read_bytes()[1:4]
    b'PNG'
    """
    path = Path(path)
    write_atomically(path, as_bytes(figure, path.suffix[1:], dpi=150))


def as_bytes(figure: matplotlib_figure.Figure, file_format: str, dpi: int) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=file_format, dpi=dpi, bbox_inches="tight")
    return buffer.getvalue()
