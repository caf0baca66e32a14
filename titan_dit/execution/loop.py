"""The loop of a pipeline rank: takes one action after another, computes, sends and receives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from titan_dit.execution.base import Output
from titan_dit.execution.stage import Stage
from titan_dit.models.base import SideInputs, Stream
from titan_dit.parallel import fsdp
from titan_dit.parallel.links import Links
from titan_dit.schedules.action import Action, Kind
from titan_dit.schedules.messages import Channels, inputs_of, output_of, reader_of
from titan_dit.schedules.moments import CAUSE, Mark, Moment, unmarked

AHEAD = 2
"""Receives are posted this many actions before the action that uses them. With 1, a link as slow as
a forward makes steps up to 6% longer (simulated); with 2 none."""


class Inbox:
    """The messages that this rank receives, posted in the sequence in which they are sent."""

    def __init__(
        self,
        channels: Channels,
        links: Links,
        empty: Callable[[Action], Stream],
    ) -> None:
        self.links, self.empty = links, empty
        incoming = {s: sent for (s, target), sent in channels.items() if target == links.rank}
        self.source_of = {message: s for s, sent in incoming.items() for message in sent}
        self.next_of = {source: iter(sent) for source, sent in incoming.items()}
        self.arriving: dict[Action, tuple[Stream, list[dist.Work]]] = {}

    def post(self, message: Action) -> None:
        """Start receiving a message of another rank, and all that its sender sends before it."""
        source = self.source_of[message]
        while message not in self.arriving:
            sent = next(self.next_of[source])
            buffers = self.empty(sent)
            self.arriving[sent] = buffers, self.links.receive(buffers, source)

    def take(self, message: Action) -> Stream:
        """Wait for a posted message."""
        buffers, works = self.arriving.pop(message)
        for work in works:
            work.wait()
        return buffers


class Loop:
    """One pass over the microbatches of a batch: forward and backward, or forward only.

    Sent tensors are freed once they are sent, received ones once they are used: memory grows with
    the depth of the pipeline, not with the number of microbatches. gloo never reports a send as
    complete, so on a CPU sent tensors live until the end of the pass.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        stage_ranks: Sequence[int],
        channels: Channels,
        links: Links,
        device: torch.device,
        mark: Mark = unmarked,
    ) -> None:
        self.stages, self.stage_ranks = stages, stage_ranks
        self.links, self.device, self.mark = links, device, mark
        self.stream = next(iter(stages.values())).stream
        self.inbox = Inbox(channels, links, self.empty)
        self.made: dict[Action, Stream] = {}
        """Outputs for another stage of this rank."""
        self.sends: list[tuple[Stream, dist.Work]] = []

    def planned(self, actions: Sequence[Action]) -> Iterator[Action]:
        """The actions of an order; receives are posted AHEAD actions before their use."""
        ahead = iter(actions)
        for action in islice(ahead, AHEAD):
            self.post_inputs(action)
        for action in actions:
            if (later := next(ahead, None)) is not None:
                self.post_inputs(later)
            yield action

    def run(
        self,
        actions: Iterable[Action],
        inputs: Sequence[Mapping[str, Tensor]],
        side_inputs: Sequence[SideInputs],
        finish: Callable[[Output, int], Tensor],
    ) -> None:
        """Perform the actions, as `planned` or another source yields them.

        `finish`: (output of the head, microbatch) -> its loss.
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
                        fsdp.reduce_gradients(self.stages[index].part)
        for _, work in self.sends:
            work.wait()

    def forward(
        self,
        action: Action,
        given: Mapping[str, Tensor],
        side_inputs: SideInputs,
        finish: Callable[[Output, int], Tensor],
    ) -> None:
        """One microbatch through one stage."""
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
        """One microbatch back through one stage, or its part for the input or the weights."""
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
        if message in self.made:
            return self.made.pop(message)
        self.mark(Moment.WAITS, CAUSE[message.kind])
        tensors = self.inbox.take(message)
        self.mark(Moment.ARRIVED, message)
        self.mark(Moment.WAITS, None)
        return tensors

    def pass_on(self, message: Action, tensors: Stream) -> None:
        """Give an output to the stage that uses it; the pipeline's own outputs have none."""
        reader = reader_of(message)
        if reader in self.stages:
            self.made[message] = tensors
        elif 0 <= reader < len(self.stage_ranks):
            whole = tuple(tensor.detach().contiguous() for tensor in tensors)
            self.sends = [sent for sent in self.sends if not sent[1].is_completed()]
            self.mark(Moment.SENDS, message)
            works = self.links.send(whole, self.stage_ranks[reader])
            self.sends += [(whole, work) for work in works]

    def post_inputs(self, action: Action) -> None:
        """Start receiving what an action needs from other ranks."""
        for message in inputs_of(action, len(self.stage_ranks)):
            if message in self.inbox.source_of:
                self.inbox.post(message)

    def empty(self, message: Action) -> Stream:
        """Buffers for a message: a stream, or the gradients of its floating-point tensors."""
        is_stream = message.kind is Kind.FORWARD
        return tuple(
            torch.empty_like(tensor, device=self.device, requires_grad=False)
            for tensor in self.stream
            if is_stream or tensor.is_floating_point()
        )
