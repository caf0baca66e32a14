"""What the trainer asks of an executor, pipelined or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from titan_dit.objectives.base import Prepared


class Executor(Protocol):
    """Runs a rank's share of a batch through the model, in microbatches."""

    def step(self, prepared: Prepared) -> Tensor:
        """Forward and backward over the rank's whole share; gradients stay on the parameters.

        Returns this rank's share of the loss, a scalar; the loss is their sum over data ranks.
        """
        ...

    def predict(self, inputs: Mapping[str, Tensor], static: Mapping[str, Tensor]) -> Tensor:
        """Forward only; the prediction for the given rows, on every rank that shares them."""
        ...
