"""The 18 layouts of the public benchmark of Megatron-LM, by this project: planned, rehearsed, run.

`--plan DEVICE`: milliseconds and GiB of each at full size, beside what others measured.
`--rehearse`: a dry run of each at full size. `--run`: real steps on gloo ranks of this machine, at
about a twelfth of the width, against one process and against their dry runs; 32 ranks at most.
`--page FILE... --out docs/matrix.md`: the page's table, from the files that `--out` wrote. Several
of one kind add up: 32 ranks may run at another time than 8.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matrix_full
import matrix_page
import matrix_plan
import matrix_rows
import matrix_small
from matrix_rows import Row, Small
from report import finish, write

from titan_dit.config.section import UserError
from titan_dit.system.progress import ProgressLine


def take_runs(rows: Sequence[Row], options: argparse.Namespace) -> int:
    """`--run`; 1 if a row failed."""
    small = Small(layers=options.layers, tokens=options.tokens)
    # An exception, so that the ranks are ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    so_far: list[dict[str, Any]] = []

    def found(result: matrix_small.Compared) -> None:
        so_far.append(result.cells)
        print(f"{so_far[-1]['case']}  {so_far[-1]['result']}", file=sys.stderr, flush=True)
        keep("matrix run", so_far, options)

    results = matrix_small.measure(rows, small, options.timeout_s, found)
    finish("matrix run", [result.cells for result in results], options.out, **named(options))
    failed = [result for result in results if result.failure]
    for result in failed:
        print(f"{result.cells['case']} failed: {result.failure}", file=sys.stderr)
    return 1 if failed else 0


def rehearse(rows: Sequence[Row], options: argparse.Namespace) -> int:
    """`--rehearse`."""
    progress = ProgressLine(len(rows), "rows", what="rehearsed")
    found = []
    for row in rows:
        found.append(matrix_full.rehearsal_row(row))
        keep("matrix rehearsed", found, options)
        progress.add(1)
    progress.end()
    finish("matrix rehearsed", found, options.out, **named(options))
    return 0


def plan(rows: Sequence[Row], options: argparse.Namespace) -> int:
    """`--plan DEVICE`."""
    found = matrix_plan.plan_rows(rows, options.plan)
    finish("matrix planned", found, options.out, device_planned=options.plan, **named(options))
    return 0


def keep(name: str, rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    """Write the rows so far: a command that is killed keeps them."""
    if options.out:
        write(name, rows, options.out, **named(options))


def named(options: argparse.Namespace) -> dict[str, Any]:
    """The command, without where it wrote."""
    words = [word for word in sys.argv[1:] if word not in ("--out", options.out)]
    return {"command": " ".join(["python benchmarks/matrix.py", *words])}


def main() -> int:
    """Run what the flags say; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--plan", metavar="DEVICE", help="such as v100_16 or h100, or a TOML file")
    what.add_argument("--rehearse", action="store_true")
    what.add_argument("--run", action="store_true")
    what.add_argument("--page", metavar="FILE", nargs="+", type=Path)
    parser.add_argument("--only", metavar="CASE", nargs="+", help="cases that begin with these")
    parser.add_argument("--ranks", type=int, help="cases of at most so many ranks")
    parser.add_argument("--layers", type=int, help="of --run, instead of the table's")
    parser.add_argument("--tokens", type=int, default=32, help="of a sample of --run")
    parser.add_argument("--timeout-s", type=float, default=900, help="of a step of --run")
    parser.add_argument("--out", help="JSON file to write; with --page, the document")
    options = parser.parse_args()
    try:
        rows = matrix_rows.chosen(matrix_rows.read(), options.only, options.ranks)
        if options.page:
            files = [json.loads(path.read_text()) for path in options.page]
            found = matrix_page.page(rows, files)
            print(found)
            if options.out:
                document = Path(options.out)
                document.write_text(matrix_page.renew(document.read_text(), found))
            return 0
        for is_wanted, function in (
            (options.run, take_runs),
            (options.rehearse, rehearse),
            (options.plan, plan),
        ):
            if is_wanted:
                return function(rows, options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
