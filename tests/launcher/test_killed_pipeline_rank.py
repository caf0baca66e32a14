"""A pipeline in run-time order: a rank is killed in a step; either order takes a run up."""

import os
import re
import signal
from itertools import pairwise
from pathlib import Path

import pytest
from running import Running, have_ended, is_running, trainer

FLAGS = ("--parallel.pp", 2, "--model.num_layers", 4, "--pipeline.virtual_stages", 2)
FLAGS += ("--pipeline.schedule", "interleaved_zero_bubble", "--training.microbatch_size", 2)
FLAGS += ("--training.steps", 900, "--checkpoint.every", 4, "--checkpoint.keep", 0)
RUN_TIME = ("--pipeline.order", "run_time", "--pipeline.memory", 1.5)
SLOT = "memfd:titan_dit-slot"


def steps(said):
    """(step, loss, gradient norm) of the steps on a console, attempt by attempt."""
    attempts, last = [], 0
    pattern = r"^step +(\d+)/\d+ +loss (\S+) .* grad (\S+)"
    for step, loss, norm in re.findall(pattern, said, re.MULTILINE):
        if int(step) <= last or not attempts:
            attempts.append({})
        last = int(step)
        attempts[-1][last] = loss, norm
    return attempts


def repeated(first, second):
    """Steps that two attempts took, with what both printed."""
    return {step: (first[step], second[step]) for step in first.keys() & second.keys()}


def maps(pid):
    return Path(f"/proc/{pid}/maps").read_text()


def stopped(run):
    """The exit code of a run that is told to stop."""
    run.send(signal.SIGTERM)
    return run.end()


def test_a_killed_rank_ends_all_leaves_nothing_and_the_run_goes_on(tmp_path):
    with Running(trainer(*FLAGS), tmp_path, "planned") as run:
        run.wait_for_step(6)
    (planned,) = steps(run.said)
    with Running(trainer(*FLAGS, *RUN_TIME, restarts=1), tmp_path, "run_time") as run:
        run.wait_for("pipeline transport: shared memory within a host (1 link)")
        run.wait_until(lambda: run.step >= 10)
        ranks = run.children()
        assert all(SLOT in maps(rank) for rank in ranks)
        os.kill(ranks[-1], signal.SIGKILL)
        assert have_ended(ranks, 40)
        run.wait_until(lambda: len(steps(run.said)) == 2 and run.step >= 11)
        again = run.children()
        assert not set(again) & set(ranks)
        assert stopped(run) == 0, run.said
        assert not any(map(is_running, again))
    assert "Signal 9 (SIGKILL)" in run.said
    assert not [path for path in Path("/dev/shm").iterdir() if "titan_dit" in path.name]
    killed, rest = steps(run.said)
    for same in (repeated(planned, killed), repeated(killed, rest)):
        assert same
        assert all(one == other for one, other in same.values()), same


@pytest.mark.long
def test_a_planned_order_takes_up_a_run_of_a_run_time_order(tmp_path):
    found = []
    for name, more in (("run_time", RUN_TIME), ("planned", ()), ("by_group", RUN_TIME)):
        more += ("--pipeline.transport", "process_group") if name == "by_group" else ()
        with Running(trainer(*FLAGS, *more), tmp_path, name) as run:
            run.wait_for_step(len(found) * 8 + 6)
        found += steps(run.said)
    for first, second in pairwise(found):
        same = repeated(first, second)
        assert same
        assert all(one == other for one, other in same.values()), same
