"""Runs pytest many times, each in a fork of a process with the imports done.

Importing torch takes four of the five CPU seconds of a small test file. `Runner` starts the server
process; requests and answers are JSON lines on its stdin and stdout.
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
"""Third-party modules of the tests, imported once."""


class Runner:
    """Client of one fork server; runs are sequential."""

    def __init__(self, preloaded: Sequence[str] = PRELOADED) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, *preloaded],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, folder: Path, arguments: Sequence[str], timeout: float) -> tuple[int | None, str]:
        """(exit code of pytest in a tree, its output); the code is None on timeout."""
        assert self.process.stdin
        assert self.process.stdout
        with tempfile.NamedTemporaryFile("r", suffix=".txt") as output:
            request = [str(folder), output.name, timeout, *arguments]
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            code: int | None = json.loads(self.process.stdout.readline())
            return code, output.read()

    def close(self) -> None:
        """Stop the server."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def serve() -> None:
    """Server loop: answer requests until stdin closes."""
    for name in sys.argv[1:]:
        __import__(name)
    for line in sys.stdin:
        folder, output, timeout, *arguments = json.loads(line)
        if not (child := os.fork()):
            in_fork(folder, output, arguments)
        sys.stdout.write(json.dumps(exit_code(child, timeout)) + "\n")
        sys.stdout.flush()


def in_fork(folder: str, output: str, arguments: list[str]) -> None:
    """In the fork: run pytest like `python -m pytest` in a folder, and exit."""
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
    """Exit code of a fork, negative for a signal; None if it was killed on timeout."""
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
