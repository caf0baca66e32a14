"""torch's own pipeline runtime on the stages of a trainer: the oracle of our loop."""

import torch
from tiny import torch_rng, whole
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

from titan_dit.build import shapes_of
from titan_dit.pipeline.pipelined import with_factor

KEYWORD = "side."


class TorchStage(PipelineStage):
    """torch passes the first input by position, the others and ours by keyword."""

    def forward_maybe_with_nosync(self, *args, **kwargs):
        side = {k.removeprefix(KEYWORD): v for k, v in kwargs.items() if k.startswith(KEYWORD)}
        inputs = {k: v for k, v in kwargs.items() if not k.startswith(KEYWORD)}
        out = self.submod({self.first_input: args[0], **inputs} if self.is_first else args, side)
        if self.is_last:
            return out
        return tuple(tensor.clone() if tensor._is_view() else tensor for tensor in out)


class ByNumber:
    """Losses by microbatch: torch's list is wrong if microbatches finish out of order."""

    def _maybe_compute_loss(self, stage, output, target_mbs, mb_index, loss_kwargs=None):
        if stage.is_last:
            self.losses[mb_index] = self.share(output, mb_index)

    def _maybe_get_loss(self, stage, mb_index):
        return self.losses[mb_index] if stage.is_last else None

    def _update_losses(self, stages, losses):
        """The losses are read from `self.losses`."""


class OurOrder(ByNumber, _PipelineScheduleRuntime):
    """torch's runtime on an order of ours."""

    def __init__(self, stages, order, num_microbatches):
        super().__init__(stages, num_microbatches, loss_fn=torch.sum, scale_grads=False)
        actions = {r: [_Action.from_str(str(a)) for a in rank] for r, rank in enumerate(order)}
        self._prepare_schedule_with_comms(actions)


class TorchsOrder(ByNumber, ScheduleInterleaved1F1B):
    """torch's runtime on its own order."""


def first_input_of(plan):
    """The name of the first stage's positional input, and that input on the meta device."""
    name, spec = next(iter(plan.spec.inputs.items()))
    dims = enumerate(spec.shape)
    shape = [n // plan.sizes.cp if dim == spec.token_dim else n for dim, n in dims]
    dtype = spec.dtype or plan.dtype
    return name, torch.empty(plan.microbatch_size, *shape, dtype=dtype, device="meta")


def gradients_in_torch(trainer, own_order=False):
    """Loss and gradients of the next batch as torch's runtime computes them."""
    plan, executor = trainer.plan, trainer.executor
    shapes, last = shapes_of(plan), plan.num_stages - 1
    first, first_input = first_input_of(plan)
    stages = []
    for index, stage in executor.stages.items():
        made = TorchStage(
            stage.part,
            index,
            plan.num_stages,
            executor.device,
            input_args=(first_input,) if index == 0 else shapes.stream,
            output_args=shapes.predictions if index == last else shapes.stream,
            group=executor.p2p.mesh.get_group(),
        )
        made.first_input = first
        stages.append(made)
    count = plan.num_microbatches
    if own_order:
        runtime = TorchsOrder(stages, count, loss_fn=torch.sum, scale_grads=False)
    else:
        runtime = OurOrder(stages, executor.order, count)
    batch = next(trainer.batches())
    prepared = trainer.objective.prepare(batch, torch_rng(trainer, batch))
    parts = list(prepared.microbatches(plan.microbatch_size))
    runtime.losses = {}
    runtime.share = lambda output, number: with_factor(
        *executor.score(executor.loss, output, parts[number])
    )
    for stage in stages:
        stage.has_backward = True
        stage.clear_runtime_states()
    keywords = [
        {k: v for k, v in part.inputs.items() if k != first}
        | {KEYWORD + k: v for k, v in part.side_inputs.items()}
        for part in parts
    ]
    args = [(part.inputs[first],) for part in parts]
    runtime._step_microbatches(args, keywords, list(range(count)), return_outputs=False)
    found = {name: whole(p.grad) for name, p in trainer.parameters.items()}
    for parameter in trainer.parameters.values():
        parameter.grad = None
    loss = sum((loss.detach() for loss in runtime.losses.values()), torch.zeros(()))
    return trainer.mesh.sum_loss(loss).item(), found
