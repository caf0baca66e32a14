"""What an objective is given, what it gives back, and the conventions all of them share.

One convention of time: t = 0 is data, t = 1 is noise. One of labels: negative means "no label".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from titan_dit.rng import SampleRNG

NO_LABEL = -1
TIMESTEPS = 1000
"""The network's unit of time: it is given t * TIMESTEPS, as the original DiT counts steps."""


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

    def output_channels(self, channels: int) -> int:
        """Channels that the network predicts for latents of `channels`."""
        ...

    def prepare(self, batch: Batch, rng: SampleRNG) -> Prepared:
        """Draw timestep, noise and label dropout; make inputs and targets."""
        ...

    def inputs(
        self, tokens: Float[Tensor, "b n d"], t: Float[Tensor, " b"], labels: Int64[Tensor, " b"]
    ) -> dict[str, Tensor]:
        """The network's inputs for noisy tokens at time t; samplers use it too."""
        ...

    def loss(
        self, prediction: Float[Tensor, "b n _"], targets: Mapping[str, Tensor]
    ) -> Float[Tensor, "b n"]:
        """One fp32 value per token, so that any slicing of the tokens gives the same sum."""
        ...
