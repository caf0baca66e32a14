"""Rectified flow: straight paths from data to noise (arXiv:2209.03003).

x_t = (1 - t) x + t noise, and the network predicts the velocity dx_t/dt = noise - x.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from titan_dit.diffusion.base import TIMESTEPS, Clean, Corrupted, Predict
from titan_dit.diffusion.keys import RectifiedFlowKeys
from titan_dit.diffusion.objective import DiffusionConfig
from titan_dit.objectives.base import at_least_fp32
from titan_dit.rng import SampleRNG


@dataclass(frozen=True, kw_only=True)
class RectifiedFlow(RectifiedFlowKeys, DiffusionConfig):
    """Velocity prediction on straight paths."""

    token_targets = ("velocity",)
    last_timestep = TIMESTEPS
    most_sampling_steps = None

    def output_channels(self, channels: int) -> int:
        """A velocity for every channel."""
        return channels

    def times(self, rng: SampleRNG) -> Float[Tensor, " b"]:
        """Draw t in (0, 1)."""
        if self.timesteps == "uniform":
            t = rng.uniform("t")
        else:
            t = torch.sigmoid(self.logit_mean + self.logit_std * rng.normal("t"))
        return self.shift * t / (1 + (self.shift - 1) * t)

    def timesteps_of(self, rng: SampleRNG) -> Float[Tensor, " b"]:
        """`times` in the network's unit."""
        return self.times(rng) * TIMESTEPS

    def corrupt(
        self,
        clean: Clean,
        timestep: Float[Tensor, " b"],
        noise: Float[Tensor, "b n d"],
        labels: Int64[Tensor, " b"],
    ) -> Corrupted:
        """Inputs and targets for a noise and a timestep, the latter in the network's unit."""
        t = (timestep / TIMESTEPS)[:, None, None]
        return Corrupted(
            inputs={
                "tokens": torch.lerp(clean.tokens, noise, t),
                "timestep": timestep,
                "labels": labels,
            },
            targets={"velocity": noise - clean.tokens},
        )

    def loss(
        self, prediction: Float[Tensor, "b n d"], targets: Mapping[str, Tensor]
    ) -> Float[Tensor, "b n"]:
        """Squared error of the velocity, mean over channels."""
        # fp32: bf16 squares lose the digits in which two runs differ.
        return (at_least_fp32(prediction) - targets["velocity"]).square().mean(-1)

    def terms(
        self, prediction: Float[Tensor, "b n d"], targets: Mapping[str, Tensor]
    ) -> dict[str, Float[Tensor, "b n"]]:
        """The single term of the loss."""
        return {"mse": self.loss(prediction, targets)}

    def process(self, predict: Predict, channels: int) -> Predict:
        """The velocity at (x, t), for the solvers of `samplers.ode`."""
        return lambda x, t: predict(x, t * TIMESTEPS)
