"""The keys of the diffusion objectives, without torch, so that `--help` is quick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from titan_dit.config.section import Bound, Finite, Fraction, PositiveFloat, Section

ScheduleName = Literal["linear", "cosine"]


@dataclass(frozen=True, kw_only=True)
class DDPMKeys(Section):
    """Discrete diffusion; the defaults are those of the original DiT."""

    section = "objective"
    name = "ddpm"

    noise_schedule: ScheduleName = "linear"
    """Noise schedule (arXiv:2006.11239 sec. 4, arXiv:2102.09672 eq. 17)."""
    steps: Annotated[int, Bound(least=25, most=100_000)] = 1000
    """Diffusion steps T. The last beta of the linear schedule, 20 / T, must be below 1."""
    prediction: Literal["eps", "v", "x"] = "eps"
    """Prediction of the network. eps: the noise. v: signal noise - sigma x_0 (arXiv:2202.00512
    app. D). x: x_0."""
    learn_sigma: bool = True
    """Learn the variance of the reverse step with the variational bound (arXiv:2102.09672)."""
    min_snr_gamma: PositiveFloat | None = None
    """Min-SNR-gamma weighting of the squared error (arXiv:2303.09556 sec. 3.4); usually 5. Unset:
    no weighting."""
    label_dropout: Fraction = 0.1
    """Fraction of samples trained without their label, for classifier-free guidance."""


@dataclass(frozen=True, kw_only=True)
class RectifiedFlowKeys(Section):
    """Velocity prediction on straight paths."""

    section = "objective"
    name = "rectified_flow"

    timesteps: Literal["uniform", "logit_normal"] = "logit_normal"
    """Distribution of t before the shift (arXiv:2403.03206 sec. 3.1)."""
    logit_mean: Finite = 0.0
    """Mean of logit(t); only for logit_normal."""
    logit_std: PositiveFloat = 1.0
    """Standard deviation of logit(t); only for logit_normal."""
    shift: PositiveFloat = 1.0
    """t -> shift t / (1 + (shift - 1) t): above 1, more noise (arXiv:2403.03206 eq. 23)."""
    direction: Literal["to_noise", "to_data"] = "to_noise"
    """Time and velocity of the network. to_noise: t, 0 at the data, and noise - data. to_data:
    1 - t and data - noise, as SiT. In all other keys t is the share of noise."""
    time_scale: PositiveFloat = 1000.0
    """Timestep of the network = its time x time_scale. 1000 is the range of DiT's steps; SiT's
    networks take 1."""
    learn_sigma: bool = False
    """Predict twice the channels, as SiT's released networks; the loss ignores the second half."""
    label_dropout: Fraction = 0.1
    """Fraction of samples trained without their label, for classifier-free guidance."""
