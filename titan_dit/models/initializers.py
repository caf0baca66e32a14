"""Initial distributions of parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from titan_dit.models import weight_draws

Initializer: TypeAlias = Callable[[torch.Size, torch.Generator], Tensor]
"""(full shape, generator) -> initial values, fp32, on the generator's device."""


@dataclass(frozen=True)
class Independent:
    """Independent elements of one distribution: a rank draws its shard alone.

    As an `Initializer` it draws the whole tensor by a torch.Generator, whose numbers depend on the
    device.
    """

    distribution: Literal["one", "uniform", "normal"]
    """Before scaling: always 1; uniform in (-1, 1); standard normal."""
    scale: Callable[[torch.Size], float]
    """Full shape -> factor."""

    def values(
        self, shape: torch.Size, key: int, elements: Int64[Tensor, " n"]
    ) -> Float64[Tensor, " n"]:
        """The values of some elements, given by row-major index; the same bits on every device."""
        scale = self.scale(shape)
        if self.distribution == "normal":
            return weight_draws.normal(key, elements, scale)
        if self.distribution == "uniform":
            return weight_draws.uniform(key, elements, scale)
        return torch.full_like(elements, scale, dtype=torch.float64)

    def __call__(self, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """The whole tensor, by the device's generator."""
        device, scale = generator.device, self.scale(shape)
        if self.distribution == "one":
            return torch.full(shape, scale, device=device)
        if self.distribution == "normal":
            return torch.randn(shape, device=device, generator=generator) * scale
        return (2 * torch.rand(shape, device=device, generator=generator) - 1) * scale


zeros = Independent("one", lambda shape: 0.0)
ones = Independent("one", lambda shape: 1.0)


def constant(value: float) -> Independent:
    """Every element is `value`."""
    return Independent("one", lambda shape: value)


def normal(std: float) -> Independent:
    """Independent normals of mean 0."""
    return Independent("normal", lambda shape: std)


def xavier_bound(shape: torch.Size) -> float:
    """sqrt(6 / (fan_in + fan_out)) for a weight [fan_out, fan_in] (Glorot 2010)."""
    fan_out, fan_in = shape
    return math.sqrt(6 / (fan_in + fan_out))


xavier_uniform = Independent("uniform", xavier_bound)


def adaln_zero(names: Iterable[str]) -> dict[str, Initializer]:
    """The initial distributions of a text-to-image DiT's parameters, as of the original DiT.

    Xavier for linears, N(0, 0.02) for the embedding of the time and for padding. Modulation, biases
    and output layer start at zero, so that every modulated block starts as the identity.
    """
    table: dict[str, Initializer] = {}
    for name in names:
        if ".modulation." in name or name.startswith("head.out"):
            table[name] = zeros
        elif name.endswith("norm.weight"):
            table[name] = ones
        elif name.endswith(".bias"):
            table[name] = zeros
        elif name.startswith(("embed.timestep", "embed.guidance")) or name.endswith(".padding"):
            table[name] = normal(0.02)
        else:
            table[name] = xavier_uniform
    return table
