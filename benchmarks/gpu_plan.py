"""The measurements of `gpu.py`, in order: first whether a step runs, and what it waits for.

The first rows are 2 layers of XL/2. A block is compiled once for all layers, so they show whether a
kind of step runs, and fill the compiler's cache for the whole model.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import gpu_ceilings
import gpu_levers
import gpu_rounds
import gpu_tokens
from gpu_contenders import CONTENDERS, OBJECTIVES, Cell, Place
from gpu_queue import Clock, Job
from shapes import config_of, parse_cell

from titan_dit.config.section import UserError
from titan_dit.observe.meter import peak_tflops

# 20 bytes per parameter (weights, gradients, two moments, EMA: XL 12.6 GiB, 4 layers of the 7B
# shape 25, 3B 57), a bf16 copy of the weights, and per token and layer 48 h bytes for the plain DiT
# under autocast, 40 h ours, 34 h ours compiled. The plain DiT in total, in GiB: XL/2 61; 61; 7B
# shape 38. On the larger device: 61; 108; 99; 99; 3B 122.
SMALL = ["XL/2:64:32", "XL/2:32:128", "7B/2x4:128:4"]
LARGE = ["XL/2:64:32", "XL/2:32:256", "7B/2x8:128:8", "7B/2x8:256:2", "3B/2:128:4"]
LARGE_GIB = 130
"""Least memory of a device for LARGE: 139 to 140 GiB of an H200. An H100 of 80 GB has 79 GiB."""
PROBED = "XL/2x2:64:32"
"""Model, tokens and batch of the first rows; the same blocks as the first cell."""
TINY, TINY_PROBED = "toy:8:4", "toyx1:8:4"

RUNS = (
    "ours",
    "ours_compiled",
    "ours_float8_tensorwise",
    "ours_compiled_cudnn",
    "ours_compiled_cuda_graphs",
)
"""Kinds of step that must run at all."""
WAITS = ("ours_compiled", "ours")
"""Measured on the first cell early: are they bound by the host?"""
USUAL = (
    "plain",
    "plain_compiled",
    "original_compiled",
    "ours_compiled",
    "ours_float8_tensorwise",
    "ours_float8_rowwise",
    "ours",
    "ours_compiled_cudnn",
    "ours_compiled_flash",
    "ours_compiled_resharded",
)
"""In every cell."""
ONCE = (
    "ours_compiled_cuda_graphs",
    "ours_compiled_fsdp",
    "ours_compiled_units_of_one",
    "ours_compiled_eager_objective",
    "ours_compiled_muon",
    "ours_compiled_plain_allocator",
)
"""In the first cell only."""
FLOAT8 = ("ours_float8_tensorwise", "ours_float8_rowwise")
RIVALS = ("ours_compiled", "original_compiled", "plain_compiled")
MAIN = (
    (0, RIVALS),
    (1, RIVALS),
    (2, ("ours_compiled", *FLOAT8)),
    (0, FLOAT8),
    (0, ("plain",)),
    (1, ("plain", "ours")),
)
"""(number of the cell, contenders): what a run is made for, in order. Ceilings come after them."""
LATER = {"ours_float8_rowwise": 1, "ours_compiled_flash": 1, "ours_compiled_cudnn": 2}
LATER |= {"ours_compiled_resharded": 3}

Pair = tuple[Cell, str]


def cells_for(options: argparse.Namespace, memory_gib: float | None) -> list[str]:
    """--cells, or those that a device with this memory can hold; None: --tiny's device."""
    if options.cells:
        return list(options.cells)
    if options.tiny:
        return [TINY]
    return LARGE if memory_gib is None or memory_gib >= LARGE_GIB else SMALL


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """Cells of the flags, which `cells_for` has completed."""
    if options.objective not in OBJECTIVES:
        raise UserError(f"--objective {options.objective}: choose from {', '.join(OBJECTIVES)}.")
    return [cell_of(text, options) for text in options.cells]


def cell_of(text: str, options: argparse.Namespace) -> Cell:
    """The cell of "model:latent size:batch"."""
    model, latent_size, batch = parse_cell(text, options.size)
    return Cell(config_of(model, latent_size), batch, options.objective, model)


def probes_of(options: argparse.Namespace) -> list[Pair]:
    """The first rows: kinds of step on a shallow model; with --only none."""
    if options.only:
        return []
    cell = cell_of(TINY_PROBED if options.tiny else PROBED, options)
    return [(cell, name) for name in RUNS]


def wanted_of(options: argparse.Namespace, cells: Sequence[Cell]) -> list[tuple[int, Cell, str]]:
    """(importance, cell, contender) sorted by importance; below 0 are those of MAIN."""
    if unknown := set(options.only or ()) - set(CONTENDERS):
        raise UserError(f"--only {', '.join(unknown)}: choose from {', '.join(CONTENDERS)}.")
    rows = [
        (importance(place, name), cell, name)
        for place, cell in enumerate(cells)
        for name in options.only or (USUAL if place else USUAL + ONCE)
    ]
    return sorted(rows, key=lambda row: row[0])


def first_pairs(cells: Sequence[Cell]) -> list[Pair]:
    """The steps that show what a step waits for."""
    return [(cells[0], name) for name in WAITS]


def importance(place: int, name: str) -> int:
    """Importance of a contender in cell `place`; up to 0 it runs before max_tokens."""
    main = [(number, each) for number, names in MAIN for each in names]
    if (place, name) in main:
        return main.index((place, name)) - len(main)
    return max(0, place - 2) + LATER.get(name, 0)


def jobs_of(options: argparse.Namespace, place: Place, clock: Clock) -> list[Job]:
    """All jobs, in order; `clock` is that of the parent."""
    cells, probes = cells_of(options), probes_of(options)
    wanted = wanted_of(options, cells)
    # An unknown GPU is assumed to be slow, so rows take less time than estimated.
    peak = peak_tflops(place.device, "bf16") or (300 if place.device.type == "cuda" else None)
    timing = gpu_rounds.Timing(options.rounds, options.warmup, options.steps)
    brief = gpu_rounds.Timing(1, 1, 2 if options.tiny else 5, traced=False)
    first: list[Job] = []
    before: list[Job] = []
    after: list[Job] = []
    if "steps" in options.parts:
        steps = list(gpu_rounds.jobs([row[1:] for row in wanted], place, timing, peak))
        urgent = [{**cell.key, "contender": name, "round": 1} for cell, name in first_pairs(cells)]
        waits = [job for job in steps if job.key in urgent]
        main = sum(rank < 0 for rank, *_ in wanted)
        count = sum(rank <= 0 for rank, *_ in wanted)
        asked = list(gpu_rounds.jobs(probes, place, brief, peak))
        # Whether the step that users run waits is worth more than whether the others run.
        first = [*asked[:2], *waits, *asked[2:], *(job for job in steps[:main] if job not in waits)]
        before = [job for job in steps[main:count] if job not in waits]
        after = steps[count:]
    if "ceilings" in options.parts:
        first += gpu_ceilings.jobs(cells, place, options.tiny)
    if "levers" in options.parts:
        sizes = gpu_levers.TINY if options.tiny else gpu_levers.FULL
        first += gpu_levers.jobs(cells[0], place, sizes)
    if "max_tokens" in options.parts:
        # The search sets the latent size; 64 is a placeholder.
        cell = Cell(config_of(options.size, 64), 1, options.objective, options.size)
        before += tokens_of(cell, place, clock, options)
    return [*first, *before, *after]


def tokens_of(cell: Cell, place: Place, clock: Clock, options: argparse.Namespace) -> Iterator[Job]:
    """The searches of max_tokens."""
    for mode in gpu_tokens.KEPT:
        yield gpu_tokens.job(cell, mode, place, clock, options.tokens_s, tiny=options.tiny)


def summary_pairs(options: argparse.Namespace, cells: Sequence[Cell]) -> list[Pair]:
    """The rows of the table of steps, in order."""
    named: list[Any] = [row[1:] for row in wanted_of(options, cells)]
    return [*probes_of(options), *named]
