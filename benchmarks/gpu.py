"""All figures of one GPU: `python benchmarks/gpu.py [--out JSON]`, under 9 minutes on an H200.

ceilings    what the device reaches: bf16 products (8192 cubed, and those of the models), a copy
            within its memory, attention of 64, 72 and 128 channels at 256 to 65,536 tokens
steps       training steps of DiT-XL/2 at 1024 and 256 tokens, of the 7B shape (8 of 24 layers) at
            4096 and 16384 tokens and of the 3B shape: ours beside a plain DiT, eager and compiled,
            bf16 and float8
max_tokens  how many tokens one sample of DiT-XL/2 can have, with and without recomputation

The most important rows come first; what the time budget does not hold is listed as "not begun".
Needs torch and jaxtyping (float8: torchao, too); see wheelhouse.py for a machine that has torch
only, docs/gpu.md for what is read off. `--tiny` runs all of it on whatever there is, a CPU too, to
see that it runs: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import wheelhouse

PARTS = ("ceilings", "steps", "max_tokens")

# 139 GiB hold 20 bytes a parameter (weights, gradients, two moments, EMA: XL 12.6 GiB, 8 layers of
# the 7B shape 47, 3B 57), a bf16 copy of the weights, and per token and layer 48 h bytes for the
# plain DiT under autocast, 40 h ours, 34 h ours compiled. The plain DiT's sums: XL/2 at 1024 tokens
# 61 GiB, at 256 108; 7B shape 99; 3B 122.
CELLS = ["XL/2:64:32", "XL/2:32:256", "7B/2x8:128:8", "7B/2x8:256:2", "3B/2:128:4"]


def parse() -> argparse.Namespace:
    """Flags; what depends on --tiny is filled in."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--size", help="model of cells that name none, and of max_tokens (XL/2)")
    parser.add_argument(
        "--cells",
        nargs="+",
        help="latent size:batch or model:latent size:batch, most important first (32:256, "
        "7B/2x8:128:8: 8 layers of the 7B shape)",
    )
    parser.add_argument("--only", nargs="+", help="contenders: plain, plain_compiled, ours, ...")
    parser.add_argument("--objective", default="rectified_flow")
    parser.add_argument("--rounds", type=int, default=1, help="times each contender is built")
    parser.add_argument("--warmup", type=int, default=2, help="steps after the first, not timed")
    parser.add_argument("--steps", type=int, help="timed steps per row (1.5 s of them, at least 5)")
    parser.add_argument("--tokens-s", type=float, default=110, help="seconds per max_tokens row")
    parser.add_argument("--budget-s", type=float, default=520, help="of all: drops what is over")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, any device")
    parser.add_argument("--wheels", type=Path, default=wheelhouse.FOLDER, help="see wheelhouse.py")
    parser.add_argument("--out", help="JSON, written anew after every measurement")
    options = parser.parse_args()
    options.size = options.size or ("toy" if options.tiny else "XL/2")
    options.cells = options.cells or (["toy:8:4"] if options.tiny else CELLS)
    return options


def cells_of(options: argparse.Namespace) -> list[Any]:
    """The cells that the flags ask for."""
    from gpu_contenders import OBJECTIVES, Cell
    from shapes import config_of, parse_cell

    from titan_dit.config.section import UserError

    if options.objective not in OBJECTIVES:
        raise UserError(f"--objective {options.objective} is none of {', '.join(OBJECTIVES)}.")
    cells = []
    for text in options.cells:
        model, latent_size, batch = parse_cell(text, options.size)
        cells.append(Cell(config_of(model, latent_size), batch, options.objective, model))
    return cells


def wanted_of(options: argparse.Namespace, cells: list[Any]) -> list[tuple[int, Any, str]]:
    """(importance, cell, contender), the most important first: 0 and up."""
    from gpu_contenders import CONTENDERS, USUAL

    from titan_dit.config.section import UserError

    if unknown := set(options.only or ()) - set(CONTENDERS):
        raise UserError(f"--only {', '.join(unknown)} is none of {', '.join(CONTENDERS)}.")
    rows = [
        (importance(place, name), cell, name)
        for place, cell in enumerate(cells)
        for name in options.only or USUAL
    ]
    return sorted(rows, key=lambda row: row[0])


def compiler_for(device_type: str) -> AbstractContextManager[object]:
    """On a GPU torch's own. A CPU would compile for minutes: there graphs are made, and run so."""
    import torch

    if device_type == "cuda":
        return nullcontext()
    # It holds from the call on, not from the `with`.
    stance: AbstractContextManager[object] = torch.compiler.set_stance(force_backend="aot_eager")
    return stance


FIRST = ("ours_compiled", "ours_float8_tensorwise")
"""What the third cell is there for."""
LATER = {
    "ours_float8_rowwise": 1,
    "ours_compiled_cudnn": 2,
    "ours_compiled_resharded": 3,
}


def importance(place: int, name: str) -> int:
    """Of a contender in the cell of that place; 0 comes before max_tokens, all else after."""
    cell = max(0, place - 1)
    return 0 if cell == 1 and name in FIRST else cell + LATER.get(name, 0)


def run(options: argparse.Namespace, began: float) -> None:
    """Measure job by job; print and write."""
    import gpu_ceilings
    import gpu_rounds
    import gpu_tokens
    import torch
    from gpu_contenders import Cell, Place
    from gpu_queue import Clock, Job, work_off
    from gpu_report import Findings
    from meter import meter_of
    from shapes import config_of

    from titan_dit.launcher import process_group
    from titan_dit.parallel.mesh import AxisSizes, Mesh

    cells = cells_of(options)
    wanted = wanted_of(options, cells)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    meter, clock = meter_of(device), Clock(options.budget_s, began)
    found = Findings(options.objective, cells, [row[1:] for row in wanted], options.out)
    found.save()
    timing = gpu_rounds.Timing(options.rounds, options.warmup, options.steps)
    with process_group.start(device.type) as world, compiler_for(device.type):
        place = Place(world.device, Mesh(AxisSizes(), device.type), meter)
        jobs: list[Job] = []
        if "ceilings" in options.parts:
            sizes = gpu_ceilings.TINY if options.tiny else gpu_ceilings.FULL
            jobs += gpu_ceilings.jobs(cells, place, sizes, found.ceilings)
        first = len(jobs)
        if "steps" in options.parts:
            pairs = [row[1:] for row in wanted]
            # A GPU that no table knows is taken for a slow one: rows end sooner than expected.
            peak = found.ceilings["peak_tflops"] or (300 if device.type == "cuda" else None)
            jobs += gpu_rounds.jobs(pairs, place, timing, peak)
            first += sum(rank == 0 for rank, *_ in wanted)
        if "max_tokens" in options.parts:
            # Its side of the grid, and so the latent size, is what is looked for.
            cell = Cell(config_of(options.size, 64), 1, options.objective, options.size)
            jobs[first:first] = [
                gpu_tokens.job(cell, mode, place, clock, options.tokens_s, tiny=options.tiny)
                for mode in gpu_tokens.KEPT
            ]
        for job, row in work_off(jobs, meter, clock, say):
            found.add(job, row)
        found.show()
        meter.release()
    if failed := [str(job) for job in jobs if found.has_failed(job)]:
        raise RuntimeError(f"failed, with tracebacks above: {'; '.join(failed)}")


def say(line: str) -> None:
    """Progress."""
    print(line, flush=True)


def main() -> None:
    """Look for what is needed, then run."""
    began = time.monotonic()
    options = parse()
    # Sizes that come and go would leave holes; read when torch is loaded.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    wheelhouse.use(options.wheels)
    if complaint := wheelhouse.complaint():
        sys.exit(f"benchmarks/gpu.py: {complaint}")
    import torch

    from titan_dit.config.section import UserError
    from titan_dit.launcher.failure import guarded

    def checked() -> None:
        if not options.tiny and not torch.cuda.is_available():
            raise UserError(
                "benchmarks/gpu.py measures a GPU, and torch sees none here. `--tiny` runs every "
                "line of it on the CPU; benchmarks/step.py compares training steps on a CPU."
            )
        run(options, began)

    guarded(checked)


if __name__ == "__main__":
    main()
