"""Ranks forked by a process that has imported what they need (fork_server.py).

A restart then costs no imports, and the ranks of a node share the memory of their code. `FORK=0`
starts a Python per rank instead.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from titan_dit.launcher.fork_server import HEARD, Request

PRELOADED = "titan_dit.preload"
"""Imports what a rank does."""


class ForkServer:
    """The server of one launcher. Thread-safe."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        words = ["-m", "titan_dit.launcher.fork_server", str(theirs.fileno()), PRELOADED]
        # Blocked until it ignores them; and Ctrl-C is not for its session.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
        self.process = subprocess.Popen(
            [sys.executable, *words], pass_fds=[theirs.fileno()], start_new_session=True
        )
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self.connection = Connection(ours.detach())
        self.lock = threading.RLock()
        self.codes: dict[int, int] = {}
        """Exit codes of ended ranks, by pid."""
        self.is_lost = False

    def start(self, request: Request) -> int:
        """Fork a rank; its pid. Raises OSError or EOFError if the server is gone."""
        with self.lock:
            self.connection.send(request)
            while True:
                pid, code = self.connection.recv()
                if code is None:
                    started: int = pid
                    self.codes.pop(started, None)
                    return started
                self.note_end(pid, code)

    def note_end(self, pid: int, code: int) -> None:
        """Keep the exit code of a rank and confirm its end."""
        self.codes[pid] = code
        self.connection.send(pid)

    def code_of(self, pid: int, wait_s: float = 0) -> int | None:
        """The exit code of a rank, None while it runs; waits for any news of ranks."""
        with self.lock:
            try:
                while pid not in self.codes and self.connection.poll(wait_s):
                    self.note_end(*self.connection.recv())
            except (EOFError, OSError):
                self.is_lost = True
            # Linux kills the ranks of a dead server.
            return self.codes.get(pid, -signal.SIGKILL if self.is_lost else None)


class ForkedRank:
    """A rank's process; has what torchrun uses of `subprocess.Popen`."""

    def __init__(self, server: ForkServer, request: Request) -> None:
        self.server, self.args = server, request.words
        self.pid = server.start(request)

    @property
    def returncode(self) -> int | None:
        """The exit code, minus the number of the signal that ended the rank, or None."""
        return self.server.code_of(self.pid)

    def poll(self) -> int | None:
        """The exit code so far, see `returncode`."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; raises TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.server.code_of(self.pid, 0.05)) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the rank has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # It has just ended.
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def fork_ranks(server: ForkServer) -> None:
    """Let torchrun's agent fork the ranks that are Python modules."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    start = subprocess_handler.SubprocessHandler._popen

    def popen(handler: Any, words: Sequence[str], environment: dict[str, str]) -> Any:
        python, *rest = words
        if (python, rest[:2]) == (sys.executable, ["-u", "-m"]) and not server.is_lost:
            output, errors = (
                getattr(file, "name", None) for file in (handler._stdout, handler._stderr)
            )
            ignored = [n for n in HEARD if signal.getsignal(n) == signal.SIG_IGN]
            try:
                return ForkedRank(
                    server,
                    Request(
                        tuple(rest[2:]),
                        dict(environment),
                        str(Path.cwd()),
                        output,
                        errors,
                        ignored,
                    ),
                )
            except (EOFError, OSError):
                server.is_lost = True
        return start(handler, tuple(words), environment)

    subprocess_handler.SubprocessHandler._popen = popen  # type: ignore[assignment, method-assign]
