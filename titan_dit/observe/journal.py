"""What a run tells of itself: lines on the console, rows of metrics, pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from titan_dit.config import JobConfig
from titan_dit.config_file import to_tables, to_toml
from titan_dit.observe import console, images
from titan_dit.observe.metrics import Metrics, Row
from titan_dit.observe.sparing import Sparing


class Journal:
    """Told by every rank, written by one. A full disk costs a part of it, not the run."""

    def __init__(self, folder: Path, name: str, *, is_written: bool) -> None:
        self.folder, self.name, self.is_written = folder, name, is_written
        self.sparing = Sparing(self.say)
        self.metrics: Metrics | None = None

    def open(self, config: JobConfig[Any, Any, Any], resumed_step: int) -> None:
        """Write the resolved config, and from here on into the run directory too."""
        if self.is_written:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "config.toml").write_text(to_toml(config))
            tables = to_tables(config)
            self.metrics = Metrics(self.folder, self.name, config.metrics, resumed_step, tables)

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

    def draw_samples(
        self, step: int, latents: Tensor, labels: Tensor, value_range: tuple[float, float] | None
    ) -> None:
        """Samples in stored units, one picture of all."""
        if self.metrics:
            picture = self.folder / "samples" / f"step-{step:08d}.png"
            with self.sparing("pictures"):
                images.draw_grid(picture, latents, labels.tolist(), value_range)
                self.say(f"drew {picture}")

    def draw_curve(self) -> None:
        """The loss so far, as a picture."""
        if self.metrics:
            with self.sparing("loss.png"):
                title = f"{self.name}: training loss"
                images.draw_curve(self.folder / "loss.png", *self.metrics.curve(), title)
