"""The rows on gloo ranks of this machine, at about a twelfth of the width, against one process."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matrix_full import planned
from matrix_ranks import Steps, Task, run
from matrix_rows import Row, Small, reference_config, small_config, small_tables

from titan_dit.config import config_file
from titan_dit.system.progress import ProgressLine

LOSS_WITHIN, STORAGES_WITHIN = 1e-5, 0.02
"""Relative differences to one process, and of storages to the dry run: larger ones fail a row."""
LATE_WITHIN = 0.2
"""Tolerance for the peak of single ranks. gloo's threads may hold sent messages a little longer.
The ranks of a stage do equal work, so the smallest of their peaks is that of the step itself."""
START = 2.0
"""GFLOP that a rank could compute while it starts: for the progress line."""
MIB = 2**20


@dataclass(frozen=True)
class Compared:
    """The row of a table, and why it failed: "" if it did not."""

    cells: dict[str, Any]
    failure: str


def measure(
    rows: Sequence[Row],
    small: Small,
    timeout_s: float,
    found: Callable[[Compared], None] = lambda compared: None,
) -> list[Compared]:
    """Run all rows, the references first, then world by world; `found` hears of each result."""
    references = {reference_of(row, small): task_of(row, small, plain=True) for row in rows}
    worlds: dict[int, list[Task]] = {}
    for row in sorted(rows, key=lambda row: row.ranks):
        worlds.setdefault(row.ranks, []).append(task_of(row, small))
    launches = [(1, list(references.values())), *worlds.items()]
    total = sum(START * ranks + sum(task.work for task in tasks) for ranks, tasks in launches)
    progress = ProgressLine(round(total), "GFLOP", what="matrix")
    by_name, results = {row.case: row for row in rows}, []
    expected: dict[str, Any] = {}
    done = 0.0
    for number, (ranks, tasks) in enumerate(launches):

        def after_step(task: Task, ranks: int = ranks) -> None:
            nonlocal done
            done += task.work / small.steps
            if done >= 1:
                progress(round(done), f"{task.name} on {ranks}")

        taken = run(tasks, ranks, timeout_s, after_step)
        done += START * ranks
        progress(round(done))
        if number == 0:
            expected = taken
            continue
        for task in tasks:
            row = by_name[task.name]
            reference = expected[references[reference_of(row, small)].name]
            results.append(compared(row, small, taken[task.name], reference))
            found(results[-1])
    progress.end()
    order = [row.case for row in rows]
    return sorted(results, key=lambda result: order.index(result.cells["case"]))


def reference_of(row: Row, small: Small) -> str:
    """Rows of the same text have the same losses."""
    return json.dumps(config_file.to_tables(reference_config(row, small)), sort_keys=True)


def task_of(row: Row, small: Small, *, plain: bool = False) -> Task:
    """The steps of a row, or those of one process."""
    config = small_config(row, small)
    hidden, layers, _ = config.model.shape
    samples = config.training.global_batch_size
    work = work_of(samples, layers, hidden, small)
    if plain:
        tables = config_file.to_tables(reference_config(row, small))
        name = f"{row.recipe}, {samples} samples, one process"
        return Task(name, tables, work)
    return Task(row.case, small_tables(row, small), work)


def work_of(samples: int, layers: int, hidden: int, small: Small) -> float:
    """GFLOP of all steps, roughly."""
    return small.steps * samples * small.tokens * layers * 96 * hidden**2 / 1e9


def compared(
    row: Row, small: Small, taken: list[Steps] | str, reference: list[Steps] | str
) -> Compared:
    """A row's steps beside those of one process, its storages beside its dry run."""
    cells: dict[str, Any] = {"case": row.case, "layout": row.layout, "ranks": row.ranks}
    if isinstance(taken, str) or isinstance(reference, str):
        empty = dict.fromkeys(COLUMNS, "-")
        why = taken if isinstance(taken, str) else f"one process: {reference}"
        return Compared(cells | empty | {"result": f"failed: {why}"}, why)
    [one] = reference
    off = max(difference(steps.losses, one.losses) for steps in taken)
    norms = max(difference(steps.norms, one.norms) for steps in taken)
    stages = [
        ([steps.peak.total for steps in taken if steps.pipeline_rank == number], wanted)
        for number, wanted in enumerate(planned(small_config(row, small), row.ranks))
    ]
    failures = [
        f"{what} differs by {value:.1e}"
        for what, value in (("loss", off), ("gradient norm", norms))
        if not value <= LOSS_WITHIN
    ]
    for number, (sizes, wanted) in enumerate(stages):
        least, most = min(sizes) / wanted.dry_run, max(sizes) / wanted.dry_run
        if abs(least - 1) > STORAGES_WITHIN or most - 1 > LATE_WITHIN:
            failures.append(
                f"storages of pipeline rank {number} are {least:.3f} to {most:.3f} of the dry run's"
            )
    ratios = [size / wanted.dry_run for sizes, wanted in stages for size in sizes]
    values = (
        f"{taken[0].losses[-1]:.6f}",
        f"{off:.1e}",
        f"{norms:.1e}",
        f"{max(size for sizes, _ in stages for size in sizes) / MIB:.2f}",
        f"{max(wanted.dry_run for _, wanted in stages) / MIB:.2f}",
        f"{max(wanted.formula for _, wanted in stages) / MIB:.2f}",
        f"{min(ratios):.4f} to {max(ratios):.4f}",
    )
    cells |= dict(zip(COLUMNS, values, strict=True))
    return Compared(
        cells | {"result": f"failed: {'; '.join(failures)}" if failures else "ok"},
        "; ".join(failures),
    )


COLUMNS = (
    "loss",
    "off",
    "norm off",
    "peak MiB",
    "dry run MiB",
    "formula MiB",
    "peak / dry run",
)
"""Loss of the last step; largest relative differences of loss and gradient norm to one process over
all steps and ranks; storages at the peak of the largest rank, measured, by its dry run, by the
planner; the least and the largest quotient over all ranks."""


def difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference; infinite if a value is not finite."""
    pairs = list(zip(found, expected, strict=True))
    if not all(map(math.isfinite, (*found, *expected))):
        return math.inf
    return max(abs(a - b) / abs(b) for a, b in pairs)
