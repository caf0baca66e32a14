"""The queue of benchmarks/gpu.py: a time budget, and a row for every job."""

import dataclasses
import sys
import time

import pytest
from commands import ROOT

from titan_dit.config.section import UserError

sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_queue
import meter
from gpu_queue import Clock, Job, attempt, work_off


class Device(meter.HostMeter):
    def release(self):
        """Skip garbage collection, which is slow with all of pytest's objects."""


@pytest.fixture
def now(monkeypatch):
    """A fake clock that jobs advance."""
    seconds = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    monkeypatch.setattr(gpu_queue.torch.compiler, "reset", lambda: None)
    return seconds


def job(now, name, estimate, taken):
    def take():
        now[0] += taken
        return {"value": name}

    return Job(key={"name": name}, estimate_s=estimate, take=take)


def results(jobs, clock, limits=None):
    def measure(job, limit_s, left_s):
        if limits is not None:
            limits.append(limit_s)
        return attempt(job.take, Device())

    rows = [row for _, row in work_off(jobs, measure, clock, lambda line: None)]
    return {row["name"]: row["result"] for row in rows}


def test_what_would_end_too_late_is_not_begun_but_what_still_fits_is(now):
    sizes = {"a": 40, "long": 80, "b": 30, "c": 40}
    jobs = [job(now, name, seconds, seconds) for name, seconds in sizes.items()]
    found = results(jobs, Clock(100, 0.0))
    assert found == {"a": "measured", "long": "not begun", "b": "measured", "c": "not begun"}
    assert now == [70.0]


def test_the_pace_is_what_was_taken_over_what_was_expected(now):
    slow = [job(now, name, 20, 50) for name in "abc"]
    dropped = {"a": "measured", "b": "not begun", "c": "not begun"}
    assert results(slow, Clock(85, 0.0)) == dropped
    now[0] = 0.0
    fast = [job(now, name, 40, 10) for name in "abcd"]
    assert set(results(fast, Clock(70, 0.0)).values()) == {"measured"}
    now[0], clock = 0.0, Clock(100, 0.0)
    bounded = dataclasses.replace(job(now, "bounded", 40, 40), keeps_time=True)
    assert results([job(now, "slow", 20, 50), bounded], clock)["bounded"] == "measured"
    assert clock.pace == 2


def test_a_row_hangs_after_a_minute_or_four_times_what_is_expected(now):
    limits = []
    results([job(now, "short", 5, 5), job(now, "long", 40, 40)], Clock(500, 0.0), limits)
    assert limits == [60, 160]


def test_what_cannot_be_had_or_fails_is_a_row_and_says_nothing_of_the_pace(now, capsys):
    def refused():
        raise UserError("torchao is not installed")

    def broken():
        raise RuntimeError("an illegal memory access was encountered")

    clock = Clock(100, 0.0)
    jobs = [
        Job(key={"name": name}, estimate_s=seconds, take=take)
        for name, seconds, take in (("a", 50, refused), ("b", 20, broken))
    ]
    found = results(jobs, clock)
    assert found == {
        "a": "not measured: torchao is not installed",
        "b": "failed: RuntimeError",
    }
    assert clock.pace == 1
    assert "illegal memory access" in capsys.readouterr().err
