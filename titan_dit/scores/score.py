"""Score pictures against a reference; all ranks compute features.

Metrics are computed in fp64, with numpy's random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from safetensors import torch as safetensors
from torch import Tensor

from titan_dit.config.section import UserError
from titan_dit.ranks.process_group import Ranks
from titan_dit.scores.features import Features
from titan_dit.scores.moments import Moments, merge
from titan_dit.scores.pictures import Pictures
from titan_dit.system.progress import ProgressLine

SEED = 2020
KID_SUBSETS, KID_SUBSET = 100, 1000
IS_SPLITS = 10
NEIGHBOURS = 5
"""k of the nearest neighbours of prdc, as in arXiv:2002.09797."""
ROWS = 2048
"""Rows per block of a distance matrix."""


def frechet(a: Moments, b: Moments) -> float:
    """Frechet distance of two Gaussians (arXiv:1706.08500, eq. 6).

    |mean_a - mean_b|^2 + tr(A + B - 2 (A B)^(1/2)). The covariance of n rows has at most n - 1
    eigenvalues above 0, and so has A B. The others are rounding errors, and are left out: they
    would count as their square root.
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
    """Unbiased squared MMD: (mean over subsets, std over subsets, size of a subset).

    The kernel is (x y / d + 1)^3 (arXiv:1801.01401, section 4). With fewer than 1,000 rows the
    subsets are smaller. The std is None if a subset is all rows of both: every subset is then the
    same.
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

    The ball around each picture reaches to its k-th nearest neighbour in its own set.
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


METRICS = ("fid", "kid", "is", "prdc")
BATCH = 64
"""Pictures per pass of the feature network. Fixed, so that bits do not depend on the number of
ranks."""
PIXELS = 1 << 24
"""Maximum pixels per pass: above 512 x 512 a pass has fewer pictures."""


@dataclass(frozen=True)
class Statistics:
    """Statistics of a set of pictures that the metrics need."""

    moments: Moments
    features: Float[Tensor, "n d"] | None = None
    logits: Float[Tensor, "n k"] | None = None


def statistics_of(
    features: Float[Tensor, "n d"], logits: Float[Tensor, "n k"] | None
) -> Statistics:
    """Statistics of features."""
    return Statistics(merge(map(Moments.of, torch.split(features, BATCH))), features, logits)


def compute_statistics(
    network: Features, chosen: Pictures, names: Sequence[str]
) -> Statistics | None:
    """Statistics of pictures on the first rank; None on the others. Collective.

    Rank r computes the batches r, r + ranks, ... Only what the metrics `names` need is kept.
    """
    ranks = Ranks()
    size = rows_at_once(chosen)
    starts = range(0, chosen.count, size)
    mine = starts[ranks.rank :: ranks.count]
    keeps_rows, keeps_logits = bool({"kid", "prdc"} & {*names}), "is" in names
    moments: list[Moments] = []
    parts: dict[str, Tensor] = {}
    progress = ProgressLine(len(mine), "batches", what=f"features of {chosen.about}")
    with progress:  # An error ends all ranks: the launcher stops those that wait below.
        for first in mine:
            features, logits = network(chosen.read(range(first, min(first + size, chosen.count))))
            moments.append(Moments.of(features))
            if keeps_rows:
                parts[f"features.{first:012d}"] = features
            if keeps_logits and logits is not None:
                # They may be the features themselves, and a file does not hold a tensor twice.
                parts[f"logits.{first:012d}"] = logits.clone()
            progress.add(1)
    return joined(ranks, moments, parts)


def rows_at_once(chosen: Pictures) -> int:
    """Pictures per pass of the network."""
    pixels = math.prod(chosen.read(range(1)).shape[1:3]) if chosen.count else 1
    return max(1, min(BATCH, PIXELS // pixels))


def joined(
    ranks: Ranks, moments: Sequence[Moments], parts: Mapping[str, Tensor]
) -> Statistics | None:
    """Join the statistics of all ranks on the first; None on the others."""
    mine = {name: tensor.contiguous() for name, tensor in parts.items()}
    if moments:
        own = merge(moments)
        mine |= {"count": torch.tensor(own.count), "mean": own.mean, "squares": own.squares}
    gathered = [safetensors.load(data) for data in ranks.gather_bytes(safetensors.save(mine))]
    if not ranks.is_first:
        return None
    every = {name: tensor for share in gathered for name, tensor in share.items() if "." in name}
    whole = merge(
        Moments(int(share["count"]), share["mean"], share["squares"])
        for share in gathered
        if "count" in share
    )

    def rows(kind: str) -> Tensor | None:
        found = [every[name] for name in sorted(every) if name.startswith(kind)]
        return torch.cat(found) if found else None

    return Statistics(whole, rows("features."), rows("logits."))


def score(
    drawn: Statistics, real: Statistics, names: Sequence[str], network: str
) -> dict[str, Any]:
    """Metric -> value for the metrics `names`. With Inception's features they have FID's names."""
    known = network == "inception"
    found: dict[str, Any] = {}
    if "fid" in names:
        name = "fid" if known else "frechet_distance"
        found[name] = frechet(drawn.moments, real.moments)
    if "kid" in names:
        assert drawn.features is not None
        assert real.features is not None
        name = "kid" if known else "kernel_distance"
        mean, std, size = kernel_distance(drawn.features, real.features)
        spread = {} if std is None else {f"{name}_std": std}
        found |= {name: mean, **spread, f"{name}_pictures": size}
    if "is" in names:
        assert drawn.logits is not None
        name = "inception_score" if known else "classifier_score"
        found[name], found[f"{name}_std"] = inception_score(drawn.logits)
    if "prdc" in names:
        assert drawn.features is not None
        assert real.features is not None
        found |= prdc(drawn.features, real.features)
    return found


def check_network(network: Features, names: Sequence[str], size: int, where: str) -> None:
    """Raise UserError unless the features of pictures of `size` serve the metrics."""
    if "is" in names and network.probe(size)[1] is None:
        raise UserError(
            f"{where}: is needs class scores, which {network.name} does not give. Remove is."
        )


def check_metrics(names: Sequence[str], count: int, real: Mapping[str, int], where: str) -> None:
    """Raise UserError unless the metrics are known and there are enough pictures.

    `count`: number of drawn pictures; `real`: by metric, number of reference pictures.
    """
    if unknown := [name for name in names if name not in METRICS] or ([] if names else ["nothing"]):
        raise UserError(f"{where} has {', '.join(unknown)}. Valid: {', '.join(METRICS)}.")
    least = {"fid": 2, "kid": 2, "is": IS_SPLITS, "prdc": NEIGHBOURS + 1}
    for name in names:
        fewest = min(count, real.get(name, count))
        if fewest < least[name]:
            raise UserError(
                f"{where}: {name} needs {least[name]} pictures, but there are {fewest}. Draw and "
                f"give more, or remove {name}."
            )
