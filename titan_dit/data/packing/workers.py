"""Pack the chunks of a plan in this process or in worker processes."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path

from titan_dit.config.section import UserError
from titan_dit.data.packing import shard_job
from titan_dit.data.packing.shard_job import PackPlan, pack_chunk
from titan_dit.launcher.disk_errors import line_of

Progress = Callable[[int, int], None]
"""Called often with (files done, of which dropped)."""


def pack_here(plan: PackPlan, output: Path, todo: list[int], progress: Progress) -> None:
    """Pack the chunks of `todo` in this process."""
    digest, counts = plan.digest(), [0, 0]

    def report(done: int, dropped: int) -> None:
        counts[0] += done
        counts[1] += dropped
        progress(*counts)

    try:
        for chunk in todo:
            pack_chunk(plan, digest, output, chunk, plan.budget(), report)
    except OSError as error:
        raise UserError(line_of(error, "[data pack]")) from None


def run_workers(
    plan: PackPlan, output: Path, todo: list[int], workers: int, progress: Progress
) -> None:
    """Pack the chunks of `todo` in worker processes; worker i takes todo[i::workers]."""
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork.
    shared = context.RawArray("q", 2 * workers)
    pipes = [context.Pipe(duplex=False) for _ in range(workers)]
    budget = plan.budget(context)
    processes = [
        context.Process(
            target=shard_job.work,
            args=(plan, output, todo[i::workers], budget, shared, i, pipes[i][1]),
            daemon=True,
        )
        for i in range(workers)
    ]
    try:
        with sigint_ignored():
            for process in processes:
                process.start()
        running = dict(zip(processes, (receiver for receiver, _ in pipes), strict=True))
        while running:
            wait([process.sentinel for process in running], timeout=0.5)
            progress(sum(shared[::2]), sum(shared[1::2]))
            for process in [process for process in running if not process.is_alive()]:
                errors = running.pop(process)
                if process.exitcode:
                    raise worker_error(process.exitcode, errors.recv() if errors.poll() else "")
    finally:
        started = [process for process in processes if process.pid]
        for process in started:
            process.terminate()
        deadline = time.monotonic() + 1
        for process in started:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()


@contextmanager
def sigint_ignored() -> Iterator[None]:
    """Make child processes ignore Ctrl-C from their start; the parent terminates them."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Only the main thread may set handlers, and only it is interrupted.
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def worker_error(exit_code: int, message: str) -> Exception:
    """Return the error of a dead worker: its message, or its signal or exit code."""
    if message:
        return UserError(message)
    if exit_code < 0:
        return UserError(
            f"[data pack] a worker was killed (signal {-exit_code}): not enough memory? Set fewer "
            "--workers; the same command resumes."
        )
    return RuntimeError(f"a worker failed (exit code {exit_code}), see above")
