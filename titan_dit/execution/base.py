"""What the trainer asks of an executor, pipelined or not."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor

from titan_dit.config.section import UserError
from titan_dit.models.base import ModelSpec, Stream
from titan_dit.objectives.base import Prepared

Output: TypeAlias = Tensor | Stream
"""What a model's head gives: a prediction, or several."""
NOTHING: Mapping[str, Tensor] = MappingProxyType({})
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


def by_name(
    loss: Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Tensor],
    names: tuple[str, ...],
    tokens: int,
) -> TokenLoss:
    """An objective's loss, of predictions that have these names, for so many tokens a sample."""

    def named(output: Output, targets: Mapping[str, Tensor]) -> Tensor:
        several = (output,) if isinstance(output, Tensor) else output
        if len(several) != len(names):
            raise UserError(
                f"[model] head gives {len(several)} predictions, but the spec names "
                f"{', '.join(names)}."
            )
        per_token = loss(dict(zip(names, several, strict=True)), targets)
        wanted = several[0].shape[0], tokens
        # Of another shape it would be broadcast against the weights, and train on something else.
        if per_token.shape != wanted:
            raise UserError(
                f"[objective] loss gives {list(per_token.shape)}; it must give one value per "
                f"token, {list(wanted)}."
            )
        return per_token

    return named


class Executor(ABC):
    """Runs a rank's share of a batch through the model, in microbatches."""

    spec: ModelSpec | None = None
    """What the batches are held against; None: nothing."""

    sum_over_data: Callable[[Tensor], Tensor] = staticmethod(nothing_to_add)
    """A value of this data-parallel rank to the sum over all of them."""

    def step(self, prepared: Prepared) -> Tensor:
        """Forward and backward over the rank's whole share; gradients stay on the parameters.

        Returns this rank's share of the loss, a scalar; the loss is their sum over all ranks that
        hold different samples, different tokens of a sample, or different stages.
        """
        if self.spec is not None:
            check_names(prepared, self.spec)
        if prepared.total_tokens is None:
            # A tensor, not a number: reading it would wait for the device. In fp64: fp32 loses
            # ones beyond 16.7 million.
            total = self.sum_over_data(prepared.weight.sum(dtype=torch.float64))
            prepared = replace(prepared, total_tokens=total)
        return self.run(prepared)

    @abstractmethod
    def run(self, prepared: Prepared) -> Tensor:
        """See `step`; the total of the weights is known."""

    @abstractmethod
    def predict(
        self,
        inputs: Mapping[str, Tensor],
        static: Mapping[str, Tensor],
        context: Mapping[str, Tensor] = NOTHING,
    ) -> Tensor:
        """Forward only; the (first) prediction in fp32, on every rank that shares the rows.

        `context`: as `Prepared.context`.
        """

    @abstractmethod
    def evaluate(self, prepared: Prepared) -> Tensor:
        """Forward only; the loss per token [b, n], whole, on every rank that shares the rows.

        The same on every layout; weights are left to the caller.
        """


def check_names(prepared: Prepared, model_spec: ModelSpec) -> None:
    """Refuse what a model does not take, or lacks; UserError with both lists."""
    for kind in ("inputs", "context", "static"):
        given, taken = getattr(prepared, kind), getattr(model_spec, kind)
        if given.keys() != taken.keys():
            raise UserError(
                f"[objective] prepares the {kind} {', '.join(given) or 'none'}, but [model] takes "
                f"{', '.join(taken) or 'none'}. Name the same in `prepare` and in the model's spec."
            )
    if prepared.total_tokens is None and prepared.weight.ndim == 1:
        raise UserError(
            "[objective] prepares total_tokens=None with a weight per sample: the weights of all "
            "ranks can be added up per token only. Give weights of [b, n], or the total."
        )


def share_of(per_token: Tensor, part: Prepared) -> Tensor:
    """The share of the step's loss that some samples have."""
    assert part.total_tokens is not None
    total = part.total_tokens
    # Not fp64: it would make the loss fp64.
    divisor = total.to(per_token.dtype) if isinstance(total, Tensor) else total
    return (per_token * part.token_weight).sum() / divisor


def first_of(output: Output) -> Tensor:
    """The first prediction."""
    return output if isinstance(output, Tensor) else output[0]
