"""An order of `pipeline plan` gives the schedule's loss and gradients, to the bit."""

import random

import pytest
from harness import on_ranks
from run_time import compared, config_of
from test_grid import CP, PP, schedule

from titan_dit.pipeline.schedules import files, planned_order
from titan_dit.plan import resolve

MEMORY = 1.5
CASES = {
    2: [
        ("dit", PP, schedule("interleaved_zero_bubble", 2)),
        ("gpt", PP, schedule("dualpipev")),
    ],
    4: [("gpt", PP | CP, schedule("interleaved_1f1b", 2))],
}


def with_file(case, folder, world_size):
    """A plan for lengths drawn at random, as FILE.csv."""
    family, parallel, pipeline = case
    plan = resolve(config_of(family, parallel, pipeline), world_size)
    draws = random.Random(0)
    lengths = [draws.choice((0.4, 1.0, 2.6)) for _ in range(plan.num_microbatches)]
    order, count = plan.order(plan.num_microbatches), plan.num_microbatches
    found = planned_order.plan_order(
        order, plan.stage_ranks, count, lambda a: lengths[a.microbatch], 1.0, MEMORY
    )
    assert found.pays
    assert found.order != order
    file = folder / f"{family}-{pipeline['schedule']}-{world_size}.csv"
    files.write_order(file, found.order, ["a plan for lengths drawn at random"])
    return family, parallel, pipeline, {"order": str(file)}


def cases_on(world, cases):
    """Every case on this rank."""
    return [compared(world, *case) for case in cases]


@pytest.mark.parametrize("number", [2, pytest.param(4, marks=pytest.mark.long)])
def test_an_order_of_a_file_gives_the_bits_of_the_schedule(number, tmp_path):
    cases = [with_file(case, tmp_path, number) for case in CASES[number]]
    for found in zip(*on_ranks(number, cases_on, cases), strict=True):
        for rank in found:
            assert rank["loss"], rank["case"]
            assert not rank["gradients"], (rank["case"], rank["gradients"])
            assert rank["held"] <= MEMORY * rank["window"], rank["case"]
        assert any(rank["order differs"] for rank in found), found[0]["case"]
