"""What every sampler is given beside the network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from titan_dit.config.section import UserError


@dataclass(frozen=True)
class Settings:
    """How a sampler goes from noise to data."""

    steps: int
    eta: float = 0.0
    """DDIM only: 0 adds no noise on the way, 1 as much as ancestral sampling."""
    fresh: Callable[[int], Tensor] | None = None
    """Index of a step -> standard normal noise like x, for the samplers that add noise."""

    def noise(self, step: int) -> Tensor:
        """Fresh noise for a step."""
        if self.fresh is None:
            raise UserError("This sampler adds noise: give Settings(fresh=...).")
        return self.fresh(step)


Sampler: TypeAlias = Callable[[Any, Tensor, Settings], Tensor]
"""(process, noise [b, n, d], settings) -> samples [b, n, d]; the process is what the objective
makes of the network (`Objective.process`)."""
