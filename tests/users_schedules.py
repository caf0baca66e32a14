"""Schedule classes as users of torch.distributed.pipelining write them."""

from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
    _Action,
    _ComputationType,
)

FORWARD, BACKWARD = _ComputationType.FORWARD, _ComputationType.FULL_BACKWARD


class Mine(ScheduleInterleaved1F1B):
    """torch's, under another name."""


class Folded(ScheduleZBVZeroBubble):
    """Two stages of a rank, placed as a V."""


class AllForward(PipelineScheduleSingle):
    """One stage of a rank: forwards, then backwards from the last microbatch on."""

    numbers = staticmethod(range)
    sends = 1

    def _step_microbatches(
        self, arg_mbs=None, kwarg_mbs=None, target_mbs=None, losses=None, *_, **__
    ):
        stage, count = self._stage, self._n_microbatches
        for number in self.numbers(count):
            self.wait(stage.get_fwd_recv_ops(number))
            output = stage.forward_one_chunk(number, arg_mbs[number], kwarg_mbs[number])
            self._maybe_compute_loss(stage, output, target_mbs, number)
            self.wait(stage.get_fwd_send_ops(number))
        for number in reversed(self.numbers(count)):
            self.wait(stage.get_bwd_recv_ops(number))
            stage.backward_one_chunk(number, loss=self._maybe_get_loss(stage, number))
            for _ in range(self.sends):
                self.wait(stage.get_bwd_send_ops(number))
        stage.perform_reduce_grad(1)

    @staticmethod
    def wait(operations):
        for operation in operations:
            operation.op(operation.tensor, operation.peer, operation.group).wait()


class Forgetful(AllForward):
    """Never runs the last microbatch."""

    numbers = staticmethod(lambda count: range(count - 1))


class Twice(AllForward):
    """Sends each gradient twice."""

    sends = 2


class Early(AllForward):
    """Sends before it has computed anything."""

    def _step_microbatches(self, *args, **kwargs):
        self._stage.get_fwd_send_ops(0)
        super()._step_microbatches(*args, **kwargs)


class Three(ScheduleInterleaved1F1B):
    """For three stages of a rank only."""

    def __init__(self, stages, n_microbatches, loss_fn=None):
        if len(stages) != 3:
            raise ValueError("three stages please")
        super().__init__(stages, n_microbatches, loss_fn=loss_fn)


class Silent(AllForward):
    """Sends no gradients."""

    sends = 0


class Placed(PipelineScheduleMulti):
    """Several stages of a rank; all ranks know the actions of all."""

    def __init__(self, stages, n_microbatches, loss_fn=None, **more):
        super().__init__(stages, n_microbatches, loss_fn=loss_fn, **more)
        self.pipeline_order = {rank: self.actions(rank) for rank in range(self.pp_group_size)}
        self._validate_and_set_stage_mapping(self.pipeline_order)

    def held(self, rank):
        return range(rank, self._num_stages, self.pp_group_size)

    def actions(self, rank):
        """Breadth first, with a bubble of one step for each rank before."""
        found = [None] * rank
        for stage in self.held(rank):
            found += [_Action(stage, FORWARD, number) for number in range(self._n_microbatches)]
        found += [None] * 2 * (self.pp_group_size - 1 - rank)
        for stage in reversed(self.held(rank)):
            found += [_Action(stage, BACKWARD, number) for number in range(self._n_microbatches)]
        return found


class Sideways(Placed):
    """The first half of the stages on the first rank, the others on the second one."""

    def held(self, rank):
        return range(2 * rank, 2 * rank + 2)


class Broken(AllForward):
    """Cannot be built."""

    def __init__(self, *args, **kwargs):
        raise RuntimeError("no schedule\ntoday")
