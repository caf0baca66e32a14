"""Metrics of generated features against real ones. All in fp64, with numpy's random numbers.

Settings, seeds included, are those of torch-fidelity 0.4, but for the neighbours of prdc.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from titan_dit.scores.moments import Moments

SEED = 2020
KID_SUBSETS, KID_SUBSET = 100, 1000
IS_SPLITS = 10
NEIGHBOURS = 5
"""Of prdc, as in arXiv:2002.09797."""
ROWS = 2048
"""Rows of a block of distances."""


def frechet(a: Moments, b: Moments) -> float:
    """Frechet distance of two Gaussians (arXiv:1706.08500, eq. 6).

    |mean_a - mean_b|^2 + tr(A + B - 2 (A B)^(1/2)). Of n rows the covariance has n - 1 eigenvalues
    above 0, so only as many of A B are: the others are rounding errors, which would count as their
    square root.
    """
    first, second = a.covariance, b.covariance
    values, vectors = torch.linalg.eigh(first)
    rank = max(1, min(a.count - 1, b.count - 1, len(first)))
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    product = torch.linalg.eigvalsh(root @ second @ root)[-rank:]
    apart = a.mean - b.mean
    traces = first.trace() + second.trace() - 2 * product.clamp(min=0).sqrt().sum()
    return float(apart @ apart + traces)


def kernel_distance(
    drawn: Float[Tensor, "n d"], real: Float[Tensor, "m d"]
) -> tuple[float, float | None, int]:
    """Mean and std over subsets of the unbiased squared MMD, and the subsets' size.

    The kernel is (x y / d + 1)^3 (arXiv:1801.01401, section 4). Fewer than 1,000 rows are one
    smaller subset size. The std is None if a subset is all rows of both: every subset is the same.
    """
    size = min(KID_SUBSET, len(drawn), len(real))
    is_one = size == len(drawn) == len(real)
    rng = np.random.RandomState(SEED)
    found = []
    for _ in range(1 if is_one else KID_SUBSETS):
        x = drawn[rng.choice(len(drawn), size, replace=False)].double()
        y = real[rng.choice(len(real), size, replace=False)].double()
        xx, yy, xy = ((p @ q.T / x.shape[1] + 1) ** 3 for p, q in ((x, x), (y, y), (x, y)))
        within = xx.sum() - xx.trace() + yy.sum() - yy.trace()
        found.append(float(within / (size * (size - 1)) - 2 * xy.sum() / size**2))
    return float(np.mean(found)), None if is_one else float(np.std(found)), size


def inception_score(logits: Float[Tensor, "n k"]) -> tuple[float, float]:
    """Mean and std over ten splits of exp(E KL(p(y | x) || p(y))) (arXiv:1606.03498, section 4)."""
    order = np.random.RandomState(SEED).permutation(len(logits))
    logs = logits[order].double().log_softmax(1)
    found = []
    for number in range(IS_SPLITS):
        first, last = (len(logs) * i // IS_SPLITS for i in (number, number + 1))
        part = logs[first:last]
        marginal = part.exp().mean(0).log()
        found.append(float((part.exp() * (part - marginal)).sum(1).mean().exp()))
    return float(np.mean(found)), float(np.std(found))


def prdc(
    drawn: Float[Tensor, "n d"], real: Float[Tensor, "m d"], neighbours: int = NEIGHBOURS
) -> dict[str, float]:
    """Precision and recall (arXiv:1904.06991), density and coverage (arXiv:2002.09797).

    A ball around each picture reaches its k-th neighbour of its own kind.
    """
    around_real, around_drawn = radii(real, neighbours), radii(drawn, neighbours)
    precise, dense, recalled, covered = 0, 0, 0, 0
    for rows in torch.split(drawn, ROWS):
        inside = distances(rows, real) <= around_real
        precise += int(inside.any(1).sum())
        dense += int(inside.sum())
    for rows, radius in zip(torch.split(real, ROWS), torch.split(around_real, ROWS), strict=True):
        apart = distances(rows, drawn)
        recalled += int((apart <= around_drawn).any(1).sum())
        covered += int((apart.amin(1) <= radius).sum())
    return {
        "precision": precise / len(drawn),
        "recall": recalled / len(real),
        "density": dense / (neighbours * len(drawn)),
        "coverage": covered / len(real),
    }


def radii(features: Float[Tensor, "n d"], neighbours: int) -> Float[Tensor, " n"]:
    """Distance of each row to its k-th nearest other row."""
    parts = torch.split(features, ROWS)
    return torch.cat([distances(p, features).kthvalue(neighbours + 1).values for p in parts])


def distances(a: Float[Tensor, "n d"], b: Float[Tensor, "m d"]) -> Float[Tensor, "n m"]:
    """Euclidean distances in fp64, by a matrix product."""
    return torch.cdist(a.double(), b.double(), compute_mode="use_mm_for_euclid_dist")
