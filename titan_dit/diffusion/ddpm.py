"""Discrete diffusion as the original DiT trains it (arXiv:2006.11239, arXiv:2102.09672).

The loss, and the variational bound in bits (arXiv:2006.11239 sec. 2 and 3.3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from titan_dit.diffusion.base import Corrupted, Predict, by_channel
from titan_dit.diffusion.noise_schedule import (
    Denoised,
    NoiseSchedule,
    Tables,
    named,
    per_sample,
    rows_of,
)
from titan_dit.diffusion.objective import Diffusion
from titan_dit.diffusion.sections import DDPMConfig
from titan_dit.objectives.base import at_least_fp32
from titan_dit.rng import SampleRNG

HALF_BIN = 1 / 255
"""Half the bin width of an 8-bit picture in [-1, 1]."""


def bits_per_value(
    clean: Float[Tensor, "b ..."],
    noisy: Float[Tensor, "b ..."],
    step: Int64[Tensor, " b"],
    estimate: Float[Tensor, "b ..."],
    log_variance: Float[Tensor, "b ..."],
    tables: Tables,
) -> Float[Tensor, "b ..."]:
    """The bound's term at each sample's step, per element, in bits.

    The KL divergence from q(x_k-1 | x_k, x_0) to the network's distribution, whose mean follows
    from its `estimate` of x_0. At step 0 it is the negative log-likelihood of the data.
    """
    mean = tables.posterior_mean(estimate, noisy, step)
    divergence = gaussian_kl(
        tables.posterior_mean(clean, noisy, step),
        per_sample(tables.posterior_log_variance, step, clean),
        mean,
        log_variance,
    )
    surprise = -log_likelihood(clean, mean, log_variance)
    is_last = (step == 0).view(-1, *[1] * (clean.ndim - 1))
    return torch.where(is_last, surprise, divergence) / math.log(2)


def gaussian_kl(
    mean_p: Float[Tensor, "*s"],
    log_variance_p: Float[Tensor, "*#s"],
    mean_q: Float[Tensor, "*s"],
    log_variance_q: Float[Tensor, "*#s"],
) -> Float[Tensor, "*s"]:
    """KL(p || q) of two normal distributions, in nats."""
    gap = log_variance_p - log_variance_q
    distance = (mean_p - mean_q).square() * torch.exp(-log_variance_q)
    return 0.5 * (torch.exp(gap) - gap - 1 + distance)


def log_likelihood(
    x: Float[Tensor, "*s"], mean: Float[Tensor, "*s"], log_variance: Float[Tensor, "*s"]
) -> Float[Tensor, "*s"]:
    """Log probability of the 8-bit bin around x under a normal (arXiv:2006.11239 eq. 13).

    The outermost bins reach to infinity. Latents are not 8-bit, but the original DiT trains with
    this term too.
    """
    precision = torch.exp(-0.5 * log_variance)
    below_upper_edge = normal_cdf(precision * (x - mean + HALF_BIN))
    below_lower_edge = normal_cdf(precision * (x - mean - HALF_BIN))
    inside = torch.where(x > 0.999, 1 - below_lower_edge, below_upper_edge - below_lower_edge)
    inside = torch.where(x < -0.999, below_upper_edge, inside)
    return inside.clamp(min=1e-12).log()


def normal_cdf(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """The standard normal CDF by its tanh approximation, within 3e-4."""
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@dataclass(frozen=True)
class DDPM(Diffusion):
    """Discrete diffusion as the original DiT trains it."""

    token_targets = ("clean", "noise")
    constants = (rows_of,)

    config: DDPMConfig

    @property
    def last_timestep(self) -> int:
        """T - 1: steps count from 0."""
        return self.config.steps - 1

    @property
    def most_sampling_steps(self) -> int:
        """All T steps."""
        return self.config.steps

    def tables(self, device: torch.device) -> Tables:
        """The tables of the noise schedule, on a device."""
        return Tables.on(device, rows_of(self.config.noise_schedule, self.config.steps))

    def timesteps_of(self, rng: SampleRNG) -> Float[Tensor, " b"]:
        """Draw an integer step for every sample."""
        return (rng.uniform("t") * self.config.steps).floor()

    def corrupt(
        self,
        clean: Float[Tensor, "b n d"],
        timestep: Float[Tensor, " b"],
        noise: Float[Tensor, "b n d"],
    ) -> Corrupted:
        """Inputs and targets for a given noise and timestep (an integer step)."""
        step, tables = timestep.long(), self.tables(clean.device)
        signal = per_sample(tables.signal, step, noise)
        noisy = signal * clean + per_sample(tables.sigma, step, noise) * noise
        return Corrupted(
            inputs={"tokens": noisy, "timestep": step.float()},
            targets={
                "clean": by_channel(clean, self.channels),
                "noise": by_channel(noise, self.channels),
                "step": step,
            },
        )

    def loss(
        self, predictions: Mapping[str, Tensor], targets: Mapping[str, Tensor]
    ) -> Float[Tensor, "b n"]:
        """Squared error, plus the variational bound in bits if the variance is learned."""
        return torch.stack(tuple(self.terms(predictions, targets).values())).sum(0)

    def terms(
        self, predictions: Mapping[str, Tensor], targets: Mapping[str, Tensor]
    ) -> dict[str, Float[Tensor, "b n"]]:
        """The terms of the loss, "mse" and "vb", each a mean over the elements of a token."""
        clean, noise, step = targets["clean"], targets["noise"], targets["step"]
        tables = self.tables(clean.device)
        signal, sigma = (per_sample(t, step, clean) for t in (tables.signal, tables.sigma))
        # fp32: bf16 squares lose the digits in which two runs differ.
        values, spread = self.split(at_least_fp32(predictions["prediction"]))
        kinds = {"eps": noise, "x": clean, "v": signal * noise - sigma * clean}
        target = kinds[self.config.prediction]
        mse = (values - target).square().mean((2, 3)) * self.weight(tables.snr[step])[:, None]
        if not self.config.learn_sigma:
            return {"mse": mse}
        noisy = signal * clean + sigma * noise
        # Detached: the bound trains the variance only (arXiv:2102.09672 sec. 3.1).
        estimate = self.clean(values.detach(), noisy, step, tables)
        bits = bits_per_value(
            clean, noisy, step, estimate, self.log_variance(spread, step, tables), tables
        )
        return {"mse": mse, "vb": bits.mean((2, 3))}

    def split(
        self, prediction: Float[Tensor, "b n _"]
    ) -> tuple[Float[Tensor, "b n p c"], Float[Tensor, "b n p _"]]:
        """Split a latent pixel's values: the first `channels`, and those of the variance."""
        pixels = by_channel(prediction, self.config.output_channels(self.channels))
        return pixels[..., : self.channels], pixels[..., self.channels :]

    def weight(self, snr: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
        """Min-SNR weight m = min(SNR, gamma): m for x_0, m / SNR for eps, m / (SNR + 1) for v.

        All three give the error of x_0 the same weight (arXiv:2303.09556 sec. 3.4).
        """
        if self.config.min_snr_gamma is None:
            return torch.ones_like(snr)
        per_clean = snr.clamp(max=self.config.min_snr_gamma)
        per_kind = {"eps": snr, "v": snr + 1, "x": torch.ones_like(snr)}
        return per_clean / per_kind[self.config.prediction]

    def clean(
        self,
        values: Float[Tensor, "b n p c"],
        noisy: Float[Tensor, "b n p c"],
        step: Int64[Tensor, " b"],
        tables: Tables,
    ) -> Float[Tensor, "b n p c"]:
        """Convert a prediction to x_0."""
        signal, sigma = (per_sample(t, step, noisy) for t in (tables.signal, tables.sigma))
        if self.config.prediction == "eps":
            return (noisy - sigma * values) / signal
        return values if self.config.prediction == "x" else signal * noisy - sigma * values

    def log_variance(
        self, spread: Float[Tensor, "b n p _"], step: Int64[Tensor, " b"], tables: Tables
    ) -> Float[Tensor, "b n p _"]:
        """Interpolate the log variance from the posterior's (`spread` -1) to log beta (`spread` 1).

        See arXiv:2102.09672 eq. 15. Without a learned variance `spread` is 1.
        """
        most = per_sample(tables.log_beta, step, spread)
        least = per_sample(tables.posterior_log_variance, step, spread)
        return least + (spread + 1) / 2 * (most - least)

    def process(self, predict: Predict) -> Reverse:
        """The `Denoiser` that the samplers of discrete diffusion call."""
        return Reverse(self, predict)


@dataclass(frozen=True)
class Reverse:
    """The reverse process of a network trained by `DDPM`: a `noise_schedule.Denoiser`."""

    objective: DDPM
    predict: Predict

    @property
    def schedule(self) -> NoiseSchedule:
        """The noise schedule of training."""
        return named(self.objective.config.noise_schedule, self.objective.config.steps)

    @property
    def prediction(self) -> str:
        """The network's prediction: "eps", "v" or "x"."""
        return self.objective.config.prediction

    def values(self, x: Float[Tensor, "b n d"], timestep: Float[Tensor, " b"]) -> Tensor:
        """The network's prediction at any timestep, without a variance."""
        return self.objective.split(self.predict(x, timestep))[0].flatten(2)

    def __call__(
        self, x: Float[Tensor, "b n d"], step: Int64[Tensor, " b"], tables: Tables
    ) -> Denoised:
        """Estimate x_0 and the log variance of the reverse step, at a step of `tables`."""
        prediction = self.predict(x, tables.timestep[step])
        noisy = by_channel(x, self.objective.channels)
        values, spread = self.objective.split(prediction)
        if not self.objective.config.learn_sigma:
            spread = torch.ones_like(values)
        clean = self.objective.clean(values, noisy, step, tables)
        log_variance = self.objective.log_variance(spread, step, tables)
        return Denoised(clean.flatten(2), log_variance.flatten(2))
