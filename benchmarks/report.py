"""Output of every benchmark: a table, and JSON with device, commit and versions."""

from __future__ import annotations

import functools
import json
import os
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


@functools.cache
def place() -> dict[str, Any]:
    """Commit, device and versions at the first call."""
    cuda = torch.cuda.is_available()
    where = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "device": torch.cuda.get_device_name() if cuda else f"CPU, {cpu_name()}",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    return where | {"cuda": torch.version.cuda, **nvidia_smi()} if cuda else where


def commit() -> str:
    """TITAN_DIT_COMMIT, which a copy of a checkout needs; else the commit of this checkout."""
    if told := os.environ.get("TITAN_DIT_COMMIT"):
        return told
    git = ["git", "-C", str(ROOT)]
    found = answer(*git, "rev-parse", "--short", "HEAD")
    if not found:
        return "unknown"
    return found + ("+changes" if answer(*git, "status", "--porcelain") else "")


def nvidia_smi() -> dict[str, str]:
    """Driver, maximum clock and power limit of the GPU in use; empty without nvidia-smi."""
    keys = {
        "driver": "driver_version",
        "max SM clock": "clocks.max.sm",
        "power limit": "power.limit",
    }
    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    query = ["nvidia-smi", f"--id={uuid}", f"--query-gpu={','.join(keys.values())}"]
    values = answer(*query, "--format=csv,noheader").split(", ")
    return dict(zip(keys, values, strict=True)) if len(values) == len(keys) else {}


def answer(*command: str) -> str:
    """Stdout of a command; empty if it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def cpu_name() -> str:
    """Number of cores and model name of the CPU."""
    info = Path("/proc/cpuinfo")
    names = info.read_text().splitlines() if info.is_file() else []
    found = [line.split(":", 1)[1].strip() for line in names if line.startswith("model name")]
    return f"{len(found)} cores of {found[0]}" if found else platform.processor()


def write(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    out: str,
    where: Mapping[str, Any] | None = None,
    **more: Any,
) -> None:
    """Write rows and `where`, or `place()`, as JSON, with an atomic rename."""
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(
        {"benchmark": name, **(where or place()), **more, "rows": list(rows)}, indent=2
    )
    draft = path.with_name(path.name + ".part")
    draft.write_text(text + "\n")
    draft.replace(path)


def finish(name: str, rows: Sequence[Mapping[str, Any]], out: str | None, **more: Any) -> None:
    """Print the table and `place()`; write them and `more` as JSON to `out`, if given."""
    print(table(rows))
    print(", ".join(f"{key} {value}" for key, value in place().items()))
    if out:
        write(name, rows, out, **more)
        print(f"wrote {out}")
