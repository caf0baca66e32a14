"""[profile]: what one launch does in a few chosen steps, as a trace, a table and a picture."""

from __future__ import annotations

import gzip
import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from titan_dit.config.operation import ProfileConfig
from titan_dit.observe import memory_snapshot, profile_picture
from titan_dit.observe.profile_summary import MARK, STEPS, summarize


class Profile:
    """Profiles [profile] steps of this launch on this rank. Disabled, it does nothing at all.

    Every rank holds one, chosen or not: `begin` before and `is_over` after every step.
    """

    def __init__(
        self, config: ProfileConfig, folder: Path, rank: int, device: torch.device
    ) -> None:
        self.config, self.folder, self.rank, self.device = config, folder, rank, device
        self.is_chosen = rank in (config.ranks or (0,))
        self.taken = 0
        """Steps that this launch has begun."""
        self.span: tuple[int, int] | None = None
        """The first and the last step profiled so far."""
        self.profiler: profile | None = None
        self.window: record_function | None = None

    def begin(self, step: int) -> None:
        """Before a step, the wait for its data included."""
        if not self.config.enabled:
            return
        self.taken += 1
        first = self.config.start
        if first <= self.taken < first + self.config.steps:
            self.span = (self.span[0] if self.span else step, step)
        if not self.is_chosen:
            return
        # One step early: what the profiler sets up would be seen in the first profiled step.
        if self.taken == max(1, first - 1):
            self._prepare()
        if self.taken == first:
            self._start()

    def mark(self, name: str) -> AbstractContextManager[object]:
        """Count what the block launches, and waits for, as `name`."""
        return record_function(MARK + name) if self.window else nullcontext()

    def is_over(self, *, stopped: bool = False) -> bool:
        """Whether a profile is there to be written: after its last step, or the launch's last."""
        if not self.config.enabled or self.span is None:
            return False
        return stopped or self.taken == self.config.start + self.config.steps - 1

    def write(self) -> list[str]:
        """End the profile and write its files, where this rank was chosen; what there is to say."""
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
        # Not from the numbers: a run that goes back to a checkpoint counts some of them twice.
        steps = min(self.config.steps, self.taken - self.config.start + 1)
        lines = summary.lines(title, steps)
        (self.folder / f"summary-{name}.txt").write_text("\n".join(lines) + "\n")
        profile_picture.draw(self.folder / f"summary-{name}.png", summary, title, steps)
        if self.config.memory:
            lines.append(memory_snapshot.write(self.folder / f"memory-{name}.pickle", self.device))
        return [*lines, f"profile in {trace}"]

    def missed(self) -> str | None:
        """After the launch: why nothing was profiled, if it should have been."""
        if not self.config.enabled or self.taken >= self.config.start:
            return None
        return (
            f"[profile] start={self.config.start}: nothing was profiled, this launch took "
            f"{self.taken} steps"
        )

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
        # Before the window is closed: what was launched in it also ends in it.
        self._wait_for_device()
        self.window.__exit__(None, None, None)
        self.profiler.stop_trace()
        self.profiler.export_chrome_trace(str(trace))
        self.profiler = self.window = None

    def _wait_for_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
