"""Discrete diffusion run backwards, on all of its steps or on a few of them."""

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

    Fewer steps than the network was trained with are spread evenly from the first to the last, and
    the variances follow (arXiv:2102.09672 sec. 4).
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
    """DDIM (arXiv:2010.02502 eq. 12 and 16): with eta 0 no noise is added on the way."""
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
    """`count` of `total` steps, evenly spaced, the first and the last among them."""
    check_count(count, total)
    stride = (total - 1) / max(1, count - 1)
    # Summed up, not multiplied: a place half-way between two steps then falls as in the original.
    places = itertools.accumulate(itertools.repeat(stride, count - 1), initial=0.0)
    return [round(place) for place in places]


def spread_from_start(count: int, total: int) -> list[int]:
    """`count` of `total` steps at a fixed distance, from the first on: 0, 100, ... 900.

    The smallest distance that gives `count`, as the original's "ddim10"; where none does, the
    distances differ by one.
    """
    check_count(count, total)
    for stride in range(1, total + 1):
        if len(range(0, total, stride)) == count:
            return list(range(0, total, stride))
    return [i * total // count for i in range(count)]


def check_count(count: int, total: int) -> None:
    """No more steps back than there are."""
    if count > total:
        raise UserError(
            f"steps={count}: the network is trained with {total} steps. Set at most {total}."
        )
