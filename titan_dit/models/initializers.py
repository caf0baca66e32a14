"""Initial distributions of parameters. A tensor is drawn whole, then sharded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

Initializer: TypeAlias = Callable[[torch.Size, torch.Generator], Tensor]
"""(full shape, generator) -> initial values, fp32, on the generator's device."""


def zeros(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """All zeros."""
    return torch.zeros(shape, device=generator.device)


def ones(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """All ones."""
    return torch.ones(shape, device=generator.device)


def normal(std: float) -> Initializer:
    """Independent normals of mean 0."""

    def initializer(shape: torch.Size, generator: torch.Generator) -> Tensor:
        return torch.randn(shape, device=generator.device, generator=generator) * std

    return initializer


def xavier_uniform(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Uniform in +-sqrt(6 / (fan_in + fan_out)) for a weight [fan_out, fan_in] (Glorot 2010)."""
    fan_out, fan_in = shape
    bound = math.sqrt(6 / (fan_in + fan_out))
    unit = torch.rand(shape, device=generator.device, generator=generator)
    return (2 * unit - 1) * bound
