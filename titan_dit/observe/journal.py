"""What a run tells of itself: lines on the console, rows of metrics, pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from titan_dit.config.config_file import Tables, to_toml
from titan_dit.config.operation import MetricsConfig
from titan_dit.objectives.base import Preview
from titan_dit.observe import console
from titan_dit.observe.console import LOSS
from titan_dit.observe.curve import draw_curve
from titan_dit.observe.metrics import Metrics, Row
from titan_dit.observe.sparing import Sparing


class Journal:
    """Told by every rank, written by one. A full disk costs a part of it, not the run."""

    def __init__(self, folder: Path, name: str, *, is_written: bool) -> None:
        self.folder, self.name, self.is_written = folder, name, is_written
        self.sparing = Sparing(self.say)
        self.metrics: Metrics | None = None

    def open(self, tables: Tables, writers: MetricsConfig, resumed_step: int) -> None:
        """Write the resolved config, and from here on into the run directory too."""
        if self.is_written:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "config.toml").write_text(to_toml(tables))
            self.metrics = Metrics(self.folder, self.name, writers, resumed_step, tables)

    def say(self, *lines: str | None) -> None:
        """Tell the person at the console; None is nothing to tell."""
        for line in lines:
            if self.is_written and line is not None:
                console.mention(line)

    def add(self, file: str, line: dict[str, Any]) -> None:
        """A line of JSON, to a file of the run directory."""
        if self.metrics:
            with self.sparing(file), (self.folder / file).open("a") as lines:
                lines.write(json.dumps(line) + "\n")

    def log(self, row: Row) -> None:
        """A row of metrics."""
        if self.metrics:
            with self.sparing("metrics"):
                self.metrics.log(row)

    def forget_after(self, step: int) -> None:
        """Drop the rows of later steps, which the run will do anew."""
        if self.metrics:
            with self.sparing("metrics"):
                self.metrics.forget_after(step)

    def show(self, step: int, preview: Preview) -> None:
        """What a run shows of itself, a file of its family's."""
        if self.metrics:
            file = self.folder / "samples" / f"step-{step:08d}{preview.suffix}"
            with self.sparing("pictures"):
                file.parent.mkdir(parents=True, exist_ok=True)
                preview.write(file)
                self.say(f"drew {file}")

    def draw_curve(self) -> None:
        """The loss so far, as a picture."""
        if self.metrics:
            with self.sparing("loss.png"):
                title, points = f"{self.name}: training loss", self.metrics.curve(LOSS)
                if points[0]:
                    title += " (blue) and validation loss (red)"
                draw_curve(self.folder / "loss.png", *self.metrics.curve("loss"), title, points)
