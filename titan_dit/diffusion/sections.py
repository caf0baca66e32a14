"""The [objective] sections of diffusion.

Nothing here imports torch when it is imported, so that `--help` is quick.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Annotated, Any, Literal

from titan_dit.config.section import Bound, Finite, Fraction, PositiveFloat, UserError, show
from titan_dit.config.training import FIDConfig, SamplingConfig, TextConfig
from titan_dit.objectives.sections import FrozenWork, ObjectiveConfig

if TYPE_CHECKING:
    from titan_dit.data.base import DataFacts, Field
    from titan_dit.data.latent_facts import LatentFacts
    from titan_dit.data.sections import DataConfig
    from titan_dit.diffusion.ddpm import DDPM
    from titan_dit.diffusion.objective import Diffusion
    from titan_dit.diffusion.rectified_flow import RectifiedFlow
    from titan_dit.models.base import ModelConfig, ModelSpec

BISECTIONS = 60
FEWEST = 1e-30
"""Smallest share of a distribution between [objective] t_min and t_max; fp32 ends at 1e-38."""
ScheduleName = Literal["linear", "cosine"]
FEW_TOKENS, MANY_TOKENS = 256, 4096
"""Tokens at which the shift of [objective] shift_by_tokens is fixed: pictures of 256 and of 1,024
pixels, with an autoencoder of factor 8 and patches of 2."""
FEW_MU, MANY_MU = 0.5, 1.15
"""Logarithms of FLUX's shift at FEW_TOKENS and MANY_TOKENS."""

FLUX2_STEPS = 10, 200
"""Sampler steps at which mu of FLUX.2 is fixed; linear between and beyond."""
FLUX2_MU = ((8.73809524e-05, 1.89833333), (0.00016927, 0.45666666))
"""At each of them: mu = slope x tokens + offset. Constants of FLUX.2's released sampler."""
FLUX2_TOKENS = 4300
"""Above it FLUX.2 takes mu of the many steps for any number of them."""


def flux2_mu(tokens: int, steps: int) -> float:
    """Logarithm of FLUX.2's shift."""
    few, many = (slope * tokens + offset for slope, offset in FLUX2_MU)
    if tokens > FLUX2_TOKENS:
        return many
    along = (steps - FLUX2_STEPS[0]) / (FLUX2_STEPS[1] - FLUX2_STEPS[0])
    return few + (many - few) * along


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig(ObjectiveConfig):
    """Base class of the diffusion sections; each builds its own `diffusion.objective.Diffusion`."""

    previews = True

    condition_dropout: Fraction = 0.1
    """Fraction of samples trained without their condition, for classifier-free guidance."""

    reference_dropout: Fraction = 0.0
    """Fraction of samples trained with zeros in place of their reference, or first frame."""

    def output_channels(self, channels: int) -> int:
        """Number of channels that the network predicts for latents with `channels` channels.

        Guidance applies to the first `channels` predicted ones.
        """
        return channels

    def model_spec(self, model: ModelConfig) -> ModelSpec:
        """The model's spec with `output_channels`."""
        from titan_dit.diffusion.fits import as_latent_model

        latent = as_latent_model(model, self.name)
        return latent.spec(self.output_channels(latent.sample_shape[0]))

    def token_grid(self, model: ModelConfig) -> tuple[int, int]:
        """See `ObjectiveConfig.token_grid`."""
        from titan_dit.diffusion.fits import as_latent_model, token_grid

        return token_grid(as_latent_model(model, self.name))

    def facts(self, values: Mapping[str, Any]) -> LatentFacts:
        """Facts of labelled latents, from a checkpoint's record."""
        from titan_dit.data.latent_facts import LatentFacts

        return LatentFacts.from_json(values)

    def example(self, model: ModelConfig) -> tuple[DataFacts, Mapping[str, Field]]:
        """Facts and fields of latents with the model's own shape."""
        from titan_dit.diffusion.fits import example

        return example(model, self.name)

    def text_multiple(self, model: ModelConfig) -> int:
        """The model's, see `ObjectiveConfig`."""
        from titan_dit.diffusion.base import text_multiple

        return text_multiple(model)

    def settled_model(self, model: ModelConfig, data: DataConfig) -> ModelConfig:
        """See `ObjectiveConfig.settled_model`."""
        from titan_dit.diffusion.fits import settled_model

        return settled_model(model, data)

    def takes_clips(self, model: ModelConfig) -> bool:
        """See `ObjectiveConfig.takes_clips`."""
        from titan_dit.diffusion.base import has_clips

        return has_clips(model)

    def sized_models(
        self, model: ModelConfig, facts: DataFacts
    ) -> Sequence[tuple[str, ModelConfig]]:
        """The model for latents of each of the data's shapes, see `ObjectiveConfig`."""
        from titan_dit.diffusion.fits import sized_models

        return sized_models(model, facts)

    @abstractmethod
    def build(self, model: ModelConfig, facts: DataFacts) -> Diffusion:
        """Build the objective, as `MyDiffusion.of(self, model, facts)`; see `Diffusion.of`."""
        raise NotImplementedError

    def frozen_work(self, model: ModelConfig, text: TextConfig, data: DataConfig) -> FrozenWork:
        """The text encoder of [text] mode = "online"."""
        if text.mode == "cached":
            return super().frozen_work(model, text, data)
        from titan_dit.diffusion import online_text

        return online_text.work_of(text, getattr(data, "path", ""))

    def check_evaluation(
        self, model: ModelConfig, sampling: SamplingConfig, evaluation: FIDConfig
    ) -> None:
        """Raise UserError for networks of clips; check the sampler, as previews do."""
        if evaluation.every and self.takes_clips(model):
            raise UserError(
                f"[fid] every={evaluation.every} compares pictures, but [model] "
                f"name={show(model.name)} draws clips. Set [fid] every = 0: [validation] measures "
                "the loss of clips."
            )
        if evaluation.every:
            self.check_sampling(model, sampling)

    def check_sampling(self, model: ModelConfig, sampling: SamplingConfig) -> None:
        """Check the sampler, its steps and the guided channels."""
        from titan_dit.diffusion import drawing

        facts, _ = self.example(model)
        drawing.check(self.build(model, facts), sampling, "[sampling] {}")


@dataclass(frozen=True, kw_only=True)
class DDPMConfig(DiffusionConfig):
    """Discrete diffusion; the defaults are those of the original DiT."""

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

    def output_channels(self, channels: int) -> int:
        """The prediction's channels, then those of a learned variance."""
        return 2 * channels if self.learn_sigma else channels

    def build(self, model: ModelConfig, facts: DataFacts) -> DDPM:
        """Build the objective; UserError if the data do not fit the model."""
        from titan_dit.diffusion.ddpm import DDPM

        return DDPM.of(self, model, facts)


@dataclass(frozen=True, kw_only=True)
class RectifiedFlowConfig(DiffusionConfig):
    """Velocity prediction on straight paths."""

    name = "rectified_flow"

    timesteps: Literal["uniform", "logit_normal", "mode"] = "logit_normal"
    """Distribution of t before the shift (arXiv:2403.03206 sec. 3.1)."""
    logit_mean: Finite = 0.0
    """Mean of logit(t); only for logit_normal."""
    logit_std: PositiveFloat = 1.0
    """Standard deviation of logit(t); only for logit_normal."""
    mode_scale: Annotated[float, Bound(least=-1, most=2 / (math.pi - 2))] = 1.29
    """Only for mode: above 0, more times around 1/2; 0 is uniform (arXiv:2403.03206 sec. 3.1)."""
    shift: PositiveFloat = 1.0
    """t -> s t / (1 + (s - 1) t): above 1, more noise (arXiv:2403.03206 eq. 23). s: `shift`, times
    what `shift_by_tokens` gives."""
    shift_by_tokens: Literal["off", "sqrt", "exponential", "flux2"] = "off"
    """More noise for samples of more tokens n. sqrt: sqrt(n / 256) (arXiv:2403.03206 sec. 5.3.2).
    exponential: exp(mu), mu linear in n, 0.5 at 256 and 1.15 at 4096 tokens, as FLUX. flux2: as
    FLUX.2, whose mu depends on the sampler's steps, too; training takes that of 200 steps."""
    t_min: Fraction = 0.0
    """Train on t from here, after the shift; see `t_max`."""
    t_max: Fraction = 1.0
    """Train on t up to here: the distribution is cut, not squeezed. For an expert of a part of the
    noise levels."""
    loss_weight: Literal["uniform", "cosmap", "sigma_sqrt"] = "uniform"
    """Weight of a sample's loss by its t. cosmap: 2 / (pi (1 - 2 t + 2 t^2)) (arXiv:2403.03206 sec.
    3.1). sigma_sqrt: 1 / t^2, at most 1e6."""
    direction: Literal["to_noise", "to_data"] = "to_noise"
    """Time and velocity of the network. to_noise: t, 0 at the data, and noise - data. to_data:
    1 - t and data - noise, as SiT. In all other keys t is the share of noise."""
    time_scale: PositiveFloat = 1000.0
    """Timestep of the network = its time x time_scale. 1000 is the range of DiT's steps; SiT's
    networks take 1."""
    learn_sigma: bool = False
    """Predict twice the channels, as SiT's released networks; the loss ignores the second half."""

    def output_channels(self, channels: int) -> int:
        """A velocity for every channel, and as many ignored values with `learn_sigma`."""
        return 2 * channels if self.learn_sigma else channels

    def __post_init__(self) -> None:
        """Raise UserError for an empty range of times."""
        super().__post_init__()
        if self.t_min >= self.t_max:
            raise UserError(
                f"[objective] t_min={self.t_min:g} must be below t_max={self.t_max:g}. Set two "
                "shares of noise, such as t_min = 0.875 and t_max = 1."
            )

    def draws(self, shift: float) -> tuple[float, float, float]:
        """(first, last, sign): the range of u whose times, with this shift, are in [t_min, t_max].

        u: uniform in (0, 1); see `RectifiedFlow.time_of`. In the upper half of a logit-normal
        distribution u is the share of longer times, and the sign -1: near 1 fp32 has few numbers.
        Raises UserError if next to no times are in the range.
        """
        # eq. 23 with 1 / shift is the inverse of the shift.
        ends = [t / (shift - (shift - 1) * t) for t in (self.t_min, self.t_max)]
        first, last, sign = *map(self.share_below, ends), 1.0
        if self.timesteps == "mode":
            first, last = 1 - last, 1 - first
        elif self.timesteps == "logit_normal" and first > 1 / 2:
            first, last, sign = *(self.share_below(1 - end, -1) for end in ends[::-1]), -1.0
        if last - first < FEWEST:
            raise UserError(
                f"[objective] t_min={self.t_min:g} and t_max={self.t_max:g}: less than {FEWEST:g} "
                f"of the times of timesteps={show(self.timesteps)} are between them. Set a wider "
                "range, or another distribution."
            )
        return first, last, sign

    def share_below(self, t: float, sign: int = 1) -> float:
        """Distribution function of the times before the shift; `sign` -1: of 1 - time."""
        if not 0 < t < 1 or self.timesteps == "uniform":
            return min(1.0, max(0.0, t))
        if self.timesteps == "logit_normal":
            return NormalDist(sign * self.logit_mean, self.logit_std).cdf(math.log(t / (1 - t)))
        low, high = 0.0, 1.0  # Of 1 - u, with which the time grows.
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            # u = 1 - middle in the formula of `RectifiedFlow.time_of`.
            found = middle - self.mode_scale * (math.sin(math.pi / 2 * middle) ** 2 - middle)
            low, high = (middle, high) if found < t else (low, middle)
        return high

    def shift_of(self, tokens: int, steps: int = FLUX2_STEPS[1]) -> float:
        """The shift of the times of a sample with so many tokens, after patching.

        `steps`: of the sampler.
        """
        if self.shift_by_tokens == "sqrt":
            return self.shift * math.sqrt(tokens / FEW_TOKENS)
        if self.shift_by_tokens == "exponential":
            along = (tokens - FEW_TOKENS) / (MANY_TOKENS - FEW_TOKENS)
            return self.shift * math.exp(FEW_MU + (MANY_MU - FEW_MU) * along)
        if self.shift_by_tokens == "flux2":
            return self.shift * math.exp(flux2_mu(tokens, steps))
        return self.shift

    def build(self, model: ModelConfig, facts: DataFacts) -> RectifiedFlow:
        """Build the objective; UserError if the data do not fit the model."""
        from titan_dit.diffusion.rectified_flow import RectifiedFlow

        return RectifiedFlow.of(self, model, facts)
