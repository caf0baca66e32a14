"""The noise schedule of discrete diffusion and the Gaussian distributions that it defines.

x_k = signal_k x_0 + sigma_k noise for the steps k = 0 ... T - 1, with signal^2 = alpha_bar and
signal^2 + sigma^2 = 1. Objectives train with it and samplers run it backwards. Equation numbers are
those of DDPM (arXiv:2006.11239).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from titan_dit.diffusion.sections import ScheduleName


class Tables(NamedTuple):
    """Tables of a noise schedule, one fp32 entry per step, on one device."""

    timestep: Float[Tensor, " T"]
    """Timestep input of the network: k, or k before respacing."""
    signal: Float[Tensor, " T"]
    sigma: Float[Tensor, " T"]
    snr: Float[Tensor, " T"]
    """(signal / sigma)^2."""
    log_beta: Float[Tensor, " T"]
    """Log variance of q(x_k | x_k-1): the upper bound of the learned variance."""
    posterior_from_clean: Float[Tensor, " T"]
    """Factor of x_0 in the mean of q(x_k-1 | x_k, x_0) (eq. 7)."""
    posterior_from_noisy: Float[Tensor, " T"]
    """Factor of x_k in that mean."""
    posterior_log_variance: Float[Tensor, " T"]
    """Log variance of that posterior; at step 0, where the variance is 0, the value of step 1."""

    @classmethod
    def on(cls, device: torch.device, rows: Float[Tensor, "8 T"]) -> Tables:
        """The tables on a device, from the CPU: one small non-blocking copy."""
        return cls(*rows.to(device, non_blocking=True).unbind())

    def posterior_mean(
        self,
        clean: Float[Tensor, "b ..."],
        noisy: Float[Tensor, "b ..."],
        step: Int64[Tensor, " b"],
    ) -> Float[Tensor, "b ..."]:
        """The mean of q(x_k-1 | x_k, x_0) (eq. 7)."""
        from_clean = per_sample(self.posterior_from_clean, step, clean)
        return from_clean * clean + per_sample(self.posterior_from_noisy, step, noisy) * noisy


@dataclass(frozen=True)
class NoiseSchedule:
    """The noise levels of T steps, in fp64 on the host."""

    alpha_bar: tuple[float, ...]
    """Fraction of the data's variance in x_k: the product of 1 - beta up to step k (eq. 4)."""
    timesteps: tuple[int, ...]
    """Timestep input of the network at each step."""

    def __len__(self) -> int:
        """Number of steps."""
        return len(self.timesteps)

    def respaced(self, steps: Sequence[int]) -> NoiseSchedule:
        """The noise schedule of a subset of steps, with the same alpha_bar at each."""
        return NoiseSchedule(
            tuple(self.alpha_bar[k] for k in steps), tuple(self.timesteps[k] for k in steps)
        )

    def tables(self, device: torch.device) -> Tables:
        """The tables on a device."""
        return Tables.on(device, torch.from_numpy(self._rows))

    @cached_property
    def _rows(self) -> np.ndarray:
        # numpy, not torch: a cached tensor would keep the mode (fake, meta) of the first call.
        alpha_bar = np.array(self.alpha_bar)
        before = np.concatenate(([1.0], alpha_bar[:-1]))
        alpha = alpha_bar / before
        beta = 1 - alpha
        variance = beta * (1 - before) / (1 - alpha_bar)
        # The last reverse step has variance 0; its log must be finite.
        variance[0] = variance[1] if len(variance) > 1 else beta[0]
        rows = {
            "timestep": np.array(self.timesteps, dtype=np.float64),
            "signal": np.sqrt(alpha_bar),
            "sigma": np.sqrt(1 - alpha_bar),
            "snr": alpha_bar / (1 - alpha_bar),
            "log_beta": np.log(beta),
            "posterior_from_clean": beta * np.sqrt(before) / (1 - alpha_bar),
            "posterior_from_noisy": (1 - before) * np.sqrt(alpha) / (1 - alpha_bar),
            "posterior_log_variance": np.log(variance),
        }
        return np.stack([rows[name] for name in Tables._fields]).astype(np.float32)


def per_sample(
    table: Float[Tensor, " T"], step: Int64[Tensor, " b"], like: Float[Tensor, "b ..."]
) -> Float[Tensor, "b ..."]:
    """Each sample's entry of a table, shaped to broadcast against `like`."""
    return table[step].view(-1, *[1] * (like.ndim - 1))


@lru_cache(maxsize=8)
def named(name: ScheduleName, steps: int) -> NoiseSchedule:
    """The linear (arXiv:2006.11239 sec. 4) or the cosine schedule (arXiv:2102.09672 eq. 17)."""
    if name == "linear":
        # The endpoints are for 1000 steps; scaling keeps the noise range for other counts.
        scale = 1000 / steps
        beta = np.linspace(scale * 1e-4, scale * 0.02, steps)
    else:
        edges = np.arange(steps + 1) / steps
        level = np.cos((edges + 0.008) / 1.008 * math.pi / 2) ** 2
        beta = np.minimum(1 - level[1:] / level[:-1], 0.999)
    return NoiseSchedule(tuple(np.cumprod(1 - beta).tolist()), tuple(range(steps)))


def rows_of(name: ScheduleName, steps: int) -> Float[Tensor, "8 T"]:
    """The tables of a named schedule on the CPU. torch.compile takes them as a constant."""
    return torch.from_numpy(named(name, steps)._rows)


class Denoised(NamedTuple):
    """A network's output at x_k."""

    clean: Float[Tensor, "b n d"]
    """Estimate of x_0."""
    log_variance: Float[Tensor, "b n d"]
    """Log variance of the predicted distribution of x_k-1."""


@runtime_checkable
class Denoiser(Protocol):
    """A network as the samplers of discrete diffusion call it."""

    @property
    def schedule(self) -> NoiseSchedule:
        """The noise schedule of training."""

    def __call__(self, x: Tensor, step: Int64[Tensor, " b"], tables: Tables) -> Denoised:
        """Estimate x_0 from x at a step of `tables`, which may be of a respaced schedule."""
