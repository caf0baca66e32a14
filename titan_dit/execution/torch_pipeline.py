"""Run our pipeline orders on torch's runtime. Only this file uses its private API."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import stage as stage_module
from torch.distributed.pipelining.schedules import _Action, _batch_p2p, _PipelineScheduleRuntime

from titan_dit.models.base import Model

KEYWORD = "side."
"""Prefix of the side inputs' names, which torch passes as keywords."""


class Buffers(dict[int, tuple[Any, ...]]):
    """Receive buffers by microbatch; allocated on first use, in the shapes of microbatch 0's."""

    def __missing__(self, microbatch: int) -> tuple[Any, ...]:
        if microbatch == 0:
            raise KeyError(microbatch)
        self[microbatch] = tuple(self.another(info) for info in self[0])
        return self[microbatch]

    @staticmethod
    def another(info: Any) -> Any:
        """Copy torch's record of one tensor; if it has a buffer, the copy gets its own."""
        made = copy.copy(info)
        buffer = getattr(info, "buffer", None)
        if buffer is not None:
            made.buffer = torch.empty_like(buffer).requires_grad_(buffer.requires_grad)
        return made

    def release(self, microbatch: int) -> None:
        """Free a buffer after use; microbatch 0's stays as the template."""
        if microbatch:
            self.pop(microbatch, None)


class Stage(PipelineStage):
    """torch's pipeline stage around one part of a `Model`.

    `first_input` (set by the runtime) names the input that torch passes by position.

    torch keeps a receive buffer per microbatch for the whole run, and sent tensors until the end of
    a step. Here both are freed after use: memory grows with the depth of the pipeline, not with the
    number of microbatches. gloo never reports a send as complete: on a CPU, sent tensors stay until
    the end of the step.
    """

    submod: Model
    first_input: str
    args_recv_info: Buffers
    grad_recv_info: Buffers

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.args_recv_info, self.grad_recv_info = Buffers(), Buffers()
        self.sends: list[dist.Work] = []

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        return super()._prepare_forward_infra(1, *args, **kwargs)

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        made = super()._prepare_backward_infra(1, *args, **kwargs)
        self.chunks = num_microbatches
        return made

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Called by torch for one microbatch; frees its receive buffer: torch caches the input."""
        out = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self.args_recv_info.release(fwd_chunk_id)
        return out

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Called by torch for one microbatch."""
        out = super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self.grad_recv_info.release(bwd_chunk_id)
        return out

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Called by torch for the outputs of one microbatch."""
        return self.send(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Called by torch for the input gradients of one microbatch."""
        return self.send(super().get_bwd_send_ops(bwd_chunk_id))

    def send(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        """Start sending here, so that completed sends can be freed; torch gets nothing to send."""
        self.sends = [work for work in self.sends if not work.is_completed()]
        # As torch would: both ends of a message must use the same call.
        self.sends += _batch_p2p(ops)
        return []

    def finish_sends(self) -> None:
        """Wait for the sends in flight."""
        while self.sends:
            self.sends.pop().wait()

    def forward_maybe_with_nosync(self, *args: Tensor, **kwargs: Tensor) -> Any:
        """Called by torch with the first stage's input or a stream, and with our keywords."""
        side = {k.removeprefix(KEYWORD): v for k, v in kwargs.items() if k.startswith(KEYWORD)}
        inputs = {k: v for k, v in kwargs.items() if not k.startswith(KEYWORD)}
        out = self.submod({self.first_input: args[0], **inputs} if self.is_first else args, side)
        if self.is_last:
            return out
        # A tensor that passes through is a view of its input, which torch cannot detach in place.
        return tuple(tensor.clone() if tensor._is_view() else tensor for tensor in out)


class Runtime(_PipelineScheduleRuntime):
    """Runs a pipeline order on this rank's stages: computes, sends, receives, reduces gradients."""

    def __init__(
        self,
        stages: Sequence[Stage],
        order: Sequence[Iterable[object]],
        num_microbatches: int,
        loss: Callable[[Tensor, int], Tensor],
        first_input: str,
    ) -> None:
        # The loss is divided by the step's tokens already: gradients are summed, not averaged.
        super().__init__(list(stages), num_microbatches, loss_fn=loss, scale_grads=False)  # type: ignore[no-untyped-call]
        self.loss, self.first_input = loss, first_input
        for stage in stages:
            stage.first_input = first_input
        self.losses: dict[int, Tensor] = {}
        self.shapes_are_known = False
        actions = {r: [_Action.from_str(str(a)) for a in rank] for r, rank in enumerate(order)}
        self._prepare_schedule_with_comms(actions)

    def step_microbatches(
        self, inputs: Sequence[Mapping[str, Tensor]], side_inputs: Sequence[Mapping[str, Tensor]]
    ) -> Tensor:
        """Forward and backward of every microbatch; the sum of losses, 0 without the last stage.

        `side_inputs`: one `models.base.SideInputs` per microbatch.
        """
        self.losses.clear()
        for stage in self._stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        name = self.first_input
        others = [{k: v for k, v in part.items() if k != name} for part in inputs]
        keywords = [{KEYWORD + k: v for k, v in one.items()} for one in side_inputs]
        self._step_microbatches(
            [(part[name],) for part in inputs],
            [part | side for part, side in zip(others, keywords, strict=True)],
            list(range(len(inputs))),
            return_outputs=False,
        )
        stages: Sequence[Any] = self._stages
        for stage in stages:
            stage.finish_sends()
        device = inputs[0][name].device
        zero = torch.zeros((), device=device)
        return sum((loss.detach() for loss in self.losses.values()), zero)

    def skip_shape_exchange(self) -> None:
        """Skip the exchange of shapes between stages, for a dry run without other ranks."""
        self.shapes_are_known = True

    def _warmup_p2p(self, stages: Any, has_backward: bool, p2p_done: bool) -> None:
        """In torch 2.13 the ranks check here that all know their shapes; a dry run skips it."""
        if not self.shapes_are_known:
            super()._warmup_p2p(stages, has_backward, p2p_done)
            return
        mode: Any = getattr(stage_module, "InferenceMode", None)  # Not in torch 2.11.
        for stage in stages:
            stage._inference_mode = mode.STATIC

    # torch indexes a list of losses by position, which is wrong if microbatches finish out of
    # order. Here the index is the microbatch's number.

    def _maybe_compute_loss(
        self, stage: Any, output: Any, target_mbs: Any, mb_index: int, loss_kwargs: Any = None
    ) -> None:
        if stage.is_last:
            self.losses[mb_index] = self.loss(output, mb_index)

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> Tensor | None:
        return self.losses[mb_index] if stage.is_last else None

    def _update_losses(self, stages: Any, losses: Any) -> None:
        """Do nothing: `self.losses` holds the losses, the argument is not used."""
