"""No order hangs or waits if NCCL runs the messages of a group one after another."""

import itertools

import pytest
from known import INTERLEAVED, SCHEDULES

from titan_dit.config.section import UserError
from titan_dit.pipeline.nccl_queues import LATENCY, makespan, planned_calls
from titan_dit.pipeline.schedules.placement import pipeline_order, rank_of_stage, stages_per_rank
from titan_dit.pipeline.schedules.schedule import channels, neighbours
from titan_dit.pipeline.schedules.simulator import simulate, stage_costs

# Pipeline ranks, microbatches, stages of a rank.
SMALL = (2, 3, 4), (1, 4, 8), (1, 2)
WHOLE = (2, 3, 4, 6, 8), (1, 2, 3, 4, 6, 8, 12, 16, 24), (1, 2, 3)


def orders(schedule, grid):
    """(order, rank of each stage, costs) wherever the schedule supports the sizes."""
    for p, m, v in itertools.product(*grid):
        if v > 1 and schedule not in INTERLEAVED:
            continue
        try:
            order = pipeline_order(schedule, num_ranks=p, num_microbatches=m, virtual_stages=v)
        except UserError:
            continue
        count = p * stages_per_rank(schedule, v)
        places = [rank_of_stage(schedule, stage, p) for stage in range(count)]
        yield order, places, stage_costs([1.0] * count)


def connects(order, stage_ranks, first=()):
    """Whether all groups connect. The host waits at the first use of a group for its other end.

    `first`: the pairs of ranks that connect before the first action, in sequence.
    """
    ends = {m: pair for pair, sent in channels(order, stage_ranks).items() for m in sent}
    hosts = []
    for rank, calls in enumerate(planned_calls(order, stage_ranks)):
        used = [ends[call.action] for call in calls if call.what != "run"]
        hosts.append(list(dict.fromkeys([pair for pair in first if rank in pair] + used)))
    progress = True
    while progress:
        heads = [host[0] for host in hosts if host]
        ready = {pair for pair in heads if heads.count(pair) == 2}
        for host in hosts:
            if host and host[0] in ready:
                host.pop(0)
        progress = bool(ready)
    return not any(hosts)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("grid", [SMALL, pytest.param(WHOLE, marks=pytest.mark.long)])
def test_no_order_hangs_and_each_takes_as_long_as_simulated(schedule, grid):
    found = list(orders(schedule, grid))
    assert len(found) >= 3
    for order, places, costs in found:
        # `P2PGroups.open` connects the groups in this sequence.
        assert connects(order, places, sorted(neighbours(places)))
        took = makespan(planned_calls(order, places), places, costs)
        assert took == pytest.approx(simulate(order, costs, latency=LATENCY).makespan)


def one_for_each_rank(rank, source, target):
    """Queues of one group for the whole pipeline before torch 2.13."""
    return rank


def test_a_single_queue_for_a_rank_would_hang():
    order, places, costs = next(orders("1f1b", ((2,), (4,), (1,))))
    calls = planned_calls(order, places)
    assert makespan(calls, places, costs) is not None
    assert makespan(calls, places, costs, one_for_each_rank) is None


def test_groups_that_connect_at_their_first_message_would_hang():
    order, places, _ = next(orders("1f1b", ((2,), (4,), (1,))))
    assert not connects(order, places)
    assert connects(order, places, sorted(neighbours(places)))
