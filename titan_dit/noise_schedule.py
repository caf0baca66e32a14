"""The noise schedule of discrete diffusion and the Gaussian laws that follow from it.

x_k = signal_k x_0 + sigma_k noise for the steps k = 0 ... T - 1, with signal^2 = alpha_bar and
signal^2 + sigma^2 = 1. Objectives train with it and samplers run it backwards. Equation numbers are
those of DDPM (arXiv:2006.11239).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

ScheduleName = Literal["linear", "cosine"]


@dataclass(frozen=True, eq=False)
class NoiseSchedule:
    """Tables over the steps; computed in fp64, kept in fp32 but for `alpha_bar`."""

    alpha_bar: Float64[Tensor, " T"]
    """Share of the data's variance in x_k: the product of 1 - beta up to step k (eq. 4)."""
    timesteps: Int64[Tensor, " T"]
    """The network's timestep of each step: k itself, or k before respacing."""
    signal: Float[Tensor, " T"]
    sigma: Float[Tensor, " T"]
    snr: Float[Tensor, " T"]
    """(signal / sigma)^2."""
    log_beta: Float[Tensor, " T"]
    """Log of the variance of q(x_k | x_k-1): the upper end of the learned variance."""
    posterior_from_clean: Float[Tensor, " T"]
    """Factor of x_0 in the mean of q(x_k-1 | x_k, x_0) (eq. 7)."""
    posterior_from_noisy: Float[Tensor, " T"]
    """Factor of x_k in that mean."""
    posterior_log_variance: Float[Tensor, " T"]
    """Log of that law's variance; at step 0, where it is 0, the value of step 1."""

    def __len__(self) -> int:
        """Number of steps."""
        return len(self.timesteps)

    def to(self, device: torch.device) -> NoiseSchedule:
        """The tables on a device; kept there, so that a training step copies nothing."""
        return move(self, device)

    def respaced(self, steps: Sequence[int]) -> NoiseSchedule:
        """The schedule of the chosen steps alone: the same alpha_bar at each of them."""
        chosen = torch.tensor(steps, device=self.timesteps.device)
        return make(self.alpha_bar[chosen], self.timesteps[chosen])

    def posterior_mean(
        self,
        clean: Float[Tensor, "b ..."],
        noisy: Float[Tensor, "b ..."],
        step: Int64[Tensor, " b"],
    ) -> Float[Tensor, "b ..."]:
        """The mean of q(x_k-1 | x_k, x_0) (eq. 7)."""
        from_clean = per_sample(self.posterior_from_clean, step, clean)
        return from_clean * clean + per_sample(self.posterior_from_noisy, step, noisy) * noisy


def per_sample(
    table: Float[Tensor, " T"], step: Int64[Tensor, " b"], like: Float[Tensor, "b ..."]
) -> Float[Tensor, "b ..."]:
    """Each sample's entry of a table, in a shape that multiplies `like`."""
    return table[step].view(-1, *[1] * (like.ndim - 1))


@lru_cache(maxsize=8)
def named(name: ScheduleName, steps: int) -> NoiseSchedule:
    """The linear (arXiv:2006.11239 sec. 4) or the cosine schedule (arXiv:2102.09672 eq. 17)."""
    if name == "linear":
        # Ends for 1000 steps; another number of them covers the same range of noise.
        scale = 1000 / steps
        beta = torch.linspace(scale * 1e-4, scale * 0.02, steps, dtype=torch.float64)
    else:
        edges = torch.arange(steps + 1, dtype=torch.float64) / steps
        level = torch.cos((edges + 0.008) / 1.008 * math.pi / 2) ** 2
        beta = (1 - level[1:] / level[:-1]).clamp(max=0.999)
    return make((1 - beta).cumprod(0), torch.arange(steps))


def make(alpha_bar: Float64[Tensor, " T"], timesteps: Int64[Tensor, " T"]) -> NoiseSchedule:
    """Every table of the steps with the given alpha_bar."""
    before = torch.cat((alpha_bar.new_ones(1), alpha_bar[:-1]))
    alpha = alpha_bar / before
    beta = 1 - alpha
    variance = beta * (1 - before) / (1 - alpha_bar)
    # The last step back adds no noise; its variance is 0, but its log is asked for.
    variance[0] = variance[1] if len(variance) > 1 else beta[0]
    return NoiseSchedule(
        alpha_bar=alpha_bar,
        timesteps=timesteps,
        signal=alpha_bar.sqrt().float(),
        sigma=(1 - alpha_bar).sqrt().float(),
        snr=(alpha_bar / (1 - alpha_bar)).float(),
        log_beta=beta.log().float(),
        posterior_from_clean=(beta * before.sqrt() / (1 - alpha_bar)).float(),
        posterior_from_noisy=((1 - before) * alpha.sqrt() / (1 - alpha_bar)).float(),
        posterior_log_variance=variance.log().float(),
    )


@lru_cache(maxsize=8)
def move(schedule: NoiseSchedule, device: torch.device) -> NoiseSchedule:
    """See `NoiseSchedule.to`."""
    return replace(
        schedule, **{f.name: getattr(schedule, f.name).to(device) for f in fields(schedule)}
    )


class Denoised(NamedTuple):
    """What the network says of x_k."""

    clean: Float[Tensor, "b n d"]
    """Its estimate of x_0."""
    log_variance: Float[Tensor, "b n d"]
    """Log of the variance of its law of x_k-1."""


@runtime_checkable
class Denoiser(Protocol):
    """A network as the samplers of discrete diffusion use it."""

    schedule: NoiseSchedule
    """What it was trained with."""

    def __call__(self, x: Tensor, step: Int64[Tensor, " b"], schedule: NoiseSchedule) -> Denoised:
        """Estimate x_0 from x at a step of `schedule`, which may be respaced."""
        ...
