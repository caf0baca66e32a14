"""Time per step, time spent waiting for data, peak memory."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Meter:
    """Mean time per step between two logged steps, and its part spent waiting for data."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Reset the times."""
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
        """Exclude the block (previews, checkpoints) from the time per step."""
        began = time.perf_counter()
        yield
        self.start += time.perf_counter() - began


def peak_gib(device: torch.device) -> float:
    """Peak memory of this rank: the device's; on a CPU, the process's (RSS)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
