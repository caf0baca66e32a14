"""The process that forks a launcher's ranks: it has imported what they need, once.

`python -m titan_dit.launcher.fork_server FD PRELOADED`, started by forked_ranks.py. It forks with
one thread (OpenBLAS ends its own before a fork), and never touches CUDA, which no fork survives.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import BinaryIO, TextIO, cast

from titan_dit.ranks.signals import PARENT
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

    The launcher confirms an end by the pid, which is then free. When the launcher is gone, its
    ranks are killed.
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
                report_ended(running, connection)
                continue
            try:
                request: Request | int = connection.recv()
            except (EOFError, OSError):
                for pid in running:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                return
            if isinstance(request, int):
                os.waitpid(request, 0)
                continue
            pid = fork(request, (connection.fileno(), reader, writer))
            running.add(pid)
            connection.send((pid, None))


def fork(request: Request, own: Iterable[int]) -> int:
    """Fork a rank; its pid, once it hears signals and leads its session.

    Until then it would ignore a stop. `own`: descriptors that only the server keeps.
    """
    ready, starting = os.pipe()
    server = os.getpid()
    pid = os.fork()
    if not pid:
        for descriptor in (*own, ready):
            os.close(descriptor)
        become(request, starting, server)
    os.close(starting)
    os.read(ready, 1)
    os.close(ready)
    return pid


def report_ended(running: set[int], connection: Connection) -> None:
    """Send the exit codes of the ranks that have ended.

    They stay zombies until the launcher knows it: torchrun sends signals to ranks that it has not
    seen end, and their pids must not be gone, or another process's.
    """
    for pid in tuple(running):
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended:
            running.discard(pid)
            code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            with contextlib.suppress(OSError):  # The launcher is gone, too.
                connection.send((pid, code))


def become(request: Request, starting: int, server: int) -> None:
    """In the fork: run the module as a new Python would, in a session of its own.

    `starting` is closed once the rank hears signals.
    """
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in HEARD:
        kept = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in request.ignored else kept)
    os.close(starting)
    for descriptor, path in ((1, request.output), (2, request.errors)):
        if path:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, descriptor)
            os.close(file)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    os.environ[PARENT] = str(server)
    if has_touched_cuda():
        os.execv(sys.executable, [sys.executable, "-u", "-m", *request.words])
    code = 1
    try:
        sys.stdout, sys.stderr = unbuffered(sys.stdout), unbuffered(sys.stderr)
        module, *sys.argv[1:] = request.words
        with contextlib.suppress(OSError):  # The name in `ps -e` and `top`.
            Path("/proc/self/comm").write_text(module)
        if not sys.flags.safe_path:
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


def unbuffered(stream: TextIO) -> TextIO:
    """The stream as `python -u` opens it: a rank that is killed has written all that it printed."""
    raw = cast(BinaryIO, io.FileIO(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(raw, encoding=stream.encoding, errors=stream.errors, write_through=True)


def has_touched_cuda() -> bool:
    """True if something that was imported has opened CUDA: the fork cannot use it."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda._is_in_bad_fork())


if __name__ == "__main__":
    stdio.prepare()
    serve(Connection(int(sys.argv[1])), sys.argv[2])
    # At once: taking torch apart takes a second, in which a pipe of the output stays open.
    os._exit(0)
