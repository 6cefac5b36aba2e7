"""Where the queries of one attention module looked, and what is measured of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["AttentionMap", "centres"]


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
        names = self.heads or [f"head {number}" for number in range(self.weights.shape[1])]
        object.__setattr__(self, "heads", tuple(names))

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
        if len(self.map_size) != len(self.image_size):
            raise ValueError(
                f"distance is of maps with as many axes as the image, {len(self.image_size)}; got {len(self.map_size)}"
            )
        rows = torch.tensor([[0.5 + at for at in cell] for cell in self.cells])
        queries = rows * torch.tensor(self.image_size) / torch.tensor(self.map_size)
        keys = centres(self.weights.shape[3:], self.image_size)
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


def centres(size: Sequence[int], image_size: Sequence[int]) -> Tensor:
    """The middles of a map's cells in pixels of the image, ``(cells, axes)``, row-major."""
    along = [(torch.arange(n) + 0.5) * length / n for n, length in zip(size, image_size, strict=True)]
    return torch.cartesian_prod(*along).reshape(-1, len(along))
