"""Computing of a rank and its data-parallel messages, side by side.

The streams of FSDP2 (torch.distributed.fsdp, `FSDPParamGroup`): a message starts when what it sends
is there and its link is free; computing waits for what it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Compute(NamedTuple):
    """Seconds of a microbatch, copies of FSDP included."""

    embed_forward: float
    block_forward: float
    head_forward: float
    embed_backward: float
    block_backward: float
    head_backward: float


class Reduction(NamedTuple):
    """Seconds of the reduction of a unit's gradients."""

    shards: float
    """Over FSDP's group."""
    copies: float
    """Then over the replicas of its shards."""


NOTHING = Reduction(0.0, 0.0)


class Overlap:
    """Computing and the link, side by side, in seconds since a microbatch began.

    `hides`: messages are sent while a rank computes. `apart`: those of replicas have another link.
    """

    def __init__(self, *, hides: bool, apart: bool) -> None:
        self.hides, self.apart = hides, apart and hides
        self.now = 0.0
        """Computing is here."""
        self.free = 0.0
        """The link has sent all."""
        self.copied = 0.0
        """The link of the replicas has sent all."""
        self.waited = 0.0

    def send(self, at: float, seconds: float) -> float:
        """A message that may start `at` this time; returns its end."""
        if not seconds:
            return at
        self.free = max(self.free, at if self.hides else self.now) + seconds
        return self.free if self.hides else self.wait(self.free)

    def reduce(self, reduction: Reduction) -> None:
        """Gradients that are there: over FSDP's group, then over the replicas."""
        end = self.send(self.now, reduction.shards)
        if self.apart:
            self.copied = max(self.copied, end) + reduction.copies
        else:
            self.send(end, reduction.copies)

    def finish(self) -> float:
        """Wait for all messages; returns the time."""
        return self.wait(max(self.free, self.copied))

    def wait(self, until: float) -> float:
        """Compute nothing until then; returns the time."""
        self.waited += max(0.0, until - self.now)
        self.now = max(self.now, until)
        return self.now

    def forward(
        self,
        compute: Compute,
        root: float,
        blocks: Sequence[tuple[int, float]],
        *,
        ahead: bool = False,
    ) -> None:
        """A forward; `blocks`: (number, seconds of the gather) of every unit.

        A gather starts when the unit before the last one starts to compute (FSDP2 then frees the
        buffer of that one's gather), `ahead`: as soon as the link is free.
        """
        begun = 0.0 if ahead else self.now
        self.wait(self.send(begun, root))
        starts = [begun, begun]
        arrived = self.send(begun, blocks[0][1]) if blocks else 0.0
        self.now += compute.embed_forward
        for index, (count, _) in enumerate(blocks):
            self.wait(arrived)
            starts.append(self.now)
            if index + 1 < len(blocks):
                arrived = self.send(begun if ahead else starts[-2], blocks[index + 1][1])
            self.now += count * compute.block_forward
        self.now += compute.head_forward

    def backward(
        self,
        compute: Compute,
        blocks: Sequence[tuple[int, float]],
        reductions: Sequence[Reduction],
    ) -> None:
        """A backward; a unit's gather starts with the unit computed before it."""
        given = list(zip(blocks, reductions, strict=True))[::-1]
        arrived = self.send(self.now, given[0][0][1]) if given else 0.0
        self.now += compute.head_backward
        for index, ((count, _), reduction) in enumerate(given):
            self.wait(arrived)
            if index + 1 < len(given):
                arrived = self.send(self.now, given[index + 1][0][1])
            self.now += count * compute.block_backward
            self.reduce(reduction)
        self.now += compute.embed_backward
