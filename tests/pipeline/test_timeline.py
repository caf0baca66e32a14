"""What every rank of a pipeline did: times that add up, microbatches held, links."""

import json

import pytest
from recorded import costs_of, order_of, timeline_of

from titan_dit.pipeline.events import Noted, PipelineEvent
from titan_dit.pipeline.schedules.schedule import Action, Kind, peak_activations
from titan_dit.pipeline.timeline import (
    COMPUTING,
    IDLE,
    KINDS,
    OUTSIDE,
    Arrival,
    TimelineReader,
    makespan,
    simulated,
    suspects,
    timeline_lines,
    write_costs,
)

SCHEDULES = [("1f1b", 1), ("interleaved_zero_bubble", 2), ("dualpipev", 1)]
F0, F1 = Action(Kind.FORWARD, 0, 0), Action(Kind.FORWARD, 0, 1)
B0 = Action(Kind.BACKWARD, 1, 0)


def read(*moments):
    """A rank's timeline from (moment, what, milliseconds)."""
    noted = [Noted(moment, what, 1e6 * at) for moment, what, at in moments]
    return TimelineReader(0, lambda at: at / 1e9).read(noted)


def milliseconds(rank):
    return {kind: pytest.approx(1e3 * s) for kind, s in rank.seconds().items() if s}


RUN_TIME = [
    (PipelineEvent.BEGINS, F0, -5),  # Before the first step of the window.
    (PipelineEvent.STEP, 7, 0),
    (PipelineEvent.OUTSIDE, "data wait", 1),
    (PipelineEvent.OUTSIDE, None, 4),
    (PipelineEvent.STARTS, None, 5),
    (PipelineEvent.DECIDES, None, 7),
    (PipelineEvent.BEGINS, F0, 8),
    (PipelineEvent.ENDS, F0, 18),
    (PipelineEvent.SENDS, F0, 19),
    (PipelineEvent.DECIDES, None, 20),
    (PipelineEvent.WAITS, "memory", 22),
    (PipelineEvent.WAITS, "gradient", 25),
    (PipelineEvent.ARRIVED, B0, 30),
    (PipelineEvent.WAITS, None, 31),
    (PipelineEvent.BEGINS, B0, 31),
    (PipelineEvent.ENDS, B0, 41),
    (PipelineEvent.FINISHED, None, 44),
    (PipelineEvent.BEGINS, F1, 45),  # A preview.
    (PipelineEvent.ENDS, F1, 50),
    (PipelineEvent.OUTSIDE, "optimizer", 50),
    (PipelineEvent.OUTSIDE, None, 60),
]


def test_every_moment_of_a_rank_has_one_kind():
    rank = read(*RUN_TIME)
    assert milliseconds(rank) == {
        "outside": 1 + 1 + 6, "data wait": 3, "rest": 2 + 2 + 3, "decision": 1 + 2, "F": 10,
        "memory": 3, "gradient": 6, "B": 10, "optimizer": 10,
    }  # fmt: skip
    assert rank.wall == pytest.approx(0.060)
    assert all(a.end == b.start for a, b in zip(rank.spans, rank.spans[1:], strict=False))
    (one,) = rank.passes
    assert [done.action for done in one.actions] == [F0, B0]
    assert [done.free for done in one.actions] == [pytest.approx(0.020), pytest.approx(0.044)]
    assert one.arrived == {B0: Arrival(pytest.approx(0.030), pytest.approx(0.025), 0.020)}
    assert [(round(1e3 * at), held) for at, held in rank.held()] == [(8, 1), (41, 0)]


def test_how_long_a_message_travelled_is_known_if_its_receiver_waited_or_looked():
    # It was here already, or not: nobody looked.
    assert Arrival(9.0, 8.9999, None).bounds(1.0, 0.0) == (0.0, 8.0)
    assert Arrival(9.0, 0.5, None).bounds(1.0, 0.0) == (8.0, 8.0)
    assert Arrival(9.0, 4.0, None).bounds(1.0, 0.0) == (8.0, 8.0)
    # The rank looked at 6, then after an action at 9.
    assert Arrival(9.0, None, 6.0).bounds(1.0, 0.0) == (5.0, 8.0)
    assert Arrival(9.0, None, 0.5).bounds(1.0, 0.0) == (0.0, 8.0)
    # Its receive was posted late.
    assert Arrival(9.0, 0.5, None).bounds(1.0, 2.0) == (0.0, 8.0)


@pytest.mark.parametrize(("schedule", "virtual_stages"), SCHEDULES)
def test_the_times_of_each_rank_add_up_to_its_wall_time(schedule, virtual_stages):
    order = order_of(schedule, virtual_stages=virtual_stages)
    timeline = timeline_of(order, costs_of(order, seed=1), passes=3)
    assert timeline.num_passes == 3
    for rank, peak in zip(timeline.ranks, peak_activations(order), strict=True):
        seconds = rank.seconds()
        assert set(seconds) == {*COMPUTING, *IDLE, *OUTSIDE} == set(KINDS)
        assert min(seconds.values()) >= 0
        assert sum(seconds.values()) == pytest.approx(rank.wall, rel=1e-9)
        counts = [held for _, held in rank.held()]
        assert (min(counts), max(counts), counts[-1]) == (0, peak, 0)
    assert timeline.order(1) == order


@pytest.mark.parametrize(("schedule", "virtual_stages"), SCHEDULES)
def test_the_simulation_of_a_step_as_it_was_gives_its_length(schedule, virtual_stages):
    order = order_of(schedule, virtual_stages=virtual_stages)
    timeline = timeline_of(order, costs_of(order, seed=2, sigma=0.3), usual=1e-3)
    for number in range(timeline.num_passes):
        length = makespan(simulated(timeline, number))
        assert length == pytest.approx(timeline.length(number), rel=0.01)


def test_the_text_has_a_column_per_rank_that_adds_up():
    order = order_of()
    timeline = timeline_of(order, costs_of(order, seed=3, slow=2))
    lines = timeline_lines(timeline, suspects(timeline))
    assert lines[0] == ("pipeline timeline, steps 10 to 11: 4 ranks, 8 stages, 8 microbatches")
    assert lines[-1].startswith("slow rank: 2, 1.")
    rows = {line[:26].strip(): [float(x) for x in line[26:].split()] for line in lines[6:-3]}
    everything = rows.pop("all")
    bubbles = rows.pop("bubble, measured"), rows.pop("bubble, simulated")
    for rank, (measured, played) in enumerate(zip(*bubbles, strict=True)):
        assert sum(row[rank] for row in rows.values()) == pytest.approx(everything[rank], abs=0.01)
        assert played == pytest.approx(measured, abs=0.01 * everything[rank])


def test_the_costs_file_has_what_a_plan_needs(tmp_path):
    order = order_of()
    timeline = timeline_of(order, lambda action, number: 1e-3 * (1 + action.microbatch + number),
                           passes=3)  # fmt: skip
    write_costs(tmp_path / "costs.json", timeline)
    found = json.loads((tmp_path / "costs.json").read_text())
    assert found["format"] == 1
    assert found["stage_ranks"] == [0, 1, 2, 3] * 2
    assert (found["num_microbatches"], found["splits_backward"]) == (8, True)
    assert found["order"] == [[str(action) for action in actions] for actions in order]
    assert set(found["actions"]) == {f"{stage}{kind}" for stage in range(8) for kind in "FIW"}
    assert found["actions"]["5W"] == pytest.approx([1e-3 * (2 + n) for n in range(8)])
    assert set(found["links"]) == {
        f"{a}->{b}" for a in range(4) for b in range(4) if (a - b) % 4 in (1, 3)
    }
    assert list(found["links"].values()) == pytest.approx([1e-4] * 8, rel=0.01)
    assert found["step_s"] == pytest.approx(timeline.length(1))
