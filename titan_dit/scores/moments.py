"""Count, mean and covariance of features. The moments of parts merge exactly."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of rows of features, in fp64."""

    count: int
    mean: Float[Tensor, " d"]
    squares: Float[Tensor, "d d"]
    """Sum over rows of the outer product of (row - mean) with itself."""

    @staticmethod
    def of(features: Float[Tensor, "n d"]) -> Moments:
        """The moments of some rows."""
        rows = features.double()
        centred = rows - rows.mean(0)
        return Moments(len(rows), rows.mean(0), centred.T @ centred)

    def merged(self, other: Moments) -> Moments:
        """The moments of both sets of rows (Chan, Golub, LeVeque 1979, eq. 2.1)."""
        count = self.count + other.count
        apart = other.mean - self.mean
        return Moments(
            count,
            self.mean + apart * (other.count / count),
            self.squares
            + other.squares
            + torch.outer(apart, apart) * (self.count * other.count / count),
        )

    @property
    def covariance(self) -> Float[Tensor, "d d"]:
        """Unbiased covariance. Needs two rows."""
        return self.squares / (self.count - 1)


def merge(parts: Iterable[Moments]) -> Moments:
    """The moments of all rows."""
    return reduce(Moments.merged, parts)
