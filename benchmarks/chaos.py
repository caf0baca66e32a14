"""Kill runs until they end, and count what was lost: `python benchmarks/chaos.py`.

kills   one run on two ranks loses a rank, again and again: at random moments, while a checkpoint is
        written, and right after one is in place. It must end with the bits of an undisturbed run.
sizes   a run is killed on 4 ranks, goes on and is killed on 2, goes on on 3.
agents  of two nodes one is killed with its ranks, the other goes on alone; it comes back.
stops   SIGTERM, again and again: the run saves, ends with exit code 0 and is started again.

Every run writes down which samples each step has seen; all of them must have been trained on once.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
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
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from report import ROOT, finish
from torch.distributed.checkpoint import FileSystemReader, state_dict_loader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from titan_dit.commands.train import RDZV_CONF
from titan_dit.recovery.ledger import Ledger
from titan_dit.recovery.sample_log import trained

PATIENCE = 120
"""Seconds that anything may take."""
BATCH = 24
FLAGS = ("--metrics.every", 1, "--metrics.tensorboard", "false", "--sampling.every", 0)
FLAGS += ("--training.global_batch_size", BATCH, "--faults.log_samples", "true")
FLAGS += ("--checkpoint.keep", 2, "--training.deterministic", "true")


class Job:
    """A launcher and its ranks, in a session of their own."""

    def __init__(
        self, cwd: Path, *flags: Any, ranks: int, restarts: int = 0, meeting: tuple[Any, ...] = ()
    ) -> None:
        words = [sys.executable, "-m", "titan_dit.launcher.launch", *(meeting or ("--standalone",))]
        words += ["--nproc-per-node", ranks, "--max-restarts", restarts, "-m", "titan_dit.train"]
        words += ["--config", "digits", *FLAGS, *flags]
        cwd.mkdir(parents=True, exist_ok=True)
        self.run = cwd / "outputs" / "digits"
        with (cwd / f"said-{time.monotonic_ns()}").open("w") as said:
            self.said = Path(said.name)
            self.process = subprocess.Popen(
                [str(word) for word in words],
                cwd=cwd,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ranks(self) -> dict[int, float]:
        """The processes that train, and when each began, in seconds of CLOCK_BOOTTIME."""
        found = {}
        for pid in children_of(self.process.pid):
            with contextlib.suppress(OSError):
                if b"titan_dit.train" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                    if fields[0] not in "ZX":
                        found[pid] = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return found

    def steps_told(self) -> list[int]:
        """The steps that the console has shown, of all attempts."""
        return [int(step) for step in re.findall(r"^step +(\d+)/", self.said.read_text(), re.M)]

    def wait(self, done: Callable[[], Any]) -> None:
        """Until `done()`, or the job has ended; an error with what was said if neither comes."""
        deadline = time.monotonic() + PATIENCE
        while not done() and self.process.poll() is None:
            if time.monotonic() > deadline:
                raise SystemExit(f"nothing for {PATIENCE} s:\n{self.said.read_text()[-3000:]}")
            time.sleep(0.002)

    def kill(self) -> None:
        """SIGKILL for the launcher and all of its ranks."""
        for pid in (self.process.pid, *children_of(self.process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def end(self) -> int:
        """The exit code."""
        code = self.process.wait(20 * PATIENCE)
        if code:
            raise SystemExit(f"exit code {code}:\n{self.said.read_text()[-3000:]}")
        return code


def children_of(pid: int) -> list[int]:
    """Processes that a process has started."""
    found = []
    for tasks in Path("/proc").glob(f"{pid}/task/*/children"):
        with contextlib.suppress(OSError):
            found += [int(child) for child in tasks.read_text().split()]
    return found


def finish_undisturbed(cwd: Path, *flags: Any, ranks: int) -> Path:
    """The run directory of a run that nobody kills."""
    job = Job(cwd, *flags, ranks=ranks)
    job.end()
    return job.run


def newest(run: Path) -> Path | None:
    """The newest whole checkpoint."""
    found = sorted((run / "checkpoints").glob("step-*/manifest.json"))
    return found[-1].parent if found and found[-1].parent.suffix == "" else None


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole."""
    entries = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    state_dict_loader.load(state, checkpoint_id=checkpoint, no_dist=True)
    return state


def same_bits(run: Path, other: Path) -> tuple[bool, str]:
    """Whether two runs' last checkpoints hold the same bits, and what to say of it."""
    first, second = newest(run), newest(other)
    assert first
    assert second
    mine, its = tensors_of(first), tensors_of(second)
    differing = [n for n in mine.keys() | its.keys() if not torch.equal(mine[n], its[n])]
    return not differing, f"{len(differing)} of {len(its)} tensors differ"


def losses(run: Path) -> dict[int, float]:
    """The loss of every step."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows}


def account(run: Path, steps: int) -> dict[str, int]:
    """Samples that were never trained on, and trained on twice."""
    last = newest(run)
    assert last, run
    record = json.loads((last / "manifest.json").read_text())
    assert record["step"] == steps
    counted: Counter[int] = trained(run, Ledger.of(record))
    wanted = range(steps * BATCH)
    return {
        "samples": len(wanted),
        "lost": sum(counted[number] == 0 for number in wanted),
        "twice": sum(times > 1 for times in counted.values()),
        "strange": sum(number not in wanted for number in counted),
    }


def same_curve(run: Path, other: Path) -> tuple[bool, str]:
    """Whether two loss curves agree, and what to say of it."""
    mine, its = losses(run), losses(other)
    assert mine.keys() == its.keys()
    error = max(abs(mine[step] - its[step]) / its[step] for step in its)
    return error <= 1e-5, f"loss within {error:.1e}"


def verdict(found: tuple[bool, str]) -> dict[str, Any]:
    """How a run compares with one that nobody disturbed."""
    return {"as undisturbed": found[0], "compared": found[1]}


MOMENTS = ("random", "write", "renamed")


def wait_for_moment(job: Job, moment: str, luck: random.Random) -> None:
    """Training goes on; then some time later, or while a checkpoint is written, or right after."""
    told = len(job.steps_told())
    job.wait(lambda: len(job.steps_told()) > told)
    folder = job.run / "checkpoints"
    if moment == "write":
        job.wait(lambda: any(folder.glob("step-*.partial")))
    elif moment == "renamed":
        before = set(folder.glob("step-*/manifest.json"))
        job.wait(lambda: set(folder.glob("step-*/manifest.json")) - before)
    else:
        time.sleep(luck.uniform(0.0, 1.5))


def kills(folder: Path, number: int, steps: int, luck: random.Random) -> dict[str, Any]:
    """Kill a rank so many times in one run."""
    flags = ("--training.steps", steps, "--checkpoint.every", 10)
    calm = finish_undisturbed(folder / "calm", *flags, ranks=2)
    job, rows = Job(folder / "kills", *flags, ranks=2, restarts=number + 5), []
    for moment, _ in zip(itertools.cycle(MOMENTS), range(number), strict=False):
        wait_for_moment(job, moment, luck)
        ranks = job.ranks()
        if job.process.poll() is not None or not ranks:
            break
        told, victim = len(job.steps_told()), luck.choice(sorted(ranks))
        os.kill(victim, signal.SIGKILL)
        killed = time.clock_gettime(time.CLOCK_BOOTTIME)
        job.wait(lambda ranks=ranks: len(job.ranks().keys() - ranks.keys()) == 2)
        began = min((t for pid, t in job.ranks().items() if pid not in ranks), default=killed)
        job.wait(lambda told=told: len(job.steps_told()) > told + 1)
        if job.process.poll() is not None:
            break
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        rows.append({"moment": moment, "seconds": now - killed, "own": now - began})
        print(
            f"kill {len(rows):>2}: {moment:<8} step {job.steps_told()[-1]:>5}, training again "
            f"after {now - killed:.1f} s, of which {now - began:.1f} s import, build, load",
            flush=True,
        )
    job.end()
    return {
        "scenario": "kills",
        "disturbances": f"{len(rows)} SIGKILL of a rank",
        **account(job.run, steps),
        **verdict(same_bits(job.run, calm)),
        "s to the next step": round(statistics.mean(row["seconds"] for row in rows), 1),
        "of it our own": round(statistics.mean(row["own"] for row in rows), 1),
    }


def sizes(folder: Path, steps: int, luck: random.Random) -> dict[str, Any]:
    """4 -> 2 -> 3 ranks, with kills between."""
    flags = ("--training.steps", steps, "--checkpoint.every", 5)
    calm = finish_undisturbed(folder / "calm-4", *flags, ranks=4)
    for ranks in (4, 2):
        job = Job(folder / "sizes", *flags, ranks=ranks)
        for _ in range(steps // 4):
            wait_for_moment(job, "random", random.Random(0))
            if newest(job.run) and len(job.steps_told()) > steps // 4:
                break
        time.sleep(luck.uniform(0.0, 0.3))
        job.kill()
    run = finish_undisturbed(folder / "sizes", *flags, ranks=3)
    return {
        "scenario": "sizes",
        "disturbances": "killed on 4 ranks, on 2, ended on 3",
        **account(run, steps),
        **verdict(same_curve(run, calm)),
    }


def agents(folder: Path, steps: int) -> dict[str, Any]:
    """Two nodes of one rank each; the second dies, and comes back."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = ("--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-id", "chaos")
    meeting += ("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", RDZV_CONF)
    flags = ("--training.steps", steps, "--checkpoint.every", 5)
    calm = finish_undisturbed(folder / "calm-2", *flags, ranks=2)
    first = Job(folder / "agents", *flags, ranks=1, restarts=5, meeting=meeting)
    time.sleep(1.0)
    second = Job(folder / "agents", *flags, ranks=1, restarts=5, meeting=meeting)
    told = steps // 5
    job = next(j for j in speaking(first, second))
    job.wait(lambda: len(job.steps_told()) > told)
    killed = time.monotonic()
    count = len(first.steps_told())
    second.kill()
    first.wait(lambda: len(first.steps_told()) > count + 2)
    seconds = time.monotonic() - killed
    third = Job(folder / "agents", *flags, ranks=1, restarts=5, meeting=meeting)
    first.end()
    third.end()
    return {
        "scenario": "agents",
        "disturbances": "a node killed, and back",
        **account(first.run, steps),
        **verdict(same_curve(first.run, calm)),
        "s to the next step": round(seconds, 1),
    }


def speaking(*jobs: Job) -> Iterator[Job]:
    """The job whose console shows the steps."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        for job in jobs:
            if job.steps_told():
                yield job
        time.sleep(0.05)
    raise SystemExit("no job took a step")


def stops(folder: Path, number: int, steps: int, luck: random.Random) -> dict[str, Any]:
    """SIGTERM to the launcher; the same command goes on."""
    flags = ("--training.steps", steps, "--checkpoint.every", 1000)
    calm = finish_undisturbed(folder / "calm-stops", *flags, ranks=2)
    seconds = []
    for _ in range(number):
        job = Job(folder / "stops", *flags, ranks=2)
        wait_for_moment(job, "random", luck)
        asked = time.monotonic()
        job.process.send_signal(signal.SIGTERM)
        job.end()
        seconds.append(time.monotonic() - asked)
    run = finish_undisturbed(folder / "stops", *flags, ranks=2)
    return {
        "scenario": "stops",
        "disturbances": f"{number} SIGTERM, saved within {max(seconds):.1f} s",
        **account(run, steps),
        **verdict(same_bits(run, calm)),
    }


def main() -> None:
    """All scenarios, or some."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenarios", nargs="*", help="kills, sizes, agents, stops; all by default")
    parser.add_argument("--kills", type=int, default=21)
    parser.add_argument("--steps", type=int, default=2500, help="of the run whose ranks are killed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="JSON file to write")
    args = parser.parse_args()
    wanted, luck = args.scenarios or ["kills", "sizes", "agents", "stops"], random.Random(args.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        every = {
            "kills": lambda: kills(folder, args.kills, args.steps, luck),
            "sizes": lambda: sizes(folder, 120, luck),
            "agents": lambda: agents(folder, 400),
            "stops": lambda: stops(folder, 3, 400, luck),
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
        raise SystemExit(f"lost or changed: {', '.join(broken)}")


if __name__ == "__main__":
    main()
