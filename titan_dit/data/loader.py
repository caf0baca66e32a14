"""The data loader: batches of named tensors, in the order of the sample numbers.

It is independent of models and objectives.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import signal
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.queues import Queue
from typing import Any, TypeAlias, TypeVar

import torch
from jaxtyping import Int64
from torch import Tensor
from torch.utils.data import get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from titan_dit.config.section import UserError
from titan_dit.data.base import BadSampleError, Batch, Fields, Source
from titan_dit.data.order import RankOrder
from titan_dit.ranks.disk_errors import FULL, line_of, shared_memory_is_full
from titan_dit.ranks.failure import Disruption
from titan_dit.system.files import reason_of

T = TypeVar("T")

Inspect: TypeAlias = Callable[[Fields], None]
"""Validates loaded fields; raises UserError."""
SMALL_BYTES = 1 << 16
NO_WORKERS = "--data.num_workers 0"
WITH_WORKERS: weakref.WeakSet[Any] = weakref.WeakSet()
"""Iterators of loaders that have workers."""
KILLED = (
    "[data] a data worker was killed: not enough memory? Set fewer [data] num_workers; the same "
    "command resumes from the last checkpoint."
)


@dataclass(frozen=True)
class StoredBatch:
    """One rank's share of a step as a worker returns it, in stored units."""

    fields: Fields
    sample_numbers: Int64[Tensor, " b"]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle small tensors as numpy arrays: shared memory costs 0.3 ms per tensor."""
        packed = {name: value.numpy() if is_small(value) else value for name, value in self.named()}
        return unpack, (packed,)

    def named(self) -> list[tuple[str, Tensor]]:
        """All tensors by name; the sample numbers are named ""."""
        return [*self.fields.items(), ("", self.sample_numbers)]

    def pin_memory(self) -> StoredBatch:
        """Copy to pinned memory; called by torch's DataLoader."""
        return unpack({name: value.pin_memory() for name, value in self.named()})

    def share(self) -> None:
        """Move large tensors to shared memory; raises RuntimeError if there is none left."""
        for _, value in self.named():
            if not is_small(value):
                value.share_memory_()  # type: ignore[no-untyped-call]


def is_small(value: Tensor) -> bool:
    """Return True if a tensor is copied out of a worker instead of shared."""
    return value.nbytes < SMALL_BYTES and value.dtype != torch.bfloat16  # numpy has no bfloat16


def unpack(packed: dict[str, Any]) -> StoredBatch:
    """Inverse of `StoredBatch.named`; accepts numpy arrays."""
    tensors = {
        name: value if isinstance(value, Tensor) else torch.from_numpy(value)
        for name, value in packed.items()
    }
    numbers = tensors.pop("")
    return StoredBatch(tensors, numbers)


@dataclass(frozen=True)
class NumberedSamples:
    """A dataset indexed by batches of (sample number, row) pairs."""

    source: Source
    inspect: Inspect

    def __len__(self) -> int:
        """Rows of the source."""
        return len(self.source)

    def __getitems__(self, pairs: list[tuple[int, int]]) -> StoredBatch | UserError:
        """Read the rows of a batch.

        Errors are returned, because raising in a worker prints a traceback. A failed read becomes a
        Disruption, which is retried: the files were checked when the source was opened.
        """
        try:
            numbers, rows = [number for number, _ in pairs], [row for _, row in pairs]
            fields = self.source.read_numbered(rows, numbers)
        except BadSampleError as error:
            return error
        except UserError as error:
            return Disruption(str(error))
        except OSError as error:
            return Disruption(line_of(error, "[data]"))
        except MemoryError:
            return Disruption(KILLED)
        try:
            self.inspect(fields)
        except UserError as error:
            return error
        stored = StoredBatch(fields, torch.tensor(numbers))
        return shared(stored) if get_worker_info() else stored


def shared(stored: StoredBatch) -> StoredBatch | UserError:
    """Move a worker's batch to shared memory. torch would do it in a thread that loses errors."""
    try:
        stored.share()
    except RuntimeError as error:
        if "shared memory" not in str(error):
            raise
        return Disruption(f"[data] {shared_memory_is_full(NO_WORKERS)}")
    return stored


def no_collate(fetched: T) -> T:
    """Return the batch unchanged: `Source.read` has stacked it."""
    return fetched


def begin_worker(worker: int) -> None:
    """Make a worker ignore signals to the process group (Ctrl-C, Slurm): the rank still needs data.

    A batch that cannot be sent ends the worker: the rank would wait for it for ever.
    """
    Queue._on_queue_feeder_error = end_worker  # type: ignore[attr-defined]
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        signal.signal(signal.Signals[name], signal.SIG_IGN)


@atexit.register
def stop_workers() -> None:
    """Stop all workers before Python's exit waits for them: they ignore its SIGTERM."""
    for shares in list(WITH_WORKERS):
        shares._shutdown_workers()


def end_worker(*_: object) -> None:
    """Exit at once."""
    os._exit(1)


def with_killed_workers(shares: Iterator[Any]) -> Iterator[Any]:
    """Yield the workers' results; a killed worker yields a Disruption."""
    workers = multiprocessing.active_children()
    try:
        yield from shares
    except RuntimeError as error:
        # Not "Caught KeyError in DataLoader worker process 0", an exception of a source.
        if "DataLoader worker (pid" not in str(error):
            raise
        ends = [worker.exitcode for worker in workers]
        # A page of shared memory that is not there.
        is_bus = "Bus error" in str(error) or -signal.SIGBUS in ends
        yield Disruption(f"[data] {shared_memory_is_full(NO_WORKERS)}" if is_bus else KILLED)


def started(loader: StatefulDataLoader[Any], workers: int) -> Iterator[Any]:
    """Start the workers. Raises Disruption if the system lacks memory, files or processes."""
    try:
        return iter(loader)
    except OSError as error:
        line = f"num_workers={workers} cannot start: {reason_of(error)}. Set fewer."
        if error.errno in FULL:  # Their locks are in shared memory, too.
            line = shared_memory_is_full(NO_WORKERS)
        # The traceback keeps a half-made iterator, which prints an error of its own when it ends.
        before, sys.unraisablehook = sys.unraisablehook, lambda _: None
        error.__traceback__ = None
        sys.unraisablehook = before
        raise Disruption(f"[data] {line}") from None


def load_samples(
    source: Source,
    pairs: list[tuple[int, int]],
    inspect: Inspect,
    device: torch.device,
    total_weight: float,
    step: int = 0,
) -> Batch:
    """Load one batch of given (sample number, row) pairs, as training does.

    Raises UserError for a row that cannot be read or is refused.
    """
    stored = NumberedSamples(source, inspect).__getitems__(pairs)
    if isinstance(stored, UserError):
        raise stored
    weight = torch.ones(len(pairs))
    return Batch(stored.fields, stored.sample_numbers, weight, total_weight, step).to(device)


def load(
    source: Source,
    order: RankOrder,
    cursor: int,
    inspect: Inspect,
    device: torch.device,
    *,
    workers: int = 0,
    step: int = 1,
) -> Iterator[Batch]:
    """Yield endless batches from `cursor` on, on `device`, in their stored dtypes.

    `step`: the optimizer step that takes the first one.

    The cursor is the only position; the loader keeps no state. `inspect` validates the fields in
    the process that reads them. Copies to a GPU are asynchronous, through pinned memory. Raises
    UserError for a row that cannot be read or is refused, Disruption for a killed worker.
    """
    weights = functools.lru_cache(maxsize=None)(functools.partial(weights_of, device=device))
    with warnings.catch_warnings():
        # torchdata 0.11 calls a function that torch 2.13 deprecates.
        warnings.filterwarnings("ignore", message="'set_vital'")
        # Two long lines about cores; [data] num_workers is the user's choice.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        loader: StatefulDataLoader[Any] = StatefulDataLoader(
            NumberedSamples(source, inspect),
            batch_sampler=order.batches(cursor),
            collate_fn=no_collate,
            num_workers=workers,
            worker_init_fn=begin_worker,
            pin_memory=device.type == "cuda",
            # The loader's state is never used: no snapshots.
            snapshot_every_n_steps=1 << 40,
        )
        shares = started(loader, workers)
    if workers:
        WITH_WORKERS.add(shares)
    try:
        pairs = zip(with_killed_workers(shares), order.shares(cursor), strict=False)
        for number, (read, share) in enumerate(pairs, step):
            if isinstance(read, UserError):
                raise read
            assert read.sample_numbers[: len(share.numbers)].tolist() == list(share.numbers)
            weight = weights(len(share.numbers), share.size)
            total = float(share.step_size)
            yield Batch(read.fields, read.sample_numbers, weight, total, number).to(device)
    finally:
        if workers:  # A traceback would keep them.
            shares._shutdown_workers()  # type: ignore[attr-defined]


def weights_of(num_real: int, size: int, device: torch.device) -> Tensor:
    """1 for each of a rank's samples, 0 for its padding: [size]."""
    return (torch.arange(size, device=device) < num_real).float()
