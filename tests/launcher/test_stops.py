"""Signals to a run as people, Slurm and Kubernetes send them."""

import os
import signal
import time
from types import SimpleNamespace

import pytest
from running import Running, alone, checkpoints, free_port, have_ended, launcher, trainer

from titan_dit.launcher import launch

pytestmark = pytest.mark.alone

ENDLESS = ("--training.steps", 100_000, "--checkpoint.every", 20)


def test_a_run_that_is_told_to_stop_saves_and_the_same_command_goes_on(tmp_path):
    with Running(trainer(*ENDLESS), tmp_path) as run:
        run.wait_for_step(5)
        run.send(signal.SIGTERM)
        assert run.end() == 0, run.said
    (stopped_at,) = set(checkpoints(tmp_path)) - set(range(0, 100_000, 20)) or {run.step}
    assert stopped_at == run.step
    assert f"stopped after step {stopped_at}; resume with the same command" in run.said
    assert "Traceback" not in run.said

    # A rank is killed; the run resumes from the newest checkpoint; Ctrl-C twice kills it.
    with Running(trainer(*ENDLESS, restarts=1), tmp_path) as run:
        run.wait_for(f"checkpoints/step-{stopped_at:08d}")
        run.wait_for_step(stopped_at + 2)
        os.kill(run.children()[-1], signal.SIGKILL)
        run.wait_for("resumed from", times=2)
        told = len(run.said.splitlines())
        run.wait_until(lambda: len(run.said.splitlines()) > told + 7)
        assert "SIGKILL" in run.said
        assert "restart 1, 0 left" in run.said
        ranks = run.children()
        run.send(signal.SIGINT)
        run.wait_for("Ctrl-C again")
        began = time.monotonic()
        run.send(signal.SIGINT)
        assert run.end() == 130
        assert time.monotonic() - began < 2
        assert "Traceback" not in run.said
        assert have_ended(ranks)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_single_process_finishes_the_step_and_saves(number, code, tmp_path):
    """Terminals and Slurm also signal the loader's workers."""
    with Running(alone(*ENDLESS, "--data.num_workers", 1), tmp_path) as run:
        run.wait_for_step(3)
        (worker,) = run.children()
        os.kill(worker, number)
        run.wait_for_step(run.step + 10)
        os.killpg(run.process.pid, number)
        assert run.end() == code, run.said
    assert run.step in checkpoints(tmp_path)
    assert f"stopped by {number.name} after step {run.step}" in run.said
    assert "Traceback" not in run.said


def script(folder, body):
    (folder / "script.py").write_text(
        f"import os, signal, sys, time\nfrom titan_dit.ranks import failure\n"
        f"from titan_dit.config.section import UserError\n{body}"
    )
    return folder / "script.py"


def test_a_signal_before_the_ranks_listen_ends_the_launch_cleanly(tmp_path):
    sleeping = script(tmp_path, "print('begun', flush=True)\ntime.sleep(600)\n")
    with Running(launcher(sleeping, restarts=3), tmp_path, STOPPED_CODE=75) as run:
        run.wait_for("begun", times=2)
        began = time.monotonic()
        run.send(signal.SIGTERM)
        assert run.end() == 75
        assert time.monotonic() - began < 10
    assert "nothing new to save" in run.said
    assert "Traceback" not in run.said


def test_a_signal_while_nodes_still_meet_ends_the_launch_at_once(tmp_path):
    command = launcher(script(tmp_path, ""), ranks=1)
    at = command.index("--standalone")
    command[at : at + 1] = ["--nnodes", "2", "--rdzv-backend", "c10d"]
    command[at + 4 : at + 4] = ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    with Running(command, tmp_path) as run:
        time.sleep(6)
        run.send(signal.SIGINT)
        assert run.end(5) == 130
    assert run.said == "titan_dit: stopped by SIGINT while there were no ranks\n"


def test_what_a_user_has_to_put_right_is_not_tried_again(tmp_path):
    body = (
        "def main():\n"
        "    print('attempt', flush=True)\n"
        "    raise UserError('[parallel] tp=3')\n"
        "failure.run_and_exit(main)\n"
    )
    with Running(launcher(script(tmp_path, body), ranks=1, restarts=3), tmp_path) as run:
        assert run.end() == 2
    assert run.said.count("attempt") == 1
    assert run.said.count("error: [parallel] tp=3") == 1


def ended(code, words=None, moment=0.0, user=False):
    extra = {"timestamp": "0", "moment": moment, "user": user}
    message = {"message": words, "extraInfo": extra} if words else "Signal"
    return SimpleNamespace(exitcode=code, message=message, timestamp=0)


LOST = "RuntimeError: Connection closed by peer"


@pytest.mark.parametrize(
    ("others", "code", "said"),
    [
        (ended(143), 75, "nothing new to save"),
        (ended(1, LOST), 75, "nothing new to save"),
        (ended(1, "Traceback: planted"), 1, "Traceback: planted"),
        (ended(2, "error: [parallel] tp=3", user=True), 2, "error: [parallel] tp=3"),
    ],
)
def test_a_request_to_stop_hides_no_failure_of_its_own(others, code, said, capsys):
    launcher = launch.Launcher(600, stopped_code=75)
    launcher.asked = signal.SIGTERM
    assert launcher.failed(SimpleNamespace(failures={0: ended(143), 1: others})) == code
    assert said in capsys.readouterr().err


ONE_BAD_READ = """
import errno
from titan_dit import train
from titan_dit.trainer import Trainer

step = Trainer.train_step

def fails_once(trainer, batch):
    if trainer.step == 5 and not failure.is_restarted():
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), "a/shard")
    return step(trainer, batch)

Trainer.train_step = fails_once
failure.run_and_exit(train.main)
"""


def test_a_disk_that_fails_in_training_is_tried_again_and_never_is_for_the_first_start(tmp_path):
    flags = ("--training.steps", 8, "--checkpoint.every", 2, "--checkpoint.async_save", "false")
    flags += ("--checkpoint.resume", "never")
    start = (script(tmp_path, ONE_BAD_READ),)
    with Running(trainer(*flags, ranks=1, restarts=1, start=start), tmp_path) as run:
        assert run.end(90) == 0, run.said
    assert "error: a/shard: Stale file handle.\nrank 0 failed (above)" in run.said
    assert "Traceback" not in run.said
    assert "resumed from outputs/digits/checkpoints/step-00000004" in run.said
    assert checkpoints(tmp_path)[-1] == 8

    # The same command, started by hand, is refused, and not retried.
    with Running(trainer(*flags, ranks=1, restarts=1), tmp_path) as run:
        assert run.end(60) == 2, run.said
    assert run.said.count('error: [checkpoint] resume="never"') == 1


def test_a_rank_that_raises_is_told_once_per_attempt_before_the_next(tmp_path):
    body = (
        "def main():\n"
        "    print('attempt', flush=True)\n"
        "    raise RuntimeError('planted')\n"
        "failure.run_and_exit(main)\n"
    )
    with Running(launcher(script(tmp_path, body), ranks=1, restarts=1), tmp_path) as run:
        assert run.end() == 1
    assert run.said.count("RuntimeError: planted") == run.said.count("Traceback") == 2
    first, second = run.said.split("restarted:")
    assert "RuntimeError: planted\nrank 0 failed (above). restart 1, 0 left." in first
    assert "resumes from the newest checkpoint" in second


def test_ranks_that_ignore_the_request_are_killed_after_the_grace(tmp_path):
    body = "signal.signal(signal.SIGUSR1, signal.SIG_IGN)\nprint('begun', flush=True)\n"
    deaf = script(tmp_path, body + "time.sleep(600)\n")
    with Running(launcher(deaf, ranks=1), tmp_path, GRACE=1) as run:
        run.wait_for("begun")
        (rank,) = run.children()
        run.send(signal.SIGTERM)
        assert run.end(10) == 143
        assert have_ended([rank])
    assert "GRACE=1" in run.said


def test_ranks_end_with_their_launcher(tmp_path):
    body = (
        "from titan_dit.ranks.signals import die_with_launcher\n"
        "die_with_launcher()\nprint('begun', flush=True)\ntime.sleep(600)\n"
    )
    with Running(launcher(script(tmp_path, body), ranks=1), tmp_path) as run:
        run.wait_for("begun")
        (rank,) = run.children()
        run.process.kill()
        run.process.wait()
        assert have_ended([rank])
