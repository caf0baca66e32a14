"""`python -m titan_dit bench attention`: benchmark the attention kernels on one shape."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titan_dit.commands import results_file
from titan_dit.commands.flags import BenchAttentionFlags
from titan_dit.kernels import attention
from titan_dit.kernels.attention_choice import AttentionShape
from titan_dit.models.base import Mask
from titan_dit.observe import console
from titan_dit.parallel.fsdp import DTYPES
from titan_dit.parallel.ring_attention import ring_attention
from titan_dit.system.progress import ProgressLine

CHECKED = 1024
"""Queries compared with exact attention; all n x n fp32 scores would not fit in memory."""


def main(options: BenchAttentionFlags) -> None:
    """Measure, print and write the table."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    heads, head_dim = options.shape
    ring = f", one rank of a ring of {options.ring}" if options.ring > 1 else ""
    mask: Mask = "causal" if options.causal else "none"
    masked = ", causal" if options.causal else ""
    console.say(
        f"{options.batch} samples, {heads} heads of {head_dim} channels{masked}, "
        f"{options.dtype}{ring}, "
        f"{describe_device(device)['device']}"
    )
    rows, refused = [], {}
    progress = ProgressLine(len(options.tokens) * len(options.backends), "kernels")
    for tokens in options.tokens:
        shape = AttentionShape(
            heads,
            tokens // options.ring,
            head_dim,
            DTYPES[options.dtype],
            device,
            options.ring > 1,
            mask,
        )
        for name in options.backends:
            reason = attention.refusal(name, shape)
            if reason is None:
                rows.append(
                    row(name, shape, options.batch, options.laps, options.ring, options.compiled)
                )
            else:
                refused[name] = reason
            progress.add(1)
    progress.end()
    attention.use_implementation("auto")
    for line in table(rows):
        console.say(line)
    for name, reason in refused.items():
        console.say(f"{name}: {reason}")
    if options.out:
        found = {"benchmark": "attention", **describe_device(device), "batch": options.batch}
        found |= {"heads": heads, "head_dim": head_dim, "dtype": options.dtype}
        found |= {"ring": options.ring, "compiled": options.compiled, "causal": options.causal}
        found |= {"rows": rows, "refused": refused}
        results_file.write("--out", Path(options.out), json.dumps(found, indent=2) + "\n")


@dataclass(frozen=True)
class Echo:
    """`Peers` of a ring on one device: every message comes back.

    A rank then attends `size` times to its own keys: the work of a ring, and the output of
    attention to these keys alone. Causal, that is the output for the first half of the queries: the
    first rank sees no keys of others there.
    """

    size: int
    rank: int = 0

    def send(self, message: Tensor) -> Tensor:
        """Return the message."""
        return message

    def arrive(self, incoming: Tensor) -> Tensor:
        """Return the message."""
        return incoming

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Return the message."""
        return parts


def row(
    name: str,
    shape: AttentionShape,
    batch: int,
    laps: int,
    ring: int = 1,
    compiled: bool = False,
) -> dict[str, Any]:
    """Benchmark one kernel on one shape: median times, TFLOP/s and relative error.

    `shape`: of one rank of the `ring`. `error`: max |output - exact| / max |exact|, with exact
    attention in fp32, on the first queries of the first sample's first head.
    """
    tokens = shape.tokens * ring
    kernel = attention.kernel_of(name, shape)
    took = {"backend": name, "kernel": kernel, "tokens": tokens}
    took |= {"ring": ring, "compiled": compiled}
    causal = shape.mask == "causal"
    attend = attention.attend_by(name, shape.device.type)
    if shape.ring:
        attend = partial(ring_attention, peers=Echo(ring), kernel=kernel, compiled=compiled)
    attend = partial(attend, causal=causal)
    try:
        forward, backward, error = measure(attend, shape, batch, laps)
    except torch.OutOfMemoryError:
        return {**took, "error": "out of memory"}
    flops = 4 * batch * shape.heads * shape.tokens * tokens * shape.head_dim // (1 + causal)
    return {
        **took,
        "forward ms": forward,
        "backward ms": backward,
        "both ms": forward + backward,
        "forward TFLOP/s": flops / forward / 1e9,
        "backward TFLOP/s": 2 * flops / backward / 1e9,
        "both TFLOP/s": 3 * flops / (forward + backward) / 1e9,
        "error": error,
    }


def measure(
    attend: attention.Attend, shape: AttentionShape, batch: int, laps: int
) -> tuple[float, float, float]:
    """Return forward and backward milliseconds, and the `error` of `row`."""
    generator = torch.Generator(shape.device).manual_seed(0)
    draw = {"generator": generator, "device": shape.device, "dtype": shape.dtype}
    size = batch, shape.tokens, shape.heads
    # Strides as in `layers.Attention`: views of one projection [b, tokens, heads, 3, head_dim].
    projected = torch.randn(*size, 3, shape.head_dim, **draw).requires_grad_()  # type: ignore[call-overload]
    q, k, v = (part.transpose(1, 2) for part in projected.unbind(3))
    d_out = torch.randn(*size, shape.head_dim, **draw).transpose(1, 2)  # type: ignore[call-overload]
    # Separate leaves exclude the projection's backward.
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    graph = attend(*leaves)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(graph, leaves, d_out, retain_graph=True)

    times = [median_ms(work, shape.device, laps) for work in (lambda: attend(*leaves), backward)]
    causal = shape.mask == "causal"
    count = min(CHECKED, shape.tokens // (1 + causal))
    keys = count if causal else shape.tokens
    q, k, v = (
        x[:1, :1].detach().float() for x in (q[:, :, :count], k[:, :, :keys], v[:, :, :keys])
    )
    exact = attention.by_products(q, k, v, causal)
    found = graph[:1, :1, :count].detach().float()
    error = (found - exact).abs().max() / exact.abs().max()
    return times[0], times[1], error.item()


def median_ms(work: Callable[[], object], device: torch.device, laps: int) -> float:
    """Return the median milliseconds of a call; on a GPU measured with CUDA events."""
    for _ in range(max(1, laps // 4)):
        work()
    if device.type == "cuda":
        events: list[Any] = [
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(laps + 1)
        ]
        events[0].record()
        for event in events[1:]:
            work()
            event.record()
        torch.cuda.synchronize()
        return float(statistics.median(a.elapsed_time(b) for a, b in pairwise(events)))
    ticks = [time.perf_counter()]
    for _ in range(laps):
        work()
        ticks.append(time.perf_counter())
    return 1e3 * statistics.median(b - a for a, b in pairwise(ticks))


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Format rows as aligned columns."""
    if not rows:
        return ["no backend supports this shape"]
    header = max((list(row) for row in rows), key=len)
    cells = [header] + [[as_text(row.get(name, "")) for name in header] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(f"{x:>{w}}" for x, w in zip(line, widths, strict=True)) for line in cells]


def as_text(value: object) -> str:
    """Format floats with three digits."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def describe_device(device: torch.device) -> dict[str, Any]:
    """Describe the device and torch's version."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    found = {"device": name, "threads": torch.get_num_threads(), "torch": torch.__version__}
    if device.type == "cuda":
        found["cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return found
