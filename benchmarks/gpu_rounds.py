"""The training steps of `gpu.py`: how each is timed, and the table made of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpu_contenders import CONTENDERS, Cell, Place, Row, Step
from gpu_queue import Job

BUILD_S, COMPILE_S = 2.0, 20.0
"""Expected of a row before its first step: weights and state; a block's graphs, cache cold."""
USUAL_MFU = {"plain": 0.25, "plain_compiled": 0.4, "ours": 0.35}
"""Expected, to tell how long a row will take; 0.42 for all others."""


@dataclass(frozen=True)
class Timing:
    """How long a contender is measured."""

    rounds: int = 1
    """Times each contender is built."""
    warmup: int = 2
    """Steps after the first that are not timed."""
    steps: int | None = None
    """Timed steps; None takes as many as fill `seconds`, five at least."""
    seconds: float = 1.5

    def count(self, laps_ms: Sequence[float]) -> int:
        """Timed steps, after warm-up steps of these lengths."""
        if self.steps is not None:
            return self.steps
        return min(40, max(5, math.ceil(1e3 * self.seconds / statistics.median(laps_ms))))


def take(make: Callable[[Cell, Place], Step], cell: Cell, place: Place, timing: Timing) -> Row:
    """Build one contender, warm it up, time its steps."""
    meter = place.meter
    meter.restart_peak()
    before = meter.peak_gib()
    step = make(cell, place)
    first = meter.laps_ms(step, 1)[0]
    warm = meter.laps_ms(step, max(1, timing.warmup))
    meter.restart_peak()
    laps = meter.laps_ms(step, timing.count(warm))
    peak = meter.peak_gib()
    loss = step().item()
    if not math.isfinite(loss):
        raise ArithmeticError(f"the loss is {loss}")
    return {
        "first_step_s": round(first / 1e3, 3),
        "laps_ms": [round(lap, 3) for lap in laps],
        "peak_gib": None if peak is None or before is None else peak - before,
        "loss": loss,
    }


def jobs(
    wanted: Sequence[tuple[Cell, str]], place: Place, timing: Timing, peak_tflops: float | None
) -> Iterator[Job]:
    """All rows in the order wanted.

    One contender at a time has the device, so that its memory is its own; the second round goes
    backwards, so that a clock that drifts one way wrongs nobody, and shows.
    """
    given_up: set[tuple[Cell, str]] = set()

    def measure(cell: Cell, name: str) -> Row:
        if (cell, name) in given_up:
            return {"result": "not tried again"}
        given_up.add((cell, name))
        row = take(CONTENDERS[name], cell, place, timing)
        given_up.remove((cell, name))
        return row

    for number in range(1, timing.rounds + 1):
        for cell, name in wanted if number % 2 else reversed(wanted):
            key = {**cell.key, "contender": name, "round": number}
            estimate = estimate_s(cell, name, timing, peak_tflops)
            yield Job(key, estimate, lambda cell=cell, name=name: measure(cell, name))  # type: ignore[misc]


def estimate_s(cell: Cell, name: str, timing: Timing, peak_tflops: float | None) -> float:
    """Seconds that a row is expected to take; one where the device's peak is not known."""
    if peak_tflops is None:
        return 1.0
    step = cell.tflop / peak_tflops / USUAL_MFU.get(name, 0.42)
    compiling = 0.0 if name in ("plain", "ours") else COMPILE_S
    return BUILD_S + compiling + step * (2 + timing.warmup + timing.count([1e3 * step]))


def summary(
    wanted: Sequence[tuple[Cell, str]], measured: Sequence[Row], ceilings: Mapping[str, Any]
) -> list[Row]:
    """One row per cell and contender: medians over all timed steps of all rounds."""
    rows = []
    for cell, name in wanted:
        laps = laps_of(cell, name, measured)
        mine = [row for row in measured if belongs(row, cell, name)]
        bases = [laps_of(cell, base, measured) for base in ("plain", "plain_compiled")]
        found = figures(cell, mine, laps, bases, ceilings) if laps else no_figures(mine)
        rows.append({**cell.key, "contender": name, **found})
    return rows


COLUMNS = (
    "ms per step",
    "by round",
    "time / plain",
    "time / plain compiled",
    "TFLOP/s",
    "MFU",
    "of GEMM",
    "peak GiB",
    "first step s",
)


def figures(
    cell: Cell,
    mine: Sequence[Row],
    laps: Sequence[float],
    bases: Sequence[Sequence[float]],
    ceilings: Mapping[str, Any],
) -> Row:
    """The columns of a contender that was measured."""
    ms = statistics.median(laps)
    tflops = cell.tflop / ms * 1e3
    good = [row for row in mine if row["result"] == "measured"]
    peaks = [row["peak_gib"] for row in good if row["peak_gib"] is not None]
    data_sheet, gemm = ceilings.get("peak_tflops"), ceilings.get("gemm_tflops")
    values = (
        f"{ms:.1f}",
        " / ".join(f"{statistics.median(row['laps_ms']):.1f}" for row in good),
        *(f"{ms / statistics.median(base):.3f}" if base else "-" for base in bases),
        f"{tflops:.3g}",
        f"{tflops / data_sheet:.3f}" if data_sheet else "-",
        f"{tflops / gemm:.3f}" if gemm else "-",
        f"{max(peaks):.1f}" if peaks else "-",
        f"{good[0]['first_step_s']:.1f}",
    )
    return dict(zip(COLUMNS, values, strict=True))


def no_figures(mine: Sequence[Row]) -> Row:
    """The columns of a contender that was not measured: why, and dashes."""
    # The first of its rows: what failed once is not tried again.
    why = mine[0]["result"].partition(". ")[0] if mine else "not begun"
    return dict.fromkeys(COLUMNS, "-") | {COLUMNS[0]: why}


def belongs(row: Row, cell: Cell, name: str) -> bool:
    """Whether a measured row is one of this contender in this cell."""
    return row.items() >= {**cell.key, "contender": name}.items()


def laps_of(cell: Cell, name: str, measured: Sequence[Row]) -> list[float]:
    """All timed steps of a contender, of every round."""
    mine = [row for row in measured if belongs(row, cell, name)]
    return [lap for row in mine for lap in row.get("laps_ms", ())]
