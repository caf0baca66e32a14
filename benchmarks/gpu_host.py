"""Host time and device time of a step: does the device wait for the host?

A step is bound by the host if the device is idle for a part of it. The time until a step's call
returns is no measure of that: the driver's queue holds about a thousand launches, and a host that
is ahead waits for room in it. So the device's kernels are traced, and their time compared with that
of the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
from gpu_queue import Row
from torch.profiler import ProfilerActivity, profile

CALLS = 2
NUM_STEPS = CALLS + 2
"""Steps of `waiting`."""


def waiting(step: Callable[[], object], device: torch.device) -> Row:
    """`host_ms` and the columns of `on_device`."""
    # First, because a tracer can fail where steps do not, and slows them down.
    host = round(host_ms(step, device), 3)
    return {"host_ms": host, **on_device(step, device)}


def host_ms(step: Callable[[], object], device: torch.device) -> float:
    """Least milliseconds until a step's call returns, from an idle device: an upper limit."""
    found = []
    for _ in range(CALLS):
        synchronize(device)
        began = time.perf_counter()
        step()
        found.append(1e3 * (time.perf_counter() - began))
    synchronize(device)
    return min(found)


def on_device(step: Callable[[], object], device: torch.device) -> Row:
    """`busy_ms`, in which at least one kernel ran, and `kernels` of a step; {} on a CPU.

    The second of two traced steps, since the first starts the tracer.
    """
    if device.type != "cuda":
        return {}
    for _ in range(2):
        synchronize(device)
        # Kernels only: tracing operators would slow the host down.
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            step()
            synchronize(device)
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in trace.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    if not spans:
        return {}  # The machine does not let kernels be traced.
    return {"busy_ms": round(union(spans) / 1e3, 3), "kernels": len(spans)}


def union(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals (streams overlap)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
