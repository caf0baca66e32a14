"""[fid]: scores of drawn pictures against real ones, during training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from jaxtyping import Bool, Int64, UInt8
from torch import Tensor

from titan_dit.config.section import UserError, few
from titan_dit.config.training import FIDConfig, SamplingConfig
from titan_dit.objectives.base import DataShare, Forward, Objective
from titan_dit.observe import console
from titan_dit.observe.console import SCORE
from titan_dit.ranks.process_group import Ranks
from titan_dit.scores import features, reference, score
from titan_dit.scores.features import Features
from titan_dit.scores.pictures import Pictures
from titan_dit.scores.score import Statistics

Conditions: TypeAlias = Callable[[Int64[Tensor, " b"]], Mapping[str, Tensor]]
"""Numbers of pictures -> their conditions: inputs of the network by name, on the same device."""
WHERE = "[fid]"
BATCH = 64
"""Pictures that a data rank draws per batch."""


@runtime_checkable
class DrawsPictures(Protocol):
    """An objective whose samples are pictures, as `diffusion.objective.Diffusion`."""

    def picture_size(self, sampling: SamplingConfig) -> int:
        """Width and height in pixels of the pictures that `pictures` draws.

        Raises UserError if none.
        """

    def knows_classes(self, like: Mapping[str, int]) -> bool:
        """True if `picture_conditions` follows the proportions `like`, or needs no classes."""

    def picture_conditions(self, num: int, like: Mapping[str, int]) -> Conditions:
        """Conditions of `num` pictures, if possible in the proportions `like`: class -> count."""

    def pictures(
        self,
        forward: Forward,
        sampling: SamplingConfig,
        seed: int,
        conditions: Conditions,
        batches: Iterable[Int64[Tensor, " b"]],
        share: DataShare,
    ) -> Iterator[tuple[UInt8[Tensor, "b h w 3"], Bool[Tensor, " b"]]]:
        """Draw the pictures of each batch of numbers, on its device.

        With each batch: which samples are finite, without NaN or infinity. `share`: the data ranks,
        which draw batches of as many pictures at the same time.
        """


@dataclass(frozen=True)
class Evaluation:
    """Scores drawn pictures: by the feature network, against the features of the reference."""

    objective: DrawsPictures
    config: FIDConfig
    network: Features
    real: Statistics | None
    """The reference's features; None on all ranks but the first."""
    classes: Mapping[str, int]
    """Class -> number of pictures in the reference; drawn pictures have the same proportions."""

    def scores(
        self,
        forward: Forward,
        sampling: SamplingConfig,
        seed: int,
        share: DataShare,
        alive: Callable[[], None],
    ) -> dict[str, float]:
        """Draw pictures, split over the data ranks, and score them. Collective.

        Returns no scores, and prints the number, if samples are NaN or infinite.
        """
        num, ranks = self.config.num, Ranks()
        conditions = self.objective.picture_conditions(num, self.classes)
        found: dict[str, list[Tensor]] = {"features": [], "logits": []}
        firsts = range(0, num, BATCH * share.num_ranks)
        rows = BATCH * share.rank + torch.arange(BATCH, device=share.device)
        # Numbers from `num` on are padding, so that all ranks draw as many; it is cut off below.
        batches = [(first + rows).clamp(max=num - 1) for first in firsts]
        pictures = self.objective.pictures(forward, sampling, seed, conditions, batches, share)
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
            described = score.statistics_of(whole["features"], whole.get("logits"))
            names = self.config.metrics
            every = score.score(described, self.real, names, self.network.name)
            return {f"{SCORE}{name}": value for name, value in every.items()}

        return ranks.run_on_first(scored)


def drawing_pictures(objective: Objective) -> DrawsPictures:
    """The objective; UserError if it draws no pictures."""
    if isinstance(objective, DrawsPictures):
        return objective
    wanted = [name for name in vars(DrawsPictures) if not name.startswith("_")]
    missing = ", ".join(name for name in wanted if not hasattr(objective, name))
    raise UserError(
        f"{WHERE} needs pictures, but the objective {type(objective).__name__} has no {missing}. "
        "Set every = 0, or add them (titan_dit/validation/evaluation.py: DrawsPictures)."
    )


def open_evaluation(
    config: FIDConfig, sampling: SamplingConfig, objective: Objective, device: torch.device
) -> Evaluation:
    """Load the features and describe the reference. Collective."""
    assert config.reference
    draws = drawing_pictures(objective)
    key = f"{WHERE} features"
    network = features.load(config.features, config.feature_weights or "", device, key)
    size, names = draws.picture_size(sampling), config.metrics
    where = f"{WHERE} reference"
    score.check_network(network, names, size, f"{WHERE} metrics")
    found = reference.open_reference(config.reference, size, network, names, where)
    score.check_metrics(names, config.num, reference.counts(found), f"{WHERE} metrics")
    real = reference.reference_statistics(network, found, names)
    classes = found.classes if isinstance(found, Pictures) else {}
    if classes and not draws.knows_classes(classes) and Ranks().is_first:
        console.say(
            f"{where} has other classes than [data] ({few(list(classes))}): all classes of the run "
            "are drawn, evenly"
        )
    return Evaluation(draws, config, network, real, classes)
