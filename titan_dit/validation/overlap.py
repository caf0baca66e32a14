"""Finds rows that two datasets share, by a digest of every row."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Iterator, Sequence

import torch

from titan_dit.config.section import UserError
from titan_dit.data.base import Source
from titan_dit.launcher.process_group import World
from titan_dit.system import stdio

BATCH = 256
REPORT_EVERY_S = 10.0


def check_overlap(
    path: str, validation: Source, rows: Sequence[int], training: Source, world: World
) -> None:
    """Raise UserError on every rank if validation rows are in the training set.

    The training data is read once, split over the ranks.
    """
    theirs = list(digests(validation, rows))
    wanted = set(theirs)
    mine = range(world.rank, len(training), world.size)
    said, began = time.monotonic(), time.monotonic()
    found: set[bytes] = set()
    for done, digest in enumerate(digests(training, mine), start=1):
        if digest in wanted:
            found.add(digest)
        if world.is_main and time.monotonic() - said > REPORT_EVERY_S:
            said = time.monotonic()
            left = (said - began) / done * (len(mine) - done)
            text = f"[validation] compared {done * world.size:,} of {len(training):,} rows of "
            stdio.write(sys.stderr, f"{text}[data] with {path}  ETA {left:.0f} s\n")
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
