"""What the first rank of a tp x cp group decides reaches the others, in sequence."""

import time

import torch.distributed as dist
from harness import on_ranks

from titan_dit.pipeline.run_time import Decisions
from titan_dit.pipeline.schedules.placement import pipeline_order
from titan_dit.ranks.failure import NetworkFailure

(ORDER,) = pipeline_order(
    "interleaved_zero_bubble", num_ranks=1, num_microbatches=70, virtual_stages=3
)


def received(decisions):
    """Every decision, in the sequence in which it came."""
    found = []
    while len(found) < len(ORDER):
        decisions.read()
        while (action := decisions.next_decision()) is not None:
            found.append(action)
        time.sleep(1e-3)
    return found


def in_groups(world):
    """The decisions of ranks 1 to 3, while rank 0 is alone; rank 2 ends first."""
    if world.rank == 0:
        alone = Decisions([0])
        alone.send(ORDER[0])
        alone.read()
        dist.barrier()
        dist.barrier()
        return alone.leads, alone.peers, alone.next_decision()
    decisions = Decisions([1, 2, 3])
    decisions.read()
    before = decisions.next_decision()
    dist.barrier()
    if decisions.leads:
        for action in ORDER:
            decisions.send(action)
        decisions.flush()  # They are more than the socket has room for.
    found = None if decisions.leads else received(decisions)
    if world.rank == 2:
        decisions.peers[0].socket.close()  # As a rank that is killed.
    dist.barrier()
    lost = ""
    if decisions.leads:
        try:
            decisions.read()
        except NetworkFailure as error:
            lost = str(error)
    if world.rank == 3:
        decisions.close()
    return decisions.leads, before, found, lost


def test_decisions_come_in_sequence_and_a_rank_that_has_ended_is_missed():
    first, leader, last, third = on_ranks(4, in_groups)
    assert first == (True, [], None)
    assert leader[:3] == (True, None, None)
    assert leader[3] == "Connection closed by peer: pipeline rank 1 has ended."
    assert last == third == (False, None, list(ORDER), "")
