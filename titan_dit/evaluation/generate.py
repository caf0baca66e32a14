"""Samples from a trained network: noise, guidance and a sampler put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from titan_dit.objectives.base import Objective
from titan_dit.rng import SampleRNG
from titan_dit.samplers.guidance import guided
from titan_dit.samplers.ode import Sampler

Forward = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Tensor]
"""(inputs, static) -> prediction: `Executor.predict`, or the network itself."""


def spread_labels(num: int, classes: list[int]) -> Int64[Tensor, " num"]:
    """`num` labels that go through `classes` in order, in shares that differ by one at most."""
    index = torch.arange(num) * len(classes) // num
    return torch.tensor(classes)[index]


def preview_labels(num: int, num_classes: int) -> Int64[Tensor, " num"]:
    """Labels for a small grid: at most ten classes, so that each is seen several times."""
    shown = max(1, min(10, num_classes, num // 4))
    return spread_labels(num, list(range(shown)))


def generate(
    forward: Forward,
    objective: Objective,
    static: Mapping[str, Tensor],
    labels: Int64[Tensor, " b"],
    numbers: Int64[Tensor, " b"],
    *,
    token_shape: tuple[int, int],
    seed: int,
    sampler: Sampler,
    steps: int,
    cfg_scale: float,
) -> Float[Tensor, "b n d"]:
    """Tokens of one sample per label.

    The noise of sample number i depends on (seed, i) alone: neither the batch it is drawn in nor
    the number of ranks changes a sample.
    """
    noise = SampleRNG(seed, numbers).normal("sample", token_shape)

    def predict(x: Tensor, t: Tensor, of: Tensor) -> Tensor:
        return forward(objective.inputs(x, t, of), static).float()

    return sampler(guided(predict, labels, cfg_scale), noise, steps)
