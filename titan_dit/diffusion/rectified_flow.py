"""Rectified flow: straight paths from data to noise (arXiv:2209.03003).

x_t = (1 - t) x + t noise, and the network predicts the velocity dx_t/dt = noise - x. With direction
"to_data" it sees the time 1 - t and predicts x - noise, as SiT does (arXiv:2401.08740).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from titan_dit.diffusion.base import Corrupted, Predict, by_channel
from titan_dit.diffusion.objective import Diffusion
from titan_dit.diffusion.samplers.ode import shifted
from titan_dit.diffusion.sections import RectifiedFlowConfig
from titan_dit.objectives.base import at_least_fp32
from titan_dit.rng import SampleRNG

LEVELS = 1000
"""Validation names a time t by its thousandths, whatever the network's direction and unit."""
Time = TypeVar("Time", float, Tensor)


@dataclass(frozen=True)
class RectifiedFlow(Diffusion):
    """Velocity prediction on straight paths."""

    token_targets = ("velocity",)

    config: RectifiedFlowConfig
    draws: tuple[float, float, float] = field(init=False, default=(0.0, 1.0, 1.0))
    """Range of the uniform draws, see `RectifiedFlowConfig.draws`."""

    def __post_init__(self) -> None:
        """Compute the range of the draws; numbers, for the compiler."""
        super().__post_init__()
        if (self.config.t_min, self.config.t_max) != (0.0, 1.0):
            object.__setattr__(self, "draws", self.config.draws(self.shift))

    @property
    def last_timestep(self) -> float:
        """The largest timestep: at the noise, with direction "to_data" at the data."""
        return self.config.time_scale

    @property
    def times_depend_on_size(self) -> bool:
        """True if the shift of times depends on the number of tokens."""
        return self.config.shift_by_tokens != "off"

    @property
    def to_data(self) -> bool:
        """True if the network's time runs from noise to data."""
        return self.config.direction == "to_data"

    def timestep_at(self, t: Time) -> Time:
        """The network's timestep at time t."""
        return ((1 - t) if self.to_data else t) * self.config.time_scale

    def noise_level(self, timestep: Time) -> Time:
        """The time t at a timestep of the network."""
        along = timestep / self.config.time_scale
        return 1 - along if self.to_data else along

    def validation_timesteps(self, bins: int) -> dict[str, float]:
        """The middles of equal bins of t in training, whatever the network's direction and unit.

        Of the whole range they are rounded to thousandths.
        """
        first, last = self.config.t_min, self.config.t_max
        if (first, last) != (0.0, 1.0):
            bounds = [first + (number + 0.5) / bins * (last - first) for number in range(bins)]
            return {f"t{LEVELS * t:.8g}": self.timestep_at(t) for t in bounds}
        middles = [round((number + 0.5) * (LEVELS + 1) / bins) for number in range(bins)]
        # Exact, unlike timestep_at(middle / LEVELS).
        along = {middle: LEVELS - middle if self.to_data else middle for middle in middles}
        return {f"t{middle}": k * self.config.time_scale / LEVELS for middle, k in along.items()}

    def times(self, rng: SampleRNG) -> Float[Tensor, " b"]:
        """Draw t in (0, 1), or between [objective] t_min and t_max."""
        config = self.config
        if (config.t_min, config.t_max) == (0.0, 1.0):
            if config.timesteps == "logit_normal":
                t = torch.sigmoid(config.logit_mean + config.logit_std * rng.normal("t"))
                return shifted(t, self.shift)
            return shifted(self.time_of(rng.uniform("t")), self.shift)
        first, last, sign = self.draws
        # Above `first`, which may be 0: a uniform draw is below 1.
        u = last - (last - first) * rng.uniform("t")
        t = shifted(self.time_of(u, sign), self.shift)
        return t.clamp(config.t_min, config.t_max)  # Against rounding.

    def time_of(self, u: Float[Tensor, " b"], sign: float = 1.0) -> Float[Tensor, " b"]:
        """The time before the shift at u in (0, 1), the inverse of its distribution function.

        It falls with u for "mode". `sign`: see `RectifiedFlowConfig.draws`.
        """
        config = self.config
        if config.timesteps == "logit_normal":
            normal = sign * torch.special.ndtri(u)
            return torch.sigmoid(config.logit_mean + config.logit_std * normal)
        if config.timesteps == "mode":
            return 1 - u - config.mode_scale * (torch.cos(math.pi / 2 * u).square() - 1 + u)
        return u

    @property
    def shift(self) -> float:
        """The shift of the times in training."""
        return self.config.shift_of(self.num_real_tokens)

    def shift_in(self, steps: int) -> float:
        """See `Diffusion.shift_in`."""
        return self.config.shift_of(self.num_real_tokens, steps)

    def timesteps_of(self, rng: SampleRNG) -> Float[Tensor, " b"]:
        """`times` in the network's unit."""
        return self.timestep_at(self.times(rng))

    def corrupt(
        self,
        clean: Float[Tensor, "b n d"],
        timestep: Float[Tensor, " b"],
        noise: Float[Tensor, "b n d"],
    ) -> Corrupted:
        """Inputs and targets for a noise and a timestep, the latter in the network's unit."""
        t = self.noise_level(timestep)[:, None, None]
        velocity = noise - clean
        target = -velocity if self.to_data else velocity
        if self.config.learn_sigma:
            target = by_channel(target, self.channels)
        targets = {"velocity": target}
        if self.config.loss_weight != "uniform":
            targets["loss_weight"] = self.loss_weight(t[:, 0, 0])
        return Corrupted(
            inputs={"tokens": torch.lerp(clean, noise, t), "timestep": timestep},
            targets=targets,
        )

    def loss_weight(self, t: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
        """The weight of a sample's loss at time t, see `RectifiedFlowConfig.loss_weight`."""
        if self.config.loss_weight == "sigma_sqrt":
            return t.clamp(min=1 / LEVELS).square().reciprocal()
        return 2 / (math.pi * (1 - 2 * t + 2 * t.square()))

    def loss(
        self, predictions: Mapping[str, Tensor], targets: Mapping[str, Tensor]
    ) -> Float[Tensor, "b n"]:
        """Squared error of the velocity, mean over channels, times the sample's weight."""
        # fp32: bf16 squares lose the digits in which two runs differ.
        found = self.velocity_of(at_least_fp32(predictions["prediction"]))
        error = (found - targets["velocity"].flatten(2)).square().mean(-1)
        return error * targets["loss_weight"][:, None] if "loss_weight" in targets else error

    def velocity_of(self, prediction: Float[Tensor, "b n _"]) -> Tensor:
        """The prediction's velocity [b, n, d], without the channels that are ignored."""
        if not self.config.learn_sigma:
            return prediction
        return by_channel(prediction, 2 * self.channels)[..., : self.channels].flatten(2)

    def terms(
        self, predictions: Mapping[str, Tensor], targets: Mapping[str, Tensor]
    ) -> dict[str, Float[Tensor, "b n"]]:
        """The single term of the loss."""
        return {"mse": self.loss(predictions, targets)}

    def process(self, predict: Predict) -> Predict:
        """dx/dt at (x, t), towards noise, for the solvers of `samplers.ode`."""

        def velocity(x: Tensor, t: Tensor) -> Tensor:
            found = self.velocity_of(predict(x, self.timestep_at(t)))
            return -found if self.to_data else found

        return velocity
