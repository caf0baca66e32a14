"""Ranks forked from a process that has imported what they need: a restart costs no imports.

Python's fork server is that process: one thread, no CUDA, one per launcher, and it ends with it.
`FORK=0` starts a Python per rank instead.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

PRELOADED = "titan_dit.launcher.rank_imports"
"""Imports all that a rank does."""


def start_server() -> None:
    """Start the fork server in the background; it inherits the environment."""
    multiprocessing.set_forkserver_preload([PRELOADED])
    forkserver.ensure_running()


def fork_ranks() -> None:
    """Let torchrun's agent fork the ranks that are Python modules."""
    start = subprocess_handler.SubprocessHandler._popen

    def popen(handler: Any, words: Sequence[str], env: dict[str, str]) -> Any:
        python, *rest = words
        if (python, rest[:2]) != (sys.executable, ["-u", "-m"]):
            return start(handler, tuple(words), env)
        files = (getattr(file, "name", None) for file in (handler._stdout, handler._stderr))
        return ForkedRank(rest[2:], env, *files)

    subprocess_handler.SubprocessHandler._popen = popen  # type: ignore[method-assign]


class ForkedRank:
    """A rank's process; has what torchrun uses of `subprocess.Popen`."""

    def __init__(
        self, words: Sequence[str], env: Mapping[str, str], out: str | None, err: str | None
    ) -> None:
        self.args = words
        self.process = multiprocessing.get_context("forkserver").Process(
            target=become, args=(list(words), dict(env), os.getcwd(), out, err)
        )
        self.process.start()
        assert self.process.pid
        self.pid = self.process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, minus the number of the signal that ended the rank, or None."""
        return self.process.exitcode

    def poll(self) -> int | None:
        """`returncode`."""
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; raises TimeoutExpired."""
        self.process.join(timeout)
        if (code := self.process.exitcode) is None:
            raise subprocess.TimeoutExpired(list(self.args), timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the rank has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def become(
    words: Sequence[str], env: Mapping[str, str], folder: str, out: str | None, err: str | None
) -> None:
    """In the fork: run `python -u -m words...` in a session of its own."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    for number, path in ((1, out), (2, err)):
        if path:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, number)
            os.close(file)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    multiprocessing.set_start_method(None, force=True)
    module, *sys.argv[1:] = words
    sys.modules.pop(module, None)  # It runs again, as __main__.
    runpy.run_module(module, run_name="__main__", alter_sys=True)
