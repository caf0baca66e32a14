"""Asynchronous saves: contents, time that a step waits, failures, retention."""

import errno
import os
import resource
import statistics
import sys
import threading
import time
from pathlib import Path

import commands
import pytest
import torch

from titan_dit.checkpoint import run_checkpoints as saving
from titan_dit.checkpoint import store, torch_files
from titan_dit.checkpoint.checkpoint import load
from titan_dit.checkpoint.run_checkpoints import Checkpoints, step_of
from titan_dit.config.operation import CheckpointConfig
from titan_dit.config.section import UserError
from titan_dit.ranks.failure import Disruption

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def _no_wait_is_worth_telling(monkeypatch):
    """The waiting time on a busy machine is not tested here."""
    monkeypatch.setattr(saving, "LONG_WAIT_S", 1e9)


def test_a_long_wait_for_the_one_before_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "LONG_WAIT_S", 0.0)
    checkpoints = series(tmp_path)
    checkpoints.save(10, state(), {"step": 10})
    checkpoints.save(20, state(), {"step": 20})
    said = [line for line in checkpoints.poll() if line.startswith("waited ")]
    assert len(said) == 1
    assert "a larger [checkpoint] every avoids the wait" in said[0]
    checkpoints.finish()


def state(value=0.0):
    return {
        "model": {"w": torch.full((300, 200), value), "b": torch.full((7,), value)},
        "optimizer": {"w": {"step": torch.tensor(value), "exp_avg": torch.full((300, 200), value)}},
    }


def values(path):
    target = state(-1.0)
    load(path, target)
    return {tensor.unique().item() for tensor in saving_leaves(target)}


def saving_leaves(tensors):
    for value in tensors.values():
        yield from saving_leaves(value) if isinstance(value, dict) else [value]


def series(folder, **settings):
    return Checkpoints(folder, CheckpointConfig(**{"every": 10, "keep": 0} | settings))


def test_what_is_saved_is_the_state_of_the_step_and_not_of_the_next(tmp_path, monkeypatch):
    checkpoints, tensors = series(tmp_path), state(1.0)
    may_write = threading.Event()
    write = saving.write
    monkeypatch.setattr(saving, "write", lambda *a: (may_write.wait(30), write(*a)))
    path = checkpoints.save(10, tensors, {"step": 10})
    for tensor in saving_leaves(tensors):
        tensor.fill_(2.0)
    may_write.set()
    checkpoints.finish()
    assert values(path) == {1.0}


def test_one_save_at_most_is_under_way_and_its_end_is_told_once(tmp_path, monkeypatch):
    checkpoints, tensors = series(tmp_path), state(1.0)
    under_way, most = [], []
    may_write = threading.Event()
    write = saving.write

    def slow(*arguments):
        under_way.append(1)
        most.append(len(under_way))
        may_write.wait(30)
        write(*arguments)
        under_way.pop()

    monkeypatch.setattr(saving, "write", slow)
    checkpoints.save(10, tensors, {"step": 10})
    assert checkpoints.poll() == []
    assert checkpoints.complete() == []
    threading.Timer(0.2, may_write.set).start()
    # The buffers are those of the first save: overwritten too early, it would hold a 2.
    tensors["model"]["w"].fill_(2.0)
    checkpoints.save(20, tensors, {"step": 20})
    assert values(tmp_path / "step-00000010") == {1.0}
    checkpoints.finish()
    assert most == [1, 1]
    said = [line for line in checkpoints.poll() if line.startswith("saved")]
    assert said == [f"saved {tmp_path / name}" for name in ("step-00000010", "step-00000020")]
    assert checkpoints.poll() == []


def test_the_copy_goes_into_the_same_buffers_every_time(tmp_path):
    checkpoints = series(tmp_path)
    places = []
    for step in (10, 20):
        checkpoints.save(step, state(float(step)), {"step": step})
        places.append([buffer.data_ptr() for buffer in checkpoints.staging.buffers])
    checkpoints.finish()
    assert places[0] == places[1]
    assert [values(path) for path in checkpoints.complete()] == [{10.0}, {20.0}]


@pytest.mark.alone
def test_a_step_waits_no_longer_than_about_one_copy_of_the_state(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "write", lambda *a: None)
    checkpoints = series(tmp_path)
    tensors = {"model": {str(i): torch.ones(512, 1024) for i in range(16)}}
    flat, target = torch.ones(16 * 512 * 1024), torch.ones(16 * 512 * 1024)
    waits, copies = [], []
    for turn in range(12):
        began = time.perf_counter()
        target.copy_(flat)
        copies.append(time.perf_counter() - began)
        began = time.perf_counter()
        checkpoints.save(turn, tensors, {})
        waits.append(time.perf_counter() - began)
        checkpoints.wait()
    # The best of several: other processes are at work. benchmarks/checkpoint.py measures it.
    assert min(waits[1:]) < 2 * min(copies[1:]) + 2e-3, (waits, copies)
    assert statistics.median(waits) < 1.0


ERRORS = {"full": errno.ENOSPC, "permission": errno.EACCES, "read-only": errno.EROFS}
MOMENTS = {
    "begin": (store.Disk, "begin"),
    "tensors": (torch_files.DigestedDisk, "create_stream"),
    "write": (torch_files.Digesting, "write"),
    "manifest": (store.Disk, "write"),
    "commit": (store.Disk, "commit"),
}


def failing(code):
    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code), "/the/disk")

    return fail


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("error", ERRORS)
def test_a_disk_that_fails_is_survived_and_the_next_save_tries_again(
    tmp_path, monkeypatch, error, moment, asynchronous
):
    checkpoints = series(tmp_path, async_save=asynchronous)
    first = checkpoints.save(10, state(1.0), {"step": 10})
    checkpoints.finish()
    checkpoints.poll()
    with monkeypatch.context() as patched:
        patched.setattr(*MOMENTS[moment], failing(ERRORS[error]))
        checkpoints.save(20, state(2.0), {"step": 20})
        checkpoints.wait()
    [said] = checkpoints.poll()
    assert said.startswith(f"step 20 was not saved in {tmp_path}: ")
    assert os.strerror(ERRORS[error]) in said
    assert "/the/disk" in said
    assert said.endswith("Training continues; the next attempt is at step 30")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
    assert values(first) == {1.0}
    third = checkpoints.save(30, state(3.0), {"step": 30})
    checkpoints.finish()
    assert checkpoints.poll() == [f"saved {third}"]
    assert values(third) == {3.0}


def test_no_memory_for_the_copy_is_survived_too(tmp_path, monkeypatch):
    checkpoints = series(tmp_path)

    def no_memory(*args, **kwargs):
        raise RuntimeError("can't allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "_foreach_copy_", no_memory)
        checkpoints.save(10, state(), {"step": 10})
        checkpoints.wait()
    assert "can't allocate memory" in checkpoints.poll()[0]
    assert list(tmp_path.iterdir()) == []
    checkpoints.save(20, state(), {"step": 20})
    checkpoints.finish()


def fail_once(checkpoints, step, monkeypatch):
    checkpoints.wait()  # The save before may not have begun.
    with monkeypatch.context() as patched:
        patched.setattr(store.Disk, "begin", failing(errno.ENOSPC))
        checkpoints.save(step, state(), {"step": step})
        checkpoints.wait()


def test_so_many_failures_in_a_row_end_the_run(tmp_path, monkeypatch):
    checkpoints = series(tmp_path, max_failures=2)
    fail_once(checkpoints, 10, monkeypatch)
    checkpoints.save(20, state(), {"step": 20})  # A good one resets the count.
    fail_once(checkpoints, 30, monkeypatch)
    fail_once(checkpoints, 40, monkeypatch)
    with pytest.raises(UserError) as caught:
        checkpoints.save(50, state(), {"step": 50})
    message = str(caught.value)
    assert message.startswith("[checkpoint] max_failures=2: the last 2 saves")
    assert "No space left on device: /the/disk" in message
    assert [step_of(path) for path in checkpoints.complete()] == [20]


def test_max_failures_0_never_ends_the_run(tmp_path, monkeypatch):
    checkpoints = series(tmp_path, max_failures=0)
    for step in range(10, 60, 10):
        fail_once(checkpoints, step, monkeypatch)
    assert len(checkpoints.poll()) == 5


def test_a_run_whose_last_save_failed_does_not_end_well(tmp_path, monkeypatch):
    checkpoints = series(tmp_path, max_failures=0)
    path = checkpoints.save(10, state(), {"step": 10})
    fail_once(checkpoints, 20, monkeypatch)
    with pytest.raises(Disruption, match=f"No space left.* it resumes from {path}"):
        checkpoints.finish()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_the_kernel_refuses_to_write_is_told_in_its_words(tmp_path, asynchronous):
    """A real file size limit, which torch.save reports as an enforce failure."""
    checkpoints = series(tmp_path, async_save=asynchronous)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        for step, size in ((10, 1), (20, 1 << 20)):
            checkpoints.save(step, {"model": {"w": torch.ones(size)}}, {"step": step})
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    saved, failed = checkpoints.poll()
    assert saved == f"saved {tmp_path}/step-00000010"
    assert f"step 20 was not saved in {tmp_path}: File too large" in failed
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("in the way")
    checkpoints = series(tmp_path / "file" / "checkpoints")
    checkpoints.save(10, state(), {"step": 10})
    checkpoints.wait()
    assert "Not a directory" in checkpoints.poll()[0]


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({"keep": 2, "keep_every": 30}, [30, 60, 70, 80]),
        ({"keep": 1, "keep_every": 20}, [20, 40, 60, 80]),
        ({"keep": 3}, [60, 70, 80]),
        ({"keep": 0, "keep_every": 30}, [10, 20, 30, 40, 50, 60, 70, 80]),
    ],
)
def test_the_newest_are_kept_and_those_of_every_so_many_steps(tmp_path, settings, left):
    checkpoints = series(tmp_path, **settings)
    for step in range(10, 90, 10):
        checkpoints.save(step, {"model": {"w": torch.ones(1)}}, {"step": step})
    checkpoints.finish()
    assert [step_of(path) for path in checkpoints.complete()] == left


def test_nothing_is_deleted_before_the_new_one_is_whole(tmp_path, monkeypatch):
    checkpoints = series(tmp_path, keep=1)
    checkpoints.save(10, state(1.0), {"step": 10})
    fail_once(checkpoints, 20, monkeypatch)
    assert [step_of(path) for path in checkpoints.complete()] == [10]
    checkpoints.save(30, state(3.0), {"step": 30})
    checkpoints.finish()
    assert [step_of(path) for path in checkpoints.complete()] == [30]


def test_an_error_elsewhere_does_not_wait_for_the_writer(tmp_path):
    script = (
        "import time, torch\n"
        "from pathlib import Path\n"
        "from titan_dit.ranks import failure\n"
        "from titan_dit.checkpoint import run_checkpoints\n"
        "def slow(*arguments):\n"
        "    time.sleep(300)\n"
        "run_checkpoints.write = slow\n"
        "def main():\n"
        "    checkpoints = run_checkpoints.Checkpoints(Path('here'))\n"
        "    checkpoints.save(1, {'model': {'w': torch.ones(1)}}, {})\n"
        "    raise RuntimeError('planted')\n"
        "failure.run_and_exit(main)\n"
    )
    done = commands.run([sys.executable, "-c", script], tmp_path, timeout=120)
    assert done.returncode == 1
    assert "planted" in done.stderr
    assert not (Path(tmp_path) / "here" / "step-00000001").exists()
