"""Time and memory of work on a device, and the two ceilings that a step is held against."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Protocol

import torch

CALLS = 10
"""Calls per timed lap, so that a lap is long against the clock's ticks."""
LEAD = 4096
"""Rows and columns of the product that keeps a GPU busy while the host fills its queue."""


class Meter(Protocol):
    """What has to be asked of a device in its own way."""

    def laps_ms(self, work: Callable[[], object], times: int) -> list[float]:
        """Milliseconds of each of `times` calls, end to end: a gap in which nothing runs counts."""
        ...

    def call_ms(self, work: Callable[[], object]) -> float:
        """Milliseconds that the device takes for one call while the host is ahead of it."""
        ...

    def restart_peak(self) -> None:
        """Forget the highest use of memory so far."""
        ...

    def peak_gib(self) -> float | None:
        """Highest allocated memory since `restart_peak` in GiB; None where nobody counts it."""
        ...

    def release(self) -> None:
        """Give back the memory of what nothing refers to any more."""
        ...


class HostMeter:
    """A CPU: the host's own clock."""

    def laps_ms(self, work: Callable[[], object], times: int) -> list[float]:
        """See `Meter`."""
        ticks = [time.perf_counter()]
        for _ in range(times):
            work()
            ticks.append(time.perf_counter())
        return [1e3 * (end - start) for start, end in pairwise(ticks)]

    def call_ms(self, work: Callable[[], object]) -> float:
        """See `Meter`: the host is the device."""
        return self.laps_ms(work, 1)[0]

    def restart_peak(self) -> None:
        """See `Meter`."""

    def peak_gib(self) -> float | None:
        """See `Meter`."""
        return None

    def release(self) -> None:
        """See `Meter`."""
        gc.collect()


class CudaMeter:
    """A GPU: events in its queue, so that the host can run ahead as it does in training."""

    def laps_ms(self, work: Callable[[], object], times: int) -> list[float]:
        """See `Meter`."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
        torch.cuda.synchronize()
        events[0].record()
        for event in events[1:]:
            work()
            event.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairwise(events)]

    def call_ms(self, work: Callable[[], object]) -> float:
        """See `Meter`: the mean of CALLS calls, behind products that last until all are queued.

        On an idle queue a small call would take as long as the host needs to launch it.
        """
        lead = self.lead()
        # The median: the first call may compile.
        launching_ms = CALLS * statistics.median(HostMeter().laps_ms(work, CALLS))
        # The first product may still load its kernel.
        leads = math.ceil(2 * launching_ms / self.laps_ms(lead, 2)[1])
        parts = iter([(lead, leads), (work, CALLS)])
        return self.laps_ms(lambda: _repeat(*next(parts)), 2)[1] / CALLS

    def lead(self) -> Callable[[], object]:
        """A product that needs the device for long and the host for a moment."""
        kind = {"device": "cuda", "dtype": torch.bfloat16}
        a, b = (torch.randn(LEAD, LEAD, **kind) for _ in range(2))  # type: ignore[call-overload]
        out = torch.empty_like(a)
        return lambda: torch.mm(a, b, out=out)

    def restart_peak(self) -> None:
        """See `Meter`."""
        torch.cuda.reset_peak_memory_stats()

    def peak_gib(self) -> float | None:
        """See `Meter`."""
        return torch.cuda.max_memory_allocated() / 2**30

    def release(self) -> None:
        """See `Meter`."""
        gc.collect()
        torch.cuda.empty_cache()


def meter_of(device: torch.device) -> Meter:
    """The meter of a device."""
    return CudaMeter() if device.type == "cuda" else HostMeter()


def _repeat(work: Callable[[], object], times: int) -> None:
    for _ in range(times):
        work()


def gemm_tflops(meter: Meter, device: torch.device, size: int, laps: int) -> float:
    """TFLOP/s of a bf16 product of two [size, size], the second transposed as in nn.Linear."""
    # Random numbers: on zeros a GPU draws less power, and runs faster.
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)

    def lap() -> None:
        for _ in range(CALLS):
            torch.mm(a, b.t(), out=out)

    return 2 * size**3 / (_median_ms(meter, lap, laps) / CALLS) / 1e9


def copy_gb_per_s(meter: Meter, device: torch.device, num_bytes: int, laps: int) -> float:
    """GB/s (1e9) of a copy within the device's memory, what is read plus what is written."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def lap() -> None:
        for _ in range(CALLS):
            target.copy_(source)

    return 2 * num_bytes / (_median_ms(meter, lap, laps) / CALLS) / 1e6


def _median_ms(meter: Meter, lap: Callable[[], None], laps: int) -> float:
    meter.laps_ms(lap, max(1, laps // 4))
    return statistics.median(meter.laps_ms(lap, laps))
