"""What every benchmark prints and writes: a table, and JSON that says where it was measured."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of equal keys as a Markdown table."""
    header = list(rows[0])
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(row[key]) for key in header) + " |" for row in rows]
    return "\n".join(lines)


def place() -> dict[str, Any]:
    """Commit, device and versions."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    dirty = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True)
    cuda = torch.cuda.is_available()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip() + ("+changes" if dirty.stdout.strip() else ""),
        "device": torch.cuda.get_device_name() if cuda else f"CPU, {cpu_name()}",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def cpu_name() -> str:
    """The processor, as the system calls it."""
    info = Path("/proc/cpuinfo")
    names = info.read_text().splitlines() if info.is_file() else []
    found = [line.split(":", 1)[1].strip() for line in names if line.startswith("model name")]
    return f"{len(found)} cores of {found[0]}" if found else platform.processor()


def finish(name: str, rows: Sequence[Mapping[str, Any]], out: str | None) -> None:
    """Print the table and where it was measured; write both as JSON if asked to."""
    where = place()
    print(table(rows))
    print(", ".join(f"{key} {value}" for key, value in where.items()))
    if out:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"benchmark": name, **where, "rows": list(rows)}, indent=2)
        Path(out).write_text(text + "\n")
        print(f"wrote {out}")
