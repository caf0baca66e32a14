"""The output of a run: console lines, metrics.jsonl, TensorBoard, wandb, previews."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from titan_dit.config.config_file import Tables, to_toml
from titan_dit.config.operation import MetricsConfig
from titan_dit.objectives.base import Preview
from titan_dit.observe import console
from titan_dit.observe.curve import draw_curve
from titan_dit.observe.metrics import (
    MetricsWriter,
    Row,
    curve,
    keep_rows,
    tensorboard_writer,
    wandb_writer,
)
from titan_dit.ranks.disk_errors import refuse_full
from titan_dit.system import run_files
from titan_dit.system.files import write_whole
from titan_dit.system.progress import Line, width_of


class RunLog:
    """Called on every rank, writes on rank 0. A failed write is reported; the run continues."""

    def __init__(self, folder: Path, name: str, *, is_written: bool) -> None:
        self.folder, self.name, self.is_written = folder, name, is_written
        self.is_open = False
        self.rows: list[Row] = []
        self.writers: list[MetricsWriter] = []
        self.failed: set[str] = set()
        self.line = Line("stdout")

    @property
    def metrics_file(self) -> Path:
        """The file with one JSON row per logged step."""
        return self.folder / run_files.METRICS

    def open(self, tables: Tables, config: MetricsConfig, resumed_step: int) -> None:
        """Write the resolved config, drop rows after `resumed_step`, open the metrics writers."""
        if not self.is_written:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / run_files.CONFIG, to_toml(tables))
            self.rows, self.is_open = keep_rows(self.metrics_file, resumed_step), True
        except OSError as error:
            refuse_full(error, f"[job] {self.folder}", "--job.dir")
            raise
        if config.tensorboard:
            self.writers.append(tensorboard_writer(self.folder / "tensorboard", resumed_step))
        if config.wandb:
            self.writers.append(
                wandb_writer(
                    self.folder,
                    self.name,
                    tables,
                    project=config.wandb_project,
                    entity=config.wandb_entity,
                )
            )

    @contextmanager
    def tolerated(self, what: str) -> Iterator[None]:
        """Catch OSError in the block that writes `what`; report it once until a write succeeds."""
        try:
            yield
        except OSError as error:
            if what not in self.failed:
                self.say(f"{what} could not be written: {error}; training continues without it")
            self.failed.add(what)
        else:
            self.failed.discard(what)

    def say(self, *lines: str | None) -> None:
        """Print lines on the console; None is skipped."""
        for line in lines:
            if self.is_written and line is not None:
                self.line.end()
                console.mention(line)

    def progress(self, row: Row, steps: int) -> None:
        """Show a logged step of `steps`; on a terminal the next one replaces it.

        One with a validation loss stays on the screen.
        """
        if self.is_written:
            self.line.show(console.progress(row, steps, width_of(sys.stdout)))
            if console.LOSS in row:
                self.line.end()

    def add(self, file: str, line: dict[str, Any]) -> None:
        """Append a line of JSON to a file of the run directory."""
        if self.is_open:
            with self.tolerated(file), (self.folder / file).open("a") as lines:
                lines.write(json.dumps(line) + "\n")

    def log(self, row: Row) -> None:
        """Write a row of metrics with every writer."""
        if self.is_open:
            self.rows.append(row)
            with self.tolerated("metrics"):
                with self.metrics_file.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                for writer in self.writers:
                    writer.row(row)

    def forget_after(self, step: int) -> None:
        """Drop metrics rows after `step`, on a rollback; other writers keep theirs."""
        if self.is_open:
            with self.tolerated("metrics"):
                self.rows = keep_rows(self.metrics_file, step)

    def show(self, step: int, preview: Preview) -> None:
        """Write a preview; the metrics writers show pictures and texts."""
        if self.is_open:
            file = self.folder / "samples" / f"step-{step:08d}{preview.suffix}"
            with self.tolerated("a preview"):
                file.parent.mkdir(parents=True, exist_ok=True)
                preview.write(file)
                self.say(f"drew {file}", preview.note or None)
                for writer in self.writers:
                    if show := writer.shows.get(preview.suffix):
                        show(step, file)

    def draw_curve(self) -> None:
        """Draw the training loss so far, and the validation loss if there is one."""
        if self.is_open:
            with self.tolerated("loss.png"):
                title, points = f"{self.name}: training loss", curve(self.rows, console.LOSS)
                if points[0]:
                    title += " (blue) and validation loss (red)"
                mean = curve(self.rows, "smooth_loss", "loss")
                file, losses = self.folder / "loss.png", curve(self.rows, "loss")
                draw_curve(file, *losses, title, points, mean)
