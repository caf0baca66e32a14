import itertools
import math
from types import SimpleNamespace

import pytest
from known import SCHEDULES, SPLIT_BACKWARD, V_SHAPED
from order_text import from_csv, parse
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

from titan_dit.pipeline.schedules.placement import pipeline_order, stages_per_rank
from titan_dit.pipeline.schedules.schedule import Kind, inputs_of, output_of, peak_activations
from titan_dit.pipeline.schedules.simulator import jitter_factor, simulate, stage_costs

GRID = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 4, 8, 16, 24)]


def idle(schedule, p, m, v=1, **costs):
    order = pipeline_order(schedule, num_ranks=p, num_microbatches=m, virtual_stages=v)
    stages = p * stages_per_rank(schedule, v)
    return simulate(order, stage_costs([1.0] * stages, **costs)).idle_fraction


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("backward", [0.5, 1.0, 2.3])
def test_gpipe_and_1f1b_are_idle_as_the_papers_say(schedule, backward):
    for p, m in GRID:
        share = idle(schedule, p, m, forward=1.0, backward_input=backward, backward_weight=0.1)
        assert share == pytest.approx((p - 1) / (m + p - 1)), (p, m)


def test_breadth_first_is_idle_as_its_docstring_says():
    for (p, m), v in itertools.product(GRID, (1, 2, 3)):
        if m >= p:
            assert idle("looped_bfs", p, m, v) == pytest.approx((p - 1) / (v * m + p - 1)), (p, m)


@pytest.mark.parametrize("backward", [0.5, 1.0, 2.3])
def test_interleaving_divides_the_idle_time_by_the_virtual_stages(backward):
    for (p, m), v in itertools.product(GRID, (1, 2, 3)):
        if m % p == 0:
            share = idle("interleaved_1f1b", p, m, v, backward_input=backward, backward_weight=0.1)
            assert share == pytest.approx((p - 1) / (v * m + p - 1)), (p, m, v)


def test_zero_bubble_is_idle_for_a_forward_per_rank():
    for (p, m), v in itertools.product(GRID, (1, 2, 3)):
        if m % p == 0:
            share = idle("interleaved_zero_bubble", p, m, v)
            assert share == pytest.approx((p - 1) / (3 * v * m + p - 1)), (p, m, v)


@pytest.mark.parametrize("schedule", V_SHAPED)
def test_v_schedules_are_idle_only_until_the_first_forward_arrives(schedule):
    for p, m in GRID:
        if m >= 2 * p:
            assert idle(schedule, p, m) == pytest.approx((p - 1) / (6 * m + p - 1)), (p, m)


@pytest.mark.parametrize("schedule", SPLIT_BACKWARD)
def test_zero_bubble_schedules_are_idle_for_less_than_half_of_1f1b(schedule):
    for p, m in GRID:
        if m >= 2 * p > 2 and m % p == 0:
            assert idle(schedule, p, m) < 0.5 * idle("1f1b", p, m), (p, m)


def test_ranks_of_zbv_never_wait_once_they_have_begun():
    order = pipeline_order("zbv_zero_bubble", num_ranks=4, num_microbatches=7)
    timeline = simulate(order, stage_costs([1.0] * 8)).timeline
    for rank in range(4):
        spans = [span for span in timeline if span.rank == rank]
        assert all(a.end == b.start for a, b in itertools.pairwise(spans))


def test_stages_of_gpipe_may_be_uneven():
    """Closed form: every stage once, plus the slowest for each further microbatch."""
    layers = [2.0, 5.0, 3.0, 1.0]
    order = pipeline_order("gpipe", num_ranks=4, num_microbatches=6)
    end = simulate(order, stage_costs(layers, forward=1.0, backward_input=1, backward_weight=1))
    assert end.makespan == pytest.approx(3 * (sum(layers) + 5 * max(layers)))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_slowest_stage_bounds_the_step_from_below(schedule):
    order = pipeline_order(schedule, num_ranks=4, num_microbatches=8)
    stages = 4 * stages_per_rank(schedule)
    even = simulate(order, stage_costs([3.0] * stages)).makespan
    heavy = simulate(order, stage_costs([3.0] * stages, embed=1.0, head=2.0))
    assert heavy.makespan > even
    assert heavy.makespan >= max(heavy.busy) >= 8 * 3 * 5.0
    assert sum(heavy.busy) == pytest.approx(8 * 3 * (3.0 * stages + 3.0))


def test_costs_of_embed_and_head_fall_on_the_ends():
    costs = stage_costs([2, 2, 1], forward=1, backward_input=2, backward_weight=3, embed=1, head=4)
    assert [costs[Kind.FORWARD, stage] for stage in range(3)] == [3, 2, 5]
    assert costs[Kind.BACKWARD, 0] == 15 == costs[Kind.BACKWARD_INPUT, 0] + 9
    assert costs[Kind.BACKWARD_WEIGHT, 2] == 15


def test_every_message_down_and_up_an_empty_pipeline_takes_its_latency():
    order = pipeline_order("1f1b", num_ranks=4, num_microbatches=1)
    costs = stage_costs([1.0] * 4)
    assert simulate(order, costs, latency=0.5).makespan == pytest.approx(4 * 3 + 6 * 0.5)
    links = {(0, 1): 1.0, (1, 2): 2.0, (2, 3): 4.0, (3, 2): 8.0, (2, 1): 16.0, (1, 0): 32.0}
    far = simulate(order, costs, latency=lambda source, target: links[source, target])
    assert far.makespan == pytest.approx(4 * 3 + 63)


def test_stages_on_one_rank_send_no_messages():
    order = pipeline_order("zbv_zero_bubble", num_ranks=1, num_microbatches=3)
    end = simulate(order, stage_costs([1.0, 1.0]), latency=100.0)
    assert end.makespan == 18
    assert end.idle == (0,)


def test_messages_do_not_overtake_each_other():
    order = from_csv("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n")
    travel = iter([10.0, 1.0, 0.0, 0.0])
    end = simulate(order, stage_costs([1.0, 1.0]), latency=lambda source, target: next(travel))
    starts = {str(span.action): span.start for span in end.timeline}
    assert (starts["1F0"], starts["1F1"]) == (11, 12)
    travel = iter([10.0, 1.0, 0.0, 0.0])
    free = stage_costs([1.0, 0.0])
    end = simulate(order, free, latency=lambda source, target: next(travel))
    starts = {str(span.action): span.start for span in end.timeline}
    assert (starts["1F0"], starts["1F1"]) == (11, 11)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_order_ends_under_random_latencies_and_costs(schedule):
    for seed, (p, m) in enumerate(itertools.product((1, 2, 4), (8, 12, 16))):
        order = pipeline_order(schedule, num_ranks=p, num_microbatches=m)
        costs = stage_costs([1.0] * p * stages_per_rank(schedule))
        end = simulate(order, costs, latency=2.0, jitter=1.5, seed=seed)
        assert len(end.timeline) == sum(map(len, order))
        assert math.isfinite(end.makespan)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_timeline_keeps_to_the_order_and_to_its_inputs(schedule):
    order = pipeline_order(schedule, num_ranks=3, num_microbatches=6)
    stages = 3 * stages_per_rank(schedule)
    end = simulate(order, stage_costs([1.0] * stages), latency=0.3, jitter=0.5, seed=7)
    made = {}
    for span in end.timeline:
        kind = Kind.BACKWARD_INPUT if span.action.kind is Kind.BACKWARD else span.action.kind
        made[span.action._replace(kind=kind)] = span
    for rank, actions in enumerate(order):
        spans = [span for span in end.timeline if span.rank == rank]
        assert [span.action for span in spans] == list(actions)
        assert all(a.end <= b.start for a, b in itertools.pairwise(spans))
        assert end.busy[rank] == pytest.approx(sum(span.end - span.start for span in spans))
        assert end.idle[rank] == pytest.approx(end.makespan - end.busy[rank])
    for span in end.timeline:
        for message in inputs_of(span.action, stages):
            assert made[message].end <= span.start
            assert made[message].rank == span.rank or made[message].end < span.start
    assert end.peak_activations == peak_activations(order)
    assert end.idle_fraction == pytest.approx(sum(end.idle) / (3 * end.makespan))


def test_a_slow_rank_slows_the_step_by_its_share():
    order = pipeline_order("1f1b", num_ranks=4, num_microbatches=200)
    costs = stage_costs([1.0] * 4)
    even = simulate(order, costs)
    slow = simulate(order, costs, slowness=[1.0, 1.0, 1.5, 1.0])
    assert slow.busy[2] == pytest.approx(1.5 * even.busy[2])
    assert slow.makespan / even.makespan == pytest.approx(1.5, rel=0.02)


def test_jitter_is_repeated_by_its_seed_and_has_mean_one():
    order = pipeline_order("1f1b", num_ranks=2, num_microbatches=4)
    costs = stage_costs([1.0] * 2)
    runs = [simulate(order, costs, latency=0.1, jitter=0.3, seed=seed) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    draws = [jitter_factor(0.5, 0, str(i)) for i in range(4000)]
    assert sum(draws) / len(draws) == pytest.approx(1, abs=0.03)
    logs = [math.log(draw) for draw in draws]
    mean = sum(logs) / len(logs)
    assert sum((x - mean) ** 2 for x in logs) / len(logs) == pytest.approx(0.25, rel=0.1)


def test_two_orders_get_the_same_jitter():
    costs = stage_costs([1.0] * 4)
    busy = [
        simulate(
            pipeline_order(schedule, num_ranks=4, num_microbatches=8), costs, jitter=0.3, seed=3
        ).busy
        for schedule in ("gpipe", "1f1b")
    ]
    assert busy[0] == pytest.approx(busy[1])


def test_an_order_that_waits_for_itself_is_refused():
    with pytest.raises(ValueError, match=r"Deadlock: .* rank 0 at 0B0"):
        simulate(from_csv("0B0,0F0\n"), stage_costs([1.0]))


def test_pairs_of_dualpipev_are_shorter_one_after_the_other():
    """torch's OVERLAP_F_B waits for both inputs and sends both outputs when both are computed."""
    p, m = 4, 8
    plan = SimpleNamespace(pp_group_size=p, _n_microbatches=m)
    generate = ScheduleDualPipeV._calculate_single_rank_operations
    rows = [[a.sub_actions or (a,) for a in generate(plan, rank)] for rank in range(p)]
    ended, free = {}, [0] * p
    while any(rows):
        for rank, row in enumerate(rows):
            parts = [parse(str(part)) for part in row[0]] if row else []
            inputs = {n for part in parts for n in inputs_of(part, 2 * p)} - set(
                map(output_of, parts)
            )
            if parts and ended.keys() >= inputs:
                start = max([free[rank], *(ended[n] for n in inputs)])
                free[rank] = start + sum(2 if a.kind is Kind.BACKWARD else 1 for a in parts)
                ended.update((output_of(part), free[rank]) for part in parts)
                row.pop(0)
    order = pipeline_order("dualpipev", num_ranks=p, num_microbatches=m)
    assert (max(free), simulate(order, stage_costs([1.0] * 8)).makespan) == (54, 51)
