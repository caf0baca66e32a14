"""What became of every sample: the run's account of what was drawn, trained on and left out.

The cursor says how far the run has come in the stream of samples. Of the samples before it, those
of skipped ranges were never drawn (the run went back and left them out), and those of skipped steps
were drawn but changed no weight. All others were trained on, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from titan_dit.data.sample_ranges import SampleRange, count, merged, ranges_of


@dataclass(frozen=True)
class Skipped:
    """Sample numbers from `first` up to `end` that no step draws, and why."""

    first: int
    end: int
    reason: str


@dataclass(frozen=True)
class Untrained:
    """Sample numbers that the steps `first_step` to `last_step` drew without training on them."""

    first: int
    end: int
    first_step: int
    last_step: int


@dataclass(frozen=True)
class Ledger:
    """The account up to a step. Every checkpoint has it as `ledger` in its record."""

    skipped: tuple[Skipped, ...] = ()
    untrained: tuple[Untrained, ...] = ()

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Ledger:
        """That of a checkpoint; empty for one from before there were ledgers."""
        saved = record.get("ledger", {})
        return cls(
            tuple(Skipped(*entry) for entry in saved.get("skipped", ())),
            tuple(Untrained(*entry) for entry in saved.get("untrained", ())),
        )

    def as_json(self, cursor: int, num_rows: int) -> dict[str, Any]:
        """For a checkpoint's record, at a cursor and for a dataset of so many rows."""
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
        """What a BatchPlan is to leave out."""
        return merged((entry.first, entry.end) for entry in self.skipped)

    @property
    def untrained_ranges(self) -> tuple[SampleRange, ...]:
        """What was drawn in vain."""
        return merged((entry.first, entry.end) for entry in self.untrained)

    def skip(self, entries: Iterable[Skipped]) -> Ledger:
        """With further ranges that no step draws."""
        new = [entry for entry in entries if entry not in self.skipped]
        return replace(self, skipped=(*self.skipped, *new))

    def leave_out(self, step: int, numbers: Sequence[int]) -> Ledger:
        """With the samples of a step that changed no weight; steps come in ascending order."""
        entries = list(self.untrained)
        for first, end in ranges_of(numbers):
            last = entries[-1] if entries else None
            if last and last.end == first and step - last.last_step <= 1:
                entries[-1] = Untrained(last.first, end, last.first_step, step)
            else:
                entries.append(Untrained(first, end, step, step))
        return replace(self, untrained=tuple(entries))
