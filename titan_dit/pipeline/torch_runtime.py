"""Runs a pipeline by a schedule class of torch.distributed.pipelining.

torch's `step()` says which stage runs which microbatch next, and when its messages are posted and
sent. The stages compute and communicate as in titan_dit's own loop: losses and gradients have the
same bits. Passes without a backward keep the own loop: they have other numbers of microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from titan_dit.models.base import Stream
from titan_dit.pipeline.pipelined import Loop, Microbatches, PipelinedExecutor, Planned
from titan_dit.pipeline.schedules.schedule import Action, num_microbatches_of
from titan_dit.pipeline.schedules.torch_classes import (
    DrivenStage,
    ScheduleClass,
    driven,
    make,
    step,
)


class TorchExecutor(PipelinedExecutor):
    """Runs training passes by a schedule of torch's."""

    def __init__(self, *planned: Any, schedule: ScheduleClass, notes: Sequence[str] = ()) -> None:
        """`planned`: the arguments of `PipelinedExecutor`, with the order of `schedule`."""
        super().__init__(*planned, notes=notes)
        self.num_microbatches = num_microbatches_of(self.order)
        self.driven = [
            DrivenStage(
                index, len(self.stage_ranks), self.p2p.rank, len(self.order), part=stage.part
            )
            for index, stage in self.stages.items()
        ]
        self.schedule = make(schedule, self.driven, self.num_microbatches)

    def learn(self, work: Microbatches) -> None:
        """See `PipelinedExecutor.learn`."""
        source = self.source(Asked, self.channels)
        with driven(self.driven, LoopDriver(self.loop(source, work), source)):
            step(self.schedule, self.num_microbatches)
        source.flush()


class Asked(Planned):
    """The messages of a pass, each posted or sent when it is asked for."""

    def __init__(self, *planned: Any) -> None:
        """`planned`: the arguments of `Planned`."""
        super().__init__(*planned)
        self.outputs: dict[Action, Stream] = {}
        """Outputs that are not yet sent."""

    def send(self, message: Action, tensors: Stream) -> None:
        """Keep an output until its `release`."""
        self.outputs[message] = tensors

    def release(self, message: Action) -> None:
        """Start sending an output to the rank that uses it."""
        super().send(message, self.outputs.pop(message))


class LoopDriver:
    """Performs what a schedule asks for by a loop and its messages; see `torch_classes.Driver`."""

    def __init__(self, loop: Loop, messages: Asked) -> None:
        self.run, self.receive, self.send = loop.perform, messages.post, messages.release
