"""Worker processes that encode chunks, in order and with a bounded number under way."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from titan_dit.config.section import UserError
from titan_dit.data.tokenizing.chunks import Chunk
from titan_dit.data.tokenizing.encoder import Encoded, Encoder, Recipe
from titan_dit.launcher.disk_errors import FULL, shared_memory_is_full

AHEAD = 4
"""Chunks of a worker that are under way."""

encoder: Encoder | None = None
"""Of a worker process."""


def begin(recipe: Recipe) -> None:
    """Prepare a worker; it ends with its parent, however that ends.

    SIGINT and SIGTERM stay blocked, as when it was started: the parent ends the workers.
    """
    global encoder
    threading.Thread(target=end_with_parent, daemon=True).start()
    one_thread()
    encoder = Encoder(recipe)


def end_with_parent() -> None:
    """End this process when its parent has ended."""
    parent = multiprocessing.parent_process()
    assert parent
    parent.join()
    os._exit(1)


def one_thread() -> None:
    """Keep the library in one thread: there are as many workers as wanted."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def work(chunk: Chunk) -> Encoded:
    """Encode a chunk in a worker."""
    assert encoder
    return encoder(chunk)


def encode_here(
    recipe: Recipe, chunks: Iterator[tuple[Chunk, int]]
) -> Iterator[tuple[Encoded, int]]:
    """Encode the chunks in this process."""
    one_thread()
    encode = Encoder(recipe)
    for chunk, done in chunks:
        yield encode(chunk), done


def encode_all(
    recipe: Recipe, chunks: Iterator[tuple[Chunk, int]], workers: int
) -> Iterator[tuple[Encoded, int]]:
    """Yield the encoded chunks in order, each with the bytes read when it was."""
    if workers == 1:
        yield from encode_here(recipe, chunks)
        return
    pool = opened(recipe, workers)
    waiting: deque[tuple[Future[Encoded], int]] = deque()
    try:
        for chunk, done in chunks:
            with blocked_signals():  # The first chunk starts the workers, which inherit this.
                waiting.append((pool.submit(work, chunk), done))
            if len(waiting) >= AHEAD * workers:
                yield result(waiting)
        while waiting:
            yield result(waiting)
    except BrokenProcessPool:
        raise UserError(
            "[data tokenize] a worker was killed: not enough memory? Set fewer --workers; nothing "
            "was written."
        ) from None
    finally:
        if waiting:  # After an error, or Ctrl-C: a chunk may take long.
            for worker in multiprocessing.active_children():
                worker.kill()
        pool.shutdown(cancel_futures=True)


def opened(recipe: Recipe, workers: int) -> ProcessPoolExecutor:
    """A pool whose workers start with the first chunk. Raises UserError without shared memory."""
    context = multiprocessing.get_context("spawn")
    try:
        return ProcessPoolExecutor(workers, context, begin, (recipe,))
    except OSError as error:
        if error.errno not in FULL:
            raise
        # Its locks are there.
        full = shared_memory_is_full("--workers 1")
        raise UserError(f"[data tokenize] {full}; nothing was written.") from None


@contextmanager
def blocked_signals() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back from this thread and what it starts; they come afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def result(waiting: deque[tuple[Future[Encoded], int]]) -> tuple[Encoded, int]:
    """Wait for the oldest chunk."""
    future, done = waiting.popleft()
    return future.result(), done
