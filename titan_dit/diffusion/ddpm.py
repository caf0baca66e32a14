"""Discrete diffusion as the original DiT trains it (arXiv:2006.11239, arXiv:2102.09672).

The network predicts the noise (or x_0, or v) and, behind it, where the variance of the reverse step
lies between its two bounds. The loss is the squared error of the first plus the variational bound
of the second, in which the prediction itself is frozen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from titan_dit.config.section import Bound, Fraction, PositiveFloat
from titan_dit.diffusion import noise_schedule
from titan_dit.diffusion.base import Clean, Corrupted, Predict
from titan_dit.diffusion.bound import bits_per_value
from titan_dit.diffusion.noise_schedule import (
    Denoised,
    NoiseSchedule,
    ScheduleName,
    Tables,
    per_sample,
)
from titan_dit.diffusion.objective import DiffusionConfig
from titan_dit.objectives.base import at_least_fp32
from titan_dit.rng import SampleRNG


@dataclass(frozen=True, kw_only=True)
class DDPM(DiffusionConfig):
    """Discrete diffusion; the defaults are those of the original DiT."""

    name = "ddpm"
    token_targets = ("clean", "noise")

    schedule: ScheduleName = "linear"
    """linear, or cosine."""
    steps: Annotated[int, Bound(least=25, most=100_000)] = 1000
    """Steps of the diffusion, T; above 20, as the last beta of the linear schedule is 20 / T."""
    prediction: Literal["eps", "v", "x"] = "eps"
    """What the network predicts: the noise, v = signal noise - sigma x_0 (arXiv:2202.00512
    app. D), or x_0."""
    learn_sigma: bool = True
    """Learn the variance of the reverse step with the variational bound (arXiv:2102.09672)."""
    min_snr_gamma: PositiveFloat | None = None
    """Weight the squared error of x_0 by min(SNR, this), of eps and v accordingly
    (arXiv:2303.09556 sec. 3.4; 5 is usual). Unset: no weight."""
    label_dropout: Fraction = 0.1
    """Share of samples trained without their label, for classifier-free guidance."""

    @property
    def last_timestep(self) -> int:
        """Steps count from 0."""
        return self.steps - 1

    @property
    def most_sampling_steps(self) -> int:
        """Each step back once."""
        return self.steps

    def output_channels(self, channels: int) -> int:
        """The prediction, and behind it the variance if it is learned."""
        return 2 * channels if self.learn_sigma else channels

    def tables(self, device: torch.device) -> Tables:
        """What follows from the noise schedule, on a device."""
        return noise_schedule.named(self.schedule, self.steps).tables(device)

    def timesteps_of(self, rng: SampleRNG) -> Float[Tensor, " b"]:
        """Draw a whole step of the diffusion for every sample."""
        return (rng.uniform("t") * self.steps).floor()

    def corrupt(
        self,
        clean: Clean,
        timestep: Float[Tensor, " b"],
        noise: Float[Tensor, "b n d"],
        labels: Int64[Tensor, " b"],
    ) -> Corrupted:
        """Inputs and targets for given draws; a timestep is a whole step of the diffusion."""
        step, tables = timestep.long(), self.tables(clean.tokens.device)
        signal = per_sample(tables.signal, step, noise)
        noisy = signal * clean.tokens + per_sample(tables.sigma, step, noise) * noise
        return Corrupted(
            inputs={"tokens": noisy, "timestep": step.float(), "labels": labels},
            targets={
                "clean": by_channel(clean.tokens, clean.channels),
                "noise": by_channel(noise, clean.channels),
                "step": step,
            },
        )

    def loss(
        self, prediction: Float[Tensor, "b n d"], targets: Mapping[str, Tensor]
    ) -> Float[Tensor, "b n"]:
        """Squared error and, for a learned variance, the variational bound in bits."""
        return torch.stack(tuple(self.terms(prediction, targets).values())).sum(0)

    def terms(
        self, prediction: Float[Tensor, "b n d"], targets: Mapping[str, Tensor]
    ) -> dict[str, Float[Tensor, "b n"]]:
        """The parts of the loss, "mse" and "vb", each a mean over the values of a token."""
        clean, noise, step = targets["clean"], targets["noise"], targets["step"]
        tables = self.tables(clean.device)
        signal, sigma = (per_sample(t, step, clean) for t in (tables.signal, tables.sigma))
        # fp32: squares of bf16 differences lose the digits that tell two runs apart.
        values, spread = self.split(at_least_fp32(prediction), clean.shape[-1])
        target = {"eps": noise, "x": clean, "v": signal * noise - sigma * clean}[self.prediction]
        mse = (values - target).square().mean((2, 3)) * self.weight(tables.snr[step])[:, None]
        if not self.learn_sigma:
            return {"mse": mse}
        noisy = signal * clean + sigma * noise
        # Frozen: the bound teaches the variance alone (arXiv:2102.09672 sec. 3.1).
        estimate = self.clean(values.detach(), noisy, step, tables)
        bits = bits_per_value(
            clean, noisy, step, estimate, self.log_variance(spread, step, tables), tables
        )
        return {"mse": mse, "vb": bits.mean((2, 3))}

    def split(
        self, prediction: Float[Tensor, "b n d"], channels: int
    ) -> tuple[Float[Tensor, "b n p c"], Float[Tensor, "b n p _"]]:
        """A prediction's first `channels` of every latent pixel, and those of the variance."""
        pixels = by_channel(prediction, self.output_channels(channels))
        return pixels[..., :channels], pixels[..., channels:]

    def weight(self, snr: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
        """min(SNR, gamma) for x_0, that over SNR for eps and over SNR + 1 for v.

        All three weight the error of x_0 alike (arXiv:2303.09556 sec. 3.4).
        """
        if self.min_snr_gamma is None:
            return torch.ones_like(snr)
        per_clean = snr.clamp(max=self.min_snr_gamma)
        return per_clean / {"eps": snr, "v": snr + 1, "x": torch.ones_like(snr)}[self.prediction]

    def clean(
        self,
        values: Float[Tensor, "b n p c"],
        noisy: Float[Tensor, "b n p c"],
        step: Int64[Tensor, " b"],
        tables: Tables,
    ) -> Float[Tensor, "b n p c"]:
        """The x_0 that a prediction stands for."""
        signal, sigma = (per_sample(t, step, noisy) for t in (tables.signal, tables.sigma))
        if self.prediction == "eps":
            return (noisy - sigma * values) / signal
        return values if self.prediction == "x" else signal * noisy - sigma * values

    def log_variance(
        self, spread: Float[Tensor, "b n p _"], step: Int64[Tensor, " b"], tables: Tables
    ) -> Float[Tensor, "b n p _"]:
        """-1 is the variance of the posterior, 1 is beta, between them the logs are mixed.

        arXiv:2102.09672 eq. 15. Without a learned variance it is beta.
        """
        most = per_sample(tables.log_beta, step, spread)
        least = per_sample(tables.posterior_log_variance, step, spread)
        return least + (spread + 1) / 2 * (most - least)

    def process(self, predict: Predict, channels: int) -> Reverse:
        """What the samplers of discrete diffusion are given."""
        return Reverse(self, predict, channels)


@dataclass(frozen=True)
class Reverse:
    """A network trained by `DDPM`, as samplers use it: `noise_schedule.Denoiser`."""

    objective: DDPM
    predict: Predict
    channels: int

    @property
    def schedule(self) -> NoiseSchedule:
        """What the network was trained with."""
        return noise_schedule.named(self.objective.schedule, self.objective.steps)

    def __call__(
        self, x: Float[Tensor, "b n d"], step: Int64[Tensor, " b"], tables: Tables
    ) -> Denoised:
        """The network's estimate of x_0 and its variance at a step of `tables`."""
        prediction = self.predict(x, tables.timestep[step])
        noisy = by_channel(x, self.channels)
        values, spread = self.objective.split(prediction, self.channels)
        if not self.objective.learn_sigma:
            spread = torch.ones_like(values)
        clean = self.objective.clean(values, noisy, step, tables)
        log_variance = self.objective.log_variance(spread, step, tables)
        return Denoised(clean.flatten(2), log_variance.flatten(2))


def by_channel(tokens: Float[Tensor, "b n d"], channels: int) -> Float[Tensor, "b n p c"]:
    """Tokens with their channels apart: a token holds (p, p, c), the channel fastest."""
    return tokens.reshape(*tokens.shape[:-1], -1, channels)
