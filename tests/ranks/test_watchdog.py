"""A hung run dumps its stacks, ends, and is restarted."""

import pickle
import subprocess
import sys

import pytest
from commands import environment, metrics
from running import Running, trainer

from titan_dit.ranks import watchdog

pytestmark = pytest.mark.alone

HANGING = """
import os, time
from titan_dit.ranks import failure
from titan_dit import train, trainer
original = trainer.Trainer.train_step
def train_step(self, batch):
    if self.world.rank == 1 and self.step == 4 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(600)
    return original(self, batch)
trainer.Trainer.train_step = train_step
failure.run_and_exit(train.main)
"""


def test_a_hanging_rank_is_dumped_with_the_others_and_the_run_goes_on(tmp_path):
    (tmp_path / "hanging.py").write_text(HANGING)
    flags = ("--training.steps", 6, "--checkpoint.every", 2, "--faults.step_timeout_s", 8)
    command = trainer(*flags, restarts=1, start=("hanging.py",))
    with Running(command, tmp_path) as run:
        assert run.end(150) == 0, run.said
    folder = tmp_path / "outputs" / "digits"
    assert [row["step"] for row in metrics(folder)] == [1, 2, 3, 4, 5, 6]
    assert run.said.count(" hung: ") == 1
    assert "after step 3. The stacks and the last collectives of all ranks" in run.said
    assert "resumed from outputs/digits/checkpoints/step-00000002" in run.said
    stacks = [
        (folder / "hangs" / f"step-00000003-rank-{rank}.txt").read_text() for rank in range(2)
    ]
    assert 'hanging.py", line 8 in train_step' in stacks[1]
    assert "hanging.py" in stacks[0], "the rank that waits for it has dumped, too"
    assert 'hanging.py", line 8 ' not in stacks[0]
    for rank, text in enumerate(stacks):
        assert "last collectives, gloo:" in text
        assert "gloo:all_reduce" in text
        record = folder / "hangs" / f"step-00000003-rank-{rank}.gloo.pickle"
        assert pickle.loads(record.read_bytes())["entries"]


def in_a_process(body, timeout=30):
    program = (
        "import ctypes, time\nfrom pathlib import Path\n"
        f"from titan_dit.ranks import watchdog\n{body}"
    )
    return subprocess.run(
        [sys.executable, "-c", program],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.mark.parametrize("wait", ["time.sleep(60)", "ctypes.CDLL(None).pause()"])
def test_python_and_native_code_that_never_return_are_ended(wait, tmp_path):
    body = (
        "watchdog.SETTLE_S = 0\n"
        f"with watchdog.Watchdog(Path({str(tmp_path)!r}), 0, 0.4) as dog:\n"
        f"    dog.alive(7)\n    {wait}\n"
    )
    done = in_a_process(body)
    assert done.returncode == 124
    assert "rank 0 hung" in done.stderr
    (file,) = (tmp_path / "hangs").glob("*.txt")
    assert file.name == "step-00000007-rank-0.txt"
    assert 'File "<string>", line 7' in file.read_text()


def test_code_that_keeps_pythons_lock_is_ended_too():
    body = (
        "watchdog.LAST_RESORT_S = 0.3\n"
        "with watchdog.Watchdog(Path('unused'), 0, 0.4) as dog:\n"
        "    dog.rearmed = 0\n    dog.alive(7)\n    ctypes.PyDLL(None).pause()\n"
    )
    done = in_a_process(body)
    assert done.returncode == 1
    assert "most recent call first" in done.stderr


def test_steps_saves_and_a_slow_start_are_signs_of_life(tmp_path):
    body = (
        f"with watchdog.Watchdog(Path({str(tmp_path)!r}), 0, 0.4) as dog:\n"
        "    time.sleep(0.9)\n"
        "    for step in range(9):\n        dog.alive(step)\n        time.sleep(0.1)\n"
        "    with dog.slow('saving'):\n        time.sleep(0.9)\n"
        "time.sleep(0.9)\nprint('done')\n"
    )
    done = in_a_process(body)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
    assert list(tmp_path.iterdir()) == []


def test_zero_never_ends_a_run(tmp_path):
    body = (
        f"with watchdog.Watchdog(Path({str(tmp_path)!r}), 0, 0) as dog:\n"
        "    dog.alive(1)\n    time.sleep(1)\n"
    )
    assert in_a_process(body).returncode == 0


def test_the_newest_collectives_are_told_in_words():
    entry = {"profiling_name": "gloo:all_reduce", "input_sizes": [[3]], "state": "scheduled"}
    entries = [
        entry | {"collective_seq_id": n, "process_group": ("1", "loss"), "retired": n < 3}
        for n in (1, 2, 3)
    ]
    save = {"profiling_name": "gloo:gather", "process_group": ("9", "checkpoints")}
    entries += [entry | save | {"collective_seq_id": n, "retired": True} for n in range(7)]
    lines = watchdog.summary(pickle.dumps({"entries": entries}), last=2)
    assert lines == [
        "#2 gloo:all_reduce of [[3]] in group 1: done",
        "#3 gloo:all_reduce of [[3]] in group 1: scheduled",
        "#5 gloo:gather of [[3]] in group 9: done",
        "#6 gloo:gather of [[3]] in group 9: done",
    ]


def test_nothing_is_armed_outside_of_the_block(monkeypatch, tmp_path):
    """A process that only saves or draws would be ended half an hour later."""
    armed = []
    monkeypatch.setattr(
        watchdog.faulthandler, "dump_traceback_later", lambda *_, **__: armed.append(True)
    )
    monkeypatch.setattr(watchdog.faulthandler, "cancel_dump_traceback_later", armed.clear)
    dog = watchdog.Watchdog(tmp_path, 0, 300.0)
    with dog.slow("saving") as alive:
        alive()
    assert not armed
    with dog:
        assert armed
    assert not armed
    dog.alive(1)
    assert not armed
