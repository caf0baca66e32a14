"""DPM-Solver++(2M): second order, one evaluation per step (arXiv:2211.01095 alg. 2).

A step goes from the noise level (signal, sigma) to the next one along the exact solution for a
constant estimate of x_0, corrected by the change of the estimate since the step before. In the log
SNR, lambda = log(signal / sigma), the solution is an integral of that estimate alone. The steps of
discrete diffusion are those of diffusers' DPMSolverMultistepScheduler. For a flow, diffusers starts
at t = 0.999 and rounds the times down to thousandths; here they are exact.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from titan_dit.diffusion.noise_schedule import Denoiser
from titan_dit.diffusion.samplers.base import Settings
from titan_dit.diffusion.samplers.discrete import check_count
from titan_dit.diffusion.samplers.ode import Velocity, shifted

Level: TypeAlias = tuple[float, float]
"""(signal, sigma): x = signal x_0 + sigma noise."""


def discrete(network: Denoiser, noise: Float[Tensor, "b n d"], settings: Settings) -> Tensor:
    """The solver for discrete-time diffusion, on evenly spaced steps from the last one."""
    steps = spread_from_end(settings.steps, len(network.schedule))
    schedule = network.schedule.respaced(steps)
    tables = schedule.tables(noise.device)
    levels = [(bar**0.5, (1 - bar) ** 0.5) for bar in reversed(schedule.alpha_bar)]

    def clean_at(number: int, x: Tensor) -> Tensor:
        step = torch.full((len(x),), len(steps) - 1 - number, device=x.device)
        return network(x, step, tables).clean

    return solve(clean_at, noise, [*levels, (1.0, 0.0)])


def flow(velocity: Velocity, noise: Float[Tensor, "b n d"], settings: Settings) -> Tensor:
    """The solver for rectified flow, on times from 1 to 0, evenly spaced but for the shift."""
    steps, shift = settings.steps, settings.shift
    levels = [(k / steps, 1 - k / steps) for k in range(steps + 1)]
    if shift != 1:
        levels = [(1 - shifted(t, shift), shifted(t, shift)) for _, t in levels]

    def clean_at(number: int, x: Tensor) -> Tensor:
        t = levels[number][1]
        return x - t * velocity(x, torch.full((len(x),), t, device=x.device))

    return solve(clean_at, noise, levels)


def solve(
    clean_at: Callable[[int, Tensor], Tensor], noise: Tensor, levels: Sequence[Level]
) -> Tensor:
    """Follow `levels` from noise to (1, 0); `clean_at(number, x)` estimates x_0 at a level.

    The first and the last step are of first order: the first has no step before it, the last ends
    where the log SNR is infinite. After a start at pure noise (signal 0) the second step is, too.
    """
    x, before, last = noise, None, 0.0
    for number, ((signal, sigma), (next_signal, next_sigma)) in enumerate(
        itertools.pairwise(levels)
    ):
        clean = clean_at(number, x)
        if next_sigma == 0:
            return clean
        change = math.log(next_signal / next_sigma) - log_ratio(signal, sigma)
        target = clean
        if before is not None:
            target = clean + (clean - before) * (change / (2 * last))
        x = (next_sigma / sigma) * x - next_signal * math.expm1(-change) * target
        before, last = clean, change
    raise AssertionError("the last level must be (1, 0)")


def log_ratio(signal: float, sigma: float) -> float:
    """Half the log SNR; minus infinity without any signal."""
    return math.log(signal / sigma) if signal else -math.inf


def spread_from_end(count: int, total: int) -> list[int]:
    """`count` of `total` steps, evenly spaced and rising, with the last one but without step 0."""
    check_count(count, total)
    places = np.linspace(0, total - 1, count + 1).round().astype(int)
    return places[1:].tolist() if count < total else list(range(total))
