"""`python -m titan_dit runs DIR...`: compare the losses and the configs of runs."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_dit.checkpoint import run_checkpoints
from titan_dit.commands.flags import RunsFlags
from titan_dit.config import config_file
from titan_dit.config.section import UserError, show
from titan_dit.observe import console
from titan_dit.observe.curve import draw_runs
from titan_dit.observe.metrics import Row, curve, read_rows
from titan_dit.system import run_files

OF_EVERY_RUN = ("job.name", "job.dir", "checkpoint.dir")
"""Keys that differ because each run has a place of its own."""
MISSING = "-"


@dataclass(frozen=True)
class Run:
    """A run directory's name and metrics."""

    name: str
    rows: list[Row]
    keys: dict[str, Any]
    """The resolved config: "section.key" -> value; {} without a config.toml."""


def main(options: RunsFlags) -> None:
    """Print the table and draw the curves."""
    out = Path(options.out)
    if out.suffix != ".png":
        raise UserError(f"--out {out}: name a .png file.")
    folders = find_runs(options.dirs)
    runs = [read_run(folder, name) for folder, name in zip(folders, names_of(folders), strict=True)]
    for line in aligned(table(runs)):
        console.say(line)
    curves = [
        (run.name, curve(run.rows, "smooth_loss", "loss"), curve(run.rows, console.LOSS))
        for run in runs
    ]
    drawn = draw_runs(out, curves)
    console.say(f"drew {out}" if drawn else "no curves: none of these runs has two logged losses")


def find_runs(given: Sequence[str]) -> list[Path]:
    """The runs that these paths name or contain, each once.

    Raises UserError for a path without any.
    """
    if not given:
        raise UserError("runs: give run directories or folders of runs, such as outputs.")
    found: dict[Path, Path] = {}
    for text in given:
        path = Path(text)
        named = run_checkpoints.resolve(path).run if path.exists() else path
        own = [folder for folder in (path, named) if isinstance(folder, Path) and is_run(folder)]
        inside = [] if own or not path.is_dir() else sorted(filter(is_run, path.iterdir()))
        if not own and not inside:
            what = "no run found" if path.exists() else "no such folder"
            raise UserError(
                f"runs {text}: {what}. Give run directories (outputs/digits) or folders of runs "
                "(outputs), on a disk."
            )
        found |= {folder.resolve(): folder for folder in own[:1] or inside}
    return list(found.values())


def is_run(folder: Path) -> bool:
    """True if a folder holds the files of a run."""
    return (folder / run_files.METRICS).is_file() or (folder / run_files.CONFIG).is_file()


def names_of(folders: Sequence[Path]) -> list[str]:
    """The folders' names; their paths where a name would appear twice."""
    names = [folder.resolve().name for folder in folders]
    return [
        name if names.count(name) == 1 else str(folder)
        for folder, name in zip(folders, names, strict=True)
    ]


def read_run(folder: Path, name: str) -> Run:
    """Read a run's metrics and its config."""
    file = folder / run_files.CONFIG
    keys = config_file.keys_of(config_file.of_run(file) if file.is_file() else {})
    return Run(name, read_rows(folder / run_files.METRICS), keys)


def table(runs: Sequence[Run]) -> list[list[str]]:
    """A header, and a row per run: last step and losses, then the keys that differ."""
    known = {key: None for run in runs for key in run.keys if key not in OF_EVERY_RUN}
    texts = [{key: show(value) for key, value in run.keys.items()} for run in runs]
    differ = [key for key in known if len({text.get(key) for text in texts}) > 1]
    rows = [["run", "step", "loss", "smooth", "validation", *differ]]
    for run, text in zip(runs, texts, strict=True):
        losses = [last(run.rows, name) for name in ("loss", "smooth_loss", console.LOSS)]
        step = f"{run.rows[-1]['step']:,}" if run.rows else MISSING
        rows.append([run.name, step, *losses, *(text.get(key, MISSING) for key in differ)])
    return rows


def last(rows: Sequence[Row], name: str) -> str:
    """The newest value of a column; "not finite" for null."""
    values = [row[name] for row in rows if name in row]
    return console.number(values[-1], ".4f") if values else MISSING


def aligned(rows: list[list[str]]) -> list[str]:
    """Lines of a table; turned, with a column per run, if it is wider than the terminal."""
    lines = lines_of(rows)
    too_wide = max(map(len, lines)) > shutil.get_terminal_size((100, 24)).columns
    return lines_of([list(column) for column in zip(*rows, strict=True)]) if too_wide else lines


def lines_of(rows: list[list[str]]) -> list[str]:
    """Pad the columns to equal widths."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
