"""The data loader: batches of named tensors, in the order of the sample numbers.

It is independent of models and objectives.
"""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from jaxtyping import Int64
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from titan_dit.config.section import UserError
from titan_dit.data.base import BadSampleError, Batch, Fields, Source
from titan_dit.data.order import RankOrder
from titan_dit.launcher.failure import Disruption

T = TypeVar("T")

Inspect: TypeAlias = Callable[[Fields], None]
"""Validates loaded fields; raises UserError."""
SMALL_BYTES = 1 << 16


@dataclass(frozen=True)
class Stored:
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

    def pin_memory(self) -> Stored:
        """Copy to pinned memory; called by torch's DataLoader."""
        return unpack({name: value.pin_memory() for name, value in self.named()})


def is_small(value: Tensor) -> bool:
    """Return True if a tensor is copied out of a worker instead of shared."""
    return value.nbytes < SMALL_BYTES and value.dtype != torch.bfloat16  # numpy has no bfloat16


def unpack(packed: dict[str, Any]) -> Stored:
    """Inverse of `Stored.named`; accepts numpy arrays."""
    tensors = {
        name: value if isinstance(value, Tensor) else torch.from_numpy(value)
        for name, value in packed.items()
    }
    numbers = tensors.pop("")
    return Stored(tensors, numbers)


@dataclass(frozen=True)
class NumberedSamples:
    """A dataset indexed by batches of (sample number, row) pairs."""

    source: Source
    inspect: Inspect

    def __len__(self) -> int:
        """Rows of the source."""
        return len(self.source)

    def __getitems__(self, pairs: list[tuple[int, int]]) -> Stored | UserError:
        """Read the rows of a batch.

        Errors are returned, because raising in a worker prints a traceback. A failed read becomes a
        Disruption, to be retried: the files were checked when the source was opened.
        """
        try:
            fields = self.source.read([row for _, row in pairs])
        except BadSampleError as error:
            return error
        except UserError as error:
            return Disruption(str(error))
        except OSError as error:
            return Disruption(f"[data] {error}")
        try:
            self.inspect(fields)
        except UserError as error:
            return error
        return Stored(fields, torch.tensor([number for number, _ in pairs]))


def no_collate(fetched: T) -> T:
    """Return the batch unchanged: `Source.read` has stacked it."""
    return fetched


def ignore_signals(worker: int) -> None:
    """Ignore signals to the process group (Ctrl-C, Slurm): the rank needs data until it stops."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        signal.signal(signal.Signals[name], signal.SIG_IGN)


def with_killed_workers(shares: Iterator[Any]) -> Iterator[Any]:
    """Yield the workers' results; a killed worker yields a Disruption."""
    try:
        yield from shares
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        yield Disruption(
            "[data] a data worker was killed: not enough memory? Set fewer [data] workers; the "
            "same command resumes from the last checkpoint."
        )


def load_samples(
    source: Source,
    pairs: list[tuple[int, int]],
    inspect: Inspect,
    device: torch.device,
    total_weight: float,
) -> Batch:
    """Load one batch of given (sample number, row) pairs, as in training."""
    stored = NumberedSamples(source, inspect).__getitems__(pairs)
    if isinstance(stored, UserError):
        raise stored
    return Batch(stored.fields, stored.sample_numbers, torch.ones(len(pairs)), total_weight).to(
        device
    )


def load(
    source: Source,
    order: RankOrder,
    cursor: int,
    inspect: Inspect,
    device: torch.device,
    *,
    workers: int = 0,
) -> Iterator[Batch]:
    """Yield endless batches from `cursor` on, on `device`, in their stored dtypes.

    The cursor is the only position; the loader keeps no state. `inspect` validates the fields in
    the process that reads them. Copies to a GPU are asynchronous, through pinned memory.
    """
    total_weight = float(order.plan.global_batch_size)
    weight = (torch.arange(order.padded_size, device=device) < order.num_real).float()
    with warnings.catch_warnings():
        # torchdata 0.11 calls a function that torch 2.13 deprecates.
        warnings.filterwarnings("ignore", message="'set_vital'")
        loader: StatefulDataLoader[Any] = StatefulDataLoader(
            NumberedSamples(source, inspect),
            batch_sampler=order.batches(cursor),
            collate_fn=no_collate,
            num_workers=workers,
            worker_init_fn=ignore_signals,
            pin_memory=device.type == "cuda",
            # The loader's state is never used: no snapshots.
            snapshot_every_n_steps=1 << 40,
        )
        shares = iter(loader)
    for share in with_killed_workers(shares):
        if isinstance(share, UserError):
            break
        yield Batch(share.fields, share.sample_numbers, weight, total_weight).to(device)
    # Only an error ends the loop. Stop the workers now: the traceback's frames would keep them.
    del shares, loader
    raise share
