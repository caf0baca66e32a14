"""The loader: sample numbers in, batches of tokens out, in the order given."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from titan_dit.data.base import Source
from titan_dit.data.order import RankOrder
from titan_dit.data.units import check_std, to_model_units
from titan_dit.failure import Disruption
from titan_dit.models.base import ModelConfig
from titan_dit.objectives.base import Batch
from titan_dit.rng import SampleRNG
from titan_dit.section import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Stored:
    """One rank's share of a step as a worker hands it over: as it lies on the disk, and small."""

    latents: Shaped[Tensor, "b k h w"]
    labels: Int64[Tensor, " b"]
    sample_numbers: Int64[Tensor, " b"]

    def __reduce__(self) -> tuple[Any, ...]:
        """Out of a worker: each tensor costs a handshake of 0.3 ms, an array goes with the rest."""
        return stored, (self.latents, self.labels.numpy(), self.sample_numbers.numpy())

    def pin_memory(self) -> Stored:
        """In page-locked memory; the loader calls this."""
        return Stored(*(tensor.pin_memory() for tensor in vars(self).values()))

    def to(self, device: torch.device) -> Stored:
        """On a device; from pinned memory the copy does not block the host."""
        return Stored(*(tensor.to(device, non_blocking=True) for tensor in vars(self).values()))


def stored(latents: Tensor, labels: Any, sample_numbers: Any) -> Stored:
    """What `Stored.__reduce__` took apart."""
    return Stored(latents, torch.from_numpy(labels), torch.from_numpy(sample_numbers))


@dataclass(frozen=True)
class NumberedSamples:
    """A source asked for a batch of (sample number, row) pairs at a time."""

    source: Source
    channels: int

    def __len__(self) -> int:
        """Rows of the source."""
        return len(self.source)

    def __getitems__(self, pairs: list[tuple[int, int]]) -> Stored | UserError:
        """The rows, with the numbers they go by.

        An error of the user's is returned: raised, it would come out of a worker as a traceback.
        Files were looked at when the source was opened: what cannot be read now may be later.
        """
        try:
            samples = self.source.read([row for _, row in pairs])
        except UserError as error:
            return Disruption(str(error))
        except OSError as error:
            return Disruption(f"[data] {error}")
        try:
            check_std(samples.latents, self.source.facts, self.channels)
        except UserError as error:
            return error
        numbers = torch.tensor([number for number, _ in pairs])
        return Stored(samples.latents, samples.labels, numbers)


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


@dataclass(frozen=True)
class Batches:
    """What is stored, to what the model is trained on."""

    source: Source
    model: ModelConfig
    static: Mapping[str, Tensor]
    seed: int
    total_weight: float
    """See `Batch.total_weight`."""

    def __call__(self, share: Stored, weight: Float[Tensor, " b"]) -> Batch:
        """In the model's units, cut into tokens, on the device where the share is."""
        channels, rng = self.model.sample_shape[0], SampleRNG(self.seed, share.sample_numbers)
        latents = to_model_units(share.latents, self.source.facts, channels, rng)
        return Batch(
            tokens=self.model.tokenize(latents),
            labels=share.labels,
            sample_numbers=share.sample_numbers,
            weight=weight,
            total_weight=float(self.total_weight),
            channels=channels,
            static=self.static,
        )


def load_samples(
    source: Source,
    pairs: list[tuple[int, int]],
    model: ModelConfig,
    device: torch.device,
    *,
    seed: int,
) -> Batch:
    """One batch of given (sample number, row) pairs, as training would see them."""
    share = NumberedSamples(source, model.sample_shape[0]).__getitems__(pairs)
    if isinstance(share, UserError):
        raise share
    to_batch = Batches(source, model, model.static(device), seed, len(pairs))
    return to_batch(share.to(device), torch.ones(len(pairs), device=device))


def load(
    source: Source,
    order: RankOrder,
    cursor: int,
    model: ModelConfig,
    device: torch.device,
    *,
    seed: int,
    workers: int = 0,
) -> Iterator[Batch]:
    """Endless batches from `cursor` on, on `device`, each with the model's `static` inputs.

    The position is the cursor alone, not the loader's. What travels is in the stored dtype; it is
    brought to the model's units, and cut into tokens, on the device. On a GPU the copy goes through
    pinned memory and does not block the host.
    """
    channels = model.sample_shape[0]
    to_batch = Batches(source, model, model.static(device), seed, order.plan.global_batch_size)
    weight = (torch.arange(order.num_rows, device=device) < order.num_real).float()
    with warnings.catch_warnings():
        # torchdata 0.11 calls a function that torch 2.13 deprecates; nothing a user can act on.
        warnings.filterwarnings("ignore", message="'set_vital'")
        loader: StatefulDataLoader[Any] = StatefulDataLoader(
            NumberedSamples(source, channels),
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
        yield to_batch(share.to(device), weight)
    # Only an error ends the loop. The workers end here: the frames of the error would keep them.
    del shares, loader
    raise share
