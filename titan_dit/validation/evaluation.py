"""[fid]: scores of drawn pictures against real ones, during training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from titan_dit.config.training import FIDConfig, SamplingConfig
from titan_dit.data.listing import few
from titan_dit.launcher.ranks import Ranks
from titan_dit.objectives.base import DataShare, Forward, Objective
from titan_dit.observe import console
from titan_dit.observe.console import SCORE
from titan_dit.scores import features, reference, score
from titan_dit.scores.features import Features
from titan_dit.scores.pictures import Pictures
from titan_dit.scores.score import Described

WHERE = "[fid]"
BATCH = 64
"""Pictures that a data rank draws at once."""


@dataclass(frozen=True)
class Evaluation:
    """The feature network, and the features of the reference."""

    config: FIDConfig
    network: Features
    real: Described | None
    """The reference's features; None on all ranks but the first."""
    classes: Mapping[str, int]
    """Class -> number of pictures in the reference; drawn pictures have the same proportions."""

    def scores(
        self,
        objective: Objective,
        forward: Forward,
        sampling: SamplingConfig,
        seed: int,
        share: DataShare,
        alive: Callable[[], None],
    ) -> dict[str, float]:
        """Draw the pictures, split over the data ranks, and score them. Collective.

        There are no scores if samples are NaN or infinite, which is said with their number.
        """
        num, ranks = self.config.num, Ranks()
        labels = objective.picture_labels(num, self.classes).to(share.device)
        found: dict[str, list[Tensor]] = {"features": [], "logits": []}
        firsts = range(0, num, BATCH * share.num_ranks)
        rows = BATCH * share.rank + torch.arange(BATCH, device=share.device)
        # Numbers from `num` on are padding, so that all ranks draw as many; it is cut off below.
        batches = [(first + rows).clamp(max=num - 1) for first in firsts]
        pictures = objective.pictures(forward, sampling, seed, labels, batches)
        lost = 0
        for first, (batch, finite) in zip(firsts, pictures, strict=True):
            lost += int((share.gather(finite.float())[: num - first] == 0).sum())
            drawn = self.network(batch)
            for name, part in zip(found, drawn, strict=True):
                if part is not None:
                    gathered = share.gather(part.to(share.device))[: num - first]
                    if ranks.is_first:
                        found[name].append(gathered.cpu())
            alive()

        def scored() -> dict[str, float]:
            assert self.real is not None
            if lost:
                console.say(f"{WHERE} {lost} of {num} samples are NaN or infinite: no scores")
                return {}
            whole = {name: torch.cat(parts) for name, parts in found.items() if parts}
            described = score.described(whole["features"], whole.get("logits"))
            names = self.config.metrics
            every = score.score(described, self.real, names, self.network.name)
            return {f"{SCORE}{name}": value for name, value in every.items()}

        return ranks.run_on_first(scored)


def open_evaluation(
    config: FIDConfig, sampling: SamplingConfig, objective: Objective, device: torch.device
) -> Evaluation:
    """Load the features and describe the reference. Collective."""
    assert config.reference
    key = f"{WHERE} features"
    network = features.load(config.features, config.feature_weights or "", device, key)
    size, names = objective.picture_size(sampling), config.metrics
    where = f"{WHERE} reference"
    score.check_network(network, names, size, f"{WHERE} metrics")
    found = reference.open_reference(config.reference, size, network, names, where)
    score.check(names, config.num, reference.counts(found), f"{WHERE} metrics")
    real = reference.describe_reference(network, found, names)
    classes = found.classes if isinstance(found, Pictures) else {}
    if classes and not objective.knows_classes(classes) and Ranks().is_first:
        console.say(
            f"{where} has other classes than [data] ({few(list(classes))}): all classes of the run "
            "are drawn, evenly"
        )
    return Evaluation(config, network, real, classes)
