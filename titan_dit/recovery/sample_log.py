"""The sample log: the sample numbers of every step, written by each data-parallel rank.

It checks the ledger independently. `RUN/samples-seen/attempt-00001/rank-00000.jsonl` has one line
per step. Every start, resume and rollback begins a new attempt.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from titan_dit.config import schema
from titan_dit.data.base import Batch
from titan_dit.data.sample_ranges import OF_STEP, numbers_of, ranges_of
from titan_dit.launcher.ranks import Ranks
from titan_dit.recovery.fault_log import whole_lines
from titan_dit.recovery.ledger import Ledger

FOLDER = "samples-seen"
LINE = {"step": schema.COUNT, "ranks": schema.COUNT, "numbers": OF_STEP}


def attempts(run: Path) -> list[Path]:
    """The folders of a run's attempts, oldest first."""
    return sorted((run / FOLDER).glob("attempt-*"), key=lambda path: int(path.name[8:]))


def next_attempt(run: Path) -> int:
    """Number of the next attempt."""
    return 1 + max((int(path.name[8:]) for path in attempts(run)), default=0)


class SampleLog:
    """Log file of one data-parallel rank in one attempt."""

    def __init__(self, run: Path, attempt: int, rank: int, num_ranks: int) -> None:
        folder = run / FOLDER / f"attempt-{attempt:05d}"
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


def seen(run: Path) -> dict[int, Counter[int]]:
    """Map step to the count of each sample number, over the run's current history.

    An attempt replaces earlier attempts from its first step on. A step without a line of every
    rank was not finished and is left out.
    """
    history: dict[int, Counter[int]] = {}
    for attempt in attempts(run):
        lines: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for file in sorted(attempt.glob("rank-*.jsonl")):
            for line in whole_lines(file, LINE):
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
    total = sum(seen(run).values(), Counter())
    for number in numbers_of(ledger.untrained_ranges):
        total.pop(number, None)
    return total
