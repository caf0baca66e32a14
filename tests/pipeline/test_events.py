"""The recorder of a rank: times of the host's clock, in sequence; the device's are read later."""

import time

import pytest
import torch

from titan_dit.pipeline.events import Noted, PipelineEvent, Recorder, in_sequence
from titan_dit.pipeline.schedules.schedule import Action, Kind
from titan_dit.pipeline.timeline import TimelineReader

F0 = Action(Kind.FORWARD, 0, 0)


def record(recorder, work):
    recorder.begin()
    start = time.perf_counter()
    recorder.mark(PipelineEvent.STEP, 3)
    recorder.mark(PipelineEvent.STARTS, None)
    recorder.mark(PipelineEvent.BEGINS, F0)
    work()
    recorder.mark(PipelineEvent.ENDS, F0)
    recorder.mark(PipelineEvent.FINISHED, None)
    return time.perf_counter() - start


def seconds(noted):
    rank = TimelineReader(0, lambda at: at / 1e9).read(noted)
    return rank.wall, rank.seconds()


def test_it_notes_the_hosts_time_and_forgets_an_earlier_window():
    recorder = Recorder(torch.device("cpu"))
    record(recorder, lambda: None)
    wall = record(recorder, lambda: time.sleep(0.05))
    noted = recorder.read()
    assert [note.event for note in noted] == ["step", "starts", "begins", "ends", "finished"]
    assert [note.what for note in noted] == [3, None, F0, F0, None]
    found, by_kind = seconds(noted)
    assert 0.05 <= by_kind["F"] <= found <= wall
    assert sum(by_kind.values()) == pytest.approx(found, rel=1e-9)


def test_no_moment_comes_before_the_one_noted_earlier():
    """Clocks of a device that are scaled may round."""
    given = [Noted(PipelineEvent.STEP, 1, 5.0), Noted(PipelineEvent.STARTS, None, 4.9)]
    assert [note.at_ns for note in in_sequence(given)] == [5.0, 5.0]
    assert in_sequence([]) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_devices_times_are_those_of_its_stream():
    device = torch.device("cuda")
    a = torch.randn(4096, 4096, device=device)
    torch.cuda.synchronize()

    def work():
        for _ in range(20):
            a @ a

    recorder = Recorder(device)
    record(recorder, work)
    host = record(recorder, work)
    wall, by_kind = seconds(recorder.read())
    # The host goes on while the device still computes.
    assert by_kind["F"] > 2 * host
    assert by_kind["F"] == pytest.approx(wall, rel=0.1)
