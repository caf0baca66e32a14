"""One stage of a pipeline: forward and backward of its microbatches, without communication."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from titan_dit.config.section import UserError
from titan_dit.execution.base import Output
from titan_dit.execution.split_backward import WeightHalf, backward_input
from titan_dit.models.base import Model, SideInputs, Stream
from titan_dit.parallel import fsdp

Gradients: TypeAlias = Sequence[Tensor] | None
"""Gradients of the floating-point tensors of a stage's output; None if the output is the loss."""


class Stage:
    """A part of the model on this rank. Frees what no later action of a microbatch needs."""

    def __init__(self, part: Model, index: int, num_stages: int, stream: Stream) -> None:
        self.part, self.index, self.stream = part, index, stream
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.kept: dict[int, tuple[Stream, Stream]] = {}
        """Microbatch -> (inputs, outputs), between its forward and its backward."""
        self.halves: dict[int, WeightHalf] = {}
        """Microbatch -> weight half of its backward, after `backward_input`."""
        self.postponed: dict[int, Gradients] = {}
        """First stage only: microbatch -> output gradients, until `backward_weight`."""

    @cached_property
    def accumulators(self) -> list[Callable[[], None]]:
        """See `fsdp.accumulators`; first read after the first forward."""
        return fsdp.accumulators(self.part)

    def forward(self, given: Mapping[str, Tensor] | Stream, side_inputs: SideInputs) -> Output:
        """The output of this stage; the first one takes named inputs, the others a stream."""
        out: Output = self.part(given, side_inputs)
        if self.is_last:
            return out
        self.check(out)
        return out

    def check(self, out: Output) -> None:
        """Raise UserError unless an output has the shapes and dtypes of the stream.

        The next rank receives into buffers of these shapes.
        """
        found = [(t.shape, t.dtype) for t in out]
        wanted = [(t.shape, t.dtype) for t in self.stream]
        if found != wanted:
            raise UserError(
                f"[model] stage {self.index} returns a stream of {shown(out)}, but the spec says "
                f"{shown(self.stream)}. Make `ModelSpec.stream` and the blocks agree."
            )

    def keep(self, microbatch: int, inputs: Stream, outputs: Stream) -> None:
        """Keep a microbatch for its backward; the output of the last stage is the loss."""
        self.kept[microbatch] = inputs, outputs

    def backward(self, microbatch: int, gradients: Gradients) -> Stream:
        """Full backward: returns the input gradients, accumulates those of the weights."""
        inputs, outputs, gradients = self.graph_of(microbatch, gradients)
        if outputs:  # A first stage whose parameters are all frozen has none.
            torch.autograd.backward(outputs, gradients)
        return with_zeros([tensor.grad for tensor in inputs], inputs)

    def backward_input(self, microbatch: int, gradients: Gradients) -> Stream:
        """Return the input gradients; `backward_weight` must follow."""
        if self.is_first:  # It has no input gradient: all its work is for the weights.
            self.postponed[microbatch] = gradients
            return ()
        inputs, outputs, gradients = self.graph_of(microbatch, gradients)
        parameters = self.part.parameters()
        found, self.halves[microbatch] = backward_input(outputs, gradients, inputs, parameters)
        return with_zeros(found, inputs)

    def backward_weight(self, microbatch: int) -> None:
        """Accumulate the gradients of the weights."""
        if self.is_first:
            self.backward(microbatch, self.postponed.pop(microbatch))
        else:
            self.halves.pop(microbatch).run()
            for accumulate in self.accumulators:
                accumulate()

    def graph_of(
        self, microbatch: int, gradients: Gradients
    ) -> tuple[Stream, list[Tensor], list[Tensor] | None]:
        """The differentiable inputs and outputs of a microbatch, and the outputs' gradients."""
        inputs, outputs = self.kept.pop(microbatch)
        learning = tuple(tensor for tensor in inputs if tensor.requires_grad)
        if gradients is None:
            return learning, list(outputs), None
        floating = [tensor for tensor in outputs if tensor.is_floating_point()]
        pairs = zip(floating, gradients, strict=True)
        used = [(tensor, gradient) for tensor, gradient in pairs if tensor.requires_grad]
        return learning, [tensor for tensor, _ in used], [gradient for _, gradient in used]


def with_zeros(gradients: Sequence[Tensor | None], inputs: Stream) -> Stream:
    """The gradients of a stage's inputs; an unused input has zeros."""
    pairs = zip(gradients, inputs, strict=True)
    return tuple(torch.zeros_like(t) if gradient is None else gradient for gradient, t in pairs)


def shown(stream: Output) -> str:
    """The shapes and dtypes of a stream, for an error message."""
    return ", ".join(f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in stream)
