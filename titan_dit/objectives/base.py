"""What an objective is given, what it gives back, and the conventions all of them share.

One convention of time: t = 0 is data, t = 1 is noise. One of labels: negative means "no label".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from titan_dit.rng import SampleRNG

NO_LABEL = -1
TIMESTEPS = 1000
"""The network's unit of time where time is continuous: it is given t * TIMESTEPS, so that its
sinusoids see the range of the original DiT's steps."""

Predict: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(noisy tokens [b, n, d], timestep [b] in the network's unit) -> prediction [b, n, d_out]."""


@dataclass(frozen=True)
class Batch:
    """Clean samples, as one rank's loader gives them."""

    tokens: Float[Tensor, "b n d"]
    labels: Int64[Tensor, " b"]
    sample_numbers: Int64[Tensor, " b"]
    """Position of each sample in the infinite stream: what its random numbers are drawn from."""
    weight: Float[Tensor, " b"]
    """1, or 0 for a row that only fills up the batch."""
    total_weight: float
    """Sum of the weights of the step over all data-parallel ranks."""
    channels: int
    """Channels of a latent: a token holds its patch as (p, p, channels)."""
    static: Mapping[str, Tensor] = field(default_factory=dict)
    """The model's static inputs, passed on."""

    def to(self, device: torch.device) -> Batch:
        """The batch on a device; from pinned memory the copy does not block the host."""
        moved = {k: v.to(device, non_blocking=True) for k, v in self._tensors().items()}
        return replace(self, **moved)

    def pin_memory(self) -> Batch:
        """In page-locked memory; the loader calls this."""
        return replace(self, **{k: v.pin_memory() for k, v in self._tensors().items()})

    def _tensors(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if isinstance(v, Tensor)}


@dataclass(frozen=True)
class Prepared:
    """A batch with its random numbers drawn: ready for an executor."""

    inputs: Mapping[str, Tensor]
    """What the model's embed is given; batch first."""
    static: Mapping[str, Tensor]
    """What every part of the model is given; no batch dim."""
    targets: Mapping[str, Tensor]
    """What the loss is given beside the prediction; batch first."""
    weight: Float[Tensor, " b"]
    total_tokens: float
    """Weighted tokens of the step over all ranks: the loss is a sum divided by it."""

    def microbatches(self, size: int | None) -> Iterator[Prepared]:
        """Consecutive parts of at most `size` samples; None takes the whole."""
        rows = self.weight.shape[0]
        for first in range(0, rows, size or rows):
            part = slice(first, first + (size or rows))
            yield Prepared(
                inputs={k: v[part] for k, v in self.inputs.items()},
                static=self.static,
                targets={k: v[part] for k, v in self.targets.items()},
                weight=self.weight[part],
                total_tokens=self.total_tokens,
            )


@runtime_checkable
class Objective(Protocol):
    """A frozen dataclass that is its own config section. Draws everything from the rng."""

    @property
    def name(self) -> str:
        """The name in the catalog."""
        ...

    @property
    def token_targets(self) -> tuple[str, ...]:
        """The targets that hold a value for every token, in dim 1."""
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

    def prepare(self, batch: Batch, rng: SampleRNG) -> Prepared:
        """Draw timestep, noise and label dropout; make inputs and targets."""
        ...

    def corrupt(
        self,
        batch: Batch,
        timestep: Float[Tensor, " b"],
        noise: Float[Tensor, "b n d"],
        labels: Int64[Tensor, " b"],
    ) -> Prepared:
        """Inputs and targets for given draws; the timestep is in the network's unit."""
        ...

    def process(self, predict: Predict, channels: int) -> Any:
        """The network as the samplers of this objective use it (see `catalog.SAMPLERS`)."""
        ...

    def loss(
        self, prediction: Float[Tensor, "b n _"], targets: Mapping[str, Tensor]
    ) -> Float[Tensor, "b n"]:
        """One fp32 value per token, so that any slicing of the tokens gives the same sum."""
        ...

    def terms(
        self, prediction: Float[Tensor, "b n _"], targets: Mapping[str, Tensor]
    ) -> dict[str, Float[Tensor, "b n"]]:
        """The parts that `loss` is the sum of, by name."""
        ...


def at_least_fp32(prediction: Tensor) -> Tensor:
    """A prediction in the format that its loss is taken in."""
    return prediction.to(torch.promote_types(prediction.dtype, torch.float32))
