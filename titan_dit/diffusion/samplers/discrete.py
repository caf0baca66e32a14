"""Samplers of discrete-time diffusion, on all steps or on a respaced subset."""

from __future__ import annotations

import itertools

import torch
from jaxtyping import Float
from torch import Tensor

from titan_dit.config.section import UserError
from titan_dit.diffusion.noise_schedule import Denoiser
from titan_dit.diffusion.samplers.base import Settings


def ddpm(network: Denoiser, noise: Float[Tensor, "b n d"], settings: Settings) -> Tensor:
    """Ancestral sampling with the network's own variance (arXiv:2006.11239 alg. 2).

    With fewer steps than in training, the steps are evenly spaced from the first to the last and
    the variances are those of the respaced schedule (arXiv:2102.09672 sec. 4).
    """
    steps = spread_with_ends(settings.steps, len(network.schedule))
    schedule = network.schedule.respaced(steps)
    tables, x = schedule.tables(noise.device), noise
    for k in reversed(range(len(schedule))):
        step = torch.full((len(x),), k, device=x.device)
        estimate = network(x, step, tables)
        x = tables.posterior_mean(estimate.clean, x, step)
        if k > 0:
            x = x + torch.exp(0.5 * estimate.log_variance) * settings.noise(k)
    return x


def ddim(network: Denoiser, noise: Float[Tensor, "b n d"], settings: Settings) -> Tensor:
    """DDIM (arXiv:2010.02502 eq. 12 and 16): deterministic with eta 0."""
    steps = spread_from_start(settings.steps, len(network.schedule))
    schedule = network.schedule.respaced(steps)
    tables, x = schedule.tables(noise.device), noise
    for k in reversed(range(len(schedule))):
        now, before = schedule.alpha_bar[k], schedule.alpha_bar[k - 1] if k > 0 else 1.0
        step = torch.full((len(x),), k, device=x.device)
        clean = network(x, step, tables).clean
        direction = (x - now**0.5 * clean) / (1 - now) ** 0.5
        added = settings.eta * ((1 - before) / (1 - now) * (1 - now / before)) ** 0.5
        x = before**0.5 * clean + max(0.0, 1 - before - added**2) ** 0.5 * direction
        if k > 0 and added > 0:
            x = x + added * settings.noise(k)
    return x


def spread_with_ends(count: int, total: int) -> list[int]:
    """`count` of `total` steps, evenly spaced, including the first and the last."""
    check_count(count, total)
    stride = (total - 1) / max(1, count - 1)
    # Accumulated, not multiplied: ties then round as in the original.
    places = itertools.accumulate(itertools.repeat(stride, count - 1), initial=0.0)
    return [round(place) for place in places]


def spread_from_start(count: int, total: int) -> list[int]:
    """`count` of `total` steps at a fixed stride from 0, such as 0, 100, ... 900.

    The smallest stride that gives `count` steps, as in the original's "ddim10". If none does, the
    strides differ by at most one.
    """
    check_count(count, total)
    for stride in range(1, total + 1):
        if len(range(0, total, stride)) == count:
            return list(range(0, total, stride))
    return [i * total // count for i in range(count)]


def check_count(count: int, total: int) -> None:
    """Raise UserError if there are fewer than `count` steps."""
    if count > total:
        raise UserError(
            f"steps={count}: the network is trained with {total} steps. Set at most {total}."
        )
