"""Which samples every step has seen, written by the ranks themselves: a proof, not a record.

`RUN/samples-seen/attempt-00001/rank-00000.jsonl` has a line for every step of a data-parallel rank.
An attempt begins whenever the run goes on from a checkpoint: the first time, after a kill, after it
went back.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titan_dit.data.base import Batch
from titan_dit.data.sample_ranges import numbers_of, ranges_of
from titan_dit.launcher.ranks import Ranks
from titan_dit.recovery.ledger import Ledger

FOLDER = "samples-seen"


def attempts(run: Path) -> list[Path]:
    """The folders of a run's attempts, the first one first."""
    return sorted((run / FOLDER).glob("attempt-*"), key=lambda path: int(path.name[8:]))


def next_attempt(run: Path) -> int:
    """The number of the attempt that begins now."""
    return 1 + max((int(path.name[8:]) for path in attempts(run)), default=0)


class SampleLog:
    """What one data-parallel rank writes in one attempt."""

    def __init__(self, run: Path, attempt: int, rank: int, num_ranks: int) -> None:
        folder = run / FOLDER / f"attempt-{attempt:05d}"
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / f"rank-{rank:05d}.jsonl").open("a")
        self.num_ranks = num_ranks

    @classmethod
    def begin(cls, run: Path, rank: int, num_ranks: int, *, writes: bool) -> SampleLog | None:
        """That of a new attempt, where this rank `writes`; every rank calls."""
        attempt = Ranks().first(lambda: next_attempt(run))
        return cls(run, attempt, rank, num_ranks) if writes else None

    def write(self, step: int, batch: Batch) -> None:
        """The samples of a step, as they were trained on. Out of this process when this returns.

        Waits for the device.
        """
        numbers = sorted(batch.sample_numbers[batch.weight > 0].tolist())
        line = {"step": step, "ranks": self.num_ranks, "numbers": ranges_of(numbers)}
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()


def seen(run: Path) -> dict[int, Counter[int]]:
    """Step -> how often each sample number was seen in it, for the history that the run now has.

    What an attempt has done takes the place of all that earlier ones did from its first step on. A
    step of which a rank's line is missing was not finished, and is left out.
    """
    history: dict[int, Counter[int]] = {}
    for attempt in attempts(run):
        lines: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for file in sorted(attempt.glob("rank-*.jsonl")):
            for line in whole_lines(file):
                lines[line["step"]].append(line)
        if lines:
            history = {step: found for step, found in history.items() if step < min(lines)}
        for step, parts in sorted(lines.items()):
            if len(parts) == parts[0]["ranks"]:
                history[step] = Counter(n for part in parts for n in numbers_of(part["numbers"]))
    return history


def trained(run: Path, ledger: Ledger) -> Counter[int]:
    """How often each sample number was trained on, by what the ranks have written.

    Of the run's last checkpoint's ledger only the steps count that changed no weight.
    """
    total = sum(seen(run).values(), Counter())
    for number in numbers_of(ledger.untrained_ranges):
        total.pop(number, None)
    return total


def whole_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file but for one that a kill cut short."""
    for line in file.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)
