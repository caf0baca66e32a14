"""The executor of a pipeline: this rank's stages, run in the order of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titan_dit.execution.base import (
    NOTHING,
    Executor,
    Output,
    Shapes,
    Tensors,
    TokenLoss,
    first_of,
    loss_share,
)
from titan_dit.execution.torch_pipeline import Runtime, Stage
from titan_dit.models.base import Model, Stream
from titan_dit.objectives.base import Prepared
from titan_dit.parallel import fsdp


class PipelinedExecutor(Executor):
    """Runs this rank's stages of the pipeline along `mesh`."""

    def __init__(
        self,
        parts: Mapping[int, Model],
        mesh: DeviceMesh,
        order: Sequence[Sequence[object]],
        stage_ranks: Sequence[int],
        shapes: Shapes,
        loss: TokenLoss,
        microbatch_size: int,
        num_microbatches: int,
        device: torch.device,
    ) -> None:
        self.parts, self.mesh, self.stage_ranks = dict(parts), mesh, stage_ranks
        self.shapes, self.loss, self.device = shapes, loss, device
        self.microbatch_size = microbatch_size
        self.prepared: list[Prepared] = []
        self.last = len(stage_ranks) - 1
        stages = [
            Stage(
                part,
                index,
                len(stage_ranks),
                device,
                input_args=(shapes.given,) if index == 0 else shapes.stream,
                output_args=shapes.predictions if index == self.last else shapes.stream,
                group=mesh.get_group(),
            )
            for index, part in sorted(parts.items())
        ]
        self.runtime = Runtime(stages, order, num_microbatches, self.loss_of, shapes.first_input)

    def loss_of(self, output: Output, microbatch: int) -> Tensor:
        """This microbatch's share of the loss."""
        part = self.prepared[microbatch]
        loss = loss_share(self.loss(output, part.targets), part)
        # The gradient's factor becomes NaN with the loss, see `LocalExecutor.run`.
        return loss * (1 + 0 * loss.detach())

    def run(self, prepared: Prepared) -> Tensor:
        """See `Executor.step`. Ranks without the last stage return 0."""
        self.prepared = list(prepared.microbatches(self.microbatch_size))
        return self.runtime.step_microbatches(
            [part.inputs for part in self.prepared], [part.side_inputs for part in self.prepared]
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
        streams: dict[tuple[int, int], tuple[Stream, list[dist.Work]]] = {}
        sends: list[dist.Work] = []
        for stage, number in forward_order(self.stage_ranks, len(inputs)):
            if stage in self.parts:
                if stage == 0:
                    given: Any = inputs[number]
                else:
                    given, arriving = streams.pop((stage, number))
                    wait_for(arriving)
                out = self.parts[stage](given, side_inputs[number])
                if stage == self.last:
                    outputs.append(finish(out, number))
                elif stage + 1 in self.parts:
                    streams[stage + 1, number] = out, []
                else:
                    sends += [self.send(tensor, stage + 1) for tensor in out]
            elif stage + 1 in self.parts:
                streams[stage + 1, number] = self.receive(stage)
        wait_for(sends)
        for part in self.parts.values():
            fsdp.reshard(part)
        return self.broadcast_last(outputs, len(inputs), like)

    def global_rank(self, stage: int) -> int:
        """The global rank of a stage of this pipeline."""
        return dist.get_global_rank(self.mesh.get_group(), self.stage_ranks[stage])

    def send(self, tensor: Tensor, stage: int) -> dist.Work:
        """Start sending to the rank of a stage."""
        work = dist.isend(tensor.contiguous(), self.global_rank(stage), self.mesh.get_group())
        assert work is not None
        return work

    def receive(self, stage: int) -> tuple[Stream, list[dist.Work]]:
        """Start receiving the output stream of a stage on another rank."""
        stream = tuple(torch.empty_like(t, device=self.device) for t in self.shapes.stream)
        source, group = self.global_rank(stage), self.mesh.get_group()
        works = [dist.irecv(tensor, source, group) for tensor in stream]
        return stream, [work for work in works if work is not None]

    def broadcast_last(self, outputs: list[Tensor], count: int, like: Tensor) -> Tensor:
        """Broadcast the last stage's outputs to every rank of the pipeline."""
        shape = (count * like.shape[0], *like.shape[1:])
        whole = (
            torch.cat(outputs)
            if outputs
            else torch.empty(shape, dtype=like.dtype, device=self.device)
        )
        dist.broadcast(whole, self.global_rank(self.last), self.mesh.get_group())
        return whole


def forward_order(stage_ranks: Sequence[int], num_microbatches: int) -> list[tuple[int, int]]:
    """The order of (stage, microbatch) in which all ranks compute, send and receive outputs.

    NCCL runs the messages between two ranks one after another, in both directions. One global order
    makes both ranks post them in the same order, which prevents deadlocks.
    """
    num_ranks = len(set(stage_ranks))
    stages = range(len(stage_ranks))
    every = [(stage, number) for stage in stages for number in range(num_microbatches)]
    # The first stage of every rank, then the second: no rank is idle.
    return sorted(every, key=lambda item: (item[0] // num_ranks, item[1], item[0]))


def wait_for(works: Iterable[dist.Work]) -> None:
    """Wait for messages in flight."""
    for work in works:
        work.wait()
