"""Finds rows that two datasets share, by a digest of every row."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch

from titan_dit.config.section import UserError
from titan_dit.data.base import Source
from titan_dit.launcher.process_group import World
from titan_dit.system.progress import ProgressLine

BATCH = 256


def check_overlap(
    path: str, validation: Source, rows: Sequence[int], training: Source, world: World
) -> None:
    """Raise UserError on every rank if validation rows are in the training set.

    The training data is read once, split over the ranks.
    """
    theirs = list(digests(validation, rows))
    wanted = set(theirs)
    mine = range(world.rank, len(training), world.size)
    what = f"[validation] {path} compared with [data]"
    progress = ProgressLine(len(mine), "rows", what=what)
    found: set[bytes] = set()
    for digest in digests(training, mine):
        if digest in wanted:
            found.add(digest)
        progress.add(1)
    progress.end()
    shared = set().union(*world.gather(found))
    if shared:
        raise UserError(
            f"[validation] path={path}: {sum(d in shared for d in theirs)} of its {len(rows)} "
            "samples are also in [data], so the validation loss would include training samples. "
            "Remove them from one dataset, or drop path and set samples to hold out rows of "
            "[data]."
        )


def digests(source: Source, rows: Sequence[int]) -> Iterator[bytes]:
    """Yield a digest of every row, over the bytes of all fields."""
    for first in range(0, len(rows), BATCH):
        part = source.read(rows[first : first + BATCH])
        # View as bytes: numpy has no bfloat16.
        whole = [part[name].contiguous().view(len(part[name]), -1) for name in sorted(part)]
        arrays = [tensor.view(torch.uint8).numpy() for tensor in whole]
        for row in range(len(arrays[0])):
            sha = hashlib.blake2b(digest_size=16)
            for array in arrays:
                sha.update(array[row].tobytes())
            yield sha.digest()
