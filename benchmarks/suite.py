"""CPU time of the test suite over all of its processes: `python benchmarks/suite.py`.

    python benchmarks/suite.py                       ./run_tests.sh of this checkout
    python benchmarks/suite.py --beside COMMIT       also the suite of a commit, and the ratio
    python benchmarks/suite.py --command "./run_tests.sh --fast"

The kernel adds the CPU time of a process to the parent that waits for it. Nobody waits for a fork
server, so its time and that of its ranks would be lost. This process is therefore a *subreaper*
(Linux, prctl(2)): it adopts and waits for orphans, so every descendant counts. Processes that
outlive the command by GRACE_S are killed and reported.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 10.0
"""Seconds that orphans may outlive the command."""


@dataclass(frozen=True)
class Usage:
    """CPU and wall time of a command and all of its descendants."""

    cpu_s: float
    wall_s: float
    exit_code: int
    killed: list[str]
    """Command lines of killed orphans."""


def measure(
    command: Sequence[str], cwd: Path, environment: Mapping[str, str] | None = None
) -> Usage:
    """Run a command and wait for all of its descendants."""
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError("suite.py needs a subreaper: run it on Linux 3.4 or later")
    before, began = waited_for_s(), time.monotonic()
    process = subprocess.Popen(command, cwd=cwd, env=environment)
    ended = -1
    while ended != process.pid:  # Orphans may exit before it.
        ended, status = os.wait()
    wall_s = time.monotonic() - began
    killed = end_orphans()
    return Usage(waited_for_s() - before, wall_s, os.waitstatus_to_exitcode(status), killed)


def waited_for_s() -> float:
    """CPU seconds of all descendants that have been waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def end_orphans() -> list[str]:
    """Wait for all children; kill those left after GRACE_S and return their command lines."""
    killed: list[str] = []
    deadline = time.monotonic() + GRACE_S
    with suppress(ChildProcessError):
        while True:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
            if time.monotonic() > deadline:
                for pid in children():
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                    killed.append(b" ".join(words).decode(errors="replace").strip())
                    os.kill(pid, signal.SIGKILL)
                os.wait()
            time.sleep(0.02)
    return killed


def children() -> list[int]:
    """Child processes of all threads of this process."""
    lists = Path("/proc/self/task").glob("*/children")
    return [int(pid) for file in lists for pid in file.read_text().split()]


def row_of(name: str, command: str, folder: Path) -> dict[str, object]:
    """Measure the suite of a checkout."""
    sys.stdout.write(f"{name}: {command}\n")
    sys.stdout.flush()
    # run_tests.sh uses this environment if it meets the checkout's dependencies.
    path = f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    used = measure(shlex.split(command), folder, os.environ | {"PATH": path})
    for words in used.killed:
        sys.stdout.write(f"killed, still running after the command: {words}\n")
    return {
        "checkout": name,
        "command": command,
        "CPU min": round(used.cpu_s / 60, 2),
        "wall min": round(used.wall_s / 60, 2),
        "exit code": used.exit_code,
    }


def main() -> int:
    """Measure one or two suites; 1 if one of them failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--command", default="./run_tests.sh")
    parser.add_argument("--beside", metavar="COMMIT", help="measure this commit's suite first")
    parser.add_argument("--out", help="write the rows as JSON")
    options = parser.parse_args()
    from report import finish  # Late, because it imports torch, which `measure` does not need.

    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        if options.beside:
            clone = Path(temporary) / "clone"
            subprocess.run(["git", "clone", "-q", "--no-checkout", ROOT, clone], check=True)
            subprocess.run(["git", "-C", clone, "checkout", "-q", options.beside], check=True)
            rows.append(row_of(options.beside, "./run_tests.sh", clone))
        rows.append(row_of("this one", options.command, ROOT))
    finish("suite", rows, options.out)
    if options.beside:
        before, after = (float(str(row["CPU min"])) for row in rows)
        sys.stdout.write(f"CPU time of this one / that of {options.beside}: {after / before:.3f}\n")
    return int(any(row["exit code"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
