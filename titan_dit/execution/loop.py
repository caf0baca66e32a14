"""The loop of a pipeline rank: runs its actions one by one, receives inputs and sends outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

from titan_dit.execution.base import Output
from titan_dit.execution.stage import Stage
from titan_dit.models.base import SideInputs, Stream
from titan_dit.schedules.action import Action, Kind
from titan_dit.schedules.messages import output_of, reader_of
from titan_dit.schedules.moments import Mark, Moment, unmarked


class Source(Protocol):
    """Yields the actions of a pass and transfers its messages: `Planned` or `Deciding`."""

    def take(self, message: Action) -> Stream:
        """Receive a message of another rank, for an action that this source has yielded."""

    def send(self, message: Action, tensors: Stream) -> None:
        """Send an output to the rank that uses it, without waiting for that rank."""

    def flush(self) -> None:
        """Wait until everything is sent; at the end of a pass."""


class Loop:
    """One pass over the microbatches of a batch: forward and backward, or forward only.

    Received tensors are freed once they are used: memory grows with the depth of the pipeline, not
    with the number of microbatches.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        num_stages: int,
        source: Source,
        mark: Mark = unmarked,
    ) -> None:
        self.stages, self.num_stages = stages, num_stages
        self.source, self.mark = source, mark
        self.stream = next(iter(stages.values())).stream
        self.made: dict[Action, Stream] = {}
        """Outputs for another stage of this rank."""

    def run(
        self,
        actions: Iterable[Action],
        inputs: Sequence[Mapping[str, Tensor]],
        side_inputs: Sequence[SideInputs],
        finish: Callable[[Output, int], Tensor],
        finish_stage: Callable[[Stage], None] = lambda stage: None,
    ) -> None:
        """Perform the actions, which the source of the messages yields.

        `finish`: (output of the head, microbatch) -> its loss. `finish_stage` is called after the
        last backward of a stage.
        """
        unfinished = dict.fromkeys(self.stages, len(inputs))
        for action in actions:
            kind, index, number = action
            with record_function(f"pipeline {action}"):
                if kind is Kind.FORWARD:
                    self.forward(action, inputs[number], side_inputs[number], finish)
                else:
                    self.backward(action)
                if kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                    unfinished[index] -= 1
                    if not unfinished[index]:
                        finish_stage(self.stages[index])
        self.source.flush()

    def forward(
        self,
        action: Action,
        given: Mapping[str, Tensor],
        side_inputs: SideInputs,
        finish: Callable[[Output, int], Tensor],
    ) -> None:
        """Forward of one microbatch through one stage."""
        stage = self.stages[action.stage]
        stream: Stream = ()
        learns = torch.is_grad_enabled()
        if not stage.is_first:
            received = self.take(action._replace(stage=action.stage - 1))
            pairs = zip(received, self.stream, strict=True)
            stream = tuple(t.detach().requires_grad_(learns and s.requires_grad) for t, s in pairs)
        self.mark(Moment.BEGINS, action)
        out = stage.forward(given if stage.is_first else stream, side_inputs)
        if stage.is_last:
            out = (finish(out, action.microbatch),)
        if learns:
            stage.keep(action.microbatch, stream, tuple(out))
        self.mark(Moment.ENDS, action)
        self.pass_on(action, tuple(out))

    def backward(self, action: Action) -> None:
        """Backward of one microbatch through one stage: full, input half or weight half."""
        kind, index, number = action
        stage, message = self.stages[index], output_of(action)
        if kind is Kind.BACKWARD_WEIGHT:
            self.mark(Moment.BEGINS, action)
            stage.backward_weight(number)
            self.mark(Moment.ENDS, action)
            return
        gradients = None if stage.is_last else self.take(message._replace(stage=index + 1))
        run = stage.backward if kind is Kind.BACKWARD else stage.backward_input
        self.mark(Moment.BEGINS, action)
        found = run(number, gradients)
        self.mark(Moment.ENDS, action)
        self.pass_on(message, found)

    def take(self, message: Action) -> Stream:
        """An input from another stage of this rank, or from another rank."""
        return self.made.pop(message) if message in self.made else self.source.take(message)

    def pass_on(self, message: Action, tensors: Stream) -> None:
        """Give an output to the stage that uses it; the pipeline's final outputs have none."""
        reader = reader_of(message)
        if reader in self.stages:
            self.made[message] = tensors
        elif 0 <= reader < self.num_stages:
            self.mark(Moment.SENDS, message)
            self.source.send(message, tuple(tensor.detach().contiguous() for tensor in tensors))
