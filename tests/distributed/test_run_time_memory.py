"""Run-time order holds the planned order's live bytes times [pipeline] memory, and little more."""

import pytest
from harness import on_ranks
from live_bytes import live_bytes
from test_grid import schedule

pytestmark = pytest.mark.timeout(900)

BY_GROUP, SHARED = {"transport": "process_group"}, {"transport": "shared_memory"}
SPARE = {"memory": 1.5}
CASES = [
    (schedule("interleaved_zero_bubble", 2), BY_GROUP, SHARED | SPARE),
    (schedule("zbv_zero_bubble"), SHARED, BY_GROUP | SPARE),
]
LONG = [
    (schedule(name, v), BY_GROUP, SHARED, BY_GROUP | SPARE, SHARED | SPARE)
    for name, v in (
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved_1f1b", 2),
        ("interleaved_zero_bubble", 2),
        ("zbv_zero_bubble", 1),
        ("dualpipev", 1),
    )
]


def check(ranks, cases):
    for rank in ranks:
        for (pipeline, *run_times), (planned, steps) in zip(cases, rank, strict=True):
            for run_time, step in zip(run_times, steps, strict=True):
                limit = planned["most"] * run_time.get("memory", 1.0)
                # A message of each lane ahead. gloo's are freed once they are known to be taken.
                lanes = step["lanes in"] + step["lanes out"] * (
                    run_time["transport"] != "shared_memory"
                )
                limit += lanes * step["stream"]
                assert step["most"] <= limit, (
                    pipeline,
                    run_time,
                    (step["most"] - limit) / step["stream"],
                )


def test_live_bytes_are_at_most_the_planned_ones_times_memory_and_a_stream_for_each_lane():
    check(on_ranks(2, live_bytes, CASES), CASES)


@pytest.mark.long
def test_live_bytes_are_bounded_in_every_schedule():
    check(on_ranks(2, live_bytes, LONG, timeout=850), LONG)
