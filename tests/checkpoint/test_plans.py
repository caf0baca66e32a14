"""Plans of saves: made once, in this process or in one of their own, and never used when stale."""

import os
import pickle
import signal
import subprocess
import sys
import time

import pytest
import torch

from titan_dit.checkpoint import planning
from titan_dit.checkpoint.checkpoint import contents, flatten, load, write
from titan_dit.checkpoint.planning import (
    GlobalPlan,
    LocalPlan,
    PlanningProcess,
    Plans,
    plan_locally,
)
from titan_dit.checkpoint.torch_files import Writer


def state(value=0.0, decays=("0.9999",)):
    weights = {"blocks.0.weight": torch.full((6, 4), value), "bias": torch.full((5,), value)}
    averages = {d: {n: w + 1 for n, w in weights.items()} for d in decays}
    moments = {n: {"step": torch.tensor(value), "exp_avg": w + 2} for n, w in weights.items()}
    return {"model": weights, "optimizer": moments, "ema": averages}


def assert_saved(path, tensors):
    """A checkpoint holds exactly these tensors."""
    expected = dict(flatten(tensors))
    found = {name: torch.full_like(value, -1) for name, value in expected.items()}
    assert contents(path) == {name: (v.shape, v.dtype) for name, v in expected.items()}
    load(path, found)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.fixture
def made(monkeypatch):
    """Counts the global plans and the metadata that are made."""
    calls = []
    for name in ("choose", "describe"):
        original = getattr(GlobalPlan, name)
        monkeypatch.setattr(
            GlobalPlan, name, lambda *a, f=original, n=name: (calls.append(n), f(*a))[1]
        )
    return calls


def test_only_the_first_save_of_a_run_plans(tmp_path, made):
    kept = Plans()
    for step in range(3):
        write(tmp_path / str(step), state(step), {"step": step}, plans=kept)
        assert_saved(tmp_path / str(step), state(step))
    assert made == ["choose", "describe"]
    first, last = ((tmp_path / name / ".metadata").read_bytes() for name in "02")
    assert first == last


CHANGES = {
    "an average more": lambda: state(3.0, decays=("0.9999", "0.99")),
    "an average less": lambda: state(3.0, decays=()),
    "another name": lambda: {**state(3.0), "ema": {"0.99": state(3.0)["ema"]["0.9999"]}},
    "another shape": lambda: {**state(3.0), "model": {"bias": torch.full((7,), 3.0)}},
    "another number format": lambda: {**state(3.0), "model": {"bias": torch.ones(5).half()}},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_is_not_used_for_other_tensors(tmp_path, made, change):
    kept = Plans()
    for step, tensors in enumerate((state(1.0), CHANGES[change](), state(2.0))):
        write(tmp_path / str(step), tensors, {"step": step}, plans=kept)
        assert_saved(tmp_path / str(step), tensors)
    assert made == ["choose", "describe"] * 3


def test_metadata_are_not_used_for_shards_at_other_places(tmp_path, made, monkeypatch):
    kept, chosen = Plans(), LocalPlan.chosen
    write(tmp_path / "0", state(1.0), {"step": 0}, plans=kept)
    monkeypatch.setattr(LocalPlan, "chosen", lambda *a: (p := chosen(*a), p.items.reverse())[0])
    write(tmp_path / "1", state(2.0), {"step": 1}, plans=kept)
    assert_saved(tmp_path / "1", state(2.0))
    assert made == ["choose", "describe"] * 2


def test_a_save_that_failed_leaves_no_half_made_plan(tmp_path, made, monkeypatch):
    kept = Plans()
    with monkeypatch.context() as patched:
        patched.setattr(planning.Plans, "finish", lambda *a: 1 / 0)
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            write(tmp_path / "0", state(1.0), {"step": 0}, plans=kept)
    write(tmp_path / "1", state(2.0), {"step": 1}, plans=kept)
    assert_saved(tmp_path / "1", state(2.0))
    assert made == ["choose", "choose", "describe"]


def three_ranks():
    """The pickled local plans of three ranks that hold the same tensors."""
    return [pickle.dumps(plan_locally(state(), rank == 0).plan) for rank in range(3)]


def results_of(choices):
    """What three ranks report of their writing."""
    chosen = [plan_locally(state(), False).chosen(pickle.loads(choice)) for choice in choices]
    places = [
        [save_plan_result(item, f"__{rank}_0.distcp", i) for i, item in enumerate(plan.items)]
        for rank, plan in enumerate(chosen)
    ]
    return [pickle.dumps(part) for part in places]


def save_plan_result(item, file, place):
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.storage import WriteResult

    return WriteResult(item.index, 100, _StorageInfo(file, 100 * place, 100))


def test_a_process_of_its_own_plans_alike():
    here, there = GlobalPlan(), PlanningProcess()
    parts = three_ranks()
    choices = here.choose(parts)
    written = [i for choice in choices for i, _ in pickle.loads(choice)]
    assert sorted(written) == list(range(8)), "each tensor has one writer"
    with pytest.raises(RuntimeError, match="cannot be planned: UnpicklingError"):
        there.choose([b"?"])
    assert there.choose(parts) == choices
    assert there.describe(results_of(choices)) == here.describe(results_of(choices))
    assert there.process.returncode is not None


def run_instead(monkeypatch, code):
    start = subprocess.Popen
    monkeypatch.setattr(
        planning.subprocess,
        "Popen",
        lambda command, **kwargs: start([sys.executable, "-c", code], **kwargs),
    )


@pytest.mark.parametrize("code", ["raise SystemExit('no memory')", "print('INFO site')"])
def test_without_a_process_the_rank_plans_itself(code, tmp_path, made, monkeypatch):
    run_instead(monkeypatch, code)
    monkeypatch.setattr(planning, "LARGE_BYTES", 0)
    write(tmp_path / "0", state(1.0), {"step": 0}, plans=Plans())
    assert_saved(tmp_path / "0", state(1.0))
    assert made == ["choose", "describe"]


def test_a_save_that_failed_leaves_no_process_whose_pipes_a_worker_could_hold(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(planning, "LARGE_BYTES", 0)
    kept, started = Plans(), []
    start = planning.PlanningProcess.__init__
    monkeypatch.setattr(
        planning.PlanningProcess, "__init__", lambda own: (started.append(own), start(own))[1]
    )
    with monkeypatch.context() as patched:
        patched.setattr(Writer, "write_plan", lambda *a: 1 / 0)
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            write(tmp_path / "0", state(1.0), {"step": 0}, plans=kept)
    assert [own.process.returncode is None for own in started] == [False]
    began = time.monotonic()
    with monkeypatch.context() as patched:
        # A worker that is forked beside a planning process inherits its pipes.
        choose, workers = planning.PlanningProcess.choose, []
        patched.setattr(
            planning.PlanningProcess,
            "choose",
            lambda *a: (workers.append(forked_sleeper()), choose(*a))[1],
        )
        write(tmp_path / "1", state(2.0), {"step": 1}, plans=kept)
    assert time.monotonic() - began < 30
    assert_saved(tmp_path / "1", state(2.0))
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
    assert len(workers) == 1


def forked_sleeper():
    """The pid of a process that sleeps for a minute."""
    if pid := os.fork():
        return pid
    time.sleep(60)
    os._exit(0)


def test_a_process_that_dies_fails_the_save_in_its_own_words(tmp_path, monkeypatch):
    code = "import pickle, sys; pickle.dump('ready', sys.stdout.buffer); sys.stdout.flush()"
    run_instead(monkeypatch, f"{code}; sys.stdin.buffer.read(9); sys.exit('killed by test')")
    monkeypatch.setattr(planning, "LARGE_BYTES", 0)
    words = r"the process that plans a checkpoint ended: exit code 1\. killed by test"
    with pytest.raises(RuntimeError, match=words):
        write(tmp_path / "0", state(1.0), {"step": 0}, plans=Plans())
    monkeypatch.undo()
    write(tmp_path / "1", state(2.0), {"step": 1})
    assert_saved(tmp_path / "1", state(2.0))


def test_the_digest_is_of_all_that_is_planned():
    plan = plan_locally(state(), True)
    assert plan.digest == plan_locally(state(7.0), True).digest
    assert plan.digest != plan_locally(state(decays=()), True).digest
    words = repr(plan.plan)
    for part in ("blocks.0.weight", "[6, 4]", "float32", "offsets=", "exp_avg"):
        assert part in words
    assert planning.digest_of_all([b"a", b"b"]) != planning.digest_of_all([b"b", b"a"])
