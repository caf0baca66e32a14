"""The measurements of `gpu.py`: contenders and cells, rounds, and the table made of them."""

from __future__ import annotations

import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import plain_dit
import torch
from meter import Meter
from ours import randomize, trainer_step
from torch import Tensor

from titan_dit.models.dit import DiTConfig
from titan_dit.objectives.base import Objective
from titan_dit.objectives.rectified_flow import RectifiedFlow
from titan_dit.parallel.mesh import Mesh

Row = dict[str, Any]
Step = Callable[[], Tensor]

OBJECTIVES: dict[str, tuple[Objective, plain_dit.Learn]] = {
    "rectified_flow": (RectifiedFlow(), plain_dit.RectifiedFlow()),
}
"""What is learned, by name: ours, and the same for the plain network."""


@dataclass(frozen=True)
class Cell:
    """A model, a batch, and what it learns."""

    config: DiTConfig
    batch: int
    objective: str

    @property
    def key(self) -> Row:
        """What tells this cell from others in a row."""
        return {"tokens": self.config.token_shape[0], "batch": self.batch}

    @property
    def tflop(self) -> float:
        """Model TFLOPs of a step, by the `flops_per_sample` of our model, for every contender."""
        objective, _ = OBJECTIVES[self.objective]
        with torch.device("meta"):
            model = self.config.build(objective.output_channels(self.config.channels))
        return model.flops_per_sample(self.config.token_shape[0]) * self.batch / 1e12


@dataclass(frozen=True)
class Place:
    """Where it is measured."""

    device: torch.device
    mesh: Mesh
    meter: Meter


def plain(cell: Cell, place: Place, *, compiled: bool) -> Step:
    """The plain DiT as its users train it: fp32 weights, autocast to bf16."""
    _, learn = OBJECTIVES[cell.objective]
    with place.device:
        model = plain_dit.PlainDiT(cell.config, learn.output_channels(cell.config.channels))
    randomize(list(model.parameters()))
    if compiled:
        for block in model.blocks:
            block.compile()
    return plain_dit.training_step(
        model, cell.config, cell.batch, learn, autocast=torch.bfloat16, ema=True
    )


def ours(cell: Cell, place: Place, *, compiled: bool, reshard: str = "auto") -> Step:
    """titan_dit's step as its trainer takes it."""
    objective, _ = OBJECTIVES[cell.objective]
    return trainer_step(
        cell.config,
        cell.batch,
        place.device,
        objective,
        place.mesh,
        compiled=compiled,
        reshard=reshard,
    )


CONTENDERS: dict[str, Callable[[Cell, Place], Step]] = {
    "plain": partial(plain, compiled=False),
    "plain_compiled": partial(plain, compiled=True),
    "ours": partial(ours, compiled=False),
    "ours_compiled": partial(ours, compiled=True),
    "ours_compiled_never_resharded": partial(ours, compiled=True, reshard="never"),
}
USUAL = list(CONTENDERS)[:4]


@dataclass(frozen=True)
class Plan:
    """How often, and how long at most."""

    rounds: int
    warmup: int
    steps: int
    budget_s: float
    began: float
    """`time.monotonic()` at the start of the program."""

    @property
    def is_spent(self) -> bool:
        """Whether nothing more should be begun."""
        return time.monotonic() - self.began > self.budget_s


def take(make: Callable[[Cell, Place], Step], cell: Cell, place: Place, plan: Plan) -> Row:
    """Build one contender on an otherwise empty device, warm it up, time its steps."""
    meter = place.meter
    meter.restart_peak()
    before = meter.peak_gib()
    step = make(cell, place)
    first = meter.laps_ms(step, 1)[0]
    meter.laps_ms(step, plan.warmup)
    meter.restart_peak()
    laps = meter.laps_ms(step, plan.steps)
    peak = meter.peak_gib()
    loss = step().item()
    if not math.isfinite(loss):
        raise ArithmeticError(f"the loss is {loss}")
    return {
        "result": "measured",
        "first_step_s": round(first / 1e3, 3),
        "laps_ms": [round(lap, 3) for lap in laps],
        "peak_gib": None if peak is None or before is None else peak - before,
        "loss": loss,
    }


def attempt(name: str, cell: Cell, place: Place, plan: Plan) -> Row:
    """A row in any case: what was measured, or why nothing was."""
    # Compiled code of the last contender goes too: a second shape would be compiled as dynamic.
    torch.compiler.reset()
    place.meter.release()
    try:
        return take(CONTENDERS[name], cell, place, plan)
    except Exception as error:
        # The compiler wraps the error of the allocator in one of its own.
        if "out of memory" in str(error).lower():
            return {"result": "out of memory"}
        traceback.print_exc(file=sys.stderr)
        return {"result": f"failed: {type(error).__name__}", "error": str(error)[:1000]}


def measure(cells: Sequence[Cell], names: Sequence[str], place: Place, plan: Plan) -> Iterator[Row]:
    """Every row as soon as it is there.

    One contender at a time has the device, so that its memory is its own; the second round goes
    backwards, so that a clock that drifts one way wrongs nobody, and shows.
    """
    given_up: set[tuple[Cell, str]] = set()
    everything = [(cell, name) for cell in cells for name in names]
    for number in range(1, plan.rounds + 1):
        for cell, name in everything if number % 2 else reversed(everything):
            if plan.is_spent or (cell, name) in given_up:
                continue
            row = attempt(name, cell, place, plan)
            if row["result"] != "measured":
                given_up.add((cell, name))
            yield {**cell.key, "contender": name, "round": number, **row}


def summary(
    cells: Sequence[Cell],
    names: Sequence[str],
    measured: Sequence[Row],
    ceilings: Mapping[str, float | None],
) -> list[Row]:
    """One row per cell and contender: medians over all timed steps of all rounds."""
    rows = []
    for cell in cells:
        base = laps_of(cell, "plain", measured)
        for name in names:
            laps = laps_of(cell, name, measured)
            mine = [row for row in measured if belongs(row, cell, name)]
            rows.append(
                {**cell.key, "contender": name}
                | (figures(cell, mine, laps, base, ceilings) if laps else no_figures(mine))
            )
    return rows


COLUMNS = (
    "ms per step",
    "by round",
    "time / plain",
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
    base: Sequence[float],
    ceilings: Mapping[str, float | None],
) -> Row:
    """The columns of a contender that was measured."""
    ms = statistics.median(laps)
    tflops = cell.tflop / ms * 1e3
    good = [row for row in mine if row["result"] == "measured"]
    peaks = [row["peak_gib"] for row in good if row["peak_gib"] is not None]
    data_sheet, gemm = ceilings["peak_tflops"], ceilings["gemm_tflops"]
    values = (
        f"{ms:.1f}",
        " / ".join(f"{statistics.median(row['laps_ms']):.1f}" for row in good),
        f"{ms / statistics.median(base):.3f}" if base else "-",
        f"{tflops:.3g}",
        f"{tflops / data_sheet:.3f}" if data_sheet else "-",
        f"{tflops / gemm:.3f}" if gemm else "-",
        f"{max(peaks):.1f}" if peaks else "-",
        f"{good[0]['first_step_s']:.1f}",
    )
    return dict(zip(COLUMNS, values, strict=True))


def no_figures(mine: Sequence[Row]) -> Row:
    """The columns of a contender that was not measured: why, and dashes."""
    why = mine[-1]["result"] if mine else "not begun"
    return dict.fromkeys(COLUMNS, "-") | {COLUMNS[0]: why}


def belongs(row: Row, cell: Cell, name: str) -> bool:
    """Whether a measured row is one of this contender in this cell."""
    return row.items() >= {**cell.key, "contender": name}.items()


def laps_of(cell: Cell, name: str, measured: Sequence[Row]) -> list[float]:
    """All timed steps of a contender, of every round."""
    mine = [row for row in measured if belongs(row, cell, name)]
    return [lap for row in mine for lap in row.get("laps_ms", ())]
