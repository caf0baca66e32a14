"""Solvers of dx/dt = velocity(x, t) from noise (t = 1) to data (t = 0)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from titan_dit.diffusion.samplers.base import Settings

Velocity: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(x [b, n, d], t [b]) -> dx/dt [b, n, d]."""


def times(noise: Float[Tensor, "b n d"], steps: int) -> list[Float[Tensor, " b"]]:
    """The `steps + 1` equally spaced times from 1 to 0, each repeated for the batch."""
    line = torch.linspace(1, 0, steps + 1, device=noise.device, dtype=noise.dtype)
    return list(line[:, None].expand(-1, noise.shape[0]))


def euler(velocity: Velocity, noise: Float[Tensor, "b n d"], settings: Settings) -> Tensor:
    """First order, one evaluation per step; exact on straight paths."""
    x, line = noise, times(noise, settings.steps)
    for t, t_next in itertools.pairwise(line):
        x = x + (t_next - t)[:, None, None] * velocity(x, t)
    return x


def heun(velocity: Velocity, noise: Float[Tensor, "b n d"], settings: Settings) -> Tensor:
    """Second order, two evaluations in every step, the last too (cf. arXiv:2206.00364 alg. 1)."""
    x, line = noise, times(noise, settings.steps)
    for t, t_next in itertools.pairwise(line):
        step = (t_next - t)[:, None, None]
        slope = velocity(x, t)
        ahead = velocity(x + step * slope, t_next)
        x = x + step * 0.5 * (slope + ahead)
    return x
