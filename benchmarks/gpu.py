"""First figures of a GPU: `python benchmarks/gpu.py [--out JSON]`, a few minutes on one H100 or so.

The ceilings of the device (a large bf16 product, a copy within its memory), then training steps of
DiT-XL/2 at 256 and 1024 tokens, ours beside a plain DiT, eager and compiled block by block. Needs
torch and jaxtyping; see wheelhouse.py for a machine that has torch only. `--tiny` runs all of it on
whatever there is, a CPU too, to see that it runs: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import wheelhouse

HOLDS = """A step of all contenders: forward, backward, AdamW and one EMA of the weights, on a batch
that lies on the device; fp32 weights, moments and averages, matrix products in bf16.
plain: autocast, torch's default AdamW, the EMA parameter by parameter.
ours: FSDP2 on one rank, random numbers by sample number, gradient clipping, fused AdamW and EMA.
FLOPs: our model's flops_per_sample, for all. MFU: of the data sheet's dense bf16 peak. of GEMM: of
the product measured here. Peak: allocated in the timed steps. First step: of the first round, with
compilation (short where the compiler finds its results of an earlier run)."""

FULL = {"size": "XL/2", "cells": ["32:256", "64:32"], "gemm": 8192, "copy": 2**30}
TINY = {"size": None, "cells": ["8:4", "16:2"], "gemm": 64, "copy": 2**16}


def parse() -> argparse.Namespace:
    """Flags; what depends on --tiny is filled in."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", help="of the model (XL/2)")
    parser.add_argument("--cells", nargs="+", help="latent size:batch (32:256 64:32)")
    parser.add_argument("--only", nargs="+", help="contenders: plain, plain_compiled, ours, ...")
    parser.add_argument("--objective", default="rectified_flow")
    parser.add_argument("--rounds", type=int, default=2, help="times each contender is built")
    parser.add_argument("--warmup", type=int, default=3, help="steps after the first, not timed")
    parser.add_argument("--steps", type=int, default=12, help="timed steps per round")
    parser.add_argument("--budget-s", type=float, default=480, help="begin nothing after this")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, any device")
    parser.add_argument("--wheels", type=Path, default=wheelhouse.FOLDER, help="see wheelhouse.py")
    parser.add_argument("--out", help="JSON, written anew after every measurement")
    options = parser.parse_args()
    scale = TINY if options.tiny else FULL
    options.size = options.size or scale["size"]
    options.cells = options.cells or scale["cells"]
    options.gemm, options.copy = scale["gemm"], scale["copy"]
    options.laps = 4 if options.tiny else 100
    return options


def cells_of(options: argparse.Namespace) -> list[Any]:
    """The cells that the flags ask for."""
    from gpu_rounds import OBJECTIVES, Cell

    from titan_dit.models.dit import DiTConfig
    from titan_dit.section import UserError

    if options.objective not in OBJECTIVES:
        raise UserError(f"--objective {options.objective} is none of {', '.join(OBJECTIVES)}.")
    toy = {"hidden": 64, "layers": 2, "heads": 2, "patch": 2}
    shape: dict[str, Any] = {"size": options.size} if options.size else toy
    cells = []
    for text in options.cells:
        if not re.fullmatch(r"\d+:\d+", text):
            raise UserError(f"--cells {text} is no latent size:batch, such as 32:256.")
        latent_size, batch = map(int, text.split(":"))
        config = DiTConfig(**shape, latent_size=latent_size, channels=4, num_classes=1000)
        cells.append(Cell(config, batch, options.objective))
    return cells


def names_of(options: argparse.Namespace) -> list[str]:
    """The contenders that the flags ask for."""
    from gpu_rounds import CONTENDERS, USUAL

    from titan_dit.section import UserError

    if unknown := set(options.only or ()) - set(CONTENDERS):
        raise UserError(f"--only {', '.join(unknown)} is none of {', '.join(CONTENDERS)}.")
    return options.only or USUAL


def run(options: argparse.Namespace, began: float) -> None:
    """Measure the ceilings, then row by row; print and write."""
    import torch
    from gpu_rounds import Place, Plan, Row, measure, summary
    from meter import ceilings_of, meter_of
    from report import finish, write

    from titan_dit.parallel import runtime
    from titan_dit.parallel.mesh import AxisSizes, Mesh

    cells, names = cells_of(options), names_of(options)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    meter = meter_of(device)
    ceilings = ceilings_of(device, meter, options.gemm, options.copy, options.laps)
    print(f"bf16 product of {options.gemm}^3: {ceilings['gemm_tflops']:.3g} TFLOP/s")
    print(f"copy, read + written: {ceilings['copy_gb_per_s']:.4g} GB/s", flush=True)

    title = f"gpu DiT-{options.size or 'toy'} bf16 {options.objective}"
    measured: list[Row] = []
    # The list grows, so every writing holds what is measured by then.
    more = {"step": HOLDS, "ceilings": ceilings, "measured": measured}
    plan = Plan(options.rounds, options.warmup, options.steps, options.budget_s, began)

    def save() -> None:
        if options.out:
            write(title, summary(cells, names, measured, ceilings), options.out, **more)

    save()
    with runtime.start(device.type) as world:
        place = Place(world.device, Mesh(AxisSizes(), device.type), meter)
        for row in measure(cells, names, place, plan):
            measured.append(row)
            print(json.dumps(row), flush=True)
            save()
        meter.release()
    print(f"\n{title}\n{HOLDS}\n")
    finish(title, summary(cells, names, measured, ceilings), options.out, **more)
    if any(row["result"].startswith("failed") for row in measured):
        raise RuntimeError("a measurement failed; its traceback stands above")


def main() -> None:
    """Look for what is needed, then run."""
    began = time.monotonic()
    options = parse()
    wheelhouse.use(options.wheels)
    if complaint := wheelhouse.complaint():
        sys.exit(f"benchmarks/gpu.py: {complaint}")
    import torch

    from titan_dit.failure import guarded
    from titan_dit.section import UserError

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
