"""The queue of benchmarks/gpu.py: a time budget, and rows in any case."""

import dataclasses
import sys
import time

import pytest
from commands import ROOT

from titan_dit.section import UserError

sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_queue
import meter
from gpu_queue import Clock, Job, work_off


@pytest.fixture
def now(monkeypatch):
    """Seconds that pass when a job says so."""
    seconds = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    return seconds


def job(now, name, estimate, taken):
    def take():
        now[0] += taken
        return {"value": name}

    return Job({"name": name}, estimate, take)


def results(jobs, clock):
    said = []
    rows = [row for _, row in work_off(jobs, meter.HostMeter(), clock, said.append)]
    return {row["name"]: row["result"] for row in rows}, said


def test_what_would_end_too_late_is_not_begun_but_what_still_fits_is(now):
    sizes = {"a": 40, "long": 80, "b": 30, "c": 40}
    jobs = [job(now, name, seconds, seconds) for name, seconds in sizes.items()]
    found, said = results(jobs, Clock(100, 0.0))
    assert found == {"a": "measured", "long": "not begun", "b": "measured", "c": "not begun"}
    assert now == [70.0]
    assert said[0] == "[   0 s, 100 left] 1/4 a: about 40 s, all that is left 190"
    assert said[1].startswith("[  40 s, 60 left] 3/4 b: about 30 s")


def test_a_slow_device_drops_more_and_a_fast_one_less(now):
    slow = [job(now, name, 20, 50) for name in "abc"]
    dropped = {"a": "measured", "b": "not begun", "c": "not begun"}
    assert results(slow, Clock(85, 0.0))[0] == dropped
    now[0] = 0.0
    fast = [job(now, name, 40, 10) for name in "abcd"]
    assert set(results(fast, Clock(70, 0.0))[0].values()) == {"measured"}


def test_what_keeps_its_time_does_so_on_a_slow_device_too(now):
    bounded = dataclasses.replace(job(now, "bounded", 40, 40), keeps_time=True)
    jobs = [job(now, "slow", 20, 50), bounded, job(now, "last", 9, 9)]
    clock = Clock(100, 0.0)
    assert results(jobs, clock)[0]["bounded"] == "measured"
    assert clock.pace == 2


def test_what_cannot_be_had_is_no_failure(now, capsys):
    def take():
        raise UserError("torchao is not installed")

    clock = Clock(100, 0.0)
    [(_, row)] = work_off([Job({"name": "a"}, 50, take)], meter.HostMeter(), clock, print)
    assert row["result"] == "not measured: torchao is not installed"
    assert "Traceback" not in capsys.readouterr().err
    # It says nothing of the device.
    assert clock.pace == 1


def test_every_attempt_begins_without_the_compiled_code_of_the_last(monkeypatch):
    told = []
    monkeypatch.setattr(gpu_queue.torch.compiler, "reset", lambda: told.append("reset"))

    class Memory(meter.HostMeter):
        def release(self):
            told.append("release")

    gpu_queue.attempt(lambda: told.append("take") or {}, Memory())
    assert told == ["reset", "release", "take"]


def test_a_device_that_is_lost_fails_every_row_and_ends_no_run(capsys):
    class Lost(meter.HostMeter):
        def release(self):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    jobs = [Job({"name": name}, 0.0, dict) for name in "ab"]
    rows = [row for _, row in work_off(jobs, Lost(), Clock(1e9, 0.0), lambda line: None)]
    assert [row["result"] for row in rows] == ["failed: RuntimeError"] * 2
    assert "illegal memory access" in rows[0]["error"]
    assert "Traceback" in capsys.readouterr().err
