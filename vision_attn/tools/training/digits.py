"""The embedded data set: two handwritten digits far apart on one canvas, of the same class or not.

A network that pools over the whole map and has a linear head can only add up what it sees at each place. Whether two
digits are the *same* is not such a sum: each class is as frequent in both answers, so each digit alone says nothing.
Information has to travel between distant positions before the pooling, and that is what spatial attention is for.

The digits are those of scikit-learn (1,797 images of 8×8; E. Alpaydin, C. Kaynak, UCI Machine Learning Repository,
https://doi.org/10.24432/C50P49, CC BY 4.0), which come with the library. Those on evaluation canvases are never on
training canvases.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: rows and columns of a canvas, in pixels
CANVAS = (8, 44)
#: what the labels 0 and 1 mean
CLASSES = ("different", "same")
DIGIT = 8
#: columns of play that each digit has at its end of the canvas
PLAY = 1
TRAIN_CANVASES, EVAL_CANVASES = 50_000, 4_000
#: of the 1,797 digits, those for training; the others are held out
TRAIN_DIGITS = 1_200


def digit_pairs(train: bool, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The data set: 50,000 canvases of training digits, or 4,000 of held-out digits; half of either are the same.

    >>> images, labels = digit_pairs(train=False)
    >>> images.shape, int(labels.sum())
    (torch.Size([4000, 1, 8, 44]), 2000)
    """
    from sklearn.datasets import load_digits

    source = load_digits()
    digits = torch.from_numpy(source.images * (255 / 16)).to(torch.uint8)
    classes = torch.from_numpy(source.target).long()
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(seed))
    chosen = order[:TRAIN_DIGITS] if train else order[TRAIN_DIGITS:]
    generator = torch.Generator().manual_seed(2 * seed + 1 + train)
    return draw_pairs(digits[chosen], classes[chosen], TRAIN_CANVASES if train else EVAL_CANVASES, generator=generator)


def draw_pairs(digits: Tensor, classes: Tensor, count: int, *, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw canvases with a digit at either end, every second one a pair of the same class.

    The class on the left is uniform over the ten, and so is the class on the right, whatever the answer.
    """
    height, width = CANVAS
    labels = torch.arange(count) % 2
    left_class = torch.randint(10, (count,), generator=generator)
    other = (left_class + torch.randint(1, 10, (count,), generator=generator)) % 10
    right_class = torch.where(labels == 1, left_class, other)
    left_edge = torch.randint(PLAY + 1, (count,), generator=generator)
    right_edge = width - DIGIT - torch.randint(PLAY + 1, (count,), generator=generator)

    images = torch.zeros(count, 1, height, width, dtype=torch.uint8)
    canvas = torch.arange(count)[:, None, None]
    steps = torch.arange(DIGIT)
    for wanted, edge in ((left_class, left_edge), (right_class, right_edge)):
        members = [torch.nonzero(classes == digit)[:, 0] for digit in range(10)]
        drawn = torch.empty(count, dtype=torch.long)
        for digit, pool in enumerate(members):
            where = wanted == digit
            drawn[where] = pool[torch.randint(len(pool), (int(where.sum()),), generator=generator)]
        top = torch.randint(height - DIGIT + 1, (count,), generator=generator)
        rows, columns = top[:, None] + steps, edge[:, None] + steps
        images[canvas, 0, rows[:, :, None], columns[:, None, :]] = digits[drawn]
    return images, labels
