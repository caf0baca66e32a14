"""The signature and the settings of a sampler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeAlias, TypeVar

from jaxtyping import Int64
from torch import Tensor

from titan_dit.config.section import UserError


@dataclass(frozen=True)
class Settings:
    """Settings of a sampler."""

    steps: int
    eta: float = 0.0
    """DDIM only: 0 is deterministic, 1 adds as much noise as ancestral sampling."""
    fresh: Callable[[int], Tensor] | None = None
    """(step index) -> standard normal noise like x, for stochastic samplers."""

    shift: float = 1.0
    """Flows only: times t -> shift t / (1 + (shift - 1) t) of equally spaced ones."""

    keys: Callable[[], Int64[Tensor, " b"]] | None = None
    """A random seed for every sample, for samplers of other libraries that draw noise."""

    def seeds(self) -> Int64[Tensor, " b"]:
        """A seed for every sample."""
        if self.keys is None:
            raise UserError("This sampler draws noise of its own: give Settings(keys=...).")
        return self.keys()

    def noise(self, step: int) -> Tensor:
        """Fresh noise for a step."""
        if self.fresh is None:
            raise UserError("This sampler adds noise: give Settings(fresh=...).")
        return self.fresh(step)


CHOSEN = ("eta",)
"""Fields of `Settings` that are keys of [sampling] and flags of `sample` by the same name. All that
draws, and all that records how it was drawn, reads this list."""


def chosen(settings: object) -> dict[str, Any]:
    """The fields `CHOSEN` of [sampling], or of the flags of `sample`, by name."""
    return {name: getattr(settings, name) for name in CHOSEN}


def planned(settings: object) -> dict[str, Any]:
    """The entries of `chosen` for the plan of a command that can be continued.

    A setting at its default is left out, so that unfinished parts of a version without it go on.
    `eta` has always been there.
    """
    default = {field.name: field.default for field in fields(Settings)}
    found = chosen(settings)
    return {name: v for name, v in found.items() if name == "eta" or v != default[name]}


Sampler: TypeAlias = Callable[[Any, Tensor, Settings], Tensor]
"""(process, noise [b, n, d], settings) -> samples [b, n, d]; the process is the network as wrapped
by `Diffusion.process`."""

Function = TypeVar("Function", bound=Sampler)


def evaluates(number: int) -> Callable[[Function], Function]:
    """Say how often a sampler calls the network in a step, for progress lines; others: once."""

    def named(sampler: Any) -> Any:
        sampler.evaluations = number
        return sampler

    return named
