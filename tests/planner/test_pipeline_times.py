"""Played pipelines against the simulator of schedules."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from tiny import tiny_config

from titan_dit.pipeline.schedules import files
from titan_dit.pipeline.schedules.placement import pipeline_order, stages_per_rank
from titan_dit.pipeline.schedules.schedule import Kind
from titan_dit.pipeline.schedules.simulator import simulate
from titan_dit.plan import resolve
from titan_dit.planner import pipeline
from titan_dit.planner.pipeline import Durations, compiled, pass_times, play, program

SCHEDULES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved_1f1b", 3),
    ("interleaved_zero_bubble", 2),
    ("zbv_zero_bubble", 1),
    ("dualpipev", 1),
]


def random_costs(draw, num_stages, spread):
    """Costs of every kind and stage, and of a full backward their sum."""
    costs = {}
    for stage in range(num_stages):
        forward, first, second = (draw.uniform(1 - spread, 1 + spread) for _ in range(3))
        costs[Kind.FORWARD, stage] = forward
        costs[Kind.BACKWARD_INPUT, stage], costs[Kind.BACKWARD_WEIGHT, stage] = first, second
        costs[Kind.BACKWARD, stage] = first + second
    return costs


def random_latency(draw, num_ranks):
    """Slow and fast links."""
    ranks = range(num_ranks)
    return {(a, b): draw.choice((0.0, 0.05, 0.3)) for a in ranks for b in ranks}


@pytest.mark.parametrize(("schedule", "stages"), SCHEDULES)
def test_a_played_order_ends_when_the_simulated_one_does(schedule, stages):
    draw = random.Random(schedule)
    for num_ranks, rounds in ((2, 3), (3, 4), (4, 2)):
        count = num_ranks * rounds
        order = pipeline_order(
            schedule, num_ranks=num_ranks, num_microbatches=count, virtual_stages=stages
        )
        num_stages = num_ranks * stages_per_rank(schedule, stages)
        costs, latency = random_costs(draw, num_stages, 0.8), random_latency(draw, num_ranks)
        found = play(compiled(order), num_ranks, Durations(costs=costs, latency=latency))
        wanted = simulate(order, costs, latency=lambda *pair, own=latency: own[pair])
        assert found.makespan == pytest.approx(wanted.makespan)
        assert found.busy == pytest.approx(wanted.busy)
        last = [0.0] * num_ranks
        for span in wanted.timeline:
            last[span.rank] = span.end
        assert found.ends == pytest.approx(last)


def test_what_follows_a_stage_delays_its_rank_but_not_its_message():
    costs = dict.fromkeys([(kind, stage) for kind in Kind for stage in (0, 1)], 1.0)
    steps = program("1f1b", 2, 1, 2)
    # 1: F0 F1 . B0 . B1; the last backward of stage 1 ends at 5.
    assert play(steps, 2, Durations(costs=costs)).ends == (6.0, 5.0)
    assert play(steps, 2, Durations(costs=costs, after={1: 9.0})).ends == (6.0, 14.0)
    assert play(steps, 2, Durations(costs=costs, after={0: 9.0})).ends == (15.0, 5.0)
    # Rank 1 waits for its first input anyway.
    assert play(steps, 2, Durations(costs=costs, ready=(0.0, 1.0))).ends == (6.0, 5.0)
    assert play(steps, 2, Durations(costs=costs, ready=(0.5, 0.0))).ends == (6.5, 5.5)


def test_a_rank_sends_one_message_after_another():
    costs = {(kind, stage): 1.0 for kind in Kind for stage in (0, 1)}
    slow = dict.fromkeys([(0, 1), (1, 0)], 5.0)
    steps = program("gpipe", 2, 1, 4)
    # Four messages of 5 s after the first forward, four after the first backward.
    found = play(steps, 2, Durations(costs=costs, latency=slow, in_turn=True))
    assert found.ends == (1 + 4 * 5 + 1 + 1 + 4 * 5 + 1, 1 + 4 * 5 + 1 + 4)
    # With links for all at once.
    assert play(steps, 2, Durations(costs=costs, latency=slow)).makespan == 4 + 5 + 1 + 4 + 5 + 1


@pytest.mark.parametrize(("schedule", "stages"), SCHEDULES)
def test_no_pass_is_faster_than_the_messages_of_a_rank(schedule, stages):
    draw = random.Random(schedule)
    num_ranks, count = 4, 8
    order = pipeline_order(
        schedule, num_ranks=num_ranks, num_microbatches=count, virtual_stages=stages
    )
    steps = compiled(order)
    costs = random_costs(draw, num_ranks * stages_per_rank(schedule, stages), 0.2)
    for seconds in (0.0, 0.2, 1.0, 9.0):
        latency = {(a, b): seconds for a in range(num_ranks) for b in range(num_ranks)}
        both = Durations(costs=costs, latency=latency)
        turns = play(steps, num_ranks, replace(both, in_turn=True)).makespan
        sent = Counter(step.rank for step in steps if step.sends)
        assert turns >= max(play(steps, num_ranks, both).makespan, seconds * max(sent.values()))
        # A rank in the middle sends forwards and backwards; V shapes keep a turn to themselves.
        assert sent[1] == 2 * count * stages_per_rank(schedule, stages)
        if not seconds:
            assert turns == play(steps, num_ranks, both).makespan


def plan_of(schedule, stages, num_ranks, count):
    """A plan of this many microbatches."""
    total = num_ranks * stages_per_rank(schedule, stages)
    config = tiny_config(
        model={"num_layers": total},
        parallel={"pp": num_ranks},
        pipeline={"schedule": schedule, "virtual_stages": stages},
        training={"global_batch_size": count, "microbatch_size": 1},
    )
    plan = resolve(config, num_ranks)
    assert plan.num_microbatches == count
    return plan


@pytest.mark.parametrize(("schedule", "stages"), SCHEDULES)
@pytest.mark.parametrize("spread", [0.0, 0.8])
def test_many_microbatches_take_what_the_whole_order_takes(schedule, stages, spread, monkeypatch):
    monkeypatch.setattr(pipeline, "MAX_ACTIONS", 1024)
    draw = random.Random(f"{schedule} {spread}")
    num_ranks = 4
    total = num_ranks * stages_per_rank(schedule, stages)
    count = (1024 // (2 * total) // num_ranks + 40) * num_ranks
    count += 0 if stages > 1 else 3
    plan = plan_of(schedule, stages, num_ranks, count)
    costs, order = random_costs(draw, total, spread), compiled(plan.order(count))
    assert len(order) > 1024
    # Messages that hide, and those that take longer than stages.
    for seconds in (0.1, 4.0):
        latency = {key: seconds for key in random_latency(draw, num_ranks)}
        times = Durations(costs=costs, latency=latency, in_turn=True)
        whole, found = play(order, num_ranks, times), pass_times(plan, times)
        assert found.makespan == pytest.approx(whole.makespan, rel=1e-9)
        assert found.ends == pytest.approx(whole.ends)
        assert found.busy == pytest.approx(whole.busy)


def test_a_thousand_microbatches_on_32_ranks_are_played_with_few():
    plan = plan_of("1f1b", 1, 32, 1000)
    costs = dict.fromkeys([(kind, stage) for kind in Kind for stage in range(32)], 1.0)
    program.cache_clear()
    found = pass_times(plan, Durations(costs=costs))
    assert found.makespan == pytest.approx((1000 + 31) * 2)
    # 1,000 = 27 rounds of 32 and 136, the growth of which is that of two rounds.
    assert program.cache_info().misses == 2
    for number in (72, 136):
        program("1f1b", 32, 1, number)
    assert program.cache_info().misses == 2


def test_an_order_of_a_file_is_played_as_it_is(tmp_path):
    order = pipeline_order("gpipe", num_ranks=2, num_microbatches=4)
    files.write_order(tmp_path / "order.csv", order)
    config = tiny_config(
        model={"num_layers": 2},
        parallel={"pp": 2},
        pipeline={"order": str(tmp_path / "order.csv")},
        training={"global_batch_size": 4, "microbatch_size": 1},
    )
    costs = {(kind, stage): 1.0 + stage for kind in Kind for stage in (0, 1)}
    latency = dict.fromkeys([(0, 1), (1, 0)], 3.0)
    found = pass_times(resolve(config, 2), Durations(costs=costs, latency=latency))
    assert found.makespan == simulate(order, costs, latency=3.0).makespan
