"""Attention maps of a network, and measures of attention."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vision_attn.checks import product

if TYPE_CHECKING:
    from vision_attn.networks.capture.figures import Figure

#: Effective width, as a fraction of the allowed positions, above which attention is nearly uniform.
UNIFORM = 0.9


def scale_end(largest: float) -> int:
    """Return the end of a color scale: the largest multiple of uniform attention, rounded up to 2, 4, 8 or 16.

    >>> scale_end(1.0), scale_end(5.5), scale_end(40.0)
    (2, 8, 16)
    """
    return next((end for end in (2, 4, 8) if largest <= end), 16)


@dataclass(frozen=True)
class AttentionMap:
    """Attention weights of one attention module in a forward pass.

    The measures use weights that are normalized to a sum of one (see ``weights``).

    >>> attention = AttentionMap(torch.full((1, 8, 1, 3, 4), 1 / 12), query_positions=((2, 0),), image_size=(48, 64))
    >>> attention
    AttentionMap(weights of shape (1, 8, 1, 3, 4), map_size=(3, 4), image_size=(48, 64))
    """

    #: weights of each query over the feature map of the keys, ``(b, heads, queries, h, w)``, or ``(b, heads, queries,
    #: w)`` for :class:`Attention1d`. The sum is one, minus the weights of tokens outside the feature map (class tokens
    #: and the zero padding of Swin). It is zero if the query may not attend to any position
    weights: Tensor
    #: row and column of each query in the feature map
    query_positions: tuple[tuple[int, ...], ...]
    #: rows and columns of the image
    image_size: tuple[int, ...]
    #: rows and columns of the feature map of the queries; by default, as in the feature map of the keys
    map_size: tuple[int, ...] = ()
    #: names of the heads, such as ``"head 3"`` or ``"mean of 8 heads"``; numbered by default
    heads: tuple[str, ...] = ()
    #: weights of class and register tokens as queries, ``(b, heads, tokens, h, w)``; None without such tokens
    prefix: Tensor | None = None
    #: length of a key along each axis, as a fraction of the image, if ``kv_stride`` pools keys: the last can be shorter
    key_lengths: tuple[float, ...] = ()
    #: number of keys to which each query may attend, ``(b, heads, queries)``; all keys if None
    allowed: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "map_size", tuple(self.map_size or self.weights.shape[3:]))
        object.__setattr__(self, "heads", tuple(self.heads or [f"head {n}" for n in range(self.weights.shape[1])]))

    def __repr__(self) -> str:  # without the values of the weights
        sizes = f"map_size={self.map_size}, image_size={self.image_size}"
        return f"AttentionMap(weights of shape {tuple(self.weights.shape)}, {sizes})"

    def normalized_weights(self) -> Tensor:
        """Return the weights ``(b, heads, queries, keys)``, normalized to a sum of one; rows of zeros stay zero."""
        weights = self.weights.detach().float().flatten(3)
        total = weights.sum(3, keepdim=True)
        return weights / torch.where(total > 0, total, 1.0)

    def entropy(self) -> Tensor:
        """Return the entropy of the weights of each query, ``-Σ_j a_j ln a_j``, as ``(b, heads, queries)``.

        The entropy is zero if the query attends to one position, and ``ln(positions)`` for uniform attention.
        ``entropy().exp()`` is the effective number of positions.

        Source: Clark et al., *What Does BERT Look At?*, 2019, section 3.3, https://arxiv.org/abs/1906.04341

        >>> attention = AttentionMap(torch.tensor([[0.5, 0.5], [0.0, 0.0]]).view(1, 1, 1, 2, 2), ((0, 0),), (8, 8))
        >>> attention.entropy().exp()
        tensor([[[2.]]])
        """
        return torch.special.entr(self.normalized_weights()).sum(3)

    def width(self) -> Tensor:
        """Return the effective number of positions divided by the number of allowed positions, ``(b, heads, queries)``.

        The result is 1 for uniform attention, also in windows and with masks.

        >>> AttentionMap(torch.tensor([0.5, 0.5, 0.0, 0.0]).view(1, 1, 1, 2, 2), ((0, 0),), (8, 8)).width()
        tensor([[[0.5000]]])
        """
        allowed = self.weights[0, 0, 0].numel() if self.allowed is None else self.allowed.clamp(min=1)
        return self.entropy().exp() / allowed

    def describe_width(self) -> str:
        """Return a sentence on the mean effective width, which shows whether the attention selects positions.

        >>> attention = AttentionMap(torch.full((1, 8, 1, 3, 4), 1 / 12), ((2, 0),), (48, 64))
        >>> attention.describe_width()
        'Mean effective width: 12.0 of 12 positions (100 %), so the attention is nearly uniform.'
        """
        allowed = self.weights[0, 0, 0].numel() if self.allowed is None else self.allowed.double().mean().item()
        width, fraction = self.entropy().exp().mean().item(), self.width().mean().item()
        verdict = "is nearly uniform" if fraction > UNIFORM else "selects positions"
        of = f"{width:.1f} of {allowed:.4g} positions ({100 * fraction:.0f} %)"
        return f"Mean effective width: {of}, so the attention {verdict}."

    def distance(self) -> Tensor:
        """Return the mean attention distance of each query in pixels, ``Σ_j a_j |p_i - p_j|``: ``(b, heads, queries)``.

        ``p`` are the centers of the positions in the image.

        Source: Dosovitskiy et al., *An Image is Worth 16x16 Words*, 2021, appendix D.7,
        https://arxiv.org/abs/2010.11929

        >>> attention = AttentionMap(torch.tensor([[0.5, 0.5], [0.0, 0.0]]).view(1, 1, 1, 2, 2), ((0, 0),), (8, 8))
        >>> attention.distance()
        tensor([[[2.]]])
        """
        image_size = torch.tensor(self.image_size)
        queries = (torch.tensor(self.query_positions) + 0.5) * image_size / torch.tensor(self.map_size)
        centers = torch.meshgrid([(at[1:] + at[:-1]) / 2 for at in self.key_edges()], indexing="ij")
        keys = torch.stack(centers, dim=-1).flatten(0, -2) * image_size
        return (self.normalized_weights() * torch.cdist(queries, keys).to(self.weights.device)).sum(3)

    def key_edges(self) -> list[Tensor]:
        """Return the edges of the keys along each axis, in 0…1."""
        return edges(self.weights.shape[3:], self.key_lengths)

    def spread(self) -> Tensor:
        """Divide the weight of each key among the queries' positions by area, ``(b, heads, queries, *map_size)``.

        >>> attention = AttentionMap(torch.tensor([[0.8, 0.2]])[None, None, None], ((0, 0),), (2, 4), (2, 4))
        >>> attention.spread()[0, 0, 0]
        tensor([[0.2000, 0.2000, 0.0500, 0.0500],
                [0.2000, 0.2000, 0.0500, 0.0500]])
        """
        overlap = area_overlap(self.key_edges(), edges(self.map_size)).to(self.weights.device)
        return (self.weights.float().flatten(3) @ overlap).unflatten(3, self.map_size)

    def similarity(self) -> Tensor:
        """Return 1 minus the Jensen-Shannon divergence of the weights of each pair of heads, ``(b, heads, heads)``.

        The divergence is in bits and averaged over queries. The similarity is 1 for identical attention, and 0 if two
        heads attend to no position in common.

        Source: Clark et al., *What Does BERT Look At?*, 2019, section 6, https://arxiv.org/abs/1906.04341

        >>> attention = AttentionMap(torch.eye(2)[None, :, None, None], ((0, 0),), (8, 8))  # two heads, two positions
        >>> attention.similarity()
        tensor([[[1., 0.],
                 [0., 1.]]])
        """
        weights, entropy = self.normalized_weights(), self.entropy()
        rows = []
        for head in range(weights.shape[1]):
            mixture = torch.special.entr((weights + weights[:, [head]]) / 2).sum(3)
            rows.append((mixture - (entropy + entropy[:, [head]]) / 2).mean(2))
        return 1 - torch.stack(rows, 1) / torch.tensor(2.0).log()

    def figure(
        self,
        images: Tensor,
        *,
        query: int | Iterable[int] = 0,
        reduction: str = "mean",
        vmax: float | None = None,
        titles: Sequence[str] = (),
        width: float = 7.0,
    ) -> Figure:
        """Draw a row for each image and query: the image with the marked query, and the image with its attention map.

        Colors show attention weights as multiples of uniform attention, one divided by the number of positions. Weights
        up to 1× leave the image unchanged. Weights of 2× or more are covered by a color, which changes with each
        doubling. The scale is the same for all maps of a figure, and the line below them states whether the attention
        selects positions. A map with three axes has a panel for each frame of the feature map, drawn over the middle
        one of the image frames that it covers.

        Args:
            images: images with values in 0…1, ``(b, 1 or 3, height, width)`` or ``(b, 1 or 3, t, height, width)``; a
                map of one image also accepts the image without ``b``.
            query: index of the query, or several indices. With several queries, the title of each row contains its
                index and position.
            reduction: combination of the heads: ``"mean"``, ``"max"``, or ``"none"`` for one panel per head. To select
                heads, pass ``heads`` to :func:`vision_attn.capture`.
            vmax: upper end of the color scale, as a multiple of uniform attention; by default, the largest weight,
                rounded up to 2, 4, 8 or 16.
            titles: a title for each image; by default, its number.
            width: width of the figure in inches.

        Returns:
            The matplotlib figure. A notebook displays it, and ``figure.savefig(path)`` saves it.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: images have values outside 0…1, the numbers of images, maps or titles differ, images and maps
                have different axes, the query does not exist, ``reduction`` is invalid, or ``vmax`` is not above 1.

        >>> attention = AttentionMap(torch.rand(2, 8, 1, 7, 7), query_positions=((3, 3),), image_size=(28, 28))
        >>> figure = attention.figure(torch.rand(2, 3, 28, 28))
        >>> len(figure.axes)  # two for each image, and the scale
        5
        >>> len(attention.figure(torch.rand(2, 3, 28, 28), reduction="none").axes)
        19
        >>> one = AttentionMap(torch.rand(1, 8, 1, 7, 7), query_positions=((3, 3),), image_size=(28, 28))
        >>> len(one.figure(torch.rand(3, 28, 28)).axes)  # one image needs no batch
        3
        """
        from vision_attn.networks.capture.figures import draw_maps  # loads matplotlib

        return draw_maps(self, images, query, reduction, vmax, titles, width)


class AttentionMaps(dict[str, AttentionMap]):
    """Attention maps of a forward pass by module path, in the order in which the modules run.

    >>> AttentionMaps()["layer4"]
    Traceback (most recent call last):
    KeyError: "there is no attention map of 'layer4' (captured: none): the model has not run inside the with block"
    >>> AttentionMaps({"1.attn": None})["1"]
    Traceback (most recent call last):
    KeyError: "there is no attention map of '1' (captured: '1.attn'): it is not attention, but contains attention"
    """

    def __init__(self, *items: Any) -> None:
        super().__init__(*items)
        #: reasons why attention modules have no map, by module path
        self.reasons: dict[str, str] = {}

    def __missing__(self, path: str) -> AttentionMap:
        captured = ", ".join(map(repr, self)) or "none"
        inside = any(name.startswith(f"{path}.") for name in self)
        ran = "no attention with this path has run" if self else "the model has not run inside the with block"
        reason = self.reasons.get(path, "it is not attention, but contains attention" if inside else ran)
        raise KeyError(f"there is no attention map of {path!r} (captured: {captured}): {reason}")

    def rollout(self, *, residual: float = 0.5) -> AttentionMaps:
        """Compute attention rollout: the attention of each block, traced back to the feature map of the first block.

        ::

            A_l = residual · I + (1 - residual) · mean of the weights over heads, with rows that sum to one
            R_l = A_l R_{l-1}

        Between feature maps of different sizes, positions correspond by the area that they cover. Rollout ignores the
        convolutions between the blocks and the size of the residual branches, and assumes that the features of
        :func:`vision_attn.context` show the same image. A new rollout starts between maps of first and second calls
        (``path`` and ``path:2``), which may be for different images.

        The maps must contain all positions as queries: capture them without ``queries``.

        Args:
            residual: weight of the shortcut; the attention has the weight ``1 - residual``.

        Returns:
            For each block, the map of its queries over the positions of the first block of its rollout, with one head.

        Raises:
            ValueError: a map contains only selected queries.

        Source: Abnar and Zuidema, *Quantifying Attention Flow in Transformers*, 2020, section 3,
        https://arxiv.org/abs/2005.00928

        >>> first = AttentionMap(torch.full((1, 2, 4, 2, 2), 1 / 4), ((0, 0), (0, 1), (1, 0), (1, 1)), (8, 8))
        >>> AttentionMaps({"first": first}).rollout()["first"].weights[0, 0, 0]
        tensor([[0.6250, 0.1250],
                [0.1250, 0.1250]])
        """
        rollouts = AttentionMaps()
        rolled: Tensor | None = None
        first: tuple[int, ...] = ()
        previous: tuple[int, ...] = ()
        latest = ""
        for path, attention in self.items():
            if latest != (latest := path.partition(":")[2]):  # the number of the call
                rolled, first = None, ()
            size, positions, device = attention.map_size, product(attention.map_size), attention.weights.device
            if len(attention.query_positions) != positions:
                got = f"{path!r} has {len(attention.query_positions)} of {positions}"
                raise ValueError(f"maps must contain all positions as queries; {got}. Capture them without queries")
            overlap = area_overlap(attention.key_edges(), edges(size)).to(device)
            heads = attention.normalized_weights().mean(1) @ overlap
            step = residual * torch.eye(positions, device=device) + (1 - residual) * heads
            step = step / step.sum(2, keepdim=True).clamp(min=torch.finfo(step.dtype).tiny)
            if rolled is not None:
                step = step @ area_overlap(edges(size), edges(previous)).to(device) @ rolled
            rolled, first, previous = step, first or size, size
            weights = rolled.unflatten(2, first)[:, None]
            rollouts[path] = AttentionMap(weights, attention.query_positions, attention.image_size, size, ("rollout",))
        return rollouts


def edges(size: Sequence[int], lengths: Sequence[float] = ()) -> list[Tensor]:
    """Return the edges of the positions of a feature map along each axis, in 0…1; by default, of equal lengths.

    >>> edges([2]), edges([2], [0.75])
    ([tensor([0.0000, 0.5000, 1.0000])], [tensor([0.0000, 0.7500, 1.0000])])
    """
    lengths = lengths or [1 / n for n in size]
    return [(torch.arange(n + 1) * length).clamp(max=1.0) for n, length in zip(size, lengths, strict=True)]


def area_overlap(of: Iterable[Tensor], other: Iterable[Tensor]) -> Tensor:
    """Return the fraction of each position of a feature map that lies in each position of another feature map.

    Both feature maps cover the same image, and are given by the edges of their positions along each axis. The result is
    ``(positions, positions of the other)``.
    """
    by_axis = []
    for at, other_at in zip(of, other, strict=True):
        overlap = torch.minimum(at[1:, None], other_at[1:]) - torch.maximum(at[:-1, None], other_at[:-1])
        by_axis.append(overlap.clamp(min=0) / at.diff()[:, None])
    return reduce(torch.kron, by_axis)
