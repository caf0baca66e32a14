"""Training steps of `gpu.py`: their timing and their table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gpu_contenders import CONTENDERS, ENVIRONMENT, Cell, Place, Row, Step
from gpu_host import NUM_STEPS, waiting
from gpu_queue import Job

BUILD_S, COMPILE_S = 2.0, 20.0
"""Expected seconds before a first step: weights and state; compiling a block, cold cache."""
TRACED = ("ours_compiled", "ours_float8_tensorwise", "ours_float8_rowwise", "plain_compiled")
"""Traced in every cell; the others in the first one."""
USUAL_MFU = {"plain": 0.25, "plain_compiled": 0.4, "ours": 0.35}
"""Expected MFU, to estimate times; 0.42 for all others."""


@dataclass(frozen=True)
class Timing:
    """Rounds and steps of a contender."""

    rounds: int = 1
    """Rounds over all contenders."""
    warmup: int = 2
    """Untimed steps after the first."""
    steps: int | None = None
    """Timed steps; None fills `seconds` with at least five."""
    seconds: float = 1.5
    traced: bool = True
    """Measure host time and trace the kernels of a step, where `jobs` asks for it."""

    def count(self, laps_ms: Sequence[float]) -> int:
        """Number of timed steps, given the times of the warm-up steps."""
        if self.steps is not None:
            return self.steps
        return min(40, max(5, math.ceil(1e3 * self.seconds / statistics.median(laps_ms))))


def take(make: Callable[[Cell, Place], Step], cell: Cell, place: Place, timing: Timing) -> Row:
    """Build a contender, warm it up and time its steps."""
    meter = place.meter
    meter.restart_peak()
    before = meter.peak_gib()
    step = make(cell, place)
    first = meter.laps_ms(step, 1)[0]
    warm = meter.laps_ms(step, max(1, timing.warmup))
    meter.restart_peak()
    laps = meter.laps_ms(step, timing.count(warm))
    peak, reserved = meter.peak_gib(), meter.reserved_gib()
    loss = step().item()
    if not math.isfinite(loss):
        raise ArithmeticError(f"the loss is {loss}")
    return {
        "first_step_s": round(first / 1e3, 3),
        "laps_ms": [round(lap, 3) for lap in laps],
        "peak_gib": None if peak is None or before is None else peak - before,
        "reserved_gib": reserved,
        "loss": loss,
        **(waiting(step, place.device) if timing.traced else {}),
    }


def jobs(
    wanted: Sequence[tuple[Cell, str]], place: Place, timing: Timing, peak_tflops: float | None
) -> Iterator[Job]:
    """Jobs in the given order.

    One contender at a time is on the device, so that peak memory is its own. Every second round is
    reversed, which cancels and reveals clock drift.
    """
    for number in range(1, timing.rounds + 1):
        for cell, name in wanted if number % 2 else reversed(wanted):
            is_traced = cell == wanted[0][0] or name in TRACED
            mine = replace(timing, traced=timing.traced and is_traced)
            yield Job(
                key={**cell.key, "contender": name, "round": number},
                estimate_s=estimate_s(cell, name, mine, peak_tflops),
                environment=ENVIRONMENT.get(name, {}),
                take=partial(take, CONTENDERS[name], cell, place, mine),
            )


def estimate_s(cell: Cell, name: str, timing: Timing, peak_tflops: float | None) -> float:
    """Expected seconds of a row; 1 if the device's peak is unknown."""
    if peak_tflops is None:
        return 1.0
    step = cell.tflop / peak_tflops / USUAL_MFU.get(name, 0.42)
    compiling = 0.0 if name in ("plain", "ours") else COMPILE_S
    count = 2 + timing.warmup + timing.count([1e3 * step]) + (NUM_STEPS if timing.traced else 0)
    return BUILD_S + compiling + step * count


def summary(
    wanted: Sequence[tuple[Cell, str]],
    measured: Sequence[Row],
    ceilings: Mapping[str, Any],
    predicted_gib: Mapping[Cell, float],
) -> list[Row]:
    """One row per cell and contender: medians over the timed steps of all rounds.

    `predicted_gib`: peak of our eager step, by the dry run.
    """
    rows = []
    for cell, name in wanted:
        laps = laps_of(cell, name, measured)
        mine = [row for row in measured if belongs(row, cell, name)]
        bases = [laps_of(cell, base, measured) for base in BASES]
        found = figures(cell, mine, laps, bases, ceilings) if laps else no_figures(mine)
        predicted = predicted_gib.get(cell) if name.startswith("ours") else None
        rows.append({**cell.key, "contender": name, **found, DRY_RUN: shown(predicted)})
    return rows


BASES = ("plain", "plain_compiled", "original_compiled")
DRY_RUN = "dry run GiB (eager)"


COLUMNS = (
    "ms per step",
    "by round",
    "time / plain",
    "time / plain compiled",
    "time / original compiled",
    "TFLOP/s",
    "MFU",
    "of GEMM",
    "peak GiB",
    "first step s",
    "host ms",
    "device busy ms",
    "kernels",
)


def figures(
    cell: Cell,
    mine: Sequence[Row],
    laps: Sequence[float],
    bases: Sequence[Sequence[float]],
    ceilings: Mapping[str, Any],
) -> Row:
    """Columns of a measured contender."""
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
        shown(good[0].get("host_ms")),
        shown(good[0].get("busy_ms")),
        str(good[0].get("kernels", "-")),
    )
    return dict(zip(COLUMNS, values, strict=True))


def shown(value: float | None) -> str:
    """A figure, or a dash."""
    return "-" if value is None else f"{value:.1f}"


def no_figures(mine: Sequence[Row]) -> Row:
    """Columns of a contender without measurements: the reason, and dashes."""
    # From its first row, because a failed contender is not retried.
    why = mine[0]["result"].partition(". ")[0] if mine else "not begun"
    return dict.fromkeys(COLUMNS, "-") | {COLUMNS[0]: why}


def belongs(row: Row, cell: Cell, name: str) -> bool:
    """True if a row belongs to this cell and contender."""
    return row.items() >= {**cell.key, "contender": name}.items()


def laps_of(cell: Cell, name: str, measured: Sequence[Row]) -> list[float]:
    """Milliseconds of all timed steps of a contender over all rounds."""
    mine = [row for row in measured if belongs(row, cell, name)]
    return [lap for row in mine for lap in row.get("laps_ms", ())]
