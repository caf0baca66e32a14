"""Conventions and interfaces of diffusion.

Time: t = 0 is data, t = 1 is noise. The timestep that a network takes has a unit of its own, and
may run the other way. Labels: negative means "no label".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from titan_dit.models.base import ModelSpec
from titan_dit.rng import SampleRNG

NO_LABEL = -1

Predict: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(noisy tokens [b, n, d], timestep [b] in the network's unit) -> prediction [b, n, d_out]."""


@dataclass(frozen=True)
class Clean:
    """Clean samples in the model's units, patchified."""

    tokens: Float[Tensor, "b n d"]
    labels: Int64[Tensor, " b"]
    channels: int
    """Channels of a latent: a token holds its patch as (p, p, channels)."""


@dataclass(frozen=True)
class Corrupted:
    """Noisy inputs of the network and the targets of the loss."""

    inputs: Mapping[str, Tensor]
    """`tokens`, `timestep` and `labels`."""
    targets: Mapping[str, Tensor]


def by_channel(tokens: Float[Tensor, "b n d"], channels: int) -> Float[Tensor, "b n p c"]:
    """Unflatten tokens into pixels and channels; a token holds (p, p, c), channel fastest."""
    return tokens.reshape(*tokens.shape[:-1], -1, channels)


@runtime_checkable
class ProbabilityPath(Protocol):
    """One kind of diffusion, on tokens: corruption, loss, and the process that samplers run."""

    token_targets: ClassVar[tuple[str, ...]]
    constants: ClassVar[tuple[Callable[..., Any], ...]]
    """See `Objective.constants`."""

    @property
    def name(self) -> str:
        """The name in the catalog, or "package.module:Class"."""

    @property
    def label_dropout(self) -> float:
        """Fraction of samples trained without their label, for classifier-free guidance."""

    @property
    def last_timestep(self) -> float:
        """The largest timestep, in the network's unit; the smallest one is 0."""

    @property
    def most_sampling_steps(self) -> int | None:
        """Maximum number of sampling steps; None for no limit."""

    def output_channels(self, channels: int) -> int:
        """Number of channels that the network predicts for latents with `channels` channels.

        Guidance applies to the first `channels` predicted ones.
        """

    def noise_level(self, timestep: float) -> float:
        """0 (data) to 1 (noise) at a timestep in the network's unit."""

    def validation_timesteps(self, bins: int) -> Mapping[str, float]:
        """The middles of equal bins of the timesteps, in the network's unit, by name."""

    def timesteps_of(self, rng: SampleRNG) -> Float[Tensor, " b"]:
        """Draw a timestep for every sample, in the network's unit."""

    def corrupt(
        self,
        clean: Clean,
        timestep: Float[Tensor, " b"],
        noise: Float[Tensor, "b n d"],
        labels: Int64[Tensor, " b"],
    ) -> Corrupted:
        """Inputs and targets for a given noise and timestep (in the network's unit)."""

    def loss(
        self, prediction: Float[Tensor, "b n _"], targets: Mapping[str, Tensor]
    ) -> Float[Tensor, "b n"]:
        """Loss per token, in fp32."""

    def terms(
        self, prediction: Float[Tensor, "b n _"], targets: Mapping[str, Tensor]
    ) -> dict[str, Float[Tensor, "b n"]]:
        """The terms whose sum is `loss`, by name."""

    def process(self, predict: Predict, channels: int) -> Any:
        """The function that samplers call: (x, t) -> velocity for flows, a `Denoiser` for DDPM."""


@runtime_checkable
class LatentModel(Protocol):
    """A [model] section that diffusion can train: a model of labelled latents."""

    @property
    def name(self) -> str:
        """The name in the catalog, or "package.module:Class"."""

    @property
    def num_classes(self) -> int:
        """Number of labels; a negative label means none."""

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        """[c, h, w] of one latent."""

    @property
    def token_shape(self) -> tuple[int, int]:
        """[n, d] of one tokenized latent."""

    def spec(self, output_channels: int | None = None) -> ModelSpec:
        """Describe the network that predicts `output_channels` from tokens, timestep, labels."""

    def tokenize(self, latents: Float[Tensor, "b c h w"]) -> Float[Tensor, "b n d"]:
        """Latents to tokens."""

    def detokenize(self, tokens: Float[Tensor, "b n d"]) -> Float[Tensor, "b c h w"]:
        """The inverse of `tokenize`."""

    def static(self, device: torch.device) -> dict[str, Tensor]:
        """The model's static inputs for samples of `sample_shape`."""
