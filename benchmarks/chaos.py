"""Fault injection: kills, resizes and stops runs, counts lost samples: `benchmarks/chaos.py`.

kills   a rank of a 2-rank run is killed many times: at random moments, during a checkpoint write,
        and right after its atomic rename. The run must end bitwise equal to an undisturbed run.
sizes   a run is killed on 4 ranks, resumed and killed on 2, resumed on 3.
agents  one of two nodes is killed with its ranks. The other resumes alone; the first rejoins.
stops   SIGTERM several times: the run saves, exits with code 0 and is restarted.

Every run logs the samples of each step. Each sample must be trained on exactly once.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from chaos_account import BATCH, account, newest, same_bits, same_curve, verdict
from report import ROOT, finish

from titan_dit.commands.train import QUICK

TIMEOUT_S = 120
"""Timeout of every wait in seconds."""
FLAGS = ("--metrics.every", 1, "--metrics.tensorboard", "false", "--sampling.every", 0)
FLAGS += ("--training.global_batch_size", BATCH, "--faults.log_samples", "true")
FLAGS += ("--checkpoint.keep", 2, "--training.deterministic", "true")


class Job:
    """A launcher and its ranks, in their own session."""

    def __init__(
        self, cwd: Path, *flags: Any, ranks: int, restarts: int = 0, rdzv: tuple[Any, ...] = ()
    ) -> None:
        words = [sys.executable, "-m", "titan_dit.launcher.launch", *(rdzv or ("--standalone",))]
        words += ["--nproc-per-node", ranks, "--max-restarts", restarts, "-m", "titan_dit.train"]
        words += ["--config", "digits", *FLAGS, *flags]
        cwd.mkdir(parents=True, exist_ok=True)
        self.run = cwd / "outputs" / "digits"
        with (cwd / f"output-{time.monotonic_ns()}").open("w") as output:
            self.output = Path(output.name)
            self.process = subprocess.Popen(
                [str(word) for word in words],
                cwd=cwd,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ranks(self) -> dict[int, float]:
        """Training processes: pid -> start in seconds of CLOCK_BOOTTIME."""
        found = {}
        for pid in children_of(self.process.pid):
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                if fields[0] not in "ZX":
                    found[pid] = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return found

    def logged_steps(self) -> list[int]:
        """Steps in the console output of all attempts."""
        return [int(step) for step in re.findall(r"^step +(\d+)/", self.output.read_text(), re.M)]

    def wait(self, done: Callable[[], Any]) -> None:
        """Wait for `done()` or the end of the job; exit with its output after TIMEOUT_S seconds."""
        deadline = time.monotonic() + TIMEOUT_S
        while not done() and self.process.poll() is None:
            if time.monotonic() > deadline:
                raise SystemExit(f"timeout ({TIMEOUT_S} s):\n{self.output.read_text()[-3000:]}")
            time.sleep(0.002)

    def kill(self) -> None:
        """Send SIGKILL to the launcher and its ranks."""
        for pid in (self.process.pid, *children_of(self.process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def end(self) -> int:
        """Wait for the job; exit with its output if it failed."""
        code = self.process.wait(20 * TIMEOUT_S)
        if code:
            raise SystemExit(f"exit code {code}:\n{self.output.read_text()[-3000:]}")
        return code


def children_of(pid: int) -> list[int]:
    """Child processes of a launcher; in place of the server that forks ranks, the ranks."""
    found = []
    for child in direct_children_of(pid):
        with contextlib.suppress(OSError):
            is_server = b"fork_server" in Path(f"/proc/{child}/cmdline").read_bytes()
            found += direct_children_of(child) if is_server else [child]
    return found


def direct_children_of(pid: int) -> list[int]:
    """Child processes of a process."""
    found = []
    for tasks in Path("/proc").glob(f"{pid}/task/*/children"):
        with contextlib.suppress(OSError):
            found += [int(child) for child in tasks.read_text().split()]
    return found


def finish_undisturbed(cwd: Path, *flags: Any, ranks: int) -> Path:
    """Finish a run without faults; return its directory."""
    job = Job(cwd, *flags, ranks=ranks)
    job.end()
    return job.run


MOMENTS = ("random", "write", "renamed")


def wait_for_moment(job: Job, moment: str, rng: random.Random) -> None:
    """Wait for a step, then for a random time, a checkpoint write, or its rename."""
    num_logged = len(job.logged_steps())
    job.wait(lambda: len(job.logged_steps()) > num_logged)
    folder = job.run / "checkpoints"
    if moment == "write":
        job.wait(lambda: any(folder.glob("step-*.partial")))
    elif moment == "renamed":
        before = set(folder.glob("step-*/manifest.json"))
        job.wait(lambda: set(folder.glob("step-*/manifest.json")) - before)
    else:
        time.sleep(rng.uniform(0.0, 1.5))


def kills(folder: Path, number: int, steps: int, rng: random.Random) -> dict[str, Any]:
    """Kill a rank `number` times in one run."""
    flags = ("--training.steps", steps, "--checkpoint.every", 10)
    reference = finish_undisturbed(folder / "reference", *flags, ranks=2)
    job, rows = Job(folder / "kills", *flags, ranks=2, restarts=number + 5), []
    for moment, _ in zip(itertools.cycle(MOMENTS), range(number), strict=False):
        wait_for_moment(job, moment, rng)
        ranks = job.ranks()
        if job.process.poll() is not None or not ranks:
            break
        num_logged, victim = len(job.logged_steps()), rng.choice(sorted(ranks))
        os.kill(victim, signal.SIGKILL)
        killed = time.clock_gettime(time.CLOCK_BOOTTIME)
        job.wait(lambda ranks=ranks: len(job.ranks().keys() - ranks.keys()) == 2)
        began = min((t for pid, t in job.ranks().items() if pid not in ranks), default=killed)
        job.wait(lambda num_logged=num_logged: len(job.logged_steps()) > num_logged + 1)
        if job.process.poll() is not None:
            break
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        rows.append({"moment": moment, "seconds": now - killed, "own": now - began})
        print(
            f"kill {len(rows):>2}: {moment:<8} step {job.logged_steps()[-1]:>5}, resumed "
            f"after {now - killed:.1f} s, of which {now - began:.1f} s imports, build, load",
            flush=True,
        )
    job.end()
    return {
        "scenario": "kills",
        "disturbances": f"{len(rows)} SIGKILL of a rank",
        **account(job.run, steps),
        **verdict(same_bits(job.run, reference)),
        "s to the next step": round(statistics.mean(row["seconds"] for row in rows), 1),
        "of it our own": round(statistics.mean(row["own"] for row in rows), 1),
    }


def sizes(folder: Path, steps: int, rng: random.Random) -> dict[str, Any]:
    """Resume on 4 -> 2 -> 3 ranks, with kills in between."""
    flags = ("--training.steps", steps, "--checkpoint.every", 5)
    reference = finish_undisturbed(folder / "reference-4", *flags, ranks=4)
    for ranks in (4, 2):
        job = Job(folder / "sizes", *flags, ranks=ranks)
        for _ in range(steps // 4):
            wait_for_moment(job, "random", random.Random(0))
            if newest(job.run) and len(job.logged_steps()) > steps // 4:
                break
        time.sleep(rng.uniform(0.0, 0.3))
        job.kill()
    run = finish_undisturbed(folder / "sizes", *flags, ranks=3)
    return {
        "scenario": "sizes",
        "disturbances": "killed on 4 and on 2 ranks, finished on 3",
        **account(run, steps),
        **verdict(same_curve(run, reference)),
    }


def agents(folder: Path, steps: int) -> dict[str, Any]:
    """Two nodes of one rank each; the second is killed and rejoins."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rdzv = ("--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-id", "chaos")
    rdzv += ("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", QUICK)
    flags = ("--training.steps", steps, "--checkpoint.every", 5)
    reference = finish_undisturbed(folder / "reference-2", *flags, ranks=2)
    first = Job(folder / "agents", *flags, ranks=1, restarts=5, rdzv=rdzv)
    time.sleep(1.0)
    second = Job(folder / "agents", *flags, ranks=1, restarts=5, rdzv=rdzv)
    num_logged = steps // 5
    job = next(j for j in logging_job(first, second))
    job.wait(lambda: len(job.logged_steps()) > num_logged)
    killed = time.monotonic()
    count = len(first.logged_steps())
    second.kill()
    first.wait(lambda: len(first.logged_steps()) > count + 2)
    seconds = time.monotonic() - killed
    third = Job(folder / "agents", *flags, ranks=1, restarts=5, rdzv=rdzv)
    first.end()
    third.end()
    return {
        "scenario": "agents",
        "disturbances": "a node killed and rejoined",
        **account(first.run, steps),
        **verdict(same_curve(first.run, reference)),
        "s to the next step": round(seconds, 1),
    }


def logging_job(*jobs: Job) -> Iterator[Job]:
    """The job that logs the steps, once there is one."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        for job in jobs:
            if job.logged_steps():
                yield job
        time.sleep(0.05)
    raise SystemExit(f"no job took a step within {TIMEOUT_S} s")


def stops(folder: Path, number: int, steps: int, rng: random.Random) -> dict[str, Any]:
    """Stop the launcher with SIGTERM and restart the same command, `number` times."""
    flags = ("--training.steps", steps, "--checkpoint.every", 1000)
    reference = finish_undisturbed(folder / "reference-stops", *flags, ranks=2)
    seconds = []
    for _ in range(number):
        job = Job(folder / "stops", *flags, ranks=2)
        wait_for_moment(job, "random", rng)
        signalled = time.monotonic()
        job.process.send_signal(signal.SIGTERM)
        job.end()
        seconds.append(time.monotonic() - signalled)
    run = finish_undisturbed(folder / "stops", *flags, ranks=2)
    return {
        "scenario": "stops",
        "disturbances": f"{number} SIGTERM, saved within {max(seconds):.1f} s",
        **account(run, steps),
        **verdict(same_bits(run, reference)),
    }


def main() -> None:
    """Run the scenarios; exit with an error if one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenarios", nargs="*", help="kills, sizes, agents, stops; default all")
    parser.add_argument("--kills", type=int, default=21)
    parser.add_argument("--steps", type=int, default=2500, help="steps of the kills scenario")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="JSON file to write")
    args = parser.parse_args()
    wanted, rng = args.scenarios or ["kills", "sizes", "agents", "stops"], random.Random(args.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        every = {
            "kills": lambda: kills(folder, args.kills, args.steps, rng),
            "sizes": lambda: sizes(folder, 120, rng),
            "agents": lambda: agents(folder, 400),
            "stops": lambda: stops(folder, 3, 400, rng),
        }
        rows = [every[scenario]() for scenario in wanted]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    rows = [{key: row.get(key, "") for key in columns} for row in rows]
    finish("chaos", rows, args.out, seed=args.seed)
    broken = [
        row["scenario"]
        for row in rows
        if row["lost"] or row["twice"] or row["strange"] or not row["as undisturbed"]
    ]
    if broken:
        raise SystemExit(f"samples lost or results changed: {', '.join(broken)}")


if __name__ == "__main__":
    main()
