"""Is the planner right? `python benchmarks/planner.py`: its figures against public tables.

For every table of benchmarks/facts: fits the efficiencies of a device to every third case (all
three offsets) and prints what they predict of the others, the coefficients, the layout that would
have been chosen, and memory. `--facts FILE` does so with any file that has the same columns,
`--calibrate-on ROWS` fits the named rows alone. Takes a few minutes on one core, and no GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import facts_fit
from facts_memory import memory_tables
from facts_rows import FACTS, Fact, read
from facts_software import device_named
from report import place, table, write

from titan_dit.config.section import UserError
from titan_dit.ranks.failure import run_and_exit

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


def sections_of(source: facts_fit.Source) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(title, rows) of the tables about a source."""
    yield f"{source.name}: fits", facts_fit.folds_table(source)
    if best := facts_fit.best_table(source):
        yield f"{source.name}: planned best against measured best", best
    yield f"{source.name}: rows (in brackets: fitted on)", facts_fit.rows_table(source)


def few_sections() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Fits on very few rows."""
    for stem, rows in FEW.items():
        for source in sources_of(FACTS / f"{stem}.csv", rows):
            yield f"{source.name}: fitted on {', '.join(rows)}", facts_fit.folds_table(source)
            yield f"{source.name}: rows of that fit", facts_fit.rows_table(source)


def sheet_rows(sources: Sequence[facts_fit.Source]) -> Iterator[dict[str, Any]]:
    """Another device: the efficiencies of one on the data sheet of the other."""
    by_name = {source.name: source for source in sources}
    for stem, first, second in SHEETS:
        one, two = (by_name.get(f"{stem}, {device}") for device in (first, second))
        if one and two:
            own = device_named(second, two.facts[0].row["software"])
            errors = facts_fit.transferred(one, two, own)
            yield {
                "table": stem,
                "fitted on": f"{first}, all rows",
                "predicted": second,
                **facts_fit.errors_row(errors),
            }


def everything() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(title, rows) of all tables of benchmarks/facts."""
    sources = [source for stem in FILES for source in sources_of(FACTS / f"{stem}.csv")]
    yield "Held-out errors by table", facts_fit.overview(sources)
    yield "Planned best against measured best by table", facts_fit.best_overview(sources)
    for source in sources:
        yield from sections_of(source)
    yield from few_sections()
    yield "Another device, from its data sheet", list(sheet_rows(sources))
    for source in sources:
        if all(fact.software.held for fact in source.facts):
            yield from memory_tables(source.name, source.facts, source.device)


def run(options: argparse.Namespace) -> None:
    """Print all tables as Markdown, write them as JSON."""
    if options.calibrate_on and not options.facts:
        raise UserError("--calibrate-on names rows of --facts FILE. Add --facts.")
    if options.facts:
        sources = sources_of(options.facts, options.calibrate_on)
        sections = [section for source in sources for section in sections_of(source)]
    else:
        sections = list(everything())
    for title, rows in sections:
        print(f"\n## {title}\n\n{table(rows)}" if rows else f"\n## {title}\n\nnone")
    print("\n" + ", ".join(f"{key} {value}" for key, value in place().items()))
    if options.out:
        tables = [{"title": title, "rows": rows} for title, rows in sections]
        write("planner against public tables", tables, options.out)
        print(f"wrote {options.out}")


if __name__ == "__main__":
    arguments = parse()
    run_and_exit(lambda: run(arguments))
