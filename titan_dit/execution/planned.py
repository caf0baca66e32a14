"""Planned order: a rank runs its actions as listed, and waits for the messages each one needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import torch
import torch.distributed as dist

from titan_dit.models.base import Stream
from titan_dit.parallel.links import Links, tensors_of
from titan_dit.schedules.action import Action
from titan_dit.schedules.messages import Channels, inputs_of, reader_of
from titan_dit.schedules.moments import CAUSE, Mark, Moment, unmarked

AHEAD = 2
"""Receives are posted this many actions before the action that uses them. With 1, a link as slow as
a forward makes steps up to 6% longer (simulated); with 2 none."""


class Planned:
    """The source of actions of one pass in a planned order, and its messages.

    Sent tensors are freed once they are sent. gloo never reports that, so on a CPU they live until
    the end of the pass.
    """

    def __init__(
        self,
        stage_ranks: Sequence[int],
        channels: Channels,
        links: Links,
        stream: Stream,
        device: torch.device,
        mark: Mark = unmarked,
    ) -> None:
        """`stream`: the tensors that the stages exchange, on the meta device."""
        self.stage_ranks, self.mark = stage_ranks, mark
        self.links, self.stream, self.device = links, stream, device
        incoming = {s: sent for (s, target), sent in channels.items() if target == links.rank}
        self.source_of = {message: s for s, sent in incoming.items() for message in sent}
        self.next_of = {source: iter(sent) for source, sent in incoming.items()}
        self.arriving: dict[Action, tuple[Stream, list[dist.Work]]] = {}
        self.sends: list[tuple[Stream, dist.Work]] = []

    def actions(self, order: Sequence[Action]) -> Iterator[Action]:
        """The actions of this rank; receives are posted AHEAD actions before their use."""
        ahead = iter(order)
        for action in islice(ahead, AHEAD):
            self.post_inputs(action)
        for action in order:
            if (later := next(ahead, None)) is not None:
                self.post_inputs(later)
            yield action

    def post_inputs(self, action: Action) -> None:
        """Start receiving the messages that an action needs from other ranks."""
        for message in inputs_of(action, len(self.stage_ranks)):
            if message in self.source_of:
                self.post(message)

    def post(self, message: Action) -> None:
        """Start receiving a message of another rank, and all that its sender sends before it."""
        source = self.source_of[message]
        while message not in self.arriving:
            sent = next(self.next_of[source])
            buffers = self.empty(sent)
            self.arriving[sent] = buffers, self.links.receive(buffers, source)
            self.mark(Moment.ALLOWS, sent)

    def take(self, message: Action) -> Stream:
        """Wait for a posted message."""
        self.mark(Moment.WAITS, CAUSE[message.kind])
        buffers, works = self.arriving.pop(message)
        for work in works:
            work.wait()
        self.mark(Moment.ARRIVED, message)
        self.mark(Moment.WAITS, None)
        return buffers

    def send(self, message: Action, tensors: Stream) -> None:
        """Start sending a message to the rank that uses it."""
        self.sends = [sent for sent in self.sends if not sent[1].is_completed()]
        works = self.links.send(tensors, self.stage_ranks[reader_of(message)])
        self.sends += [(tensors, work) for work in works]

    def flush(self) -> None:
        """Wait until everything is sent."""
        for _, work in self.sends:
            work.wait()

    def empty(self, message: Action) -> Stream:
        """Buffers for a message."""
        return tuple(
            torch.empty_like(tensor, device=self.device, requires_grad=False)
            for tensor in tensors_of(self.stream, message.kind)
        )
