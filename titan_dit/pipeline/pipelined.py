"""The executor of a pipeline: this rank's stages, run in the order of a schedule.

`PipelinedExecutor` holds the stages. A `Loop` runs the actions of a pass one by one; `Messages`
receives their inputs and sends their outputs. `Planned` yields the actions as listed, waiting for
the messages that each one needs. `Deciding` (run_time.py) yields them by what has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from titan_dit.execution import (
    NOTHING,
    Executor,
    Output,
    Tensors,
    TokenLoss,
    first_of,
    scaled,
)
from titan_dit.models.base import Model, SideInputs, Stream
from titan_dit.objectives.base import Prepared
from titan_dit.parallel import fsdp
from titan_dit.parallel.p2p_groups import P2PGroups
from titan_dit.pipeline.events import CAUSE, Mark, PipelineEvent, unmarked
from titan_dit.pipeline.schedules.schedule import (
    Action,
    Channels,
    Kind,
    Order,
    channels,
    inputs_of,
    output_of,
    reader_of,
)
from titan_dit.pipeline.stage import Shapes, Stage
from titan_dit.pipeline.tied import TiedWeights
from titan_dit.pipeline.transports.base import tensors_of


class Messages(Protocol):
    """Receives and sends the messages of a pass.

    `Planned` and `Deciding` also yield its actions.
    """

    def take(self, message: Action) -> Stream:
        """Wait for a message of another rank that a yielded action needs; return its tensors."""

    def send(self, message: Action, tensors: Stream) -> None:
        """Send an output to the rank that uses it. Does not wait for that rank."""

    def flush(self) -> None:
        """Wait until everything is sent. Called at the end of a pass."""


class Microbatches(NamedTuple):
    """The inputs of a pass, and the function of its outputs."""

    inputs: Sequence[Mapping[str, Tensor]]
    """Inputs of the first stage, by microbatch."""
    side_inputs: Sequence[SideInputs]
    """Side inputs of every stage, by microbatch."""
    finish: Callable[[Output, int], Tensor]
    """(output of the head, microbatch) -> its loss, or what a pass without backward returns."""


class Loop:
    """One pass over the microbatches of a batch: forward and backward, or forward only.

    Received tensors are freed once they are used: memory grows with the depth of the pipeline, not
    with the number of microbatches.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        num_stages: int,
        messages: Messages,
        work: Microbatches,
        mark: Mark = unmarked,
        finish_stage: Callable[[Stage], None] = lambda stage: None,
    ) -> None:
        """`finish_stage` is called after the last backward of a stage."""
        self.stages, self.num_stages = stages, num_stages
        self.messages, self.work, self.mark = messages, work, mark
        self.finish_stage = finish_stage
        self.unfinished = dict.fromkeys(stages, len(work.inputs))
        """Stage -> microbatches whose backward has not ended."""
        self.stream = next(iter(stages.values())).stream
        self.made: dict[Action, Stream] = {}
        """Outputs for another stage of this rank."""

    def run(self, actions: Iterable[Action]) -> None:
        """Perform the actions, which `Planned` or `Deciding` yields; then flush the messages."""
        for action in actions:
            self.perform(action)
        self.messages.flush()

    def perform(self, action: Action) -> None:
        """Perform one action."""
        kind, index, _ = action
        with record_function(f"pipeline {action}"):
            if kind is Kind.FORWARD:
                self.forward(action)
            else:
                self.backward(action)
            if kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                self.unfinished[index] -= 1
                if not self.unfinished[index]:
                    self.finish_stage(self.stages[index])

    def forward(self, action: Action) -> None:
        """Forward of one microbatch through one stage."""
        stage, number = self.stages[action.stage], action.microbatch
        stream: Stream = ()
        learns = torch.is_grad_enabled()
        if not stage.is_first:
            received = self.take(action._replace(stage=action.stage - 1))
            pairs = zip(received, self.stream, strict=True)
            stream = tuple(t.detach().requires_grad_(learns and s.requires_grad) for t, s in pairs)
        self.mark(PipelineEvent.BEGINS, action)
        given = self.work.inputs[number] if stage.is_first else stream
        out = stage.forward(given, self.work.side_inputs[number])
        if stage.is_last:
            out = (self.work.finish(out, number),)
        if learns:
            stage.keep(number, stream, tuple(out))
        self.mark(PipelineEvent.ENDS, action)
        self.pass_on(action, tuple(out))

    def backward(self, action: Action) -> None:
        """Backward of one microbatch through one stage: full, input half or weight half."""
        kind, index, number = action
        stage, message = self.stages[index], output_of(action)
        if kind is Kind.BACKWARD_WEIGHT:
            self.mark(PipelineEvent.BEGINS, action)
            stage.backward_weight(number)
            self.mark(PipelineEvent.ENDS, action)
            return
        gradients = None if stage.is_last else self.take(message._replace(stage=index + 1))
        run = stage.backward if kind is Kind.BACKWARD else stage.backward_input
        self.mark(PipelineEvent.BEGINS, action)
        found = run(number, gradients)
        self.mark(PipelineEvent.ENDS, action)
        self.pass_on(message, found)

    def take(self, message: Action) -> Stream:
        """An input from another stage of this rank, or from another rank."""
        return self.made.pop(message) if message in self.made else self.messages.take(message)

    def pass_on(self, message: Action, tensors: Stream) -> None:
        """Give an output to the stage that uses it; the pipeline's final outputs have none."""
        reader = reader_of(message)
        if reader in self.stages:
            self.made[message] = tensors
        elif 0 <= reader < self.num_stages:
            self.mark(PipelineEvent.SENDS, message)
            self.messages.send(message, tuple(tensor.detach().contiguous() for tensor in tensors))


RECEIVES_AHEAD = 2
"""Receives are posted this many actions before the action that uses them. With 1, a link as slow as
a forward makes steps up to 6% longer (simulated); with 2 none."""


class Planned:
    """The actions and the messages of one pass in a planned order.

    Sent tensors are freed once they are sent. gloo never reports that, so on a CPU they live until
    the end of the pass.
    """

    def __init__(
        self,
        stage_ranks: Sequence[int],
        sequences: Channels,
        p2p: P2PGroups,
        stream: Stream,
        device: torch.device,
        mark: Mark = unmarked,
    ) -> None:
        """`stream`: the tensors that the stages exchange, on the meta device."""
        self.stage_ranks, self.mark = stage_ranks, mark
        self.p2p, self.stream, self.device = p2p, stream, device
        incoming = {s: sent for (s, target), sent in sequences.items() if target == p2p.rank}
        self.sender_of = {message: s for s, sent in incoming.items() for message in sent}
        self.next_of = {sender: iter(sent) for sender, sent in incoming.items()}
        self.arriving: dict[Action, tuple[Stream, list[dist.Work]]] = {}
        self.sends: list[tuple[Stream, dist.Work]] = []

    def actions(self, order: Sequence[Action]) -> Iterator[Action]:
        """The actions of this rank; receives are posted RECEIVES_AHEAD actions before their use."""
        ahead = iter(order)
        for action in islice(ahead, RECEIVES_AHEAD):
            self.post_inputs(action)
        for action in order:
            if (later := next(ahead, None)) is not None:
                self.post_inputs(later)
            yield action

    def post_inputs(self, action: Action) -> None:
        """Start receiving the messages that an action needs from other ranks."""
        for message in inputs_of(action, len(self.stage_ranks)):
            if message in self.sender_of:
                self.post(message)

    def post(self, message: Action) -> None:
        """Start receiving a message of another rank, and all that its sender sends before it."""
        sender = self.sender_of[message]
        while message not in self.arriving:
            sent = next(self.next_of[sender])
            buffers = self.empty(sent)
            self.arriving[sent] = buffers, self.p2p.receive(buffers, sender)
            self.mark(PipelineEvent.ALLOWS, sent)

    def take(self, message: Action) -> Stream:
        """Wait for a posted message."""
        self.mark(PipelineEvent.WAITS, CAUSE[message.kind])
        buffers, works = self.arriving.pop(message)
        for work in works:
            work.wait()
        self.mark(PipelineEvent.ARRIVED, message)
        self.mark(PipelineEvent.WAITS, None)
        return buffers

    def send(self, message: Action, tensors: Stream) -> None:
        """Start sending a message to the rank that uses it."""
        self.sends = [sent for sent in self.sends if not sent[1].is_completed()]
        works = self.p2p.send(tensors, self.stage_ranks[reader_of(message)])
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


P = TypeVar("P", bound=Planned)


@dataclass(frozen=True, kw_only=True)
class PipelineParts:
    """What an executor of a pipeline needs on this rank."""

    parts: Mapping[int, Model]
    """Stage -> the part of the model, of this rank's stages."""
    p2p: P2PGroups
    """The open groups between neighbours."""
    order: Order
    stage_ranks: Sequence[int]
    """The pipeline rank of every stage."""
    shapes: Shapes
    loss: TokenLoss
    microbatch_size: int
    device: torch.device
    dtype: torch.dtype
    """The compute dtype, see `TiedWeights`."""


class PipelinedExecutor(Executor):
    """Runs this rank's stages of a pipeline."""

    mark: Mark = staticmethod(unmarked)
    """Called at the events of every pass, see `pipeline/events.py`."""

    def __init__(self, given: PipelineParts, notes: Sequence[str] = ()) -> None:
        """`notes`: see `Executor`."""
        self.p2p, self.order, self.stage_ranks = given.p2p, given.order, given.stage_ranks
        self.shapes, self.loss, self.device = given.shapes, given.loss, given.device
        self.microbatch_size, self.notes = given.microbatch_size, notes
        count = len(self.stage_ranks)
        self.stages = {
            index: Stage(part, index, count, self.shapes.stream)
            for index, part in sorted(given.parts.items())
        }
        self.channels = channels(self.order, self.stage_ranks)
        self.tied = TiedWeights(given.parts, self.stage_ranks, self.p2p, given.dtype)

    def run(self, prepared: Prepared, loss_scale: Tensor | None = None) -> Tensor:
        """See `Executor.step`. Ranks without the last stage return 0."""
        microbatches = list(prepared.microbatches(self.microbatch_size))
        losses: list[Tensor] = []

        def loss_of(output: Output, microbatch: int) -> Tensor:
            found = self.score(self.loss, output, microbatches[microbatch])
            loss, factor = scaled(found, loss_scale)
            losses.append(loss.detach())
            return with_factor(loss, factor)

        self.mark(PipelineEvent.STARTS, None)
        self.gather()
        for stage in self.stages.values():
            fsdp.hold_gradients(stage.part)
        self.learn(
            Microbatches(
                inputs=[microbatch.inputs for microbatch in microbatches],
                side_inputs=[microbatch.side_inputs for microbatch in microbatches],
                finish=loss_of,
            )
        )
        self.tied.add_gradients()
        self.mark(PipelineEvent.FINISHED, None)
        return sum(losses, torch.zeros((), device=prepared.weight.device))

    def gather(self) -> None:
        """Start to all-gather the weights of this rank's stages, at the start of every pass."""
        self.tied.fetch()
        for stage in self.stages.values():
            fsdp.gather(stage.part)

    def learn(self, work: Microbatches) -> None:
        """Forward and backward of all microbatches; the gradients are reduced."""
        self.perform(self.order, self.channels, work)

    def perform(self, order: Order, sequences: Channels, work: Microbatches) -> None:
        """This rank's actions of an order."""
        messages = self.messages(Planned, sequences)
        self.loop(messages, work).run(messages.actions(order[self.p2p.rank]))

    def loop(self, messages: Messages, work: Microbatches) -> Loop:
        """The loop of a pass in a planned order."""
        # All replicas run the same order: they reduce a stage while others still compute.
        return Loop(self.stages, len(self.stage_ranks), messages, work, self.mark, reduce_gradients)

    def messages(self, kind: type[P], sequences: Channels) -> P:
        """The messages of a pass, sent in these sequences; of class `kind`."""
        return kind(
            self.stage_ranks, sequences, self.p2p, self.shapes.stream, self.device, self.mark
        )

    @torch.no_grad()
    def predict(self, inputs: Tensors, static: Tensors, context: Tensors = NOTHING) -> Tensor:
        """See `Executor.predict`. Microbatches are pipelined through the stages."""
        rows = next(iter(inputs.values())).shape[0]
        parts = self.padded_indices(rows)
        microbatches = [{k: v[part] for k, v in inputs.items()} for part in parts]
        side_inputs = [{**static, **{k: v[part] for k, v in context.items()}} for part in parts]
        like = self.shapes.predictions[0]
        found = self.forward_all(microbatches, side_inputs, lambda out, _: first_of(out), like)
        return found[:rows].float()

    @torch.no_grad()
    def evaluate(self, prepared: Prepared) -> Tensor:
        """See `Executor.evaluate`."""
        parts = [prepared.select(part) for part in self.padded_indices(prepared.num_samples)]

        def losses_of(output: Output, number: int) -> Tensor:
            return self.loss(output, parts[number].targets)

        inputs, side_inputs = [part.inputs for part in parts], [part.side_inputs for part in parts]
        losses = self.forward_all(inputs, side_inputs, losses_of, self.shapes.losses)
        return losses[: prepared.num_samples]

    def padded_indices(self, rows: int) -> tuple[Tensor, ...]:
        """Sample indices of every microbatch; the last one is padded with the last sample."""
        size = self.microbatch_size
        index = torch.arange(-(-rows // size) * size, device=self.device).clamp(max=rows - 1)
        return torch.split(index, size)

    def forward_all(
        self,
        inputs: Sequence[Mapping[str, Tensor]],
        side_inputs: Sequence[Mapping[str, Tensor]],
        finish: Callable[[Output, int], Tensor],
        like: Tensor,
    ) -> Tensor:
        """Forward only; `finish(output, number)` of all microbatches, concatenated, on every rank.

        `like`: what `finish` returns for one microbatch, on the meta device.
        """
        outputs: list[Tensor] = []

        def collect(output: Output, number: int) -> Tensor:
            outputs.append(finish(output, number))
            return outputs[-1]

        self.gather()
        order = forward_order(self.stage_ranks, len(inputs))
        work = Microbatches(inputs, side_inputs, collect)
        self.perform(order, channels(order, self.stage_ranks), work)
        for stage in self.stages.values():
            fsdp.reshard(stage.part)
        return self.broadcast_last(outputs, len(inputs), like)

    def broadcast_last(self, outputs: list[Tensor], count: int, like: Tensor) -> Tensor:
        """Broadcast the last stage's outputs to every rank of the pipeline."""
        shape = (count * like.shape[0], *like.shape[1:])
        whole = (
            torch.cat(outputs)
            if outputs
            else torch.empty(shape, dtype=like.dtype, device=self.device)
        )
        mesh, sender = self.p2p.mesh, self.p2p.global_rank(self.stage_ranks[-1])
        dist.broadcast(whole, sender, mesh.get_group())
        return whole


def with_factor(loss: Tensor, factor: Tensor) -> Tensor:
    """The loss times the factor of its gradient (see `scored`); backward starts from it with 1."""
    return loss * factor


def reduce_gradients(stage: Stage) -> None:
    """Reduce the gradients of a stage over its replicas and shards."""
    fsdp.reduce_gradients(stage.part)


def forward_order(stage_ranks: Sequence[int], num_microbatches: int) -> Order:
    """The order of a pass without backward: each rank's first stage, then its second."""
    num_ranks = len(set(stage_ranks))
    stages = range(len(stage_ranks))
    every = [(stage, number) for stage in stages for number in range(num_microbatches)]
    # All ranks follow one global order, so no rank waits for a message that is sent later.
    every.sort(key=lambda item: (item[0] // num_ranks, item[1], item[0]))
    return tuple(
        tuple(Action(Kind.FORWARD, *item) for item in every if stage_ranks[item[0]] == rank)
        for rank in range(num_ranks)
    )
