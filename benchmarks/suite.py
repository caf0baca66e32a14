"""CPU time of the test suite, over all of its processes: `python benchmarks/suite.py`.

    python benchmarks/suite.py                       ./run_tests.sh of this checkout
    python benchmarks/suite.py --beside COMMIT       first the suite of a commit, then the ratio
    python benchmarks/suite.py --command "./run_tests.sh --fast"

A process's time reaches whoever waits for it. A fork server is waited for by nobody, and takes the
time of the ranks it has forked along. So this process is a *subreaper* (Linux, prctl(2)): what
loses its parent becomes its child, is waited for here, and every descendant counts. What still runs
some seconds after the command has ended is killed, and named.
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
"""How long what the command has left behind may go on."""


@dataclass(frozen=True)
class Usage:
    """What a command and all of its descendants have used."""

    cpu_s: float
    wall_s: float
    exit_code: int
    killed: list[str]
    """Command lines of what had to be killed."""


def measure(
    command: Sequence[str], cwd: Path, environment: Mapping[str, str] | None = None
) -> Usage:
    """Run a command and wait for every process that it starts."""
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError("this system has no subreapers (Linux 3.4 or later)")
    before, began = waited_for_s(), time.monotonic()
    process = subprocess.Popen(command, cwd=cwd, env=environment)
    ended = -1
    while ended != process.pid:  # Orphans may end before it.
        ended, status = os.wait()
    wall_s = time.monotonic() - began
    killed = end_orphans()
    return Usage(waited_for_s() - before, wall_s, os.waitstatus_to_exitcode(status), killed)


def waited_for_s() -> float:
    """CPU seconds of all descendants that were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def end_orphans() -> list[str]:
    """Wait for all children; kill those that outlive the grace. The command lines of these."""
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
    """The children of this process, by its threads' lists."""
    lists = Path("/proc/self/task").glob("*/children")
    return [int(pid) for file in lists for pid in file.read_text().split()]


def row_of(name: str, command: str, folder: Path) -> dict[str, object]:
    """Measure the suite of a checkout."""
    sys.stdout.write(f"{name}: {command}\n")
    sys.stdout.flush()
    # One environment for all: where it has what a checkout asks for, run_tests.sh takes it.
    path = f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    used = measure(shlex.split(command), folder, os.environ | {"PATH": path})
    for words in used.killed:
        sys.stdout.write(f"still running after it, killed: {words}\n")
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
    from report import finish  # Imports torch, which `measure` does without.

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
