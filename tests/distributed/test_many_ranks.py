"""A world of 64 ranks starts, steps, stops and gathers with few sockets per rank."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from harness import on_ranks

from titan_dit.optim.gradient_norm import clip_norm
from titan_dit.parallel.mesh import AxisSizes, Mesh
from titan_dit.ranks import open_files
from titan_dit.ranks.process_group import Ranks
from titan_dit.ranks.stop_request import Reason, StopRequest

pytestmark = pytest.mark.alone

RANKS, FILES = 64, 160
"""If every rank connects to every other, it needs about 170 for two groups of all ranks."""


def a_run(world):
    mesh = Mesh(AxisSizes(dp_replicate=8, dp_shard=8), "cpu")
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    with StopRequest(world.size, world.device) as stop:
        assert not stop.agreed()
        if world.rank == 5:
            os.kill(os.getpid(), signal.SIGUSR1)
            while not stop.asked:
                time.sleep(0.001)
        norm = clip_norm([parameter], 0.0, stop.flag())
        assert stop.agreed()
    losses = mesh.sum_loss(torch.ones(1))
    saved = sum(Ranks.with_own_group().gather(world.rank))
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    needed = open_files.needed(world.rank, world.size, "cpu")
    return norm.item(), losses.item(), stop.reason, saved, num_open <= needed


def test_sixty_four_ranks_do_with_few_files():
    expected = 8.0, 64.0, Reason.STOP, sum(range(RANKS)), True
    assert on_ranks(RANKS, a_run, files=FILES) == [expected] * RANKS
