"""Snapshots of averages beside a run's checkpoints."""

import threading

import pytest
import records
import torch

from titan_dit.checkpoint import run_checkpoints, torch_files
from titan_dit.checkpoint.averages import Snapshots, averages_in
from titan_dit.checkpoint.checkpoint import contents
from titan_dit.checkpoint.record import read_record
from titan_dit.checkpoint.run_checkpoints import Checkpoints, step_of
from titan_dit.checkpoint.store import Disk, location
from titan_dit.config.operation import CheckpointConfig
from titan_dit.config.section import UserError
from titan_dit.config.training import EMAConfig

EMA = EMAConfig(decays=(0.9,), power=(0.05, 0.1), snapshots=6)
POWERS = ("power_0.05", "power_0.1")


def saves_in(folder, *, ema=EMA, steps=12, **keys):
    checkpoints = Checkpoints(location(str(folder)), CheckpointConfig(**{"every": 3, **keys}))
    checkpoints.snapshots = Snapshots(checkpoints, ema, steps)
    return checkpoints


def state(step):
    averages = {name: {"w": torch.full((4,), float(step))} for name in ("0.9", *POWERS)}
    return {"model": {"w": torch.zeros(4)}, "ema": averages}


def save(checkpoints, step):
    record = records.of_run(step, {"ema": {"decays": [0.9], "power": [0.05, 0.1]}})
    checkpoints.save(step, state(step), record, whole=step % 3 == 0)


def steps_of(series):
    return [step_of(path) for path in series.complete()]


def run(checkpoints, first=1, last=12):
    for step in range(first, last + 1):
        if step % 3 == 0 or checkpoints.takes_snapshot(step):
            save(checkpoints, step)
    checkpoints.finish()


@pytest.mark.parametrize("kind", ["disk", "store"])
@pytest.mark.parametrize("async_save", [True, False])
def test_cleaning_keeps_all_snapshots_and_they_hold_the_power_averages(kind, async_save, tmp_path):
    folder = tmp_path / "checkpoints" if kind == "disk" else f"memory://{tmp_path.name}"
    checkpoints = saves_in(folder, keep=1, async_save=async_save)
    run(checkpoints)
    snapshots = checkpoints.snapshots
    assert steps_of(checkpoints) == [12]
    assert steps_of(snapshots) == [2, 4, 6, 8, 10, 12]
    # Again, as a later launch does.
    Checkpoints(checkpoints.folder, CheckpointConfig(keep=1)).prune()
    assert steps_of(snapshots) == [2, 4, 6, 8, 10, 12]
    for path in snapshots.complete():
        assert sorted(contents(path)) == [f"ema.{name}.w" for name in POWERS]
        assert read_record(path)["step"] == step_of(path)
    # One line per checkpoint, none per snapshot.
    assert [line.rpartition("-")[2] for line in checkpoints.poll()] == [
        f"{step:08d}" for step in (3, 6, 9, 12)
    ]


def test_without_checkpoints_or_power_nothing_is_saved(tmp_path):
    for keys in ({"every": 0}, {"ema": EMAConfig(decays=(0.9,))}):
        checkpoints = saves_in(tmp_path / "checkpoints", **keys)
        assert not any(map(checkpoints.takes_snapshot, range(1, 13)))
        checkpoints.save(2, state(2), {"step": 2}, whole=False)
        checkpoints.finish()
    assert not (tmp_path / "checkpoints").exists()


def test_a_checkpoint_is_complete_only_after_the_snapshots_before_it(tmp_path, monkeypatch):
    """Else a run that is killed in between would resume without a snapshot."""
    checkpoints, go, order, write = saves_in(tmp_path), threading.Event(), [], run_checkpoints.write

    def slow(path, *arguments):
        if path.parent.name == "averages":
            go.wait(10)
        order.append(path.parent.name)
        write(path, *arguments)

    monkeypatch.setattr(run_checkpoints, "write", slow)
    save(checkpoints, 2)
    save(checkpoints, 3)
    checkpoints.thread.join(0.3)
    assert checkpoints.thread.is_alive()
    assert order == []
    go.set()
    checkpoints.finish()
    assert order == ["averages", tmp_path.name]


def test_a_step_is_saved_once_and_again_after_the_run_went_back(tmp_path):
    checkpoints = saves_in(tmp_path)
    run(checkpoints, 1, 8)
    written = checkpoints.snapshots.folder / "step-00000008" / "manifest.json"
    before = written.stat().st_ino
    save(checkpoints, 8)
    checkpoints.finish()
    assert written.stat().st_ino == before
    checkpoints.forget_snapshots_after(6)
    assert steps_of(checkpoints.snapshots) == [2, 4, 6]
    run(checkpoints, 7)
    assert steps_of(checkpoints.snapshots) == [2, 4, 6, 8, 10, 12]


def test_a_snapshot_of_steps_to_come_that_cannot_be_deleted_is_an_error(tmp_path, monkeypatch):
    checkpoints = saves_in(tmp_path)
    run(checkpoints)
    monkeypatch.setattr(Disk, "remove", lambda *_: None)
    with pytest.raises(UserError, match=r"goes on after step 9, but .*10 cannot be deleted"):
        checkpoints.forget_snapshots_after(9)


def test_a_failed_snapshot_is_reported_and_ends_no_run(tmp_path, monkeypatch):
    checkpoints = saves_in(tmp_path, max_failures=1)
    with monkeypatch.context() as patched:
        patched.setattr(torch_files.Digesting, "write", full)
        save(checkpoints, 2)
        checkpoints.snapshots.wait()
        save(checkpoints, 4)
        checkpoints.snapshots.wait()
    run(checkpoints, 5)
    assert steps_of(checkpoints.snapshots) == [6, 8, 10, 12]
    failed = [line for line in checkpoints.poll() if "not saved" in line]
    assert len(failed) == 2
    assert "[ema] the snapshot of step 2 was not saved" in failed[0]
    assert "No space left on device" in failed[0]
    assert not list(tmp_path.rglob("*.partial"))


def full(*_):
    raise OSError(28, "No space left on device")


def test_the_disk_space_is_said(tmp_path):
    (line,) = saves_in(tmp_path).snapshot_lines(2**28)
    assert line.startswith("averages: 6 snapshots of 2, 2 GiB each, 12 GiB in all, in ")
    (line,) = saves_in(tmp_path, every=0).snapshot_lines(2**28)
    assert line == "no snapshots of [ema] power are taken: [checkpoint] every=0"
    assert not list(saves_in(tmp_path, ema=EMAConfig()).snapshot_lines(2**28))
    # As old records are: without the key.
    assert averages_in({"config": {"ema": {"decays": [0.9]}}}) == ["0.9"]
