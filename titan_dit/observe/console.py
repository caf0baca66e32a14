"""Console output of a run."""

from __future__ import annotations

import sys
from typing import Any

from titan_dit.system import stdio

LOSS = "validation_loss"
"""Key of the validation loss in a row of metrics."""


def say(line: str) -> None:
    """Print a line of a command's result and flush; a closed stdout is an error."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def mention(line: str) -> None:
    """Print a line of a run; a closed stdout does not stop the run."""
    stdio.write(sys.stdout, line + "\n")


def progress(row: dict[str, Any], steps: int) -> str:
    """Console line of a logged step."""
    step = row["step"]
    parts = [
        f"step {step:>{len(str(steps))}}/{steps}",
        f"loss {number(row['loss'], '.4f')}",
        f"grad {number(row['grad_norm'], '.3f')}",
        f"lr {row['lr']:.1e}",
        f"{count(row['samples_per_s'])} samples/s",
        f"{count(row['tokens_per_s'])} tokens/s",
        f"{row['tflops_per_gpu']:.3g} TFLOP/s",
    ]
    if LOSS in row:
        parts.insert(2, f"validation {number(row[LOSS], '.4f')}")
    if row.get("smooth_loss") is not None:
        parts.insert(2, f"smooth {row['smooth_loss']:.4f}")
    if row["mfu"] is not None:
        parts.append(f"MFU {row['mfu']:.1%}")
    parts += [f"{row['peak_gib']:.2f} GiB", f"data {row['data_wait_ms']:.1f} ms"]
    if row["skipped_steps"]:
        parts.append(f"skipped {row['skipped_steps']}")
    parts.append(f"ETA {duration((steps - step) * row['step_ms'] / 1e3)}")
    return "  ".join(parts)


def number(value: float | None, form: str) -> str:
    """A formatted number; "not finite" for None."""
    return "not finite" if value is None else format(value, form)


def count(value: float) -> str:
    """Short form of a count: 1234.5 -> "1.2k", 12 -> "12"."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f}{letter}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """Clock form of seconds: 3725 -> "1:02:05", 65 -> "1:05"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
