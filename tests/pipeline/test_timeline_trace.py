"""The Chrome trace of a pipeline: what Perfetto needs to draw it."""

import gzip
import json
from collections import defaultdict
from itertools import pairwise

import pytest
from recorded import costs_of, order_of, timeline_of

from titan_dit.pipeline.events import Noted, PipelineEvent
from titan_dit.pipeline.schedules.schedule import Action, Kind
from titan_dit.pipeline.timeline import (
    COMPUTE,
    DECISION,
    RECEIVE,
    SEND,
    TRACKS,
    Timeline,
    TimelineReader,
    trace_events,
    write_trace,
)


@pytest.fixture(scope="module")
def timeline():
    order = order_of()
    return timeline_of(order, costs_of(order, seed=4), late={(1, 2): 4e-3})


@pytest.fixture(scope="module")
def events(timeline, tmp_path_factory):
    file = tmp_path_factory.mktemp("trace") / "timeline.json.gz"
    write_trace(file, timeline)
    with gzip.open(file, "rt") as opened:
        return json.load(opened)["traceEvents"]


def of(events, phase):
    return [event for event in events if event["ph"] == phase]


def test_every_rank_is_a_process_with_named_tracks(events):
    names = {e["pid"]: e["args"]["name"] for e in of(events, "M") if e["name"] == "process_name"}
    assert names == {rank: f"rank {rank} (stages {rank}, {rank + 4})" for rank in range(4)}
    tracks = [(e["pid"], e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"]
    assert tracks == [(rank, n, name) for rank in range(4) for n, name in enumerate(TRACKS)]


def test_nothing_is_negative_and_slices_of_a_track_do_not_overlap(events):
    tracks = defaultdict(list)
    for event in events:
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["dur"], event["name"]))
    assert set(tracks) == {(rank, track) for rank in range(4) for track in (COMPUTE, SEND, RECEIVE)}
    for spans in tracks.values():
        spans.sort()
        for (start, length, name), (later, *_) in pairwise(spans):
            assert start + length <= later + 0.11, name


def test_arrows_join_each_send_with_its_receive(events, timeline):
    starts, ends = ({e["id"]: e for e in of(events, phase)} for phase in "sf")
    messages = list(timeline.messages())
    assert starts.keys() == ends.keys() == set(range(1, len(messages) + 1))
    assert len(messages) == 2 * 7 * 2 * 8  # passes, borders of stages, directions, microbatches
    slices = defaultdict(list)
    for event in of(events, "X"):
        slices[event["pid"], event["tid"]].append(event)
    for number, start in starts.items():
        end = ends[number]
        assert start["ts"] <= end["ts"]
        assert start["pid"] != end["pid"]
        assert (start["tid"], end["tid"], end["bp"]) == (SEND, RECEIVE, "e")
        bound = [
            [s for s in slices[e["pid"], e["tid"]] if s["ts"] <= e["ts"] <= s["ts"] + s["dur"]]
            for e in (start, end)
        ]
        names = [{s["name"] for s in found} for found in bound]
        assert names[0] & names[1], (number, names)


def test_the_compute_track_adds_up_to_the_wall_time(events, timeline):
    for rank in timeline.ranks:
        lengths = [
            e["dur"] for e in of(events, "X") if (e["pid"], e["tid"]) == (rank.rank, COMPUTE)
        ]
        assert sum(lengths) == pytest.approx(1e6 * rank.wall, rel=1e-6)
    kinds = {(e["cat"], e["name"]) for e in of(events, "X") if e["tid"] == COMPUTE}
    assert {("F", "0F0"), ("W", "7W7"), ("idle", "idle: input"), ("idle", "idle: gradient"),
            ("outside", "optimizer"), ("outside", "data wait")} <= kinds  # fmt: skip


def test_a_counter_shows_the_microbatches_held(events, timeline):
    for rank in timeline.ranks:
        counts = [e["args"]["held"] for e in of(events, "C") if e["pid"] == rank.rank]
        assert counts == [held for _, held in rank.held()]


def test_decisions_and_clocks_that_are_off_by_a_little():
    """A message seems to arrive before it left: the clocks are known to microseconds only."""
    message = Action(Kind.FORWARD, 0, 0)
    sender = [
        (PipelineEvent.BEGINS, message, 5),
        (PipelineEvent.ENDS, message, 9),
        (PipelineEvent.SENDS, message, 9.2),
    ]
    receiver = [
        (PipelineEvent.DECIDES, None, 4), (PipelineEvent.WAITS, "input", 5),
        (PipelineEvent.ARRIVED, message, 9.1),
        (PipelineEvent.WAITS, None, 9.1), (PipelineEvent.BEGINS, message._replace(stage=1), 9.1),
        (PipelineEvent.ENDS, message._replace(stage=1), 12),
    ]  # fmt: skip
    ranks = []
    for rank, moments in enumerate((sender, receiver)):
        whole = [(PipelineEvent.STEP, 1, -0.1 * rank), (PipelineEvent.STARTS, None, 3), *moments,
                 (PipelineEvent.FINISHED, None, 13)]  # fmt: skip
        noted = [Noted(moment, what, at) for moment, what, at in whole]
        ranks.append(TimelineReader(rank, lambda at: at / 1e6).read(noted))
    order = ((message,), (message._replace(stage=1),))
    found = list(trace_events(Timeline(tuple(ranks), (0, 1), (1.0, 1.0), order, 1)))
    assert min(event.get("ts", 0) for event in found) == 0
    [start], [end] = of(found, "s"), of(found, "f")
    assert start["ts"] <= end["ts"]
    [decision] = [e for e in of(found, "X") if e["tid"] == DECISION]
    assert (decision["pid"], decision["dur"]) == (1, 1.0)
