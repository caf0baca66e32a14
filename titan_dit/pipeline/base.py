"""What the trainer asks of an executor, pipelined or not."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import Tensor

from titan_dit.models.base import Stream
from titan_dit.objectives.base import Prepared

Output: TypeAlias = Tensor | Stream
"""What a model's head gives: a prediction, or several."""
TokenLoss: TypeAlias = Callable[[Output, Mapping[str, Tensor]], Tensor]
"""(output of the head, targets) -> loss per token [b, n]: `Objective.loss`."""


@dataclass(frozen=True)
class Shapes:
    """What one microbatch looks like between stages: tensors on the meta device."""

    first_input: str
    """The name of `given`; torch hands the other inputs on by name."""
    given: Tensor
    """What the first stage is given."""
    stream: tuple[Tensor, ...]
    predictions: tuple[Tensor, ...]
    losses: Tensor
    """Per token, [b, n]."""


def nothing_to_add(value: Tensor) -> Tensor:
    """The sum over one data-parallel rank."""
    return value


class Executor(ABC):
    """Runs a rank's share of a batch through the model, in microbatches."""

    add_up: Callable[[Tensor], Tensor] = staticmethod(nothing_to_add)
    """A value of this data-parallel rank to the sum over all of them."""

    def step(self, prepared: Prepared) -> Tensor:
        """Forward and backward over the rank's whole share; gradients stay on the parameters.

        Returns this rank's share of the loss, a scalar; the loss is their sum over all ranks that
        hold different samples, different tokens of a sample, or different stages.
        """
        if prepared.total_tokens is None:
            # A tensor, not a number: reading it would wait for the device.
            total: object = self.add_up(prepared.weight.sum())
            prepared = replace(prepared, total_tokens=total)  # type: ignore[arg-type]
        return self.run(prepared)

    @abstractmethod
    def run(self, prepared: Prepared) -> Tensor:
        """See `step`; the total of the weights is known."""

    @abstractmethod
    def predict(self, inputs: Mapping[str, Tensor], static: Mapping[str, Tensor]) -> Tensor:
        """Forward only; the (first) prediction in fp32, on every rank that shares the rows."""

    @abstractmethod
    def evaluate(self, prepared: Prepared) -> Tensor:
        """Forward only; the loss per token [b, n], whole, on every rank that shares the rows.

        The same on every layout; weights are left to the caller.
        """


def share_of(per_token: Tensor, part: Prepared) -> Tensor:
    """The share of the step's loss that some samples have."""
    assert part.total_tokens is not None
    weight = part.weight if part.weight.ndim == 2 else part.weight[:, None]
    return (per_token * weight).sum() / part.total_tokens


def first_of(output: Output) -> Tensor:
    """The first prediction."""
    return output if isinstance(output, Tensor) else output[0]
