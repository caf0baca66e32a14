"""Benchmark of one GPU: `python benchmarks/gpu.py [--out JSON]`, under 9 minutes on an H200.

ceilings    peak rates of bf16 products (8192 cubed, and those of the models), of a copy in device
            memory, of attention with 64, 72 and 128 channels at 256 to 65,536 tokens
steps       training steps of DiT-XL/2 at 1024 and 256 tokens, of the 7B shape (8 of 24 layers) at
            4096 and 16384 tokens and of the 3B shape: ours against a plain DiT, eager and
            compiled, bf16 and float8
max_tokens  most tokens that one sample of DiT-XL/2 can have, with and without recomputation

The most important rows come first; rows that exceed the time budget are listed as "not begun".
Needs torch and jaxtyping, torchao for float8; see wheelhouse.py for a machine with torch only.
Explained in docs/gpu.md. `--tiny` is a smoke test on any device; its figures mean nothing.
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

# All fit in 139 GiB: 20 bytes per parameter (weights, gradients, two moments, EMA: XL 12.6 GiB, 8
# layers of the 7B shape 47, 3B 57), a bf16 copy of the weights, and per token and layer 48 h bytes
# for the plain DiT under autocast, 40 h ours, 34 h ours compiled. The plain DiT in total: XL/2 at
# 1024 tokens 61 GiB, at 256 108; 7B shape 99; 3B 122.
CELLS = ["XL/2:64:32", "XL/2:32:256", "7B/2x8:128:8", "7B/2x8:256:2", "3B/2:128:4"]


def parse() -> argparse.Namespace:
    """Command-line flags, with the defaults of --tiny."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--size", help="model of max_tokens and of cells without one (XL/2)")
    parser.add_argument(
        "--cells",
        nargs="+",
        help="latent size:batch or model:latent size:batch, most important first (32:256, "
        "7B/2x8:128:8 is 8 layers of the 7B shape)",
    )
    parser.add_argument("--only", nargs="+", help="contenders: plain, plain_compiled, ours, ...")
    parser.add_argument("--objective", default="rectified_flow")
    parser.add_argument("--rounds", type=int, default=1, help="rounds over all contenders")
    parser.add_argument("--warmup", type=int, default=2, help="untimed steps after the first")
    parser.add_argument("--steps", type=int, help="timed steps per row (default 1.5 s, >= 5)")
    parser.add_argument("--tokens-s", type=float, default=110, help="limit of a max_tokens row")
    parser.add_argument("--budget-s", type=float, default=520, help="limit of all; skips the rest")
    parser.add_argument("--tiny", action="store_true", help="smoke test: a tiny model, any device")
    parser.add_argument("--wheels", type=Path, default=wheelhouse.FOLDER, help="see wheelhouse.py")
    parser.add_argument("--out", help="JSON file, rewritten after every measurement")
    options = parser.parse_args()
    options.size = options.size or ("toy" if options.tiny else "XL/2")
    options.cells = options.cells or (["toy:8:4"] if options.tiny else CELLS)
    return options


def cells_of(options: argparse.Namespace) -> list[Any]:
    """Cells of the flags."""
    from gpu_contenders import OBJECTIVES, Cell
    from shapes import config_of, parse_cell

    from titan_dit.config.section import UserError

    if options.objective not in OBJECTIVES:
        raise UserError(f"--objective {options.objective}: choose from {', '.join(OBJECTIVES)}.")
    cells = []
    for text in options.cells:
        model, latent_size, batch = parse_cell(text, options.size)
        cells.append(Cell(config_of(model, latent_size), batch, options.objective, model))
    return cells


def wanted_of(options: argparse.Namespace, cells: list[Any]) -> list[tuple[int, Any, str]]:
    """(importance, cell, contender) sorted by importance; 0 is most important."""
    from gpu_contenders import CONTENDERS, USUAL

    from titan_dit.config.section import UserError

    if unknown := set(options.only or ()) - set(CONTENDERS):
        raise UserError(f"--only {', '.join(unknown)}: choose from {', '.join(CONTENDERS)}.")
    rows = [
        (importance(place, name), cell, name)
        for place, cell in enumerate(cells)
        for name in options.only or USUAL
    ]
    return sorted(rows, key=lambda row: row[0])


def compiler_for(device_type: str) -> AbstractContextManager[object]:
    """Inductor on a GPU; on a CPU, where it takes minutes, traced graphs run eagerly."""
    import torch

    if device_type == "cuda":
        return nullcontext()
    # The stance is set by this call, not by entering the context.
    stance: AbstractContextManager[object] = torch.compiler.set_stance(force_backend="aot_eager")
    return stance


FIRST = ("ours_compiled", "ours_float8_tensorwise")
"""Main contenders of the third cell; they run before max_tokens."""
LATER = {
    "ours_float8_rowwise": 1,
    "ours_compiled_cudnn": 2,
    "ours_compiled_resharded": 3,
}


def importance(place: int, name: str) -> int:
    """Importance of a contender in cell `place`; 0 runs before max_tokens, others after."""
    cell = max(0, place - 1)
    return 0 if cell == 1 and name in FIRST else cell + LATER.get(name, 0)


def run(options: argparse.Namespace, began: float) -> None:
    """Run all jobs; print and write after each."""
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
            # An unknown GPU is assumed to be slow, so rows take less time than estimated.
            peak = found.ceilings["peak_tflops"] or (300 if device.type == "cuda" else None)
            jobs += gpu_rounds.jobs(pairs, place, timing, peak)
            first += sum(rank == 0 for rank, *_ in wanted)
        if "max_tokens" in options.parts:
            # The search sets the latent size; 64 is a placeholder.
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
        raise RuntimeError(f"failed (tracebacks above): {'; '.join(failed)}")


def say(line: str) -> None:
    """Print a progress line."""
    print(line, flush=True)


def main() -> None:
    """Check packages and device, then run."""
    began = time.monotonic()
    options = parse()
    # Against fragmentation by changing sizes; torch reads it on import.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    wheelhouse.use(options.wheels)
    if complaint := wheelhouse.complaint():
        sys.exit(f"benchmarks/gpu.py: {complaint}")
    import torch

    from titan_dit.config.section import UserError
    from titan_dit.launcher.failure import run_and_exit

    def checked() -> None:
        if not options.tiny and not torch.cuda.is_available():
            raise UserError(
                "benchmarks/gpu.py needs a GPU, but torch sees none. Use --tiny for a smoke test, "
                "or benchmarks/step.py to compare training steps on a CPU."
            )
        run(options, began)

    run_and_exit(checked)


if __name__ == "__main__":
    main()
