"""Solver without training steps for pictures that are cut into pieces: a linear map between borders.

The border of a piece predicts the border of its neighbor by ridge regression, fitted on photographs in closed form. A
pair of pieces is scored by the ratio of two Gaussian likelihoods: of the residual of the prediction, and of the border
without a prediction. The second term is needed because a border that is likely everywhere, such as a clear sky, is not
evidence for a neighbor.
"""

import torch


class BorderSolver:
    """Costs of neighbors, fitted to pairs of borders.

    Args:
        borders: borders of pieces, ``(n, k)``.
        neighbors: the borders of their neighbors, ``(n, k)``.
        ridge: variance that is added to every component.
    """

    def __init__(self, borders, neighbors, ridge=1e-3):
        borders, neighbors = borders.double(), neighbors.double()
        self.mean, self.neighbor_mean = borders.mean(0), neighbors.mean(0)
        x, y = borders - self.mean, neighbors - self.neighbor_mean
        added = ridge * torch.eye(x.shape[1], dtype=torch.double)
        self.weight = torch.linalg.solve(x.T @ x / len(x) + added, x.T @ y / len(x))
        residual = y - x @ self.weight
        self.residual_root, self.root = (
            torch.linalg.cholesky(torch.linalg.inv(z.T @ z / len(z) + added)) for z in (residual, y)
        )

    def costs(self, borders, neighbors):
        """Return twice the negative log-likelihood ratio of all pairs, ``(b, n, k), (b, n, k) -> (b, n, n)``."""
        predicted = (borders.double() - self.mean) @ self.weight
        actual = neighbors.double() - self.neighbor_mean
        distances = torch.cdist(predicted @ self.residual_root, actual @ self.residual_root).square()
        return distances - (actual @ self.root).square().sum(2)[:, None]
