"""Offsets between the host clocks of ranks: ping-pong with the first rank of a group.

The fastest of many round trips counts: it leaves least room for an asymmetry, which is the error of
an offset. Clocks drift: an offset is measured twice and interpolated linearly in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

ROUNDS = 32
"""Round trips of each rank; the first ones also connect the two ends."""
TAG = 1_000_003
"""Tag of these messages, in a group that others may use."""


class Offset(NamedTuple):
    """A rank's clock minus that of the first rank, in nanoseconds."""

    at_ns: float
    """Time of the measurement, on the first rank's clock."""
    offset_ns: float
    round_trip_ns: float
    """The error is at most half of it."""


@dataclass(frozen=True)
class Clock:
    """A rank's clock against that of the first rank."""

    before: Offset
    after: Offset

    def to_first(self, own_ns: float) -> float:
        """A time of this rank, on the first rank's clock."""
        (first, offset, _), (last, later, _) = self.before, self.after
        if last <= first:
            return own_ns - offset
        drift = (later - offset) / (last - first)
        # own = reference + offset + drift * (reference - first), solved for the reference.
        return first + (own_ns - offset - first) / (1 + drift)


NO_OFFSET = Offset(0.0, 0.0, 0.0)


def fastest(trips: Sequence[tuple[int, int, int]]) -> Offset:
    """The offset by the fastest of (sent, answered on the other clock, received) round trips."""
    sent, answered, received = min(trips, key=lambda trip: trip[2] - trip[0])
    middle = (sent + received) / 2
    return Offset(middle, answered - middle, received - sent)


def measure(
    group: dist.ProcessGroup, now: Callable[[], int] = time.perf_counter_ns
) -> list[Offset]:
    """The offsets of all ranks of a group, in group order; [] on ranks but the first. Collective.

    `now`: this rank's clock, in nanoseconds. The group needs a backend for CPU tensors.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    value = torch.zeros(1, dtype=torch.int64)
    if rank > 0:
        answer(group, value, now)
        return []
    found = [NO_OFFSET._replace(at_ns=float(now()))]
    for other in range(1, size):
        peer = dist.get_global_rank(group, other)
        trips = []
        for _ in range(ROUNDS):
            sent = now()
            dist.send(value, peer, group, TAG)
            dist.recv(value, peer, group, TAG)
            trips.append((sent, int(value), now()))
        found.append(fastest(trips))
    return found


def answer(group: dist.ProcessGroup, value: torch.Tensor, now: Callable[[], int]) -> None:
    """Answer every message of the first rank with this rank's time."""
    first = dist.get_global_rank(group, 0)
    for _ in range(ROUNDS):
        dist.recv(value, first, group, TAG)
        value.fill_(now())
        dist.send(value, first, group, TAG)
