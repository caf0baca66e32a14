"""Run-time against planned order on sleeping stages: what is compared, and that it runs."""

import statistics
import sys

import pytest
from commands import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import dynamic
from sleeping import SCENARIOS, Contender

from titan_dit.pipeline.schedules.schedule import Action, Kind
from titan_dit.pipeline.schedules.simulator import simulate

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


@pytest.mark.parametrize("name", BY_NAME)
def test_durations_are_the_same_every_time_and_last_a_forward_on_average(name):
    drawn = [BY_NAME[name].seconds(8, 16, 0.02, seed) for seed in (*range(20), 0)]
    assert drawn[0] == drawn[-1] != {}
    assert len(drawn[0]) == 3 * 8 * 16
    average = statistics.mean(statistics.mean(seconds.values()) for seconds in drawn)
    late = {"late actions": 0.03 * 5}.get(name, 0.0)
    assert average == pytest.approx(0.02 * (1 + late), rel=0.03)


def test_clips_last_as_long_on_every_stage_and_in_every_contender():
    few, many = (BY_NAME["video lengths"].seconds(stages, 16, 1.0, 3) for stages in (4, 8))
    for number in range(16):
        of_clip = {few[Action(kind, stage, number)] for kind in (Kind.FORWARD,) for stage in (0, 3)}
        assert of_clip == {many[Action(Kind.BACKWARD_INPUT, 7, number)]}
    assert len(set(few.values())) > 1


def test_a_row_compares_with_the_planned_steps_of_the_same_seed_and_the_simulation():
    scenario, one = BY_NAME["even"], dynamic.ONE_F_ONE_B
    order = one.order(dynamic.RANKS, 4)
    took = [dict.fromkeys(actions, 1.0) for actions in order]
    step = simulate(order, lambda action: 1.0).makespan
    ranks = [
        [(scenario, seed, one, (0.0, step * (1 + seed)), ran) for seed in (0, 1)] for ran in took
    ]
    (row,) = dynamic.rows_of(ranks, unit=1.0)
    assert row["planned / this"] == row["planned 1f1b / this"] == 1
    assert row["measured / simulated"] == pytest.approx(2**0.5, abs=1e-3)
    assert (
        dynamic.goal(dynamic.GOALS, "late links", Contender("interleaved_1f1b", 2, 1.0))
        == ">= 0.98"
    )


@pytest.mark.long
def test_run_time_order_pays_with_spare_memory_and_is_as_long_as_simulated():
    arguments = dynamic.parsed(["--seeds", "1", "--scenarios", "late links"])
    rows = {row["contender"]: row for row in dynamic.measure(arguments)}
    assert len(rows) == len(dynamic.CONTENDERS)
    spare = rows["interleaved_zero_bubble, run_time, memory 1.5"]
    assert spare["planned / this"] > 1.2
    assert spare["measured / simulated"] == pytest.approx(1, abs=0.05)
