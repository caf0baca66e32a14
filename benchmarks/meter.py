"""Time and memory of work on a device; ceilings of products and copies."""

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
"""Calls per timed lap, so that a lap is long relative to the clock's resolution."""
LEAD = 4096
"""Rows and columns of the product that keeps a GPU busy while its queue fills."""


class Meter(Protocol):
    """Device-specific measurements."""

    def laps_ms(self, work: Callable[[], object], times: int) -> list[float]:
        """Milliseconds of each of `times` calls, end to end, idle gaps included."""
        ...

    def call_ms(self, work: Callable[[], object]) -> float:
        """Device milliseconds of one call, with a full queue."""
        ...

    def restart_peak(self) -> None:
        """Reset the memory peak."""
        ...

    def peak_gib(self) -> float | None:
        """Peak allocated GiB since `restart_peak`; None on a CPU."""
        ...

    def reserved_gib(self) -> float | None:
        """Peak GiB that the allocator held since `restart_peak`; None on a CPU."""
        ...

    def memory_gib(self) -> float | None:
        """GiB of the device; None on a CPU."""
        ...

    def release(self) -> None:
        """Collect garbage and free cached memory."""
        ...


class HostMeter:
    """CPU: the host's clock."""

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

    def reserved_gib(self) -> float | None:
        """See `Meter`."""
        return None

    def memory_gib(self) -> float | None:
        """See `Meter`."""
        return None

    def release(self) -> None:
        """See `Meter`."""
        gc.collect()


class CudaMeter:
    """GPU: CUDA events, so that the host runs ahead as in training."""

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
        """See `Meter`: the mean of CALLS calls, queued behind products that outlast the launches.

        With an empty queue a small call would take as long as its launch on the host.
        """
        lead = self.lead()
        # Median: the first call may compile.
        launching_ms = CALLS * statistics.median(HostMeter().laps_ms(work, CALLS))
        # Second lap: the first product may load its kernel.
        leads = math.ceil(2 * launching_ms / self.laps_ms(lead, 2)[1])
        parts = iter([(lead, leads), (work, CALLS)])
        return self.laps_ms(lambda: _repeat(*next(parts)), 2)[1] / CALLS

    def lead(self) -> Callable[[], object]:
        """A product that is slow on the device and quick to launch."""
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

    def reserved_gib(self) -> float | None:
        """See `Meter`."""
        return torch.cuda.max_memory_reserved() / 2**30

    def memory_gib(self) -> float | None:
        """See `Meter`."""
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / 2**30

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
    # Random data: on zeros a GPU draws less power and runs faster.
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)

    def lap() -> None:
        for _ in range(CALLS):
            torch.mm(a, b.t(), out=out)

    return 2 * size**3 / (_median_ms(meter, lap, laps) / CALLS) / 1e9


def copy_gb_per_s(meter: Meter, device: torch.device, num_bytes: int, laps: int) -> float:
    """GB/s (1e9) of a copy in device memory, bytes read plus written."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def lap() -> None:
        for _ in range(CALLS):
            target.copy_(source)

    return 2 * num_bytes / (_median_ms(meter, lap, laps) / CALLS) / 1e6


def _median_ms(meter: Meter, lap: Callable[[], None], laps: int) -> float:
    meter.laps_ms(lap, max(1, laps // 4))
    return statistics.median(meter.laps_ms(lap, laps))
