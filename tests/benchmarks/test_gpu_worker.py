"""The process that measures in benchmarks/gpu.py: a row that hangs or dies costs no other."""

import multiprocessing
import os
import sys
import time

import pytest
from commands import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from gpu_queue import Task
from gpu_worker import Worker

NAMES = ("good", "hangs", "dies", "fails", "refused", "out of memory")
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
        where = os.environ.get("PLACE")
        row = {"result": result.get(name, name), "pid": os.getpid(), "left_s": left_s}
        pipe.send({**row, "place": where})


@pytest.fixture
def worker():
    found = Worker(serve, "options", FORK)
    yield found
    found.stop()


def take(worker, name, limit_s=60.0, environment=None):
    task = Task(key={"name": name}, estimate_s=1.0, environment=environment or {})
    return worker.measure(task, limit_s, 12.0)


def test_one_process_serves_rows_that_go_well_or_are_refused(worker):
    facts, tasks = worker.start()
    assert facts == {"options": "options"}
    assert [str(task) for task in tasks] == list(NAMES)
    rows = [take(worker, name) for name in ("good", "refused", "good")]
    assert len({row["pid"] for row in rows}) == 1
    assert rows[0]["left_s"] == 12.0
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


def test_a_process_that_dies_before_its_first_row_ends_the_benchmark():
    with pytest.raises(RuntimeError, match="died with exit code 3 before its first row"):
        Worker(lambda pipe, options: os._exit(3), None, FORK).start()
