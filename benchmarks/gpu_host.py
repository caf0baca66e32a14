"""Host time and device time of a step: does the device wait for the host?

A step is bound by the host if the device is idle for a part of it. The time until a step's call
returns is no measure of that: the driver's queue holds about a thousand launches, and a host that
is ahead waits for room in it. So the device's kernels are traced, and their time compared with that
of the step.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from gpu_queue import Row
from torch.profiler import ProfilerActivity, profile

CALLS = 2
NUM_STEPS = CALLS + 2
"""Steps of `waiting`."""


KINDS = {
    "attention": re.compile(r"flash|fmha|sdpa|cudnn_generated|attention"),
    "compiled": re.compile(r"^triton"),
    "products": re.compile(r"gemm|nvjet|cutlass|xmma|cublas|splitk", re.IGNORECASE),
    "copies": re.compile(r"^Mem(cpy|set)"),
}
"""Kinds of kernels by their names, the first that matches; the rest are "other"."""
NUM_SLOWEST = 30


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
    """`busy_ms`, in which at least one kernel ran, `kernels` of a step, and where its time went.

    `span_ms`: from the first kernel to the end of the last one. {} on a CPU. The second of two
    traced steps, since the first starts the tracer.
    """
    if device.type != "cuda":
        return {}
    for _ in range(2):
        synchronize(device)
        # Kernels only: tracing operators would slow the host down.
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            step()
            synchronize(device)
    ran = [
        (str(event.name), event.time_range.start, event.time_range.end)
        for event in trace.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    if not ran:
        return {}  # The machine does not let kernels be traced.
    busy = round(union((start, end) for _, start, end in ran) / 1e3, 3)
    span = (max(end for *_, end in ran) - min(start for _, start, _ in ran)) / 1e3
    return {"busy_ms": busy, "span_ms": round(span, 3), "kernels": len(ran), **spent(ran)}


def spent(ran: Iterable[tuple[str, float, float]]) -> Row:
    """`by_kind_ms` and the `slowest` kernels, by (name, start, end) in microseconds."""
    by_name: dict[str, list[float]] = defaultdict(list)
    by_kind: dict[str, float] = defaultdict(float)
    for name, start, end in ran:
        by_name[name].append((end - start) / 1e3)
        by_kind[kind_of(name)] += (end - start) / 1e3
    slowest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:NUM_SLOWEST]
    rows = [
        {"ms": round(sum(ms), 3), "calls": len(ms), "kernel": name[:120]} for name, ms in slowest
    ]
    return {"by_kind_ms": {kind: round(ms, 3) for kind, ms in by_kind.items()}, "slowest": rows}


def kind_of(name: str) -> str:
    """One of KINDS, or "other"."""
    return next((kind for kind, pattern in KINDS.items() if pattern.search(name)), "other")


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
