"""The table of docs/matrix.md, from the JSON files of `matrix.py --out`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matrix_rows import Row
from report import table

from titan_dit.config.section import UserError

File = Mapping[str, Any]
COLUMNS = {
    "matrix planned": {"{device} ms": "planned ms", "{device} GiB": "in total GiB"},
    "matrix rehearsed": {"rehearsed GiB": "peak GiB"},
    "matrix run": {
        "loss off": "off",
        "norm off": "norm off",
        "run MiB": "peak MiB",
        "dry run MiB": "dry run MiB",
        "planner MiB": "formula MiB",
        "run / dry run": "peak / dry run",
    },
}
"""Benchmark -> column of the page -> key of the file's rows, or a text with keys in braces."""


def page(rows: Sequence[Row], files: Sequence[File]) -> str:
    """The table of all rows, and a line on where each file's columns are from."""
    found: dict[str, dict[str, Any]] = {row.case: of_others(row) for row in rows}
    sources = []
    for file in files:
        columns = columns_of(file)
        cells = {cells["case"]: cells for cells in file["rows"]}
        for case, own in found.items():
            for name, key in columns.items():
                if case in cells or name not in own:
                    own[name] = value(cells.get(case, {}), key)
        of_all = "" if len(cells) == len(found) else f" of {len(cells)} cases"
        sources.append(f"- {', '.join(columns)}{of_all}: {source(file)}")
    return "\n".join([table(list(found.values())), "", *sources])


def renew(text: str, found: str) -> str:
    """A document with its table, and the sources below it, replaced by those of `page`."""
    lines = text.splitlines()
    first = lines.index(next(line for line in lines if line.startswith("| case |")))
    last = first
    while last < len(lines) and (not lines[last] or lines[last].startswith(("|", "- "))):
        last += 1
    return "\n".join([*lines[:first], found, "", *lines[last:], ""])


def of_others(row: Row) -> dict[str, Any]:
    """The columns of the public table."""
    return {
        "case": row.case,
        "layout": row.layout,
        "Megatron-LM ms": row.megatron_ms,
        "Megatron-LM MiB": row.megatron_mib,
        "OneFlow ms": row.oneflow_ms,
        "OneFlow MiB": row.oneflow_mib,
    }


def columns_of(file: File) -> dict[str, str]:
    """Columns of the page -> keys of the file's rows."""
    if file.get("benchmark") not in COLUMNS:
        raise UserError(
            f"--page: a file of {file.get('benchmark')!r} is not of the matrix. Give files that "
            "--plan, --rehearse and --run wrote with --out."
        )
    columns = COLUMNS[file["benchmark"]]
    return {name.format(device=file.get("device_planned")): key for name, key in columns.items()}


def value(cells: Mapping[str, Any], key: str) -> str:
    """A cell of the page; "-" if the file lacks the row."""
    if not cells:
        return "-"
    return key.format_map(cells) if "{" in key else str(cells[key])


def source(file: File) -> str:
    """Command, commit, versions, machine and date of a file."""
    versions = f"torch {file['torch']}, Python {file['python']}"
    where = f"commit {file['commit']}, {versions}, {file['device']}, {file['date']}"
    return f"`{file['command']}`, {where}"
