"""The process that measures in benchmarks/gpu.py: a row that hangs or dies costs no other."""

import json
import multiprocessing
import os
import signal
import sys
import time

import pytest
from commands import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu
import gpu_plan
import gpu_queue
import gpu_worker
import meter
from gpu_queue import Task
from gpu_worker import Worker

NAMES = ("good", "hangs", "dies", "fails", "refused", "out of memory", "dies after")
FORK = multiprocessing.get_context("fork")
"""No imports again; the real one spawns, because of CUDA."""


def serve(pipe, options):
    """Stands in for gpu.serve: each row does what its name says."""
    tasks = [Task(key={"name": name}, estimate_s=1.0) for name in NAMES]
    pipe.send(({"options": options}, tasks))
    while True:
        name, left_s = pipe.recv()
        if name == "hangs":
            time.sleep(1000)
        if name == "dies":
            os._exit(7)
        result = {"good": "measured", "fails": "failed: RuntimeError", "refused": "not measured: x"}
        result["dies after"] = "measured"
        where = os.environ.get("PLACE")
        row = {"result": result.get(name, name), "pid": os.getpid(), "left_s": left_s}
        pipe.send({**row, "place": where})
        if name == "dies after":
            os._exit(9)


@pytest.fixture
def worker():
    found = Worker(serve, "options", FORK)
    yield found
    found.stop()


def take(worker, name, limit_s=60.0, environment=None, left_s=12.0):
    task = Task(key={"name": name}, estimate_s=1.0, environment=environment or {})
    return worker.measure(task, limit_s, left_s)


def test_one_process_serves_rows_that_go_well_or_are_refused(worker):
    facts, tasks = worker.start(60.0)
    assert facts == {"options": "options"}
    assert [str(task) for task in tasks] == list(NAMES)
    rows = [take(worker, name) for name in ("good", "refused", "good")]
    assert len({row["pid"] for row in rows}) == 1
    assert 11.0 < rows[0]["left_s"] < 12.0
    assert len(worker.starts_s) == 1


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("hangs", "failed: gave no answer in 0 s"),
        ("dies", "failed: died with exit code 7"),
        ("fails", "failed: RuntimeError"),
        ("out of memory", "out of memory"),
    ],
)
def test_after_a_bad_row_the_next_one_has_a_new_process(worker, name, result):
    before = take(worker, "good")
    assert take(worker, name, 0.3 if name == "hangs" else 60.0)["result"] == result
    after = take(worker, "good")
    assert after["result"] == "measured"
    assert after["pid"] != before["pid"]
    with pytest.raises(ProcessLookupError):
        os.kill(before["pid"], 0)


def test_a_row_with_other_variables_has_a_process_of_its_own(worker, monkeypatch):
    monkeypatch.setenv("PLACE", "here")
    places = [
        take(worker, "good", environment=changes)["place"]
        for changes in ({}, {"PLACE": "there"}, {"PLACE": None}, {})
    ]
    assert places == ["here", "there", None, "here"]
    assert os.environ["PLACE"] == "here"


def test_a_process_that_dies_between_two_rows_costs_one_row(worker):
    assert take(worker, "dies after")["result"] == "measured"
    worker.process.join()
    assert take(worker, "good")["result"] == "failed: died with exit code 9"
    assert take(worker, "good")["result"] == "measured"


def test_neither_a_row_nor_a_start_takes_longer_than_is_left(worker):
    worker.start(60.0)
    began = time.monotonic()
    # The end of the budget is no fault of the row.
    ended = "not measured: the budget ended ("
    silent = f"{ended}gave no answer in 0 s)"
    assert take(worker, "hangs", 60.0, left_s=0.3)["result"] == silent
    worker.start(60.0)
    assert take(worker, "good", left_s=0.0)["result"] == "not begun"
    hanging = Worker(lambda pipe, options: time.sleep(1000), None, FORK)
    with pytest.raises(RuntimeError, match="gave no answer in 0 s before its first row"):
        hanging.start(0.2)
    assert hanging.process is None
    assert take(hanging, "good", left_s=0.2)["result"].startswith(f"{ended}the process that")
    assert take(worker, "dies", 60.0, left_s=9.0)["result"] == "failed: died with exit code 7"
    assert time.monotonic() - began < 30


def test_a_process_that_dies_before_its_first_row_ends_the_benchmark():
    with pytest.raises(RuntimeError, match="died with exit code 3 before its first row"):
        Worker(lambda pipe, options: os._exit(3), None, FORK).start(60.0)


def test_a_process_that_cannot_be_started_again_costs_one_row(worker):
    worker.start(60.0)
    worker.stop()
    worker.serve = lambda pipe, options: os._exit(3)
    row = take(worker, "good")
    assert (
        row["result"] == "failed: the process that measures died with exit code 3 before its fir"
        "st row"
    )
    worker.serve = serve
    assert take(worker, "good")["result"] == "measured"


class Device(meter.HostMeter):
    def release(self):
        """Skip garbage collection, which is slow with all of pytest's objects."""


LEVERS = ("fine", "hangs", "raises", "killed", "fine again", "interrupts", "never")


def levers(pipe, options):
    """Stands in for gpu.serve: rows of levers, through the real `attempt`."""

    def work(name):
        if name == "hangs":
            time.sleep(1000)
        if name == "raises":
            raise RuntimeError("a bug")
        if name == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "interrupts":
            os.kill(os.getppid(), signal.SIGTERM)
            time.sleep(1000)
        return {"ms": {"slow": 2.0, "fast": 1.0}}

    tasks = [Task(key={"lever": name}, estimate_s=0.01) for name in LEVERS]
    facts = {"place": {"device": "fake"}, "peak_tflops": None, "memory_gib": None}
    pipe.send(({**facts, "cells": [gpu_plan.TINY]}, tasks))
    while True:
        name, _ = pipe.recv()
        pipe.send(gpu_queue.attempt(lambda name=name: work(name), Device()))


def test_an_interrupted_benchmark_shows_what_it_has(monkeypatch, tmp_path, capsys):
    """Rows that hang, raise and are killed cost one row each; a time limit's SIGTERM ends it."""
    monkeypatch.setattr(gpu, "serve", levers)
    monkeypatch.setattr(gpu_worker.multiprocessing, "get_context", lambda kind: FORK)
    monkeypatch.setattr(gpu, "predicted", lambda cells: dict)
    monkeypatch.setattr(gpu_queue.torch.compiler, "reset", lambda: None)
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--tiny", "--limit-s", "4", "--out", str(out)])
    before = signal.signal(signal.SIGTERM, gpu.interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            gpu.run(gpu.settle(gpu.parse()), time.monotonic())
    finally:
        signal.signal(signal.SIGTERM, before)
    results = {row["lever"]: row["result"] for row in json.loads(out.read_text())["levers"]}
    assert results == {
        "fine": "measured",
        "hangs": "failed: gave no answer in 4 s",
        "raises": "failed: RuntimeError",
        "killed": "failed: died with exit code -9",
        "fine again": "measured",
    }
    shown = capsys.readouterr().out
    assert "Parts of a step" in shown
    assert "\nVerdicts\n" in shown
    assert "| fine again | fast | 1.0 |" in shown
