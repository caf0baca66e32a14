"""Runs pytest again and again, each time in a fork that has its imports already.

Importing torch takes four of the five CPU seconds of a small test file. A process of its own, which
`Runner` starts: a request a line on stdin, an answer a line on stdout.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PRELOADED = (
    "pytest",
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "beartype",
    "torchdata.stateful_dataloader",
)
"""What the tests import beside the tree they test."""


class Runner:
    """One process that forks for every run; runs follow each other."""

    def __init__(self, preloaded: Sequence[str] = PRELOADED) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, *preloaded],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, folder: Path, arguments: Sequence[str], timeout: float) -> tuple[int | None, str]:
        """Exit code of pytest in a tree (None: it took too long), and its output."""
        assert self.process.stdin
        assert self.process.stdout
        with tempfile.NamedTemporaryFile("r", suffix=".txt") as output:
            request = [str(folder), output.name, timeout, *arguments]
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            code: int | None = json.loads(self.process.stdout.readline())
            return code, output.read()

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def serve() -> None:
    """Answer requests until stdin ends."""
    for name in sys.argv[1:]:
        __import__(name)
    for line in sys.stdin:
        folder, output, timeout, *arguments = json.loads(line)
        if not (child := os.fork()):
            in_fork(folder, output, arguments)
        sys.stdout.write(json.dumps(exit_code(child, timeout)) + "\n")
        sys.stdout.flush()


def in_fork(folder: str, output: str, arguments: list[str]) -> None:
    """Run pytest as `python -m pytest` in a folder would, and end."""
    os.setsid()
    for stream, file, flags in ((0, os.devnull, os.O_RDONLY), (1, output, os.O_WRONLY)):
        os.dup2(os.open(file, flags), stream)
    os.dup2(1, 2)
    os.chdir(folder)
    os.environ |= {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
    sys.path[0] = folder
    sys.argv = ["pytest"]
    code: Any = 70
    try:
        import pytest

        code = pytest.main(arguments)
        sys.stdout.flush()
    finally:
        os._exit(code)


def exit_code(child: int, timeout: float) -> int | None:
    """That of a fork, negative for a signal; None where it was ended for taking too long."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


if __name__ == "__main__":
    serve()
