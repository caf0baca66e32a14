"""The loader: sample numbers in, batches of named tensors out, in the order given.

It moves bytes, and knows neither what they mean nor what is made of them.
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
from titan_dit.data.base import Batch, Fields, Source
from titan_dit.data.order import RankOrder
from titan_dit.launcher.failure import Disruption

T = TypeVar("T")

Inspect: TypeAlias = Callable[[Fields], None]
"""Looks at what was read; a UserError refuses it."""
SMALL_BYTES = 1 << 16


@dataclass(frozen=True)
class Stored:
    """One rank's share of a step as a worker hands it over: as it lies on the disk, and small."""

    fields: Fields
    sample_numbers: Int64[Tensor, " b"]

    def __reduce__(self) -> tuple[Any, ...]:
        """Out of a worker: each tensor costs a handshake of 0.3 ms, an array goes with the rest."""
        packed = {name: value.numpy() if is_small(value) else value for name, value in self.named()}
        return unpack, (packed,)

    def named(self) -> list[tuple[str, Tensor]]:
        """All tensors; the numbers have no name."""
        return [*self.fields.items(), ("", self.sample_numbers)]

    def pin_memory(self) -> Stored:
        """In page-locked memory; the loader calls this."""
        return unpack({name: value.pin_memory() for name, value in self.named()})


def is_small(value: Tensor) -> bool:
    """Whether to copy it out of a worker, rather than to share its memory."""
    return value.nbytes < SMALL_BYTES and value.dtype != torch.bfloat16  # numpy has no bfloat16


def unpack(packed: dict[str, Any]) -> Stored:
    """What `Stored.named` took apart."""
    tensors = {
        name: value if isinstance(value, Tensor) else torch.from_numpy(value)
        for name, value in packed.items()
    }
    numbers = tensors.pop("")
    return Stored(tensors, numbers)


@dataclass(frozen=True)
class NumberedSamples:
    """A source asked for a batch of (sample number, row) pairs at a time."""

    source: Source
    inspect: Inspect

    def __len__(self) -> int:
        """Rows of the source."""
        return len(self.source)

    def __getitems__(self, pairs: list[tuple[int, int]]) -> Stored | UserError:
        """The rows, with the numbers they go by.

        An error of the user's is returned: raised, it would come out of a worker as a traceback.
        Files were looked at when the source was opened: what cannot be read now may be later.
        """
        try:
            fields = self.source.read([row for _, row in pairs])
        except UserError as error:
            return Disruption(str(error))
        except OSError as error:
            return Disruption(f"[data] {error}")
        try:
            self.inspect(fields)
        except UserError as error:
            return error
        return Stored(fields, torch.tensor([number for number, _ in pairs]))


def as_it_is(fetched: T) -> T:
    """What the loader would collate is collated already."""
    return fetched


def only_the_rank_ends_it(worker: int) -> None:
    """In a worker: Ctrl-C and Slurm signal whole groups of processes; the rank still needs data."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        signal.signal(signal.Signals[name], signal.SIG_IGN)


def answers(shares: Iterator[Any]) -> Iterator[Any]:
    """What the workers hand over; that one of them was killed is told in the same way."""
    try:
        yield from shares
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        yield Disruption(
            "[data] a data worker was killed: not enough memory? Take fewer [data] workers; the "
            "same command goes on from the last checkpoint."
        )


def load_samples(
    source: Source,
    pairs: list[tuple[int, int]],
    inspect: Inspect,
    device: torch.device,
    total_weight: float,
) -> Batch:
    """One batch of given (sample number, row) pairs, as training would see them.

    `total_weight`: see `Batch`.
    """
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
    """Endless batches from `cursor` on, on `device`, in the dtypes that they are stored in.

    The position is the cursor alone, not the loader's. `inspect` looks at what was read, where it
    was read. On a GPU the copy goes through pinned memory and does not block the host.
    """
    total_weight = float(order.plan.global_batch_size)
    weight = (torch.arange(order.num_rows, device=device) < order.num_real).float()
    with warnings.catch_warnings():
        # torchdata 0.11 calls a function that torch 2.13 deprecates; nothing a user can act on.
        warnings.filterwarnings("ignore", message="'set_vital'")
        loader: StatefulDataLoader[Any] = StatefulDataLoader(
            NumberedSamples(source, inspect),
            batch_sampler=order.batches(cursor),
            collate_fn=as_it_is,
            num_workers=workers,
            worker_init_fn=only_the_rank_ends_it,
            pin_memory=device.type == "cuda",
            # The loader's own state is never asked for, so it need not be kept.
            snapshot_every_n_steps=1 << 40,
        )
        shares = iter(loader)
    for share in answers(shares):
        if isinstance(share, UserError):
            break
        yield Batch(share.fields, share.sample_numbers, weight, total_weight).to(device)
    # Only an error ends the loop. The workers end here: the frames of the error would keep them.
    del shares, loader
    raise share
