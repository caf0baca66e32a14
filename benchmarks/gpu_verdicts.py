"""Verdicts of `gpu.py`: each finding's figure, computed from measured rows, against a threshold.

One row of `FINDINGS` per question. A figure is None, and its verdict "not measured", if a row that
it needs is missing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpu_contenders import Cell, Row
from gpu_levers import by_name, ratio
from gpu_plan import RUNS

TOKENS = (1024, 4096, 16384)
"""Lengths at which attention is judged."""


class Measured:
    """The rows of a run, by what a figure asks for."""

    def __init__(
        self, cell: Cell, steps: Sequence[Row], levers: Sequence[Row], ceilings: Mapping[str, Any]
    ) -> None:
        """`cell`: the first one, to which findings about steps refer."""
        self.cell, self.steps, self.ceilings = cell, steps, ceilings
        self.levers = by_name(list(levers))

    def step(self, contender: str) -> Row | None:
        """The last measured row of a contender in the cell."""
        wanted = {**self.cell.key, "contender": contender, "result": "measured"}
        return next((row for row in self.steps[::-1] if row.items() >= wanted.items()), None)

    def of_step(self, contender: str, column: str) -> float | None:
        """A column of that row; "ms" is the median step."""
        row = self.step(contender)
        if row is None:
            return None
        return statistics.median(row["laps_ms"]) if column == "ms" else row.get(column)

    def faster(self, contender: str, base: str = "ours_compiled") -> float | None:
        """Speed of a contender over `base`."""
        return over(self.of_step(base, "ms"), self.of_step(contender, "ms"))

    def lever(self, name: str, slow: str, fast: str, which: str = "ms") -> float | None:
        """Speed of a lever's variant `fast` over the other."""
        return ratio(self.levers.get(name), slow, fast, which)

    def idle(self, contender: str) -> float | None:
        """Share of a step in which the device is idle; without a trace at most what is known."""
        # The traced step's own length: others run at the clock that the power limit leaves them.
        ms = self.of_step(contender, "span_ms") or self.of_step(contender, "ms")
        busy = self.of_step(contender, "busy_ms")
        if ms and busy is None:
            # A host that returns early is ahead of the device.
            host = self.of_step(contender, "host_ms")
            return 0.0 if host is not None and host < 0.8 * ms else None
        return None if not ms or busy is None else max(0.0, 1 - busy / ms)

    def attention(
        self, backend: str, tokens: int, ring: int = 1, compiled: bool = False
    ) -> float | None:
        """Milliseconds forward and backward of heads of 128 channels."""
        wanted = {"head_dim": 128, "backend": backend, "tokens": tokens}
        wanted |= {"ring": ring, "compiled": compiled}
        rows = self.ceilings.get("attention", ())
        return next(
            (row["both ms"] for row in rows if row.items() >= wanted.items() and "both ms" in row),
            None,
        )


def over(slow: float | None, fast: float | None) -> float | None:
    """Slow / fast; None if either is missing."""
    return slow / fast if slow and fast else None


def worst(figures: Sequence[float | None]) -> float | None:
    """The least of the figures; None if one is missing."""
    known = [figure for figure in figures if figure is not None]
    return min(known) if known and len(known) == len(figures) else None


@dataclass(frozen=True)
class Finding:
    """A question, the figure that answers it, and the threshold between two answers."""

    question: str
    figure: Callable[[Measured], float | None]
    threshold: float
    above: str
    """Verdict if the figure is at least the threshold."""
    below: str

    def row(self, measured: Measured) -> Row:
        """Its line in the report."""
        figure = self.figure(measured)
        verdict = "not measured"
        if figure is not None:
            verdict = self.above if figure >= self.threshold else self.below
        shown = "-" if figure is None else f"{figure:.3g}"
        return {
            "finding": self.question,
            "figure": shown,
            "threshold": f"{self.threshold:g}",
            "verdict": verdict,
        }


def share_of_copies(measured: Measured) -> float | None:
    """Copies of all tokens around the collectives of sequence parallelism, as a share of a step.

    A block has 4 collectives forward and 4 backward (docs/roofline.md).
    """
    copies = measured.levers.get("token copies", {}).get("ms", {})
    ms, (_, layers, *_rest) = measured.of_step("ours_compiled", "ms"), measured.cell.config.shape
    return 8 * layers * copies["dim 1"] / ms if ms and copies.get("dim 1") else None


def share_of_prepare(measured: Measured) -> float | None:
    """Host time of `prepare` as a share of a step."""
    host = measured.levers.get("prepare", {}).get("host_ms", {}).get("eager")
    ms = measured.of_step("ours_compiled", "ms")
    return host / ms if host and ms else None


def share_of_host(measured: Measured) -> float | None:
    """Host time of AdamW on DTensors as a share of a step."""
    host = measured.levers.get("optimizer", {}).get("host_ms", {}).get("DTensor")
    ms = measured.of_step("ours_compiled", "ms")
    return host / ms if host and ms else None


def auto_is_fastest(measured: Measured) -> float | None:
    """Speed of auto over the faster of flash and cuDNN, at the length where it is worst."""
    figures = []
    for tokens in TOKENS:
        auto, *named = (measured.attention(x, tokens) for x in ("auto", "flash", "cudnn"))
        known = [ms for ms in named if ms is not None]
        figures.append(over(min(known), auto) if known else None)
    return worst(figures)


def cudnn_over_flash(measured: Measured) -> float | None:
    """Speed of cuDNN over flash at 16,384 tokens."""
    return over(measured.attention("flash", 16384), measured.attention("cudnn", 16384))


def ring_cudnn_over_flash(measured: Measured) -> float | None:
    """Speed of cuDNN over flash for a rank of a ring of 4, joins included."""
    flash, cudnn = (measured.attention(x, 16384, ring=4) for x in ("flash", "cudnn"))
    return over(flash, cudnn)


def ring_compiled_over_eager(measured: Measured) -> float | None:
    """Speed of a ring with compiled joins over one with eager joins."""
    eager, compiled = (measured.attention("auto", 16384, 4, x) for x in (False, True))
    return over(eager, compiled)


def held_without_expanding(measured: Measured) -> float | None:
    """Memory reserved without expandable segments over that with them."""
    plain = measured.of_step("ours_compiled_plain_allocator", "reserved_gib")
    return over(plain, measured.of_step("ours_compiled", "reserved_gib"))


def float8_rate(measured: Measured) -> float | None:
    """Speed of the tensorwise recipe over bf16."""
    return measured.faster("ours_float8_tensorwise")


WAITS, AHEAD = "the device waits for the host", "the host is ahead"
GAINS, NOTHING = "a gain", "no gain"

FINDINGS = (
    Finding("idle share of a compiled step", lambda m: m.idle("ours_compiled"), 0.05, WAITS, AHEAD),
    Finding("idle share of an eager step", lambda m: m.idle("ours"), 0.05, WAITS, AHEAD),
    Finding(
        "speed of compiled blocks",
        lambda m: m.faster("ours_compiled", "ours"),
        1.05,
        GAINS,
        NOTHING,
    ),
    Finding("speed of float8", float8_rate, 1.05, GAINS, NOTHING),
    Finding(
        "speed of CUDA graphs",
        lambda m: m.faster("ours_compiled_cuda_graphs"),
        1.02,
        GAINS,
        NOTHING,
    ),
    Finding(
        "speed of cuDNN attention over flash, 16k tokens", cudnn_over_flash, 1.05, "cuDNN", "flash"
    ),
    Finding(
        "speed of auto over the faster of flash and cuDNN, worst length",
        auto_is_fastest,
        0.95,
        "auto takes the faster one",
        "auto takes the slower one",
    ),
    Finding(
        "speed of cuDNN over flash in a ring of 4, 16k tokens",
        ring_cudnn_over_flash,
        1.05,
        "cuDNN",
        "flash",
    ),
    Finding("speed of compiled joins in that ring", ring_compiled_over_eager, 1.02, GAINS, NOTHING),
    Finding(
        "speed of compiled joins alone",
        lambda m: m.lever("ring joins", "eager", "compiled"),
        1.5,
        GAINS,
        NOTHING,
    ),
    Finding(
        "copies of tokens in dim 1, share of a step",
        share_of_copies,
        0.02,
        "worth a layout",
        "negligible",
    ),
    Finding(
        "speed of preadv over mapped rows",
        lambda m: m.lever("reading", "mapped", "preadv"),
        1.5,
        GAINS,
        NOTHING,
    ),
    Finding(
        "speed of EMA in one call over lerp",
        lambda m: m.lever("EMA", "lerp", "one call"),
        1.05,
        GAINS,
        NOTHING,
    ),
    Finding(
        "host time of AdamW on DTensors over local tensors",
        lambda m: m.lever("optimizer", "DTensor", "local", "host_ms"),
        1.5,
        GAINS,
        NOTHING,
    ),
    Finding("that host time, share of a step", share_of_host, 0.02, "matters", "negligible"),
    Finding(
        "speed of compiled prepare",
        lambda m: m.lever("prepare", "eager", "compiled"),
        1.5,
        GAINS,
        NOTHING,
    ),
    Finding(
        "host time of prepare, share of a step", share_of_prepare, 0.01, "matters", "negligible"
    ),
    Finding(
        "speed of a compiled objective in a step",
        lambda m: m.faster("ours_compiled", "ours_compiled_eager_objective"),
        1.01,
        GAINS,
        NOTHING,
    ),
    Finding(
        "speed of one rank's own copies over FSDP2",
        lambda m: m.faster("ours_compiled", "ours_compiled_fsdp"),
        1.01,
        GAINS,
        NOTHING,
    ),
    Finding(
        "speed of several blocks per FSDP unit over one",
        lambda m: m.faster("ours_compiled_fsdp", "ours_compiled_units_of_one"),
        1.01,
        GAINS,
        NOTHING,
    ),
    Finding(
        "speed of a step with Muon over AdamW",
        lambda m: m.faster("ours_compiled_muon"),
        0.95,
        "at most 5% slower",
        "more than 5% slower",
    ),
    Finding(
        "memory held without expandable segments over with them",
        held_without_expanding,
        1.02,
        GAINS,
        NOTHING,
    ),
)


def verdicts(measured: Measured) -> list[Row]:
    """One line per kind of step that must run, then one per finding."""
    return [runs(name, measured) for name in RUNS] + [each.row(measured) for each in FINDINGS]


def runs(contender: str, measured: Measured) -> Row:
    """A line for a kind of step: did it run, and after how many seconds its first step ended."""
    row = next((row for row in measured.steps if row["contender"] == contender), None)
    line = {"finding": f"a step of {contender} runs", "figure": "-", "threshold": "-"}
    if row is None:
        return {**line, "verdict": "not measured"}
    if row["result"] != "measured":
        return {**line, "verdict": row["result"].partition(". ")[0]}
    return {**line, "figure": f"first after {row['first_step_s']:.3g} s", "verdict": "yes"}
