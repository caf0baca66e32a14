"""What all of diffusion shares: its conventions, and the path from data to noise.

One convention of time: t = 0 is data, t = 1 is noise. One of labels: negative means "no label".
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
TIMESTEPS = 1000
"""The network's unit of time where time is continuous: it is given t * TIMESTEPS, so that its
sinusoids see the range of the original DiT's steps."""

Predict: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(noisy tokens [b, n, d], timestep [b] in the network's unit) -> prediction [b, n, d_out]."""


@dataclass(frozen=True)
class Clean:
    """Samples as a diffusion sees them: in the model's units, cut into tokens."""

    tokens: Float[Tensor, "b n d"]
    labels: Int64[Tensor, " b"]
    channels: int
    """Channels of a latent: a token holds its patch as (p, p, channels)."""


@dataclass(frozen=True)
class Corrupted:
    """Clean samples with noise on them."""

    inputs: Mapping[str, Tensor]
    """`tokens`, `timestep` and `labels`."""
    targets: Mapping[str, Tensor]


@runtime_checkable
class ProbabilityPath(Protocol):
    """The maths of one kind of diffusion, in tokens: corruption, loss, and what samplers need."""

    token_targets: ClassVar[tuple[str, ...]]

    @property
    def name(self) -> str:
        """The name in the catalog, or "package.module:Class"."""
        ...

    @property
    def label_dropout(self) -> float:
        """Share of samples trained without their label, for classifier-free guidance."""
        ...

    @property
    def last_timestep(self) -> int:
        """The noisiest timestep, in the network's unit; the cleanest is 0."""
        ...

    @property
    def most_sampling_steps(self) -> int | None:
        """The most steps that its samplers can take; None for any number."""
        ...

    def output_channels(self, channels: int) -> int:
        """Channels that the network predicts for latents of `channels`.

        The first `channels` of them are what guidance strengthens.
        """
        ...

    def timesteps_of(self, rng: SampleRNG) -> Float[Tensor, " b"]:
        """Draw a timestep for every sample, in the network's unit."""
        ...

    def corrupt(
        self,
        clean: Clean,
        timestep: Float[Tensor, " b"],
        noise: Float[Tensor, "b n d"],
        labels: Int64[Tensor, " b"],
    ) -> Corrupted:
        """Inputs and targets for given draws; the timestep is in the network's unit."""
        ...

    def loss(
        self, prediction: Float[Tensor, "b n _"], targets: Mapping[str, Tensor]
    ) -> Float[Tensor, "b n"]:
        """One fp32 value per token."""
        ...

    def terms(
        self, prediction: Float[Tensor, "b n _"], targets: Mapping[str, Tensor]
    ) -> dict[str, Float[Tensor, "b n"]]:
        """The parts that `loss` is the sum of, by name."""
        ...

    def process(self, predict: Predict, channels: int) -> Any:
        """The network as the samplers of this path use it."""
        ...


@runtime_checkable
class LatentModel(Protocol):
    """A model of latents with labels: what diffusion asks of the [model] section."""

    @property
    def name(self) -> str:
        """The name in the catalog, or "package.module:Class"."""
        ...

    @property
    def num_classes(self) -> int:
        """Number of labels; a negative label stands for none."""
        ...

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        """[c, h, w] of one latent."""
        ...

    @property
    def token_shape(self) -> tuple[int, int]:
        """[n, d] of one tokenized latent."""
        ...

    def spec(self, output_channels: int | None = None) -> ModelSpec:
        """The network that predicts so many channels; inputs `tokens`, `timestep`, `labels`."""
        ...

    def tokenize(self, latents: Float[Tensor, "b c h w"]) -> Float[Tensor, "b n d"]:
        """Latents to tokens."""
        ...

    def detokenize(self, tokens: Float[Tensor, "b n d"]) -> Float[Tensor, "b c h w"]:
        """The inverse of `tokenize`."""
        ...

    def static(self, device: torch.device) -> dict[str, Tensor]:
        """The model's static inputs for samples of `sample_shape`."""
        ...
