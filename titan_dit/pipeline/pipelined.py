"""The executor of a pipeline: this rank's stages, run in the order of a schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titan_dit.models.base import Model, Stream
from titan_dit.objectives.base import Prepared
from titan_dit.parallel import fsdp
from titan_dit.pipeline.base import Shapes, TokenLoss
from titan_dit.pipeline.runtime import Runtime, Stage


class PipelinedExecutor:
    """The stages of this rank among those of the ranks along `mesh`."""

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
                input_args=shapes.tokens if index == 0 else shapes.stream,
                output_args=shapes.prediction if index == self.last else shapes.stream,
                group=mesh.get_group(),
            )
            for index, part in sorted(parts.items())
        ]
        self.runtime = Runtime(stages, order, num_microbatches, self.loss_of)

    def loss_of(self, prediction: Tensor, microbatch: int) -> Tensor:
        """This microbatch's share of the loss."""
        part = self.prepared[microbatch]
        per_token = self.loss(prediction, part.targets)
        loss = (per_token * part.weight[:, None]).sum() / part.total_tokens
        # The gradient's factor becomes NaN with the loss, see `LocalExecutor.step`.
        return loss * (1 + 0 * loss.detach())

    def step(self, prepared: Prepared) -> Tensor:
        """See `Executor.step`. Only the ranks of the last stage have a loss; the others have 0."""
        self.prepared = list(prepared.microbatches(self.microbatch_size))
        inputs = [part.inputs for part in self.prepared]
        return self.runtime.step_microbatches(inputs, prepared.static)

    @torch.no_grad()
    def predict(self, inputs: Mapping[str, Tensor], static: Mapping[str, Tensor]) -> Tensor:
        """See `Executor.predict`: microbatches follow each other through the stages."""
        rows, size = inputs["tokens"].shape[0], self.microbatch_size
        # The last microbatch is filled up to the size that the stages expect.
        index = torch.arange(-(-rows // size) * size, device=self.device).clamp(max=rows - 1)
        microbatches = [
            {k: v[part] for k, v in inputs.items()} for part in torch.split(index, size)
        ]
        outputs: list[Tensor] = []
        here: dict[int, list[Stream]] = {0: microbatches}  # type: ignore[dict-item]
        sends = []
        for stage, part in sorted(self.parts.items()):
            for number in range(len(microbatches)):
                given = here[stage][number] if stage in here else self.receive(stage - 1)
                out = part(given, static)
                if stage == self.last:
                    outputs.append(out)
                elif self.stage_ranks[stage + 1] == self.rank:
                    here.setdefault(stage + 1, []).append(out)
                else:
                    sends += [self.send(tensor, stage + 1) for tensor in out]
            fsdp.reshard(part)
        for send in sends:
            send.wait()
        return self.share(outputs, len(microbatches))[:rows].float()

    @property
    def rank(self) -> int:
        """This rank's place along the pipeline."""
        return self.mesh.get_local_rank()

    def global_rank(self, stage: int) -> int:
        """The rank, among all, that holds a stage of this pipeline."""
        return dist.get_global_rank(self.mesh.get_group(), self.stage_ranks[stage])

    def send(self, tensor: Tensor, stage: int) -> dist.Work:
        """Begin to send to the rank of a stage."""
        work = dist.isend(tensor.contiguous(), self.global_rank(stage), self.mesh.get_group())
        assert work is not None
        return work

    def receive(self, stage: int) -> Stream:
        """The stream that comes out of a stage on another rank."""
        stream = tuple(torch.empty_like(t, device=self.device) for t in self.shapes.stream)
        for tensor in stream:
            dist.recv(tensor, self.global_rank(stage), self.mesh.get_group())
        return stream

    def share(self, outputs: list[Tensor], count: int) -> Tensor:
        """The last stage's predictions on every rank of the pipeline."""
        (like,) = self.shapes.prediction
        shape = (count * like.shape[0], *like.shape[1:])
        whole = (
            torch.cat(outputs)
            if outputs
            else torch.empty(shape, dtype=like.dtype, device=self.device)
        )
        dist.broadcast(whole, self.global_rank(self.last), self.mesh.get_group())
        return whole
