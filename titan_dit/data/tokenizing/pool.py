"""Encode chunks in worker processes: in order, with a bounded number in flight."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from titan_dit.config.section import UserError
from titan_dit.data.tokenizing.chunks import BadLine, TextChunk, texts_of
from titan_dit.ranks.disk_errors import FULL, shared_memory_is_full
from titan_dit.system.worker import end_with_parent


@dataclass(frozen=True)
class Recipe:
    """Settings of an `Encoder`, pickled to the workers."""

    tokenizer: str
    """The contents of a tokenizer.json."""
    dtype: str
    keys: tuple[str, ...]
    end_of_document: int | None
    """Id that is appended to every document; None: none."""
    language: str | None
    """Language of the rules that split a document into sentences. None: a document is one
    sequence."""


@dataclass(frozen=True)
class Documents:
    """Documents of one key.

    `ids`: all ids. `lengths`: tokens of each sequence. `sequences`: sequences of each document.
    """

    ids: NDArray[np.integer]
    lengths: NDArray[np.int32]
    sequences: NDArray[np.int64]


@dataclass(frozen=True)
class Encoded:
    """A chunk's documents by key, and counts of what was left out."""

    by_key: dict[str, Documents]
    num_bytes: int
    """UTF-8 bytes of the texts."""
    num_empty: int
    """Documents without ids, over all keys."""
    bad: list[BadLine]


class Encoder:
    """Encoder of chunks, in one thread."""

    def __init__(self, recipe: Recipe) -> None:
        from tokenizers import Tokenizer

        self.recipe = recipe
        self.tokenizer = Tokenizer.from_str(recipe.tokenizer)
        self.split = splitter(recipe.language) if recipe.language else None

    def __call__(self, chunk: TextChunk) -> Encoded:
        """Encode the documents of a chunk."""
        keys, bad, columns = self.recipe.keys, [], []
        for found in texts_of(chunk, self.recipe.keys):
            if isinstance(found, BadLine):
                bad.append(found)
            else:
                columns.append(found)
        by_key, num_empty, num_bytes = {}, 0, 0
        for key, texts in zip(keys, zip(*columns, strict=True), strict=False):
            by_key[key] = documents = self.encode(texts)
            num_empty += len(texts) - len(documents.sequences)
            num_bytes += sum(len(text.encode()) for text in texts)
        return Encoded(by_key, num_bytes, num_empty, bad)

    def encode(self, texts: Sequence[str]) -> Documents:
        """Encode documents. Documents and sentences without ids are left out."""
        whole = [self.split(text) if self.split else [text] for text in texts]
        sentences = list(chain.from_iterable(whole))
        found = self.tokenizer.encode_batch(sentences, add_special_tokens=False)
        ids = [sentence.ids for sentence in found]
        lengths = np.fromiter(map(len, ids), np.int32, len(ids))
        owner = np.repeat(np.arange(len(whole)), [len(part) for part in whole])
        kept = np.flatnonzero(lengths)
        sequences = np.bincount(owner[kept], minlength=len(whole))
        last = kept[(sequences[sequences > 0]).cumsum() - 1]
        if self.recipe.end_of_document is not None:
            for place in last.tolist():
                ids[place] = [*ids[place], self.recipe.end_of_document]
            lengths[last] += 1
        total = int(lengths.sum())
        joined = np.fromiter(chain.from_iterable(ids), self.recipe.dtype, total)
        return Documents(joined, lengths[kept], sequences[sequences > 0])


def splitter(language: str) -> Callable[[str], list[str]]:
    """A function that splits a text into sentences by a language's rules, and strips them."""
    from sentencex import segment

    def split(text: str) -> list[str]:
        return [sentence.strip() for sentence in segment(language, text)]

    return split


AHEAD = 4
"""Chunks in flight per worker."""

encoder: Encoder | None = None
"""The encoder of a worker process; None in the parent."""


def begin(recipe: Recipe) -> None:
    """Start a worker. It ends with its parent, however that ends.

    SIGINT and SIGTERM stay blocked, as inherited: the parent ends the workers.
    """
    global encoder
    end_with_parent()
    one_thread()
    encoder = Encoder(recipe)


def one_thread() -> None:
    """Keep the library in one thread: parallelism comes from the workers."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def work(chunk: TextChunk) -> Encoded:
    """Encode a chunk in a worker."""
    assert encoder
    return encoder(chunk)


def encode_here(
    recipe: Recipe, chunks: Iterator[tuple[TextChunk, int]]
) -> Iterator[tuple[Encoded, int]]:
    """Encode the chunks in this process."""
    one_thread()
    encode = Encoder(recipe)
    for chunk, done in chunks:
        yield encode(chunk), done


def encode_all(
    recipe: Recipe, chunks: Iterator[tuple[TextChunk, int]], workers: int
) -> Iterator[tuple[Encoded, int]]:
    """Yield (encoded chunk, bytes read up to it), in order.

    Raises UserError if a worker was killed.
    """
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
    """A pool whose workers start with the first chunk. UserError without shared memory."""
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
    """Block SIGINT and SIGTERM for this thread and its children; they are delivered afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def result(waiting: deque[tuple[Future[Encoded], int]]) -> tuple[Encoded, int]:
    """Wait for the oldest chunk in flight."""
    future, done = waiting.popleft()
    return future.result(), done
