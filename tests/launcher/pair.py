"""One run on two hosts of hosts.py, its ranks' progress, and the account of its samples."""

import contextlib
import itertools
import json
import sys
import time

from commands import ROOT
from running import checkpoints

PORT = 29511
FLAGS = ("--metrics.every", 1, "--metrics.tensorboard", "false", "--sampling.every", 0)
FLAGS += ("--precision.dtype", "fp32", "--training.deterministic", "true")
FLAGS += ("--training.global_batch_size", 24, "--faults.log_samples", "true")
FLAGS += ("--model.hidden_size", 16, "--model.num_layers", 1, "--checkpoint.keep", 2)


class Pair:
    """A run in `folder`/outputs/digits, with a launcher on each host of a network."""

    def __init__(self, net, folder, *flags, **variables):
        """`flags`: after FLAGS, which they may override; `variables`: of the environment."""
        self.net, self.folder, self.flags = net, folder, flags
        self.variables = {"NNODES": 2, "NGPU": 1, "MAX_RESTARTS": 5} | variables
        self.variables["RDZV_ENDPOINT"] = f"{net.hosts[0].address}:{PORT}"
        self.output = folder / "outputs" / "digits"
        self.launchers, self.names = {}, itertools.count()

    def command(self, *more):
        start = [sys.executable, "-m", "titan_dit", "train", "--config", "digits"]
        return [*start, *FLAGS, "--job.dir", self.output, *self.flags, *more]

    def start(self, host, *more, **variables):
        """Start the launcher of a host."""
        name = f"said-{host.name}-{next(self.names)}"
        started = host.start(self.command(*more), self.folder, name, **self.variables | variables)
        self.launchers[host.name] = started
        return started

    def __enter__(self):
        for host in self.net:
            self.start(host)
        return self

    def __exit__(self, *_):
        for launcher in self.launchers.values():
            with contextlib.suppress(ProcessLookupError):
                launcher.__exit__()

    def __getitem__(self, host):
        return self.launchers[host.name]

    @property
    def said(self):
        """What all launchers and ranks of the run have said, for the message of a failure."""
        files = sorted(self.folder.glob("said-*"))
        return "\n".join(f"== {file.name}\n{file.read_text()}" for file in files)

    def lines(self, rank):
        """How many steps a rank has logged, in all attempts."""
        files = self.output.glob(f"samples-seen/attempt-*/rank-{rank:05d}.jsonl")
        return sum(file.read_bytes().count(b"\n") for file in files)

    def step(self):
        """The last step of rank 0 in the newest attempt."""
        files = sorted(self.output.glob("samples-seen/attempt-*/rank-00000.jsonl"))
        lines = files[-1].read_bytes().split(b"\n") if files else []
        return json.loads(lines[-2])["step"] if len(lines) > 1 else 0

    def wait(self, done, seconds=90):
        """Wait until `done()`; returns how long it took."""
        began = time.monotonic()
        while not done():
            assert time.monotonic() - began < seconds, self.said
            time.sleep(0.01)
        return time.monotonic() - began

    def wait_for_steps(self, number=5, ranks=(0, 1), seconds=90):
        """Wait until the ranks have logged more steps; returns how long the slowest one took."""
        before = {rank: self.lines(rank) for rank in ranks}
        return self.wait(
            lambda: all(self.lines(rank) >= before[rank] + number for rank in ranks), seconds
        )

    def restarts(self):
        """How often the ranks of the hosts were started again, the largest number."""
        files = self.folder.glob("said-*")
        return max(file.read_text().count("titan_dit: restarted:") for file in files)

    def end(self, seconds=120):
        """Wait for the exit codes of the launchers, by host."""
        launchers = self.launchers.values()
        self.wait(lambda: all(each.process.poll() is not None for each in launchers), seconds)
        return {name: each.process.poll() for name, each in self.launchers.items()}

    def in_a_save(self):
        """Wait until a checkpoint is being written."""
        folder = self.output / "checkpoints"
        self.wait(lambda: any(folder.glob("step-*.partial")))

    def checkpoints(self):
        return checkpoints(self.folder)


def chaos_account():
    """benchmarks/chaos_account.py."""
    folder = str(ROOT / "benchmarks")
    sys.path.insert(0, folder)
    try:
        import chaos_account as found
    finally:
        sys.path.remove(folder)
    return found


def nothing_lost(run, steps):
    """Assert that every sample of the run was trained on exactly once."""
    counts = chaos_account().account(run, steps)
    assert counts == {"samples": steps * 24, "lost": 0, "twice": 0, "strange": 0}
