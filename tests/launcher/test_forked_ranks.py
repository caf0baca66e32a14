"""Ranks forked by a server, in place of a Python per rank."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import commands
import pytest
from running import Running, have_ended, is_running, launcher

from titan_dit.launcher import forked_ranks
from titan_dit.launcher.fork_server import Request
from titan_dit.launcher.forked_ranks import ForkedRank, ForkServer

PROBE = """
import json, os, signal, sys, time
if __name__ == "__main__":
    def is_ignored(name):
        return signal.getsignal(getattr(signal, name)) == signal.SIG_IGN
    print(json.dumps({
        "argv": sys.argv[1:], "folder": os.getcwd(), "own": os.environ.get("OWN"),
        "left": os.environ.get("LEFT"), "leads": os.getsid(0) == os.getpid(),
        "ignored": [n for n in ("SIGHUP", "SIGTERM", "SIGINT", "SIGUSR1") if is_ignored(n)],
        "preloaded": "colorsys" in sys.modules, "files": sorted(os.listdir("/proc/self/fd")),
    }))
    end = sys.argv[1]
    if end == "killed":
        sys.stdout.buffer.write(b"raw")
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "sleep":
        time.sleep(60)
    if end == "raise":
        raise ValueError("no more")
    sys.exit({"three": 3, "words": "in words"}.get(end))
"""


@pytest.fixture
def server(monkeypatch):
    """A server that preloads a small module."""
    monkeypatch.setattr(forked_ranks, "PRELOADED", "colorsys")
    monkeypatch.setenv("LEFT", "of the launcher")
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    server = ForkServer()
    yield server
    server.connection.close()
    assert server.process.wait(10) == 0


@pytest.fixture
def rank(server, tmp_path):
    """Fork a rank that runs PROBE."""
    (tmp_path / "probe.py").write_text(PROBE)

    def start(*words, ignored=()):
        files = [str(tmp_path / name) for name in ("out", "err")]
        given = {"OWN": "1", "PATH": os.environ["PATH"]}
        return ForkedRank(server, Request(("probe", *words), given, str(tmp_path), *files, ignored))

    return start


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [("well", 0, ""), ("three", 3, ""), ("words", 1, "in words"), ("raise", 1, "no more")],
)
def test_a_rank_ends_as_a_python_of_its_own_would(rank, tmp_path, end, code, said):
    assert rank(end).wait(10) == code
    errors = (tmp_path / "err").read_text()
    assert said in errors
    assert bool(errors) == bool(said)


def test_a_rank_has_its_own_arguments_environment_folder_and_session(rank, tmp_path):
    assert rank("well", "--flag", ignored=[signal.SIGHUP]).wait(10) == 0
    found = json.loads((tmp_path / "out").read_text())
    assert found.pop("files")[:3] == ["0", "1", "2"]
    assert found == {
        **{"argv": ["well", "--flag"], "folder": str(tmp_path), "own": "1", "left": None},
        **{"leads": True, "ignored": ["SIGHUP"], "preloaded": True},
    }


def test_what_a_killed_rank_printed_is_written(rank, tmp_path):
    """As with `python -u`."""
    assert rank("killed").wait(10) == -signal.SIGKILL
    assert (tmp_path / "out").read_text().endswith("}\nraw")


def test_a_rank_hears_signals_and_leads_its_session_from_its_first_moment(rank):
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        started = rank("sleep")
        os.killpg(started.pid, number)
        assert started.wait(10) == -number


def test_a_rank_whose_end_the_launcher_has_not_seen_can_be_signalled(rank):
    """torchrun polls a rank, then sends a signal: no error if the rank ends in between."""
    ended = rank("three")
    stat = Path(f"/proc/{ended.pid}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    time.sleep(0.2)
    os.killpg(ended.pid, signal.SIGTERM)
    assert ended.wait(10) == 3
    ended.terminate()
    while stat.exists():  # Now its pid is free.
        time.sleep(0.01)


def test_signals_and_timeouts(rank):
    first, second = rank("sleep"), rank("sleep")
    assert first.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        first.wait(0.1)
    first.terminate()
    assert first.wait(10) == -signal.SIGTERM
    first.kill()  # It has ended: nobody gets this.
    assert second.poll() is None
    second.kill()
    assert second.wait(10) == -signal.SIGKILL
    assert first.returncode == -signal.SIGTERM


def test_a_scheduler_that_signals_every_process_ends_no_server(server, rank):
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
        os.kill(server.process.pid, number)
    assert rank("three").wait(10) == 3


def test_without_its_server_a_rank_is_a_python_of_its_own(server, rank, tmp_path, monkeypatch):
    running = rank("sleep")
    os.kill(running.pid, signal.SIGKILL)
    server.process.kill()
    assert running.wait(10) == -signal.SIGKILL
    popen = subprocess.Popen
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    handler = subprocess_handler.SubprocessHandler
    monkeypatch.setattr(handler, "_popen", lambda _, words, env: popen(words, env=env))
    forked_ranks.fork_ranks(server)
    silent = SimpleNamespace(_stdout=None, _stderr=None)
    words = (sys.executable, "-u", "-m", "probe", "three")
    monkeypatch.chdir(tmp_path)
    started = handler._popen(silent, words, dict(os.environ))
    assert isinstance(started, popen)
    assert started.wait(10) == 3
    # The fixture expects a server that ends by itself.
    monkeypatch.setattr(server, "process", SimpleNamespace(wait=lambda _: 0))


LAUNCHER = """
import sys, time
from titan_dit.launcher import forked_ranks
from titan_dit.launcher.fork_server import Request
forked_ranks.PRELOADED = "colorsys"
server = forked_ranks.ForkServer()
request = Request(("probe", "sleep"), {}, sys.argv[1], None, None, ())
print(server.process.pid, server.start(request), flush=True)
time.sleep(60)
"""


def test_a_killed_launcher_leaves_no_processes(tmp_path):
    (tmp_path / "probe.py").write_text(PROBE)
    words = [sys.executable, "-c", LAUNCHER, str(tmp_path)]
    with subprocess.Popen(
        words, env=commands.environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        # The forked rank prints, too.
        line = next(line for line in process.stdout if line[0].isdigit())
        pids = [int(pid) for pid in line.split()]
        assert all(map(is_running, pids))
        process.kill()
        assert have_ended(pids)


UNTOUCHED = """
import os, torch
def touched(*_): raise SystemExit("CUDA is asked for")
for name in ("is_available", "device_count", "_lazy_init", "current_device", "get_device_name"):
    setattr(torch.cuda, name, touched)
if hasattr(torch._C, "_cuda_getDeviceCount"):  # A build with CUDA.
    torch._C._cuda_getDeviceCount = touched
import titan_dit.preload
if pid := os.fork():
    os.waitpid(pid, 0)
    print(len(os.listdir("/proc/self/task")), flush=True)
os._exit(0)  # As ranks end.
"""


def test_what_ranks_import_leaves_no_thread_at_a_fork_and_asks_for_no_gpu():
    """With more than one thread OpenBLAS starts some at its import, and ends them at the fork."""
    done = subprocess.run(
        [sys.executable, "-c", UNTOUCHED], env=commands.environment() | {"OMP_NUM_THREADS": "2"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_a_killed_rank_is_forked_again_and_goes_on(tmp_path):
    flags = ("--training.steps", 400, "--checkpoint.every", 10, "--metrics.every", 1)
    flags += ("--model.hidden_size", 16, "--model.num_layers", 1, "--training.global_batch_size", 8)
    flags += ("--sampling.every", 0, "--metrics.tensorboard", "false")
    command = launcher("-m", "titan_dit.train", "--config", "digits", *flags, restarts=1)
    with Running(command, tmp_path, FORK=1) as run:
        run.wait_for_step(15)
        ranks = run.children()
        assert len(ranks) == 2
        assert Path(f"/proc/{ranks[0]}/comm").read_text() == "titan_dit.train\n"
        os.kill(ranks[-1], signal.SIGKILL)
        killed = time.monotonic()
        run.wait_for("resumed from")
        run.wait_until(lambda: run.said.count("step  16/") + run.said.count("step  21/") >= 1)
        assert time.monotonic() - killed < 20
        assert not set(ranks) & set(run.children())
        run.send(signal.SIGTERM)
        assert run.end() == 0
    assert "saved" in run.said
