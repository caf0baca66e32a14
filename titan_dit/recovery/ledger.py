"""The ledger: which samples were trained on, drawn without training, or skipped.

The cursor is the run's position in the stream of samples. Of the samples before it, skipped ranges
were left out by a rollback, and untrained ranges were drawn by bad steps, which change no weight.
All others were trained on exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from titan_dit.data.sample_ranges import SampleRange, count, merged, ranges_of


@dataclass(frozen=True)
class Skipped:
    """Sample numbers `first` to `end` - 1, left out by a rollback."""

    first: int
    end: int
    reason: str


@dataclass(frozen=True)
class Untrained:
    """Sample numbers `first` to `end` - 1, drawn by the bad steps `first_step` to `last_step`."""

    first: int
    end: int
    first_step: int
    last_step: int


@dataclass(frozen=True)
class Ledger:
    """The ledger up to a step; stored in every checkpoint's record."""

    skipped: tuple[Skipped, ...] = ()
    untrained: tuple[Untrained, ...] = ()

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Ledger:
        """Read from a checkpoint's record; empty for old checkpoints without one."""
        saved = record.get("ledger", {})
        return cls(
            tuple(Skipped(*entry) for entry in saved.get("skipped", ())),
            tuple(Untrained(*entry) for entry in saved.get("untrained", ())),
        )

    def as_json(self, cursor: int, num_rows: int) -> dict[str, Any]:
        """Serialise for a checkpoint's record; `num_rows`, the rows per epoch, give the epoch."""
        out = count(self.skipped_ranges, below=cursor) + count(self.untrained_ranges)
        return {
            "samples": cursor,
            "epoch": cursor // num_rows,
            "trained": cursor - out,
            "skipped": [list(vars(entry).values()) for entry in self.skipped],
            "untrained": [list(vars(entry).values()) for entry in self.untrained],
        }

    @property
    def skipped_ranges(self) -> tuple[SampleRange, ...]:
        """Merged ranges for BatchPlan to skip."""
        return merged((entry.first, entry.end) for entry in self.skipped)

    @property
    def untrained_ranges(self) -> tuple[SampleRange, ...]:
        """Sample numbers of bad steps, as merged ranges."""
        return merged((entry.first, entry.end) for entry in self.untrained)

    def skip(self, entries: Iterable[Skipped]) -> Ledger:
        """Return a ledger with further skipped ranges."""
        new = [entry for entry in entries if entry not in self.skipped]
        return replace(self, skipped=(*self.skipped, *new))

    def mark_untrained(self, step: int, numbers: Sequence[int]) -> Ledger:
        """Return a ledger with a bad step's samples as untrained; steps must be ascending."""
        entries = list(self.untrained)
        for first, end in ranges_of(numbers):
            last = entries[-1] if entries else None
            if last and last.end == first and step - last.last_step <= 1:
                entries[-1] = Untrained(last.first, end, last.first_step, step)
            else:
                entries.append(Untrained(first, end, step, step))
        return replace(self, untrained=tuple(entries))
