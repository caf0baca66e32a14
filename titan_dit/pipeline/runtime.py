"""torch's pipeline runtime, given our orders. The only file that touches its private parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import stage as stage_module
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

from titan_dit.models.base import Model

KEYWORD = "static."
"""Before the names of static inputs, which every stage is given beside the stream."""


class Stage(PipelineStage):
    """torch's stage around a part of our model, which speaks of inputs, streams and static."""

    submod: Model

    def forward_maybe_with_nosync(self, *args: Tensor, **kwargs: Tensor) -> Any:
        """Called by torch with the first stage's tokens, or a stream, and our keywords."""
        static = {k.removeprefix(KEYWORD): v for k, v in kwargs.items() if k.startswith(KEYWORD)}
        inputs = {k: v for k, v in kwargs.items() if not k.startswith(KEYWORD)}
        out = self.submod({"tokens": args[0], **inputs} if self.is_first else args, static)
        if self.is_last:
            return out
        # What a stage only passes on is a view of its input, which torch cannot detach in place.
        return tuple(tensor.clone() if tensor._is_view() else tensor for tensor in out)


class Runtime(_PipelineScheduleRuntime):
    """Executes an order on this rank's stages: computes, sends, receives, reduces gradients."""

    def __init__(
        self,
        stages: Sequence[Stage],
        order: Sequence[Iterable[object]],
        num_microbatches: int,
        loss: Callable[[Tensor, int], Tensor],
    ) -> None:
        # The loss is divided by the step's tokens already: gradients are summed, not averaged.
        super().__init__(list(stages), num_microbatches, loss_fn=loss, scale_grads=False)  # type: ignore[no-untyped-call]
        self.loss = loss
        self.losses: dict[int, Tensor] = {}
        self.shapes_are_known = False
        actions = {r: [_Action.from_str(str(a)) for a in rank] for r, rank in enumerate(order)}
        self._prepare_schedule_with_comms(actions)

    def step_microbatches(
        self, inputs: Sequence[Mapping[str, Tensor]], static: Mapping[str, Tensor]
    ) -> Tensor:
        """Forward and backward of every microbatch; their losses' sum, 0 off the last stage."""
        self.losses.clear()
        for stage in self._stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        others = [{k: v for k, v in part.items() if k != "tokens"} for part in inputs]
        shared = {KEYWORD + name: value for name, value in static.items()}
        self._step_microbatches(
            [(part["tokens"],) for part in inputs],
            [part | shared for part in others],
            list(range(len(inputs))),
            return_outputs=False,
        )
        device = inputs[0]["tokens"].device
        zero = torch.zeros((), device=device)
        return sum((loss.detach() for loss in self.losses.values()), zero)

    def trust_shapes(self) -> None:
        """Take the stages' shapes as given, for ranks that cannot speak with the others."""
        self.shapes_are_known = True

    def _warmup_p2p(self, stages: Any, has_backward: bool, p2p_done: bool) -> None:
        """In torch 2.13 the ranks vote here on whether all of them know their shapes."""
        if not self.shapes_are_known:
            super()._warmup_p2p(stages, has_backward, p2p_done)
            return
        mode: Any = getattr(stage_module, "InferenceMode", None)  # Not in torch 2.11.
        for stage in stages:
            stage._inference_mode = mode.STATIC

    @property
    def receive_buffers(self) -> list[Tensor]:
        """What this rank's stages receive into: torch keeps one set for every microbatch."""
        stages: Sequence[Any] = self._stages
        tables = (t for stage in stages for t in (stage.args_recv_info, stage.grad_recv_info))
        infos = (info for table in tables for of_one in table.values() for info in of_one)
        buffers = (getattr(info, "buffer", None) for info in infos)
        return [buffer for buffer in buffers if buffer is not None]

    # torch keeps losses in a list and finds them by position: wrong as soon as microbatches do not
    # finish in order. Kept by number instead.

    def _maybe_compute_loss(
        self, stage: Any, output: Any, target_mbs: Any, mb_index: int, loss_kwargs: Any = None
    ) -> None:
        if stage.is_last:
            self.losses[mb_index] = self.loss(output, mb_index)

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> Tensor | None:
        return self.losses[mb_index] if stage.is_last else None

    def _update_losses(self, stages: Any, losses: Any) -> None:
        """Nothing: `losses` has them."""
