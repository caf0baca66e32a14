"""Solvers of dx/dt = velocity(x, t) from noise (t = 1) to data (t = 0)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeAlias, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from titan_dit.diffusion.samplers.base import Settings, evaluates

Velocity: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(x [b, n, d], t [b]) -> dx/dt [b, n, d]."""


Time = TypeVar("Time", float, Tensor)


def shifted(t: Time, shift: float) -> Time:
    """Times with a shift: above 1 they are closer to the noise (arXiv:2403.03206 eq. 23)."""
    return shift * t / (1 + (shift - 1) * t)


def times(noise: Float[Tensor, "b n d"], settings: Settings) -> list[Float[Tensor, " b"]]:
    """The `steps + 1` times from 1 to 0, equally spaced but for the shift, for each sample."""
    line = torch.linspace(1, 0, settings.steps + 1, device=noise.device, dtype=noise.dtype)
    return list(shifted(line, settings.shift)[:, None].expand(-1, noise.shape[0]))


def euler(velocity: Velocity, noise: Float[Tensor, "b n d"], settings: Settings) -> Tensor:
    """First order, one evaluation per step; exact on straight paths."""
    x, line = noise, times(noise, settings)
    for t, t_next in itertools.pairwise(line):
        x = x + (t_next - t)[:, None, None] * velocity(x, t)
    return x


@evaluates(2)
def heun(velocity: Velocity, noise: Float[Tensor, "b n d"], settings: Settings) -> Tensor:
    """Second order, two evaluations in every step, the last too (cf. arXiv:2206.00364 alg. 1)."""
    x, line = noise, times(noise, settings)
    for t, t_next in itertools.pairwise(line):
        step = (t_next - t)[:, None, None]
        slope = velocity(x, t)
        ahead = velocity(x + step * slope, t_next)
        x = x + step * 0.5 * (slope + ahead)
    return x
