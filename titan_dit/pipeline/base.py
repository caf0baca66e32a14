"""What the trainer asks of an executor, pipelined or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from titan_dit.objectives.base import Prepared

TokenLoss: TypeAlias = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
"""(prediction, targets) -> loss per token [b, n]: `Objective.loss`."""


@dataclass(frozen=True)
class Shapes:
    """What one microbatch looks like between stages: tensors on the meta device."""

    tokens: tuple[Tensor, ...]
    """What the first stage is given."""
    stream: tuple[Tensor, ...]
    prediction: tuple[Tensor, ...]


class Executor(Protocol):
    """Runs a rank's share of a batch through the model, in microbatches."""

    def step(self, prepared: Prepared) -> Tensor:
        """Forward and backward over the rank's whole share; gradients stay on the parameters.

        Returns this rank's share of the loss, a scalar; the loss is their sum over all ranks that
        hold different samples, different tokens of a sample, or different stages.
        """
        ...

    def predict(self, inputs: Mapping[str, Tensor], static: Mapping[str, Tensor]) -> Tensor:
        """Forward only; the prediction for the given rows, on every rank that shares them."""
        ...
