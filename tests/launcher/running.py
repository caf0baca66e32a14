"""A run that goes on while a test sends signals to it."""

import re
import socket
import sys
import time
from pathlib import Path

import forked
from commands import environment, train_command

QUICK = ("--metrics.every", 1, "--metrics.tensorboard", "false", "--sampling.every", 0)
QUICK += ("--model.hidden", 16, "--model.layers", 1, "--training.global_batch_size", 8)


class Running:
    """The process in a session of its own, what it says in one file, killed with its ranks."""

    def __init__(self, command, cwd, name="said", **variables):
        self.file = cwd / name
        self.file.touch()
        variables = environment() | {k: str(v) for k, v in variables.items()}
        self.process = forked.start(command, cwd, variables, self.file)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        forked.kill_all(self.process.pid)
        self.process.wait()

    @property
    def said(self):
        return self.file.read_text()

    @property
    def step(self):
        """The newest step that it has told."""
        steps = re.findall(r"^step +(\d+)/", self.said, re.MULTILINE)
        return int(steps[-1]) if steps else 0

    def children(self):
        return forked.children(self.process.pid)

    def wait_until(self, done, seconds=90):
        """Until `done()`; what was said is shown where that never comes."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if done():
                return
            assert self.process.poll() is None or done(), self.said
            time.sleep(0.02)
        raise AssertionError(f"not within {seconds} s:\n{self.said}")

    def wait_for(self, words, times=1):
        self.wait_until(lambda: self.said.count(words) >= times)

    def wait_for_step(self, step):
        self.wait_until(lambda: self.step >= step)

    def send(self, number):
        self.process.send_signal(number)

    def end(self, seconds=60):
        """The exit code, when it has ended by itself."""
        return self.process.wait(seconds)


def free_port():
    """One that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_running(pid):
    """Whether a process lives; a dead one may lie there until someone asks for its code."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.is_file() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX"


def have_ended(pids, seconds=10):
    """Whether processes are gone within some seconds; the kernel takes a moment to end one."""
    deadline = time.monotonic() + seconds
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_running, pids))


def launcher(*words, ranks=2, restarts=0):
    """A command line of ours around a script or `-m module`."""
    options = ["--standalone", "--nproc-per-node", ranks, "--max-restarts", restarts]
    return [sys.executable, "-m", "titan_dit.launcher.launch", *options, *words]


def trainer(*flags, ranks=2, restarts=0, start=("-m", "titan_dit.train")):
    """The trainer as run_train.sh starts it; `start` may be a script that changes it first."""
    run = [*start, "--config", "digits", *QUICK, *flags]
    return launcher(*run, ranks=ranks, restarts=restarts)


def alone(*flags):
    """One process, without a launcher."""
    return train_command(*QUICK, *flags)


def checkpoints(cwd, name="digits"):
    """The steps that are saved."""
    found = (cwd / "outputs" / name / "checkpoints").glob("step-*/manifest.json")
    return sorted(int(path.parent.name[5:]) for path in found)
