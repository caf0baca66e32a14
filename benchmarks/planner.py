"""Is the planner right? `python benchmarks/planner.py`: its figures against public tables.

For every table of benchmarks/facts: fits the efficiencies of a device to every third case (all three
offsets) and prints what they predict of the others, the coefficients, the layout that would have
been chosen, and memory. `--facts FILE` does so with any file that has the same columns,
`--calibrate-on ROWS` fits the named rows alone. Takes a few minutes on one core, and no GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import facts_fit
from facts_memory import memory_sections
from facts_rows import FACTS, Fact, read
from facts_software import device_named
from report import ROOT, finish, place, table, write

from titan_dit.config.section import UserError
from titan_dit.launcher.failure import run_and_exit

FILES = ("megatron_v100", "oneflow_v100", "megatron_a100", "llm_foundry", "torchtitan_h100")
"""Tables of benchmarks/facts, in the order of the report."""
FEW = {"megatron_v100": ("DP_1x1x1_2_1536x16", "MP_1x8x1_16_1536x16", "2D_1x8x1_16_1536x16")}
"""One GPU and tp 8 (measured twice): what someone without a cluster could have timed."""
SHEETS = (("llm_foundry", "a100_80", "h100"), ("llm_foundry", "a100_40", "h100"))
"""(table, device to fit, device to predict with its efficiencies and own data sheet)."""


def parse() -> argparse.Namespace:
    """Command-line flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--facts", type=Path, help="a CSV with the columns of benchmarks/facts")
    parser.add_argument(
        "--calibrate-on", nargs="+", default=(), metavar="CASE", help="rows to fit, by their case"
    )
    parser.add_argument("--out", help="JSON file with all tables")
    return parser.parse_args()


def by_device(facts: Sequence[Fact]) -> dict[str, list[Fact]]:
    """The rows of each device."""
    found: dict[str, list[Fact]] = {}
    for fact in facts:
        found.setdefault(fact.row["device"], []).append(fact)
    return found


def sources_of(path: Path, only: Sequence[str] = ()) -> Iterator[facts_fit.Source]:
    """The fits of a table, one for each device in it."""
    facts = read(path)
    names = {fact.name for fact in facts}
    if unknown := [name for name in only if name not in names]:
        raise UserError(
            f"--calibrate-on {' '.join(unknown)}: no such case in {path}. Its cases: "
            f"{', '.join(sorted(names))}."
        )
    for name, rows in by_device(facts).items():
        chosen = [fact.name for fact in rows if fact.name in only]
        if only and not chosen:
            continue
        device = device_named(name, rows[0].row["software"])
        yield facts_fit.source_of(f"{path.stem}, {name}", rows, device, chosen)
