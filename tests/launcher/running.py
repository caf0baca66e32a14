"""A run in the background, to which a test sends signals."""

import re
import socket
import sys
import time
from pathlib import Path

import forked
from commands import environment, run, train_command

QUICK = ("--metrics.every", 1, "--metrics.tensorboard", "false", "--sampling.every", 0)
QUICK += ("--model.hidden_size", 16, "--model.num_layers", 1, "--training.global_batch_size", 8)


class Running:
    """A process in its own session, its output in one file; killed with its ranks on exit."""

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
        """The last step on its console."""
        steps = re.findall(r"^step +(\d+)/", self.said, re.MULTILINE)
        return int(steps[-1]) if steps else 0

    def children(self):
        return forked.children(self.process.pid)

    def wait_until(self, done, seconds=90):
        """Wait until `done()`; on a timeout fail with the output."""
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
        """Wait for the exit code."""
        return self.process.wait(seconds)


def free_port():
    """A TCP port without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_open(endpoint):
    """True if something listens at "host:port"."""
    host, port = endpoint.split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def is_running(pid):
    """True if a process is alive and no zombie."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.is_file() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX"


def have_ended(pids, seconds=10):
    """True if all processes end within `seconds`."""
    deadline = time.monotonic() + seconds
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_running, pids))


def launcher(*words, ranks=2, restarts=0):
    """The launcher's command line around a script or `-m module`."""
    options = ["--standalone", "--nproc-per-node", ranks, "--max-restarts", restarts]
    return [sys.executable, "-m", "titan_dit.launcher.launch", *options, *words]


def trainer(*flags, ranks=2, restarts=0, start=("-m", "titan_dit.train")):
    """The trainer as run_train.sh starts it; `start` may be a script that patches it."""
    words = [*start, "--config", "digits", *QUICK, *flags]
    return launcher(*words, ranks=ranks, restarts=restarts)


def undisturbed_run(folder, *flags):
    """Train on two ranks of this host, without faults; returns the run directory."""
    folder.mkdir(exist_ok=True)
    done = run(launcher("-m", "titan_dit.train", *flags), folder)
    assert done.returncode == 0, done.stderr
    return folder / "outputs" / "digits"


def alone(*flags):
    """One process, without a launcher."""
    return train_command(*QUICK, *flags)


def checkpoints(cwd, name="digits"):
    """The steps of the saved checkpoints."""
    found = (cwd / "outputs" / name / "checkpoints").glob("step-*/manifest.json")
    return sorted(int(path.parent.name[5:]) for path in found)
