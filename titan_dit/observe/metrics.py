"""Rows of metrics and their writers: metrics.jsonl, TensorBoard, wandb."""

from __future__ import annotations

import json
import math
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from titan_dit.observe.flops import Work
from titan_dit.system.files import write_whole

Row = dict[str, Any]
Writer = Callable[[Row], None]


def curve(rows: Iterable[Row], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of a column, without missing values."""
    finite = [row for row in rows if row.get(name) is not None]
    return [row["step"] for row in finite], [row[name] for row in finite]


def row_of(
    step: int,
    samples: int,
    loss: float,
    smooth_loss: float,
    grad_norm: float,
    lr: float,
    *,
    times: tuple[float, float],
    work: Work,
    peak_gib: float,
    bad_steps: tuple[int, int],
) -> Row:
    """The row of a step.

    `samples` since the start of training, `times` of `Meter.read`, `bad_steps`: non-finite ones and
    spikes.
    """
    step_ms, data_wait_ms = times
    return {
        "step": step,
        "samples": samples,
        "loss": finite_or_none(loss),
        "smooth_loss": finite_or_none(smooth_loss),
        "grad_norm": finite_or_none(grad_norm),
        "lr": lr,
        "step_ms": step_ms,
        **work.rates(step_ms),
        "peak_gib": peak_gib,
        "data_wait_ms": data_wait_ms,
        "skipped_steps": sum(bad_steps),
        "nan_steps": bad_steps[0],
    }


def keep_rows(file: Path, resumed_step: int) -> list[Row]:
    """Read the rows up to `resumed_step` and delete later ones from the file."""
    rows = [row for row in read_rows(file) if row["step"] <= resumed_step]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    write_whole(file, text.encode())
    return rows


def read_rows(file: Path) -> list[Row]:
    """Read a metrics.jsonl; skips a line truncated by a kill."""
    rows = []
    for line in file.read_text().splitlines() if file.is_file() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and "step" in row:
            rows.append(row)
    return rows


def tensorboard_writer(folder: Path, resumed_step: int) -> Writer:
    """A writer of TensorBoard scalars, named as in metrics.jsonl; purges steps > `resumed_step`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.utils.tensorboard import SummaryWriter

    events = SummaryWriter(str(folder), purge_step=resumed_step + 1)

    def write(row: Row) -> None:
        for name, value in row.items():
            if name != "step" and value is not None:
                events.add_scalar(name, value, row["step"])
        events.flush()

    return write


def wandb_writer(folder: Path, name: str, run: Mapping[str, Any]) -> Writer:
    """A writer to Weights & Biases."""
    import wandb

    # Stored, so that a resumed run continues the same wandb run.
    identity = folder / "wandb_id"
    if not identity.is_file():
        identity.write_text(uuid.uuid4().hex)
    wandb.init(
        project="titan_dit",
        name=name,
        id=identity.read_text(),
        dir=str(folder),
        config=dict(run),
        resume="allow",
    )

    def write(row: Row) -> None:
        wandb.log({k: v for k, v in row.items() if v is not None}, step=row["step"])

    return write


def finite_or_none(value: float) -> float | None:
    """Replace NaN and infinity, which JSON lacks, by None."""
    return value if math.isfinite(value) else None
