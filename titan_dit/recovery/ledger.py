"""The ledger: which samples were trained on, drawn without training, or skipped.

The sample log has the sample numbers of every step, written by each data-parallel rank.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from titan_dit.config import schema
from titan_dit.data.base import Batch
from titan_dit.data.order import STEP_RANGES, SampleRange, count, merged, numbers_of, ranges_of
from titan_dit.ranks.process_group import Ranks
from titan_dit.recovery.bad_steps import checked_lines
from titan_dit.system import run_files


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

    def as_json(self, cursor: int, num_rows: int, stage_cursor: int = 0) -> dict[str, Any]:
        """Serialise for a checkpoint's record.

        `num_rows`: samples of an epoch of the stage, which began at `stage_cursor`.
        """
        out = count(self.skipped_ranges, below=cursor) + count(self.untrained_ranges)
        return {
            "samples": cursor,
            "epoch": (cursor - stage_cursor) // num_rows,
            "samples_per_epoch": num_rows,
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


LINE = {"step": schema.COUNT, "ranks": schema.COUNT, "numbers": STEP_RANGES}


def attempts(run: Path) -> list[Path]:
    """The folders of a run's attempts, oldest first."""
    folders = (run / run_files.SAMPLES_SEEN).glob("attempt-*")
    return sorted(folders, key=lambda path: int(path.name[8:]))


def next_attempt(run: Path) -> int:
    """Number of the next attempt."""
    return 1 + max((int(path.name[8:]) for path in attempts(run)), default=0)


class SampleLog:
    """Log file of one data-parallel rank in one attempt."""

    def __init__(self, run: Path, attempt: int, rank: int, num_ranks: int) -> None:
        folder = run / run_files.SAMPLES_SEEN / f"attempt-{attempt:05d}"
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / f"rank-{rank:05d}.jsonl").open("a")
        self.num_ranks = num_ranks

    @classmethod
    def begin(cls, run: Path, rank: int, num_ranks: int, *, writes: bool) -> SampleLog | None:
        """Open the log of a new attempt; None unless this rank `writes`. Collective."""
        attempt = Ranks().run_on_first(lambda: next_attempt(run))
        return cls(run, attempt, rank, num_ranks) if writes else None

    def write(self, step: int, batch: Batch) -> None:
        """Write and flush a step's sample numbers, padding excluded. Synchronises the device."""
        numbers = sorted(batch.sample_numbers[batch.weight > 0].tolist())
        line = {"step": step, "ranks": self.num_ranks, "numbers": ranges_of(numbers)}
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()


def logged_samples(run: Path) -> dict[int, Counter[int]]:
    """Map step to the count of each sample number, over the run's current history.

    An attempt replaces earlier attempts from its first step on. A step without a line of every
    rank was not finished and is left out.
    """
    history: dict[int, Counter[int]] = {}
    for attempt in attempts(run):
        lines: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for file in sorted(attempt.glob("rank-*.jsonl")):
            for line in checked_lines(file, LINE):
                lines[line["step"]].append(line)
        if lines:
            history = {step: found for step, found in history.items() if step < min(lines)}
        for step, parts in sorted(lines.items()):
            if len(parts) == parts[0]["ranks"]:
                history[step] = Counter(n for part in parts for n in numbers_of(part["numbers"]))
    return history


def trained(run: Path, ledger: Ledger) -> Counter[int]:
    """Count how often each sample number was trained on, by the sample log.

    `ledger` of the last checkpoint gives the untrained samples, which are excluded.
    """
    total = sum(logged_samples(run).values(), Counter())
    for number in numbers_of(ledger.untrained_ranges):
        total.pop(number, None)
    return total
