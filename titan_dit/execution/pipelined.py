"""The executor of a pipeline: this rank's stages, run in the order of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from titan_dit.execution.base import (
    NOTHING,
    Executor,
    Output,
    Shapes,
    Tensors,
    TokenLoss,
    first_of,
    scaled,
)
from titan_dit.execution.loop import Loop
from titan_dit.execution.planned import Planned
from titan_dit.execution.stage import Stage
from titan_dit.models.base import Model, SideInputs
from titan_dit.objectives.base import Prepared
from titan_dit.parallel import fsdp
from titan_dit.parallel.links import Links
from titan_dit.parallel.tied import TiedWeights
from titan_dit.schedules.action import Action, Kind, Order
from titan_dit.schedules.messages import Channels, channels
from titan_dit.schedules.moments import Mark, Moment, unmarked


class PipelinedExecutor(Executor):
    """Runs this rank's stages of a pipeline; `links` between the neighbours are open."""

    mark: Mark = staticmethod(unmarked)
    """Called at the moments of every pass, see `schedules/moments.py`."""

    def __init__(
        self,
        parts: Mapping[int, Model],
        links: Links,
        order: Order,
        stage_ranks: Sequence[int],
        shapes: Shapes,
        loss: TokenLoss,
        microbatch_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """`dtype`: the compute dtype, see `TiedWeights`."""
        self.links, self.order, self.stage_ranks = links, order, stage_ranks
        self.shapes, self.loss, self.device = shapes, loss, device
        self.microbatch_size = microbatch_size
        count = len(stage_ranks)
        self.stages = {
            index: Stage(part, index, count, shapes.stream) for index, part in sorted(parts.items())
        }
        self.channels = channels(order, stage_ranks)
        self.tied = TiedWeights(parts, stage_ranks, links, dtype)

    def run(self, prepared: Prepared, loss_scale: Tensor | None = None) -> Tensor:
        """See `Executor.step`. Ranks without the last stage return 0."""
        parts = list(prepared.microbatches(self.microbatch_size))
        losses: list[Tensor] = []

        def loss_of(output: Output, microbatch: int) -> Tensor:
            found = self.score(self.loss, output, parts[microbatch])
            loss, factor = scaled(found, loss_scale)
            losses.append(loss.detach())
            return with_factor(loss, factor)

        self.mark(Moment.STARTS, None)
        self.gather()
        for stage in self.stages.values():
            fsdp.hold_gradients(stage.part)
        self.learn([part.inputs for part in parts], [part.side_inputs for part in parts], loss_of)
        self.tied.add_gradients()
        self.mark(Moment.FINISHED, None)
        return sum(losses, torch.zeros((), device=prepared.weight.device))

    def gather(self) -> None:
        """Start to all-gather the weights of this rank's stages, at the start of every pass."""
        self.tied.fetch()
        for stage in self.stages.values():
            fsdp.gather(stage.part)

    def learn(
        self,
        inputs: Sequence[Mapping[str, Tensor]],
        side_inputs: Sequence[SideInputs],
        finish: Callable[[Output, int], Tensor],
    ) -> None:
        """Forward and backward of all microbatches; the gradients are reduced. See `Loop.run`."""
        self.perform(self.order, self.channels, inputs, side_inputs, finish)

    def perform(
        self,
        order: Order,
        sequences: Channels,
        inputs: Sequence[Mapping[str, Tensor]],
        side_inputs: Sequence[Mapping[str, Tensor]],
        finish: Callable[[Output, int], Tensor],
    ) -> None:
        """This rank's actions of an order; see `Loop.run`."""
        source = Planned(
            self.stage_ranks,
            sequences,
            self.links,
            self.shapes.stream,
            self.device,
            self.mark,
        )
        actions = source.actions(order[self.links.rank])
        loop = Loop(self.stages, len(self.stage_ranks), source, self.mark)
        # All replicas run the same order: they reduce a stage while others still compute.
        loop.run(actions, inputs, side_inputs, finish, reduce_gradients)

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
        self.perform(order, channels(order, self.stage_ranks), inputs, side_inputs, collect)
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
        mesh, source = self.links.mesh, self.links.global_rank(self.stage_ranks[-1])
        dist.broadcast(whole, source, mesh.get_group())
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
