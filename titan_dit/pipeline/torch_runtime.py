"""Runs a pipeline by a schedule class of torch.distributed.pipelining.

torch's `step()` says which stage runs which microbatch next, and when its output is sent. The
stages compute and communicate as in titan_dit's own loop: losses and gradients have the same bits.
Passes without a backward keep the own loop: they have other numbers of microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from titan_dit.config.section import UserError
from titan_dit.models.base import Stream
from titan_dit.pipeline.pipelined import (
    Loop,
    Microbatches,
    PipelinedExecutor,
    PipelineParts,
    Planned,
)
from titan_dit.pipeline.runtimes import Runtime
from titan_dit.pipeline.schedules.schedule import Action, num_microbatches_of
from titan_dit.pipeline.schedules.torch_classes import (
    DrivenStage,
    driven,
    make,
    step,
)


class TorchExecutor(PipelinedExecutor):
    """Runs training passes by a schedule of torch's."""

    def __init__(
        self, given: PipelineParts, *, runtime: Runtime, notes: Sequence[str] = ()
    ) -> None:
        """`given`: with the order of the runtime."""
        super().__init__(given, notes)
        assert runtime.torch
        self.num_microbatches, self.posts = num_microbatches_of(self.order), runtime.posts
        self.driven = [
            DrivenStage(
                index, len(self.stage_ranks), self.p2p.rank, len(self.order), part=stage.part
            )
            for index, stage in self.stages.items()
        ]
        self.schedule = make(runtime.torch, self.driven, self.num_microbatches)

    def learn(self, work: Microbatches) -> None:
        """See `PipelinedExecutor.learn`."""
        messages = self.messages(MessagesOnDemand, self.channels)
        order = self.order[self.p2p.rank]
        driver = LoopDriver(self.loop(messages, work), messages, order, self.posts)
        with driven(self.driven, driver):
            step(self.schedule, self.num_microbatches)
        driver.end()
        messages.flush()


class MessagesOnDemand(Planned):
    """The messages of a pass, sent when a schedule asks for it."""

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

    def __init__(
        self, loop: Loop, messages: MessagesOnDemand, order: Sequence[Action], posts: bool = False
    ) -> None:
        """`order`: this rank's actions. `posts`: see `Runtime`."""
        self.loop, self.messages, self.posts = loop, messages, posts
        # Receives are posted as actions are taken from `messages.actions`.
        self.actions = iter(order) if posts else messages.actions(order)

    def receive(self, message: Action) -> None:
        """See `Driver.receive`."""
        if self.posts:
            self.messages.post(message)

    def send(self, message: Action) -> None:
        """See `Driver.send`."""
        self.messages.release(message)

    def run(self, action: Action) -> None:
        """See `Driver.run`. Raises UserError if the schedule differs from its record."""
        planned = next(self.actions, None)
        if action != planned:
            raise UserError(
                f"[pipeline] schedule: its class runs {action} where it ran {planned or 'nothing'} "
                "before. Make its order depend on the ranks, stages and microbatches alone."
            )
        self.loop.perform(action)

    def end(self) -> None:
        """At the end of a step. Raises UserError if the schedule has left out actions."""
        if left := next(self.actions, None):
            raise UserError(
                f"[pipeline] schedule: its class ends before {left}, which it ran before. Make its "
                "order depend on the ranks, stages and microbatches alone."
            )
