"""Console output of a run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from titan_dit.system import stdio
from titan_dit.system.progress import count, duration

SCORE = "evaluation_"
"""Prefix of the scores of drawn pictures in a row of metrics."""
LOSS = "validation_loss"
"""Key of the validation loss in a row of metrics."""


def say(line: str) -> None:
    """Print a line of a command's result and flush; a closed stdout is an error."""
    say_text(stdio.printable(line, stdio.JOINERS + "\t"))


def say_text(text: str) -> None:
    """Print text of several lines as a command's result, as `say`."""
    sys.stdout.write(stdio.printable(text, stdio.JOINERS + "\n\t") + "\n")
    sys.stdout.flush()


def mention(line: str) -> None:
    """Print a line of a run; a closed stdout does not stop the run."""
    stdio.write(sys.stdout, stdio.printable(line, stdio.JOINERS + "\t") + "\n")


DROPPED = (
    *("tokens", "data", "tflops", "peak", "lr", "mfu", "grad", "samples", "validation", "smooth"),
)
"""Parts of a step's line that are left out on a narrow terminal, in this order."""


def progress(row: dict[str, Any], steps: int, width: int | None = None) -> str:
    """Console line of a logged step. Parts are left out until it is shorter than `width`."""
    step = row["step"]
    parts = {
        "step": f"step {step:>{len(str(steps))}}/{steps}",
        "loss": f"loss {number(row['loss'], '.4f')}",
        "smooth": f"smooth {smooth:.4f}" if (smooth := row.get("smooth_loss")) is not None else "",
        "validation": f"validation {number(row[LOSS], '.4f')}" if LOSS in row else "",
        "score": "  ".join(scored(row)),
        "grad": f"grad {number(row['grad_norm'], '.3f')}",
        "lr": f"lr {row['lr']:.1e}",
        "samples": f"{count(row['samples_per_s'])} samples/s",
        "tokens": f"{count(row['tokens_per_s'])} tokens/s",
        "tflops": f"{row['tflops_per_gpu']:.3g} TFLOP/s",
        "mfu": "" if row["mfu"] is None else f"MFU {row['mfu']:.1%}",
        "peak": f"{row['peak_gib']:.2f} GiB",
        "data": f"data {row['data_wait_ms']:.1f} ms",
        "skipped": f"skipped {row['skipped_steps']}" if row["skipped_steps"] else "",
        "left": f"ETA {duration((steps - step) * row['step_ms'] / 1e3)}",
    }
    for name in ("", *DROPPED):
        parts.pop(name, None)
        line = "  ".join(part for part in parts.values() if part)
        if width is None or len(line) < width:
            break
    return line


def scored(row: dict[str, Any]) -> Iterator[str]:
    """Scores of drawn pictures, without their spread."""
    for name, value in row.items():
        if name.startswith(SCORE) and not name.endswith(("_std", "_pictures")):
            yield f"{name.removeprefix(SCORE).replace('_', ' ')} {value:.4g}"


def number(value: float | None, form: str) -> str:
    """A formatted number; "not finite" for None."""
    return "not finite" if value is None else format(value, form)
