"""Targets of `gpu.py`, and the measured value of each."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gpu_contenders import Cell, Row
from gpu_plan import LARGE_GIB
from gpu_rounds import laps_of

BF16 = ("ours_compiled", "ours_compiled_cudnn", "ours_compiled_resharded")
FLOAT8 = ("ours_float8_tensorwise", "ours_float8_rowwise")
MFU = {("XL/2", 256): 0.47, ("XL/2", 1024): 0.45, ("7B/2", 4096): 0.57}
"""Target MFU over the data sheet's dense bf16 peak, by model, however many of its layers, and
tokens."""
FASTER = {"plain": 1.3, "plain_compiled": 1.05}
"""Target speedup over the plain DiT, in every cell."""
FLOAT8_FASTER = {("XL/2", 1024): 1.12, ("7B/2", 4096): 1.3}
"""Target speedup of the faster float8 recipe over bf16."""
FLOAT8_LEAST = 1.0
"""Target speedup of each float8 recipe over bf16, in every cell."""
TOKENS = {"none": 100_000, "full": 1_000_000}
"""Target tokens of one sample, by [activation_checkpoint] mode, on a GPU of LARGE_GIB."""
TOKENS_SMALL = {"none": 52_000, "full": 520_000}
"""Target on a smaller device (80 GB): the same share of the estimate of gpu_tokens.py."""


def targets(
    cells: Sequence[Cell],
    measured: Sequence[Row],
    max_tokens: Sequence[Row],
    ceilings: Mapping[str, Any],
) -> list[Row]:
    """One row per target, with the measured value or "not measured"."""
    rows = []
    for cell in cells:
        tokens = cell.config.token_shape[0]
        key = re.sub(r"x\d+$", "", cell.model), tokens
        where = f"{cell.model} at {tokens} tokens"
        ms = {name: median(cell, name, measured) for name in (*BF16, *FLOAT8, *FASTER)}
        ours, name = fastest(ms, BF16)
        peak = ceilings.get("peak_tflops")
        if key in MFU:
            reached = cell.tflop / ours * 1e3 / peak if ours and peak else None
            rows.append(row(f"{where}: MFU", MFU[key], reached, name))
        for base, target in FASTER.items():
            what = f"{where}: speed over {base.replace('_', ' ')} DiT"
            rows.append(row(what, target, over(ms[base], ours), name))
        base = ms["ours_compiled"]
        if key in FLOAT8_FASTER:
            fast, name = fastest(ms, FLOAT8)
            what = f"{where}: speed of float8 over bf16"
            rows.append(row(what, FLOAT8_FASTER[key], over(base, fast), name))
        for recipe in FLOAT8:
            what = f"{where}: speed of {recipe.removeprefix('ours_')} over bf16"
            rows.append(row(what, FLOAT8_LEAST, over(base, ms[recipe]), ""))
    memory = ceilings.get("memory_gib")
    for mode, least in (TOKENS if memory is None or memory >= LARGE_GIB else TOKENS_SMALL).items():
        found = next((r for r in max_tokens if r["remat"] == mode and "fits" in r), None)
        fits, by = (found["fits"]["tokens"], whole_step(found)) if found else (None, "")
        rows.append(row(f"tokens on one GPU, remat {mode}", least, fits, by))
    return rows


def whole_step(found: Row) -> str:
    """The largest step with full attention (see gpu_tokens.py)."""
    return f"a whole step: {found['whole']['tokens']:,}" if found["whole"] else "no whole step"


def median(cell: Cell, name: str, measured: Sequence[Row]) -> float | None:
    """Median milliseconds of a contender's step, or None."""
    laps = laps_of(cell, name, measured)
    return statistics.median(laps) if laps else None


def fastest(ms: Mapping[str, float | None], names: Sequence[str]) -> tuple[float | None, str]:
    """(least milliseconds, its contender)."""
    found = [(taken, name) for name in names if (taken := ms[name])]
    return min(found, default=(None, ""))


def over(base: float | None, mine: float | None) -> float | None:
    """Speedup over `base`, or None."""
    return base / mine if base and mine else None


def row(what: str, target: float, reached: float | None, by: str) -> Row:
    """One line of the table."""
    if reached is None:
        return {"target": what, "at least": f"{target:,}", "measured": "not measured", "met": "-"}
    text = f"{reached:,}" if isinstance(reached, int) else f"{reached:.3f}"
    text += f" ({by})" if by else ""
    met = "yes" if reached >= target else "no"
    return {"target": what, "at least": f"{target:,}", "measured": text, "met": met}
