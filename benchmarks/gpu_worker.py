"""Measures rows in a process of its own, which is replaced when a row hangs, dies or fails.

A process per row would isolate rows as well, but each begins with imports and a CUDA context, which
takes as long as a small row. So one process serves many rows. It is replaced where the next row
could suffer: after a hang and a crash, after an error (an illegal access leaves the CUDA context
unusable), and after running out of memory. The parent never opens the device.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any

from gpu_queue import Row, Task

STOP_S = 10.0
SILENT = "gave no answer"

Serve = Callable[[Connection, Any], None]
"""(pipe, options): sends (facts, tasks), then a row for every (name, seconds left) it receives."""


class NotStarted(RuntimeError):
    """The process that measures died or hung before its first row."""


class Worker:
    """The process that measures; started by its first use."""

    def __init__(self, serve: Serve, options: Any, context: BaseContext | None = None) -> None:
        self.serve, self.options = serve, options
        # Not a fork: a process that holds a CUDA context, or threads, cannot be forked.
        self.context = context or multiprocessing.get_context("spawn")
        self.process: Any = None
        self.environment: Mapping[str, str | None] = {}
        self.starts_s: list[float] = []
        """Seconds of each start."""

    def start(self, left_s: float) -> tuple[Row, list[Task]]:
        """Start the process; returns facts about the device, and the tasks in order.

        Imports from a cold network disk take minutes: the limit is all that is left of the budget.
        Raises `NotStarted`.
        """
        began = time.monotonic()
        self.pipe, theirs = self.context.Pipe()
        self.process = self.context.Process(  # type: ignore[attr-defined]
            target=leading, args=(self.serve, theirs, self.options), daemon=True
        )
        with variables(self.environment):
            self.process.start()
        theirs.close()
        found = self.receive(max(0.0, left_s))
        if isinstance(found, str):
            self.stop()
            raise NotStarted(f"the process that measures {found} before its first row")
        self.starts_s.append(round(time.monotonic() - began, 1))
        facts, tasks = found
        return facts, tasks

    def measure(self, task: Task, limit_s: float, left_s: float) -> Row:
        """The row of a task; see `gpu_queue.Measure`. A start and the row end within `left_s`."""
        end = time.monotonic() + left_s
        if task.environment != self.environment:
            self.stop()
            self.environment = task.environment
        if self.process is None:
            try:
                self.start(left_s)
            except NotStarted as error:
                return unanswered(str(error), at_end=True)
        left_s = end - time.monotonic()
        if left_s <= 0:
            return {"result": "not begun"}
        found = self.receive(min(limit_s, left_s), (str(task), left_s))
        row: Row = unanswered(found, left_s <= limit_s) if isinstance(found, str) else found
        if isinstance(found, str) or row["result"].startswith(("failed", "out of memory")):
            self.stop()
        return row

    def receive(self, limit_s: float, request: tuple[str, float] | None = None) -> Any:
        """The answer to a request, or the first message; or in words what became of the process."""
        try:
            if request is not None:
                self.pipe.send(request)
            if self.pipe.poll(limit_s):
                return self.pipe.recv()
            return f"{SILENT} in {limit_s:.0f} s"
        except (EOFError, OSError):  # It has died, before the request or after it.
            self.process.join(STOP_S)
            return f"died with exit code {self.process.exitcode}"

    def stop(self) -> None:
        """End the process and the compiler's processes, its children; it may be hanging."""
        if self.process is None:
            return
        self.pipe.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join(STOP_S)
        self.process = None


def unanswered(why: str, at_end: bool) -> Row:
    """The row of a task without an answer; the end of the budget (`at_end`) is no failure."""
    if at_end and SILENT in why:
        return {"result": f"not measured: the budget ended ({why})"}
    return {"result": f"failed: {why}"}


def leading(serve: Serve, pipe: Connection, options: Any) -> None:
    """Serve as the leader of a process group, so that children can be ended with it."""
    os.setpgrp()
    with contextlib.suppress(EOFError, BrokenPipeError):
        serve(pipe, options)


@contextlib.contextmanager
def variables(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables inside the block; None unsets one."""
    before = {name: os.environ.get(name) for name in changes}
    _set(changes)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
