"""The executor without a pipeline: gradient accumulation over microbatches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from titan_dit.execution.base import NOTHING, Executor, Tensors, TokenLoss, first_of, scaled
from titan_dit.objectives.base import Prepared
from titan_dit.parallel import fsdp


class LocalExecutor(Executor):
    """The whole model on this rank (its parameters may be sharded)."""

    def __init__(self, model: nn.Module, loss: TokenLoss, microbatch_size: int | None) -> None:
        self.model = model
        self.loss = loss
        self.microbatch_size = microbatch_size

    def run(self, prepared: Prepared, loss_scale: Tensor | None = None) -> Tensor:
        """See `Executor.step`. Gradients are reduced once, with the last microbatch."""
        parts = list(prepared.microbatches(self.microbatch_size))
        losses: list[Tensor] = []
        for number, part in enumerate(parts, start=1):
            if len(parts) > 1:
                fsdp.sync_gradients(self.model, enabled=number == len(parts))
            output = self.model(part.inputs, part.side_inputs)
            loss, factor = scaled(self.score(self.loss, output, part), loss_scale)
            losses.append(loss.detach())
            torch.autograd.backward(loss, factor)
        total = losses[0].float()
        for loss in losses[1:]:
            total += loss
        return total

    @torch.no_grad()
    def predict(self, inputs: Tensors, static: Tensors, context: Tensors = NOTHING) -> Tensor:
        """See `Executor.predict`."""
        rows = next(iter(inputs.values())).shape[0]
        size = self.microbatch_size or rows
        parts = []
        for first in range(0, rows, size):
            part = {name: value[first : first + size] for name, value in inputs.items()}
            own = {name: value[first : first + size] for name, value in context.items()}
            # A copy: the next microbatch overwrites the outputs of CUDA graphs.
            output = first_of(self.model(part, {**static, **own}))
            parts.append(output.to(torch.float32, copy=True))
        fsdp.reshard(self.model)
        return torch.cat(parts)

    @torch.no_grad()
    def evaluate(self, prepared: Prepared) -> Tensor:
        """See `Executor.evaluate`."""
        losses = [
            self.loss(self.model(part.inputs, part.side_inputs), part.targets)
            for part in prepared.microbatches(self.microbatch_size)
        ]
        fsdp.reshard(self.model)
        return torch.cat(losses)
