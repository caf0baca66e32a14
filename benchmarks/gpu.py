"""Benchmark of one GPU: `python benchmarks/gpu.py [--out JSON]`, under 9 minutes.

first minute  does a step run (eager, compiled, float8, cuDNN attention, CUDA graphs), and does the
              device wait for the host
steps         training steps of DiT-XL/2 at 1024 and 256 tokens and of the 7B shape (4 of 24 layers)
              at 4096 tokens, with 141 GB more of them: ours against the original and a plain DiT,
              eager and compiled, bf16 and float8
ceilings      peak rates of bf16 products (8192 cubed, and those of the models), of a copy in device
              memory, of attention by torch's choice, flash and cuDNN, local and in a ring
levers        parts of a step, in two variants each
max_tokens    most tokens that one sample of DiT-XL/2 can have, with and without recomputation
verdicts      an answer to each open question, with its figure and threshold

The most important rows come first (gpu_plan.py); rows that exceed the time budget are listed as
"not begun". They are measured in a process of their own, so that a row that hangs or dies costs no
other. Needs torch and jaxtyping, torchao for float8; see wheelhouse.py for a machine with torch
only. Explained in docs/gpu.md. `--tiny` is a smoke test on any device; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import wheelhouse

if TYPE_CHECKING:
    from gpu_contenders import Cell

PARTS = ("steps", "levers", "ceilings", "max_tokens")


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
    parser.add_argument(
        "--match", default="", help="only rows whose names match, such as '7B.* plain|channels'"
    )
    parser.add_argument("--objective", default="rectified_flow")
    parser.add_argument("--rounds", type=int, default=1, help="rounds over all contenders")
    parser.add_argument("--warmup", type=int, default=2, help="untimed steps after the first")
    parser.add_argument("--steps", type=int, help="timed steps per row (default 1.5 s, >= 5)")
    parser.add_argument("--tokens-s", type=float, default=110, help="limit of a max_tokens row")
    parser.add_argument("--budget-s", type=float, help="limit of all (520); skips the rest")
    parser.add_argument("--limit-s", type=float, help="least limit of a row (60), see gpu_queue.py")
    parser.add_argument("--original", type=Path, help="a clone of facebookresearch/DiT")
    parser.add_argument("--tiny", action="store_true", help="smoke test: a tiny model, any device")
    parser.add_argument("--wheels", type=Path, default=wheelhouse.FOLDER, help="see wheelhouse.py")
    parser.add_argument("--out", help="JSON file, rewritten after every measurement")
    return parser.parse_args()


def settle(options: argparse.Namespace) -> argparse.Namespace:
    """Fill in defaults; those of --cells follow from the device, see `gpu_plan.cells_for`."""
    options.size = options.size or ("toy" if options.tiny else "XL/2")
    clones = (wheelhouse.FOLDER / "DiT", wheelhouse.ROOT.parent / "DiT")
    options.original = options.original or next(filter(Path.is_dir, clones), clones[0])
    # A smoke test on a busy machine is slow, not hanging.
    options.budget_s = options.budget_s or (7200 if options.tiny else 520)
    options.limit_s = options.limit_s or (1800 if options.tiny else 60)
    return options


def compiler_for(device_type: str) -> AbstractContextManager[object]:
    """Inductor on a GPU; on a CPU, where it takes minutes, traced graphs run eagerly."""
    import torch

    if device_type == "cuda":
        return nullcontext()
    # The stance is set by this call, not by entering the context.
    stance: AbstractContextManager[object] = torch.compiler.set_stance(force_backend="aot_eager")
    return stance


def serve(pipe: Connection, options: argparse.Namespace) -> None:
    """The process that measures: see `gpu_worker.Serve`."""
    import torch
    from gpu_contenders import Place
    from gpu_plan import cells_for, jobs_of
    from gpu_queue import Clock, attempt
    from meter import meter_of
    from report import place as described

    from titan_dit.observe.meter import peak_tflops
    from titan_dit.parallel.mesh import AxisSizes, Mesh
    from titan_dit.ranks import process_group

    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    clock = Clock(options.budget_s, time.monotonic())
    with process_group.start(device_type) as world, compiler_for(device_type):
        meter = meter_of(world.device)
        place = Place(world.device, Mesh(AxisSizes(), device_type), meter, options.original)
        memory_gib = meter.memory_gib()
        options.cells = cells_for(options, memory_gib)
        jobs = {str(job): job for job in jobs_of(options, place, clock)}
        facts = {"place": described(), "peak_tflops": peak_tflops(world.device, "bf16")}
        facts |= {"memory_gib": memory_gib, "cells": options.cells}
        pipe.send((facts, [job.task for job in jobs.values()]))
        while True:
            name, left_s = pipe.recv()
            clock.began, clock.budget_s = time.monotonic(), left_s
            pipe.send(attempt(jobs[name].take, meter))


def run(options: argparse.Namespace, began: float) -> None:
    """Run all rows; print and write after each."""
    from gpu_plan import cells_of, summary_pairs
    from gpu_queue import Clock, work_off
    from gpu_report import Findings
    from gpu_worker import Worker

    worker, clock = Worker(serve, options), Clock(options.budget_s, began)
    try:
        facts, tasks = worker.start(clock.left_s)
        options.cells = facts["cells"]
        tasks = [task for task in tasks if re.search(options.match, str(task))]
        cells = cells_of(options)
        pairs = summary_pairs(options, cells)
        found = Findings(options.objective, cells, pairs, options.out, facts)
        found.starts_s = worker.starts_s
        found.save()
        predictions = predicted(dict.fromkeys(cell for cell, _ in pairs))
        try:
            for task, row in work_off(tasks, worker.measure, clock, say, options.limit_s):
                found.predicted_gib |= predictions()
                found.add(task, row)
        finally:
            found.show()
    finally:
        worker.stop()
    if failed := [str(task) for task in tasks if found.has_failed(task)]:
        raise RuntimeError(f"failed (tracebacks above): {'; '.join(failed)}")


def predicted(cells: Iterable[Cell]) -> Callable[[], dict[Cell, float]]:
    """Start the dry runs of cells; returns what takes the peaks in GiB that are there by then."""
    from gpu_configs import predict
    from gpu_worker import variables

    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    with variables({"CUDA_VISIBLE_DEVICES": ""}):
        context.Process(target=predict, args=(theirs, list(cells)), daemon=True).start()
    theirs.close()

    def take() -> dict[Cell, float]:
        found = {}
        with suppress(EOFError):
            while mine.poll():
                cell, gib = mine.recv()
                found[cell] = gib
        return found

    return take


def say(line: str) -> None:
    """Print a progress line."""
    print(line, flush=True)


def interrupted(*_: object) -> None:
    """SIGTERM, which a time limit sends, ends a run as Ctrl-C does: what it found is shown."""
    raise KeyboardInterrupt


def main() -> None:
    """Check packages and device, then run."""
    began = time.monotonic()
    options = parse()
    wheelhouse.use(options.wheels)
    if complaint := wheelhouse.complaint():
        sys.exit(f"benchmarks/gpu.py: {complaint}")
    import torch

    from titan_dit.config.section import UserError
    from titan_dit.ranks.failure import run_and_exit
    from titan_dit.train import expand_segments

    # As a run does. The process that measures inherits it; rows with CUDA graphs unset it.
    expand_segments(os.environ, cuda_graphs=False)
    signal.signal(signal.SIGTERM, interrupted)

    def checked() -> None:
        if not options.tiny and not torch.cuda.is_available():
            raise UserError(
                "benchmarks/gpu.py needs a GPU, but torch sees none. Use --tiny for a smoke test, "
                "or benchmarks/step.py to compare training steps on a CPU."
            )
        run(settle(options), began)

    run_and_exit(checked)


if __name__ == "__main__":
    main()
