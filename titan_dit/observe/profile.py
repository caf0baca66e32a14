"""[profile]: a trace, a table and a picture of a few steps of one launch."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from titan_dit.config.operation import ProfileConfig
from titan_dit.observe import memory_snapshot, profile_picture
from titan_dit.observe.profile_summary import MARK, STEPS, summarize

SLOWED = "recorded while the ranks of [profile] were profiled, which slows them down"


class Recording(Protocol):
    """A recording of the timeline of a pipeline; the ranks of a run call it together."""

    def begin(self) -> None:
        """Begin a window; an unwritten one is discarded."""

    def step(self, step: int) -> None:
        """A step of the window begins."""

    def outside(self, name: str) -> AbstractContextManager[None]:
        """Attribute the block to `name`."""

    def write(self, folder: Path, note: str) -> list[str]:
        """End the window, write its files with a note, and return console lines."""


class Profile:
    """Profiles the steps of [profile] on this rank; does nothing if disabled.

    Every rank has one: call `begin` before and `is_over` after every step. Only the ranks of
    [profile] record. A pipeline's timeline covers the same number of steps after the profiled ones,
    because the profiler slows its ranks down. If a launch ends before these, the timeline of the
    profiled steps is written.
    """

    def __init__(
        self,
        config: ProfileConfig,
        run: Path,
        rank: int,
        device: torch.device,
        pipeline: Recording | None = None,
    ) -> None:
        self.config, self.rank, self.device = config, rank, device
        self.folder, self.pipeline = run / "profile", pipeline
        self.recording = self.stopped = False
        self.is_chosen = rank in (config.ranks or (0,))
        self.taken = 0
        """Steps started in this launch."""
        self.span: tuple[int, int] | None = None
        """First and last step profiled so far."""
        self.profiler: profile | None = None
        self.window: record_function | None = None

    def begin(self, step: int) -> None:
        """Call before a step and its wait for data."""
        if not self.config.enabled:
            return
        self.taken += 1
        first = self.config.start
        if first <= self.taken < first + self.config.steps:
            self.span = (self.span[0] if self.span else step, step)
        if self.is_chosen:
            # One step early: the profiler's set-up must not fall into the first profiled step.
            if self.taken == max(1, first - 1):
                self._prepare()
            if self.taken == first:
                self._start()
        if self.pipeline:
            self._record(self.pipeline, step)

    def mark(self, name: str) -> AbstractContextManager[object]:
        """Attribute the kernels and waits of the block to `name`."""
        profiled = record_function(MARK + name) if self.window else nullcontext()
        return self._both(profiled, name) if self.recording else profiled

    def is_over(self, *, stopped: bool = False) -> bool:
        """True if a profile is ready to write: after its last step, or when training `stopped`."""
        if not self.config.enabled:
            return False
        self.stopped, first, steps = stopped, self.config.start, self.config.steps
        if self.span is not None:
            return stopped or self.taken == first + steps - 1
        return self.recording and (stopped or self.taken == first + 2 * steps - 1)

    def write(self) -> list[str]:
        """Write the profile, the pipeline's timeline or both, if finished; return console lines."""
        lines: list[str] = []
        try:
            if self.span:
                lines += self._write_profile()
        finally:  # The ranks of a pipeline write together, even if one could not write its profile.
            lines += self._write_timeline()
        return lines

    def _write_timeline(self) -> list[str]:
        is_clean = self.taken >= self.config.start + self.config.steps
        if not (self.recording and self.pipeline and (self.stopped or is_clean)):
            return []
        self.recording = False
        return self.pipeline.write(self.folder, "" if is_clean else SLOWED)

    def _write_profile(self) -> list[str]:
        """Stop the profile, write its files on the chosen ranks, and return console lines."""
        assert self.span
        (first, last), self.span = self.span, None
        if not self.is_chosen:
            return [f"profiles of ranks {', '.join(map(str, self.config.ranks))} in {self.folder}"]
        name = f"rank-{self.rank}-steps-{first}-{last}"
        self.folder.mkdir(parents=True, exist_ok=True)
        trace = self.folder / f"{name}.json.gz"
        self._stop(trace)
        with gzip.open(trace, "rt") as file:
            summary = summarize(json.load(file)["traceEvents"])
        title = f"rank {self.rank}, steps {first} to {last}"
        # Not last - first + 1: a rollback repeats step numbers.
        steps = min(self.config.steps, self.taken - self.config.start + 1)
        lines = summary.lines(title, steps)
        (self.folder / f"summary-{name}.txt").write_text("\n".join(lines) + "\n")
        profile_picture.draw(self.folder / f"summary-{name}.png", summary, title, steps)
        if self.config.memory:
            lines.append(memory_snapshot.write(self.folder / f"memory-{name}.pickle", self.device))
        return [*lines, f"profile in {trace}"]

    def missed(self) -> str | None:
        """After the launch: a warning if it ended before the first profiled step, else None."""
        if not self.config.enabled or self.taken >= self.config.start:
            return None
        return (
            f"[profile] start={self.config.start}: nothing was profiled, this launch took only "
            f"{self.taken} steps. Lower start."
        )

    def _record(self, pipeline: Recording, step: int) -> None:
        first = self.config.start
        if self.taken in (first, first + self.config.steps):
            pipeline.begin()
            self.recording = True
        if self.recording:
            pipeline.step(step)

    @contextmanager
    def _both(self, profiled: AbstractContextManager[object], name: str) -> Iterator[None]:
        assert self.pipeline
        with self.pipeline.outside(name), profiled:
            yield

    def _prepare(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self.profiler = profile(activities=activities, acc_events=True)
        self.profiler.prepare_trace()

    def _start(self) -> None:
        assert self.profiler
        if self.config.memory:
            memory_snapshot.start(self.device)
        self._wait_for_device()
        self.profiler.start_trace()
        self.window = record_function(MARK + STEPS)
        self.window.__enter__()  # type: ignore[no-untyped-call]

    def _stop(self, trace: Path) -> None:
        assert self.profiler
        assert self.window
        # Before the window closes: kernels launched in it also end in it.
        self._wait_for_device()
        self.window.__exit__(None, None, None)
        self.profiler.stop_trace()
        self.profiler.export_chrome_trace(str(trace))
        self.profiler = self.window = None

    def _wait_for_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
