"""Where the queries of a network looked: its attention maps, and measures of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from vision_attn.checks import check_probability, product


@dataclass(frozen=True)
class AttentionMap:
    """Where the queries of one attention module looked, in its last forward pass.

    The measures are of the weights on the map, made to sum to one where they do not (see ``weights``).

    >>> seen = AttentionMap(torch.full((1, 8, 1, 3, 4), 1 / 12), cells=((2, 0),), image_size=(48, 64))
    >>> seen.weights.shape
    torch.Size([1, 8, 1, 3, 4])
    """

    #: ``(b, heads, queries, h, w)``: for each query the weights over the map that keys are taken from. They sum to one,
    #: less what goes to tokens that have no place on it (a class token, the zeros that Swin pads with); to zero where
    #: the query may attend to nothing. Of :class:`Attention1d` ``(b, heads, queries, w)``, and so on
    weights: Tensor
    #: row and column of each query, in cells of the map
    cells: tuple[tuple[int, ...], ...]
    #: rows and columns of the image
    image_size: tuple[int, ...]
    #: rows and columns of the map that queries are taken from; those of the keys where nothing is said
    map_size: tuple[int, ...] = ()
    #: what each head is called: ``"head 3"``, ``"mean of 8 heads"``; numbered where nothing is said
    heads: tuple[str, ...] = ()
    #: ``(b, heads, tokens, h, w)``: likewise of class and register tokens, where the network has any
    prefix: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "map_size", tuple(self.map_size or self.weights.shape[3:]))
        object.__setattr__(self, "heads", tuple(self.heads or [f"head {n}" for n in range(self.weights.shape[1])]))

    def shares(self) -> Tensor:
        """The weights, ``(b, heads, queries, keys)``, made to sum to one; zeros where they are all zero."""
        weights = self.weights.detach().float().flatten(3)
        total = weights.sum(3, keepdim=True)
        return weights / torch.where(total > 0, total, 1.0)

    def entropy(self) -> Tensor:
        """How widely each query looks, ``(b, heads, queries)``: the entropy of its weights, ``-Σ_j a_j ln a_j``.

        Zero for a query that looks at one cell, ``ln(cells)`` for one that looks at all alike: ``entropy().exp()`` is
        the number of cells that it would look at evenly.

        Source: Clark et al., *What Does BERT Look At?*, 2019, section 3.3, https://arxiv.org/abs/1906.04341

        >>> seen = AttentionMap(torch.tensor([[0.5, 0.5], [0.0, 0.0]]).view(1, 1, 1, 2, 2), ((0, 0),), (8, 8))
        >>> seen.entropy().exp()
        tensor([[[2.]]])
        """
        return torch.special.entr(self.shares()).sum(3)

    def distance(self) -> Tensor:
        """How far each query looks, ``(b, heads, queries)``, in pixels of the image: ``Σ_j a_j |p_i - p_j|``.

        ``p`` are the middles of cells.

        Source: Dosovitskiy et al., *An Image is Worth 16x16 Words*, 2021, appendix D.7,
        https://arxiv.org/abs/2010.11929

        >>> seen = AttentionMap(torch.tensor([[0.5, 0.5], [0.0, 0.0]]).view(1, 1, 1, 2, 2), ((0, 0),), (8, 8))
        >>> seen.distance()
        tensor([[[2.]]])
        """
        image_size, size = torch.tensor(self.image_size), torch.tensor(self.weights.shape[3:])
        queries = (torch.tensor(self.cells) + 0.5) * image_size / torch.tensor(self.map_size)
        keys = (torch.ones(*size).nonzero() + 0.5) * image_size / size
        return (self.shares() * torch.cdist(queries, keys).to(self.weights.device)).sum(3)

    def similarity(self) -> Tensor:
        """How alike any two heads look, ``(b, heads, heads)``: 1 less the Jensen-Shannon divergence of their weights.

        With the logarithm to base 2: 1 for heads that look at the same, 0 for heads that look at no cell in common; the
        mean over queries.

        Source: Clark et al., *What Does BERT Look At?*, 2019, section 6, https://arxiv.org/abs/1906.04341

        >>> seen = AttentionMap(torch.eye(2)[None, :, None, None], ((0, 0),), (8, 8))  # two heads, two cells
        >>> seen.similarity()
        tensor([[[1., 0.],
                 [0., 1.]]])
        """
        shares, entropy = self.shares(), self.entropy()
        rows = []
        for head in range(shares.shape[1]):
            both = torch.special.entr((shares + shares[:, [head]]) / 2).sum(3)
            rows.append((both - (entropy + entropy[:, [head]]) / 2).mean(2))
        return 1 - torch.stack(rows, 1) / torch.tensor(2.0).log()


class Maps(dict[str, AttentionMap]):
    """The maps of a forward pass by module path, in the order of running.

    >>> Maps()["layer4"]
    Traceback (most recent call last):
    KeyError: "no map of 'layer4': captured are none; did the model run it?"
    """

    def __init__(self, *items: Any) -> None:
        super().__init__(*items)
        #: why other attention has no map, by module path
        self.reasons: dict[str, str] = {}

    def __missing__(self, path: str) -> AttentionMap:
        captured = ", ".join(map(repr, self)) or "none"
        reason = self.reasons.get(path, "did the model run it?")
        raise KeyError(f"no map of {path!r}: captured are {captured}; {reason}")

    def rollout(self, *, residual: float = 0.5) -> Maps:
        """Attention rolled out through the blocks of a residual network, from each back to the map of the first.

        ::

            A_l = residual · 1 + (1 - residual) · mean of the heads' weights, rows made to sum to one
            R_l = A_l R_{l-1}

        Where the next map has another size, each of its cells is taken for the cells of the map before that it covers,
        by area. What the convolutions in between move is not in it, nor how large a branch is beside its stream.

        The maps are to be of all cells, captured without ``queries``.

        Args:
            residual: weight of the stream beside the attention.

        Returns:
            For each block the map of its queries, with one head, on the cells of the first block.

        Raises:
            ValueError: a map is of chosen queries only, or ``residual`` is not in 0…1.

        Source: Abnar and Zuidema, *Quantifying Attention Flow in Transformers*, 2020, section 3,
        https://arxiv.org/abs/2005.00928

        >>> first = AttentionMap(torch.full((1, 2, 4, 2, 2), 1 / 4), ((0, 0), (0, 1), (1, 0), (1, 1)), (8, 8))
        >>> Maps({"first": first}).rollout()["first"].weights[0, 0, 0]
        tensor([[0.6250, 0.1250],
                [0.1250, 0.1250]])
        """
        check_probability("residual", residual)
        found = Maps()
        rolled: Tensor | None = None
        first: tuple[int, ...] = ()
        before: tuple[int, ...] = ()
        for path, one in self.items():
            cells = product(one.map_size)
            if len(one.cells) != cells:
                found_here = f"{path!r} is of {len(one.cells)} of {cells}"
                raise ValueError(f"maps must be of all cells; {found_here}: capture without queries")
            heads = one.shares().mean(1) @ overlaps(one.weights.shape[3:], one.map_size).to(one.weights.device)
            step = residual * torch.eye(cells, device=heads.device) + (1 - residual) * heads
            step = step / step.sum(2, keepdim=True).clamp(min=torch.finfo(step.dtype).tiny)
            if rolled is not None:
                step = step @ overlaps(one.map_size, before).to(step.device) @ rolled
            rolled, first, before = step, first or one.map_size, one.map_size
            weights = rolled.unflatten(2, first)[:, None]
            found[path] = AttentionMap(weights, one.cells, one.image_size, one.map_size, ("rollout",))
        return found


def overlaps(size: Sequence[int], other: Sequence[int]) -> Tensor:
    """The share of each cell of a map that lies in each cell of another over the same image, ``(cells, others)``."""
    along = []
    for n, m in zip(size, other, strict=True):
        begin, others = torch.arange(n)[:, None] / n, torch.arange(m) / m
        overlap = torch.minimum(begin + 1 / n, others + 1 / m) - torch.maximum(begin, others)
        along.append(overlap.clamp(min=0) * n)
    return reduce(torch.kron, along)
