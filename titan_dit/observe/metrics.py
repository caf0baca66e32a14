"""Rows of metrics and their writers: metrics.jsonl, TensorBoard, wandb."""

from __future__ import annotations

import html
import json
import math
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from titan_dit.config import user_text
from titan_dit.config.section import UserError, show
from titan_dit.observe.meter import Throughput
from titan_dit.system import run_files
from titan_dit.system.files import write_whole

Row = dict[str, Any]
CURVES = ("loss", "smooth_loss", "validation_loss")
PICTURES = (".png", ".jpg", ".jpeg")
Show = Callable[[int, Path], None]
"""(step, file of a preview)."""


@dataclass(frozen=True)
class MetricsWriter:
    """Writes metrics to another program, besides metrics.jsonl."""

    row: Callable[[Row], None]
    shows: Mapping[str, Show]
    """Suffix of a preview's file -> function that shows the file."""


def curve(rows: Iterable[Row], *names: str) -> tuple[list[int], list[float]]:
    """(steps, values) of a column; of several, the first that a row has."""
    found = [(row["step"], next(values_of(row, names), None)) for row in rows]
    known = [(step, value) for step, value in found if value is not None]
    return [step for step, _ in known], [value for _, value in known]


def values_of(row: Row, names: Iterable[str]) -> Iterator[float]:
    """The values of these columns, without missing ones."""
    return (row[name] for name in names if row.get(name) is not None)


def row_of(
    step: int,
    samples: int,
    loss: float,
    smooth_loss: float,
    grad_norm: float,
    lr: float,
    *,
    times: tuple[float, float],
    work: Throughput,
    peak_gib: float,
    counters: Row,
) -> Row:
    """The row of a step.

    `samples`: since the start of training. `times`: see `Meter.read`. `counters`: see `Guard`.
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
        **counters,
    }


def keep_rows(file: Path, resumed_step: int) -> list[Row]:
    """Read the rows up to `resumed_step` and delete later ones from the file."""
    rows = [row for row in read_rows(file) if row["step"] <= resumed_step]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    write_whole(file, text)
    return rows


def read_rows(file: Path) -> list[Row]:
    """Read a metrics.jsonl; skip damaged lines, and lines without a step."""
    numbers = (int, float, type(None))
    return [
        row
        for _, row in user_text.whole_lines(file)
        if type(row.get("step")) is int
        and all(isinstance(row.get(name), numbers) for name in CURVES)
    ]


def tensorboard_writer(folder: Path, resumed_step: int) -> MetricsWriter:
    """A writer to TensorBoard, named as in metrics.jsonl; purges steps > `resumed_step`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.utils.tensorboard import SummaryWriter

    events = SummaryWriter(str(folder), purge_step=resumed_step + 1)

    def write(row: Row) -> None:
        for name, value in row.items():
            if name != "step" and value is not None:
                events.add_scalar(name, value, row["step"])
        events.flush()

    def picture(step: int, file: Path) -> None:
        from PIL import Image

        with Image.open(file) as image:
            events.add_image("samples", np.asarray(image.convert("RGB")), step, dataformats="HWC")
        events.flush()

    def text(step: int, file: Path) -> None:
        # As a block of code: TensorBoard reads Markdown, which joins lines.
        lines = file.read_text(encoding="utf-8").splitlines()
        events.add_text("samples", "\n".join(f"    {line}" for line in lines), step)
        events.flush()

    return MetricsWriter(write, by_suffix(picture, text))


def wandb_writer(
    folder: Path, name: str, run: Mapping[str, Any], project: str, entity: str | None
) -> MetricsWriter:
    """A writer to Weights & Biases; UserError if it cannot start."""
    import wandb

    # Stored, so that a resumed run continues the same wandb run.
    identity = folder / run_files.WANDB
    if not identity.is_file():
        write_whole(identity, uuid.uuid4().hex)
    try:
        wandb.init(
            project=project,
            entity=entity,
            name=name,
            id=identity.read_text(),
            dir=str(folder),
            config=dict(run),
            resume="allow",
        )
    except Exception as error:  # Of many kinds: no login, no network, no such entity.
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise UserError(
            f"[metrics] wandb=true, wandb_project={show(project)}, "
            f"wandb_entity={show(entity or '')}: wandb did not start: {reason}. Run `wandb login`, "
            "correct the names, set WANDB_MODE=offline, or set wandb = false."
        ) from None

    # wandb's own step only grows: it would drop the steps that are repeated after a kill.
    wandb.define_metric("step")
    wandb.define_metric("*", step_metric="step")

    def write(row: Row) -> None:
        wandb.log({k: v for k, v in row.items() if v is not None})

    def picture(step: int, file: Path) -> None:
        wandb.log({"samples": wandb.Image(str(file)), "step": step})

    def text(step: int, file: Path) -> None:
        shown = html.escape(file.read_text(encoding="utf-8"))
        wandb.log({"samples": wandb.Html(f"<pre>{shown}</pre>"), "step": step})

    return MetricsWriter(write, by_suffix(picture, text))


def by_suffix(picture: Show, text: Show) -> dict[str, Show]:
    """Suffix of a file -> `picture` or `text`."""
    return {**dict.fromkeys(PICTURES, picture), ".txt": text}


def finite_or_none(value: float) -> float | None:
    """Replace NaN and infinity, which JSON lacks, by None."""
    return value if math.isfinite(value) else None
