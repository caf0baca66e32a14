"""The loader: sample numbers in, batches of tokens out, in the order given."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from titan_dit.data.base import Sample, Source
from titan_dit.data.order import RankOrder
from titan_dit.models.base import ModelConfig
from titan_dit.objectives.base import Batch


@dataclass(frozen=True)
class NumberedSamples:
    """A source asked for (sample number, row) pairs."""

    source: Source

    def __len__(self) -> int:
        """Rows of the source."""
        return len(self.source)

    def __getitem__(self, index: tuple[int, int]) -> tuple[int, Sample]:
        """The row, with the number it goes by."""
        number, row = index
        return number, self.source[row]


@dataclass(frozen=True)
class Collate:
    """Samples to a Batch on the CPU; runs in the worker, patchifying included."""

    model: ModelConfig
    global_batch_size: int

    def __call__(self, numbered: list[tuple[int, Sample]]) -> Batch:
        """Stack the samples of one rank's share of a step."""
        return Batch(
            tokens=self.model.tokenize(torch.stack([sample.latent for _, sample in numbered])),
            labels=torch.tensor([sample.label for _, sample in numbered]),
            sample_numbers=torch.tensor([number for number, _ in numbered]),
            weight=torch.ones(len(numbered)),
            total_weight=float(self.global_batch_size),
            channels=self.model.sample_shape[0],
        )


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

    The position is the cursor alone, not the loader's. On a GPU the copy goes through pinned memory
    and does not block the host.
    """
    static = model.static(device)
    with warnings.catch_warnings():
        # torchdata 0.11 calls a function that torch 2.13 deprecates; nothing a user can act on.
        warnings.filterwarnings("ignore", message="'set_vital'")
        loader: StatefulDataLoader[Any] = StatefulDataLoader(
            NumberedSamples(source),
            batch_sampler=order.batches(cursor),
            collate_fn=Collate(model, order.plan.global_batch_size),
            num_workers=workers,
            pin_memory=device.type == "cuda",
            # The loader's own state is never asked for, so it need not be kept.
            snapshot_every_n_steps=1 << 40,
        )
        batches = iter(loader)
    for batch in batches:
        yield replace(batch.to(device), static=static)
