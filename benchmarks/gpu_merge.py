"""One report of several runs of gpu.py on one kind of device: `gpu_merge.py A.json B.json --out C`.

A GPU that is lent for minutes is measured in pieces. Repeated rows of a step are further rounds; of
all other rows the last one counts. Tables, targets and verdicts are computed again.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from gpu_contenders import Cell, Row
from gpu_plan import cells_for, cells_of, summary_pairs
from gpu_report import Findings
from gpu_rounds import DRY_RUN

from titan_dit.config.section import UserError

KEYS = {
    "configs": ("model", "tokens", "batch", "contender"),
    "levers": ("lever",),
    "max_tokens": ("remat",),
    "attention": ("head_dim", "tokens", "ring", "compiled", "backend"),
    "gemm_shapes": ("M", "K", "N"),
}
"""Key columns of rows of which the last one counts."""


def merged(runs: list[dict[str, Any]], out: str | None) -> Findings:
    """The findings of all runs; UserError if they are of several devices or objectives."""
    for key in ("device", "objective", "torch"):
        if len(found := {run[key] for run in runs}) > 1:
            raise UserError(f"{key}: {', '.join(sorted(found))}. Merge runs with the same {key}.")
    last = runs[-1]
    options = argparse.Namespace(
        cells=None, tiny=False, only=None, size="XL/2", objective=last["objective"]
    )
    options.cells = cells_for(options, last["ceilings"]["memory_gib"])
    cells = cells_of(options)
    pairs = summary_pairs(options, cells)
    commits = ", ".join(dict.fromkeys(run["commit"] for run in runs))
    names = ("device", "torch", "python", "cuda", "driver", "max SM clock", "power limit")
    place = {"date": last["date"], "commit": commits, **{name: last[name] for name in names}}
    facts = {"place": place} | {key: last["ceilings"][key] for key in ("peak_tflops", "memory_gib")}
    found = Findings(last["objective"], cells, pairs, out, facts)
    found.measured = [
        {**row, "round": number} for number, run in enumerate(runs, 1) for row in run["measured"]
    ]
    found.levers = latest("levers", [row for run in runs for row in run["levers"]])
    found.max_tokens = latest("max_tokens", [row for run in runs for row in run["max_tokens"]])
    found.configs = latest("configs", [row for run in runs for row in run["configs"]])
    for run in runs:
        found.ceilings |= run["ceilings"]
        found.predicted_gib |= predictions(run["rows"], [cell for cell, _ in pairs])
        found.failed |= run["failed"]
        found.starts_s += run["starts_s"]
    for name in ("attention", "gemm_shapes"):
        rows = [row for run in runs for row in run["ceilings"].get(name, [])]
        found.ceilings[name] = latest(name, rows)
    return found


def latest(kind: str, rows: list[Row]) -> list[Row]:
    """The last row of each key."""
    return list({tuple(row[key] for key in KEYS[kind]): row for row in rows}.values())


def predictions(rows: list[Row], cells: list[Cell]) -> dict[Cell, float]:
    """Peaks of the dry runs that a run's table has."""
    return {
        cell: float(row[DRY_RUN])
        for row in rows
        for cell in cells
        if row[DRY_RUN] != "-" and row.items() >= cell.key.items()
    }


def main() -> None:
    """Merge the files that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", help="JSON")
    options = parser.parse_args()
    try:
        found = merged([json.loads(path.read_text()) for path in options.runs], options.out)
    except UserError as error:
        sys.exit(f"benchmarks/gpu_merge.py: {error}")
    found.save()
    found.show()


if __name__ == "__main__":
    main()
