"""What a run reports: metrics.jsonl, TensorBoard, wandb, the loss curve and the console."""

from __future__ import annotations

import json
import math
import resource
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from titan_dit.config.operation import MetricsConfig
from titan_dit.observe.flops import Work

Row = dict[str, Any]
Writer = Callable[[Row], None]


class Metrics:
    """The writers of the one rank that speaks for the run."""

    def __init__(
        self,
        folder: Path,
        name: str,
        config: MetricsConfig,
        resumed_step: int,
        run: Mapping[str, Any],
    ) -> None:
        self.file = folder / "metrics.jsonl"
        self.rows = keep_rows(self.file, resumed_step)
        self.writers: list[Writer] = [self._write_line]
        if config.tensorboard:
            self.writers.append(tensorboard_writer(folder / "tensorboard", resumed_step))
        if config.wandb:
            self.writers.append(wandb_writer(folder, name, run))

    def log(self, row: Row) -> None:
        """One logged step, to every writer."""
        self.rows.append(row)
        for write in self.writers:
            write(row)

    def forget_after(self, step: int) -> None:
        """Drop the lines of later steps, which the run will do anew; other writers keep theirs."""
        self.rows = keep_rows(self.file, step)

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of the whole run, the part before a resume included."""
        finite = [row for row in self.rows if row.get(name) is not None]
        return [row["step"] for row in finite], [row[name] for row in finite]

    def _write_line(self, row: Row) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")


def row_of(
    step: int,
    samples: int,
    loss: float,
    grad_norm: float,
    lr: float,
    *,
    times: tuple[float, float],
    work: Work,
    peak_gib: float,
    nan_steps: int,
    spike_steps: int,
) -> Row:
    """The line of a step, `samples` from the start of training; `times` are of `Meter.read`."""
    step_ms, data_wait_ms = times
    return {
        "step": step,
        "samples": samples,
        "loss": finite_or_none(loss),
        "grad_norm": finite_or_none(grad_norm),
        "lr": lr,
        "step_ms": step_ms,
        **work.rates(step_ms),
        "peak_gib": peak_gib,
        "data_wait_ms": data_wait_ms,
        "skipped_steps": nan_steps + spike_steps,
        "nan_steps": nan_steps,
    }


def keep_rows(file: Path, resumed_step: int) -> list[Row]:
    """The rows up to the step a run goes on from; later ones will be written anew."""
    rows = [row for row in read_rows(file) if row["step"] <= resumed_step]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    aside = file.with_suffix(".jsonl.partial")
    aside.write_text(text)
    aside.replace(file)
    return rows


def read_rows(file: Path) -> list[Row]:
    """The rows of a metrics.jsonl, without a line that a kill cut short."""
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
    """Scalars under their names in metrics.jsonl."""
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
    """The same rows to Weights & Biases."""
    import wandb

    # Kept in the run directory, so that a resumed run goes on in the same one.
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


class Meter:
    """Time per step between two logged steps, and how much of it was spent waiting for data."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start anew from now."""
        self.start = time.perf_counter()
        self.steps = 0
        self.waited = 0.0

    def read(self) -> tuple[float, float]:
        """(milliseconds per step, of which waiting for data) since the last reading."""
        elapsed, steps = time.perf_counter() - self.start, max(1, self.steps)
        result = 1e3 * elapsed / steps, 1e3 * self.waited / steps
        self.restart()
        return result

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block as a wait for data."""
        began = time.perf_counter()
        yield
        self.waited += time.perf_counter() - began

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what happens in the block (previews, checkpoints) out of the time per step."""
        began = time.perf_counter()
        yield
        self.start += time.perf_counter() - began


def peak_gib(device: torch.device) -> float:
    """Highest memory of this rank so far: of the device, on a CPU of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def finite_or_none(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None
