"""Most tokens of one sample on one GPU, for `gpu.py`: training steps of increasing size.

A step of a million tokens takes half an hour or more, nearly all of it attention. The tensors that
attention saves (q, k, v, the output, one number per query and head) do not depend on its span. So
sizes are tried with attention along the rows of the token grid only, which saves the same and takes
seconds. The largest step with full attention that the time allows is measured as well.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from gpu_contenders import Cell, Place, ours
from gpu_queue import Clock, Job, Row, attempt
from gpu_rounds import BUILD_S, COMPILE_S
from limits import Work, attention_flops, gemm_passes, products
from torch import Tensor

from titan_dit.observe.meter import peak_tflops

GIB = 2**30
STATE = 20
"""Bytes per parameter: weight, gradient, two moments and an EMA in fp32."""
KEPT = {"none": 17.03, "full": 1.0}
"""Elements per token and layer that compiled blocks save, in units of h (docs/remat.md)."""
AT_WORK = 25
"""Elements per token that a block's backward works with, in units of h: a guess, used for the first
size only."""
PRODUCTS, ATTENTION = 0.5, 0.25
"""Expected shares of the peak; flash kernels are slow for heads of 72 channels."""
FIRST, LATER = 0.96, 0.985
"""Target shares of the memory after one measured size, and after two."""


@dataclass(frozen=True)
class Limits:
    """Limits of one search."""

    capacity_gib: float
    """Memory that can be allocated."""
    seconds: float
    """Time limit; no trial starts that would exceed it."""
    unit: int = 4
    """Sides of the grid are multiples of this."""


def along_rows(q: Tensor, k: Tensor, v: Tensor, side: int) -> Tensor:
    """Attention [b, heads, n, d] within every row of the square token grid."""
    b = q.shape[0]

    def rows(x: Tensor) -> Tensor:
        return x.transpose(1, 2).unflatten(1, (-1, side)).flatten(0, 1).transpose(1, 2)

    out = F.scaled_dot_product_attention(rows(q), rows(k), rows(v))
    return out.transpose(1, 2).unflatten(0, (b, -1)).flatten(1, 2).transpose(1, 2)


def job(
    cell: Cell, mode: str, place: Place, clock: Clock, seconds: float, *, tiny: bool = False
) -> Job:
    """The search in one [activation_checkpoint] mode; it ignores the cell's latent size.

    `tiny` assumes that the device holds 64 tokens.
    """
    key = {"max tokens of": cell.model, "remat": mode}

    def take() -> Row:
        capacity, unit = (estimated_gib(cell, 8, mode), 2) if tiny else (free_gib(), 4)
        limits = Limits(capacity, min(seconds, clock.left_s), unit)
        return result(list(trials(cell, mode, place, limits)))

    return Job(key=key, estimate_s=1.0 if tiny else seconds, take=take, keeps_time=not tiny)


def free_gib() -> float:
    """Free GPU memory in GiB."""
    return torch.cuda.mem_get_info()[0] / GIB


def sized(cell: Cell, side: int) -> Cell:
    """The cell with one sample of side^2 tokens."""
    return replace(cell, config=replace(cell.config, latent_size=side * cell.config.shape[3]))


def work_of(cell: Cell, side: int, mode: str) -> Work:
    """The step as `Work` of limits.py."""
    return Work(sized(cell, side).config, cell.config.in_channels, 1, remat=mode)


def estimated_gib(cell: Cell, side: int, mode: str) -> float:
    """Estimated GiB of state, saved activations and one block in backward."""
    h, layers, *_ = cell.config.shape
    kept = 2 * h * side**2 * (layers * KEPT[mode] + AT_WORK)
    return (STATE * work_of(cell, side, mode).num_parameters + kept) / GIB


def trials(cell: Cell, mode: str, place: Place, limits: Limits) -> Iterator[Row]:
    """Trials with attention along rows: a small size, one expected to fit, refinements.

    A step with full attention comes before the refinements, which matter least.
    """
    began = time.monotonic()
    tried: list[tuple[int, float | None]] = []
    state = STATE * work_of(cell, 1, mode).num_parameters / GIB
    guess = guessed(cell, mode, limits)
    was_whole = False

    def left() -> float:
        return limits.seconds - (time.monotonic() - began)

    while len(tried) < 6:
        side = next_side(tried, guess, state, limits)
        if not was_whole and (side is None or sum(peak is not None for _, peak in tried) > 1):
            was_whole = True
            best = max((good for good, peak in tried if peak is not None), default=0)
            if whole := largest_in_time(cell, mode, best, left(), limits.unit, place):
                yield trial(cell, mode, place, whole, whole=True)
        if side is None or step_s(cell, mode, side, place, whole=False) > left():
            return
        row = trial(cell, mode, place, side, whole=False)
        yield row
        if row["result"] not in ("measured", "out of memory"):
            return
        tried.append((side, row.get("peak_gib")))


def guessed(cell: Cell, mode: str, limits: Limits) -> int:
    """Estimated side of the grid that fills the memory."""
    one, four = (estimated_gib(cell, side, mode) for side in (1, 2))
    slope = (four - one) / 3
    return math.isqrt(max(0, int((limits.capacity_gib - one) / slope)))


def next_side(
    tried: Sequence[tuple[int, float | None]], guess: int, state_gib: float, limits: Limits
) -> int | None:
    """The next side after trials of (side, peak in GiB, or None if out of memory); None: done.

    Extrapolates memory as linear in the tokens, with the state at 0 tokens.
    """
    good = sorted((side, peak) for side, peak in tried if peak is not None)
    bad = [side for side, peak in tried if peak is None]
    if not good:
        side = min([guess, *bad]) // 2 // limits.unit * limits.unit
        return side or None
    best, peak = good[-1]
    under, base = good[-2] if len(good) > 1 else (0, state_gib)
    slope = max((peak - base) / (best**2 - under**2), 1e-12)
    aim = (FIRST if len(good) == 1 else LATER) * limits.capacity_gib
    side = math.isqrt(max(0, int(best**2 + (aim - peak) / slope)))
    if bad:
        side = min(side, math.isqrt((best**2 + min(bad) ** 2) // 2))
    side = side // limits.unit * limits.unit
    return side if side > best else None


def step_s(cell: Cell, mode: str, side: int, place: Place, *, whole: bool) -> float:
    """Expected seconds of a trial: build, compile, two steps."""
    if place.device.type != "cuda":
        return 1.0
    return BUILD_S + COMPILE_S + 2 * one_step_s(cell, mode, side, place, whole=whole)


def one_step_s(cell: Cell, mode: str, side: int, place: Place, *, whole: bool) -> float:
    """Expected seconds of one step, recomputation included."""
    work = work_of(cell, side, mode)
    flops = sum(p.count * gemm_passes(work, p) * p.flops for p in products(work))
    seen = attention_flops(work) / (1 if whole else side)
    peak = 1e12 * (peak_tflops(place.device, "bf16") or 300)
    return (flops / PRODUCTS + seen / ATTENTION) / peak


def largest_in_time(
    cell: Cell, mode: str, best: int, left_s: float, unit: int, place: Place
) -> int | None:
    """The largest side, at most `best`, whose step with full attention fits in the time left."""
    sides = range(best, 0, -unit)
    return next((s for s in sides if step_s(cell, mode, s, place, whole=True) <= left_s), None)


def trial(cell: Cell, mode: str, place: Place, side: int, *, whole: bool) -> Row:
    """Two compiled steps: the first allocates the optimizer's state, the second is measured."""
    meter = place.meter

    def take() -> Row:
        attend = None if whole else functools.partial(along_rows, side=side)
        step = ours(sized(cell, side), place, compiled=True, remat=mode, attend=attend)
        meter.laps_ms(step, 1)
        meter.restart_peak()
        lap = meter.laps_ms(step, 1)[0]
        peak = meter.peak_gib()
        peak = estimated_gib(cell, side, mode) if peak is None else peak
        return {"peak_gib": peak, "step_s": round(lap / 1e3, 3)}

    row = attempt(take, meter)
    return {"tokens": side**2, "attention": "whole" if whole else "along rows", **row}


def result(tried: Sequence[Row]) -> Row:
    """Result row of a search, with all trials."""
    good = [row for row in tried if row["result"] == "measured"]
    best = {
        kind: max((row for row in good if row["attention"] == kind), key=tokens_of, default=None)
        for kind in ("along rows", "whole")
    }
    if best["along rows"] is None:
        raise RuntimeError(f"no size could be measured: {[row['result'] for row in tried]}")
    largest = max(tried, key=tokens_of)
    return {"fits": best["along rows"], "whole": best["whole"], "largest": largest, "tried": tried}


def tokens_of(row: Row) -> int:
    """Sort key of trials."""
    return int(row["tokens"])


def table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Printed table with one line per [activation_checkpoint] mode."""
    lines = []
    for row in rows:
        line = {"model": row["max tokens of"], "remat": row["remat"]}
        if row["result"] != "measured":
            lines.append(line | dict.fromkeys(COLUMNS, "-") | {COLUMNS[0]: row["result"]})
            continue
        fits, whole, largest = row["fits"], row["whole"], row["largest"]
        values = [fits["tokens"], f"{fits['peak_gib']:.1f}", f"{fits['step_s']:.1f}"]
        values += ["-"] * 3
        if whole:
            values[3:] = whole["tokens"], f"{whole['peak_gib']:.1f}", f"{whole['step_s']:.1f}"
        values.append(f"{largest['tokens']} ({largest['result']})")
        lines.append(line | dict(zip(COLUMNS, values, strict=True)))
    return lines


COLUMNS = (
    "tokens that fit",
    "peak GiB",
    "s per step, attention along rows",
    "tokens of a whole step",
    "its peak GiB",
    "its s per step",
    "largest tried",
)
