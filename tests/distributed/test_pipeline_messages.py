"""Buffers and messages of pipeline ranks: freed after use; in one order on both sides."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from tiny import gradients, randomize, tiny_config

from titan_dit.execution.pipelined import forward_order
from titan_dit.execution.torch_pipeline import Buffers
from titan_dit.trainer import Trainer

MICROBATCHES = 8


def trainer_of(world, schedule, virtual_stages):
    config = tiny_config(
        model={"layers": 4},
        parallel={"pp": world.size},
        pipeline={"schedule": schedule, "virtual_stages": virtual_stages},
        training={"global_batch_size": MICROBATCHES, "microbatch_size": 1},
    )
    trainer = Trainer(config, world)
    randomize(trainer.parameters)
    return trainer


def most_buffers(world):
    """The most microbatches that a stage has buffers for during a step, and after it."""
    most, make = [0], Buffers.__missing__

    def counted(self, microbatch):
        made = make(self, microbatch)
        most[0] = max(most[0], len(self))
        return made

    trainer = trainer_of(world, "1f1b", 1)
    with mock.patch.object(Buffers, "__missing__", counted):
        gradients(trainer)
    stages = trainer.executor.runtime._stages
    kept = [len(stage.args_recv_info) for stage in stages]
    kept += [len(stage.grad_recv_info) for stage in stages]
    return most[0], kept


def test_a_rank_receives_into_as_many_buffers_as_it_has_microbatches_under_way():
    for most, kept in on_ranks(2, most_buffers):
        # Microbatch 0's is the template; one more is in use, another may be arriving.
        assert 2 <= most <= 3
        assert kept == [1, 1]


def messages_of_a_prediction(world, cases):
    """(source, target, bytes) of every message in the order of this rank, for each case."""
    found = []
    for case in cases:
        trainer, line = trainer_of(world, *case), []
        send, receive = dist.isend, dist.irecv

        def isend(tensor, dst, group, send=send, line=line):
            line.append((world.rank, dst, tensor.nbytes))
            return send(tensor, dst, group)

        def irecv(tensor, src, group, receive=receive, line=line):
            line.append((src, world.rank, tensor.nbytes))
            return receive(tensor, src, group)

        model = trainer.config.model
        inputs = {
            "tokens": torch.randn(3, *model.token_shape),
            "timestep": torch.rand(3),
            "labels": torch.arange(3),
        }
        with mock.patch.object(dist, "isend", isend), mock.patch.object(dist, "irecv", irecv):
            trainer.executor.predict(inputs, model.static(world.device))
        found.append(line)
    return found


def test_two_ranks_have_the_messages_of_a_prediction_in_the_same_line():
    """NCCL runs the messages of two ranks one after another, in both directions."""
    cases = [("1f1b", 1), ("interleaved_1f1b", 2), ("zbv_zero_bubble", 1)]
    first, second = on_ranks(2, messages_of_a_prediction, cases)
    for case, one, other in zip(cases, first, second, strict=True):
        assert one == other, case
        # Two tensors for each of three rows, over every boundary between the ranks.
        assert len(one) == 2 * 3 * {"1f1b": 1, "interleaved_1f1b": 3, "zbv_zero_bubble": 2}[case[0]]


@pytest.mark.parametrize("stage_ranks", [[0, 1], [0, 1, 0, 1], [0, 1, 2, 2, 1, 0], [0, 1, 2] * 3])
def test_every_stage_follows_the_one_before_it(stage_ranks):
    order = forward_order(stage_ranks, 3)
    assert len(set(order)) == len(order) == 3 * len(stage_ranks)
    for stage, number in order:
        if stage:
            assert order.index((stage - 1, number)) < order.index((stage, number))
