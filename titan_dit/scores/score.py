"""Score pictures against a reference, their features computed by all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from safetensors import torch as safetensors
from torch import Tensor

from titan_dit.config.section import UserError
from titan_dit.launcher.ranks import Ranks
from titan_dit.scores import metrics
from titan_dit.scores.features import Features
from titan_dit.scores.moments import Moments, merge
from titan_dit.scores.pictures import Pictures
from titan_dit.system.progress import ProgressLine

METRICS = ("fid", "kid", "is", "prdc")
BATCH = 64
"""Pictures in a pass of the feature network, whatever the number of ranks: the same bits."""
PIXELS = 1 << 24
"""Their pixels: of larger pictures than 512 x 512 fewer are in a pass."""


@dataclass(frozen=True)
class Described:
    """What the metrics need of a set of pictures."""

    moments: Moments
    features: Float[Tensor, "n d"] | None = None
    logits: Float[Tensor, "n k"] | None = None


def described(features: Float[Tensor, "n d"], logits: Float[Tensor, "n k"] | None) -> Described:
    """Features as the metrics need them."""
    return Described(merge(map(Moments.of, torch.split(features, BATCH))), features, logits)


def describe(network: Features, chosen: Pictures, names: Sequence[str]) -> Described | None:
    """Features of all pictures, on the first rank; None on the others. Collective.

    Rank r takes the batches r, r + ranks, ... Only what the metrics `names` need is kept.
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
    """Pictures of a pass."""
    pixels = math.prod(chosen.read(range(1)).shape[1:3]) if chosen.count else 1
    return max(1, min(BATCH, PIXELS // pixels))


def joined(
    ranks: Ranks, moments: Sequence[Moments], parts: Mapping[str, Tensor]
) -> Described | None:
    """Join the shares of all ranks on the first."""
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

    return Described(whole, rows("features."), rows("logits."))


def score(drawn: Described, real: Described, names: Sequence[str], network: str) -> dict[str, Any]:
    """The metrics `names`. Those of Inception's features have their known names."""
    known = network == "inception"
    found: dict[str, Any] = {}
    if "fid" in names:
        name = "fid" if known else "frechet_distance"
        found[name] = metrics.frechet(drawn.moments, real.moments)
    if "kid" in names:
        assert drawn.features is not None
        assert real.features is not None
        name = "kid" if known else "kernel_distance"
        mean, std, size = metrics.kernel_distance(drawn.features, real.features)
        spread = {} if std is None else {f"{name}_std": std}
        found |= {name: mean, **spread, f"{name}_pictures": size}
    if "is" in names:
        assert drawn.logits is not None
        name = "inception_score" if known else "classifier_score"
        found[name], found[f"{name}_std"] = metrics.inception_score(drawn.logits)
    if "prdc" in names:
        assert drawn.features is not None
        assert real.features is not None
        found |= metrics.prdc(drawn.features, real.features)
    return found


def check_network(network: Features, names: Sequence[str], size: int, where: str) -> None:
    """Raise UserError unless the features of pictures of `size` serve the metrics."""
    if "is" in names and network.probe(size)[1] is None:
        raise UserError(f"{where}: is needs class scores, which {network.name} does not give.")


def check(names: Sequence[str], count: int, real: Mapping[str, int], where: str) -> None:
    """Raise UserError unless the metrics are known and there are enough pictures.

    `count`: of drawn ones; `real`: of those that a metric compares them with, if it does.
    """
    if unknown := [name for name in names if name not in METRICS] or ([] if names else ["nothing"]):
        raise UserError(f"{where} has {', '.join(unknown)}. Valid: {', '.join(METRICS)}.")
    least = {"fid": 2, "kid": 2, "is": metrics.IS_SPLITS, "prdc": metrics.NEIGHBOURS + 1}
    for name in names:
        fewest = min(count, real.get(name, count))
        if fewest < least[name]:
            raise UserError(
                f"{where}: {name} needs {least[name]} pictures, but there are {fewest}."
            )
