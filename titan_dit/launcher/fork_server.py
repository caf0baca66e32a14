"""The process that forks a launcher's ranks: it has imported what they need, once.

`python -m titan_dit.launcher.fork_server FD PRELOADED`, started by forked_ranks.py. It has one
thread and never touches CUDA, whose state no fork survives.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Collection
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from titan_dit.system import stdio

HEARD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT)
"""Schedulers send them to every process of a job. They are for the launcher and its ranks."""


@dataclass(frozen=True)
class Request:
    """A rank to fork: `python -u -m words...`."""

    words: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    output: str | None
    errors: str | None
    """Files for stdout and stderr; None keeps the server's."""
    ignored: Collection[int]
    """Signals that the launcher ignores, as under nohup."""


def serve(connection: Connection, preloaded: str) -> None:
    """Fork a rank per Request; answer (pid, None) at once and (pid, exit code) at its end.

    When the launcher is gone, its ranks are killed.
    """
    for number in HEARD:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writer)
    with contextlib.suppress(Exception):  # A rank says it better.
        importlib.import_module(preloaded)
    running: set[int] = set()
    while True:
        for ready in wait([connection, reader]):
            if ready == reader:
                os.read(reader, 512)
                reap(running, connection)
                continue
            try:
                request: Request = connection.recv()
            except (EOFError, OSError):
                for pid in running:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                return
            pid = os.fork()
            if not pid:
                for descriptor in (connection.fileno(), reader, writer):
                    os.close(descriptor)
                become(request)
            running.add(pid)
            connection.send((pid, None))


def reap(running: set[int], connection: Connection) -> None:
    """Send the exit codes of the ranks that have ended."""
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        running.discard(pid)
        with contextlib.suppress(OSError):  # The launcher is gone, too.
            connection.send((pid, os.waitstatus_to_exitcode(status)))


def become(request: Request) -> None:
    """In the fork: run the module as a new Python would, in a session of its own."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in HEARD:
        kept = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in request.ignored else kept)
    for descriptor, path in ((1, request.output), (2, request.errors)):
        if path:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, descriptor)
            os.close(file)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    if has_touched_cuda():
        os.execv(sys.executable, [sys.executable, "-u", "-m", *request.words])
    code = 1
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
        module, *sys.argv[1:] = request.words
        with contextlib.suppress(OSError):  # The name in `ps -e` and `top`.
            Path("/proc/self/comm").write_text(module)
        sys.path[0] = request.folder
        sys.modules.pop(module, None)  # It runs again, as __main__.
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            stdio.write(sys.stderr, f"{end.code}\n")
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def has_touched_cuda() -> bool:
    """True if something that was imported has opened CUDA: the fork cannot use it."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda._is_in_bad_fork())


if __name__ == "__main__":
    stdio.open_missing()
    serve(Connection(int(sys.argv[1])), sys.argv[2])
