"""Time per step, time spent waiting for data, peak memory, FLOPs and MFU."""

from __future__ import annotations

import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

# Dense bf16 tensor-core peaks in TFLOP/s, from the vendors' data sheets; the longest match wins.
# The peaks in fp16 are the same.
PEAK_BF16_TFLOPS = {
    "A100": 312,
    "A800": 312,
    "H20": 148,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "H200": 989,
    "H800": 989,
    "GH200": 989,
    "L40S": 362,
    "B200": 2250,
    "GB200": 2500,
}
PEAK_FP16_TFLOPS = {"Tesla T4": 65, "V100-PCIE": 112, "V100": 125}
"""Dense fp16 peaks in TFLOP/s of GPUs without bf16."""


def peak_tflops(device: torch.device, dtype: str) -> float | None:
    """Peak TFLOP/s of the device in bf16 or fp16; None if unknown (a CPU, fp32)."""
    if device.type != "cuda" or dtype not in ("bf16", "fp16"):
        return None
    peaks = PEAK_BF16_TFLOPS | (PEAK_FP16_TFLOPS if dtype == "fp16" else {})
    name = torch.cuda.get_device_name(device)
    matches = [known for known in peaks if known in name]
    return peaks[max(matches, key=len)] if matches else None


@dataclass(frozen=True)
class Throughput:
    """Samples of a step over all ranks, and the cost per sample, for throughput and MFU."""

    samples: float
    tokens_per_sample: float
    """Predicted tokens."""
    flops_per_sample: float
    """Forward and backward, without recomputation."""
    ranks: int
    peak_tflops: float | None
    """Peak TFLOP/s of one rank's device; None if unknown."""

    def rates(self, step_ms: float) -> dict[str, float | None]:
        """Throughput and MFU of a step of `step_ms`, by the keys of metrics.jsonl."""
        samples_per_s = self.samples / step_ms * 1e3
        tflops = samples_per_s * self.flops_per_sample / self.ranks / 1e12
        return {
            "samples_per_s": samples_per_s,
            "tokens_per_s": samples_per_s * self.tokens_per_sample,
            "tflops_per_gpu": tflops,
            "mfu": tflops / self.peak_tflops if self.peak_tflops else None,
        }


def mean_step(work: Sequence[Throughput], steps: Mapping[int, int]) -> Throughput:
    """The mean step of some of each bucket; `steps`: bucket -> steps."""
    taken = [(work[bucket], number) for bucket, number in steps.items()] or [(work[0], 1)]
    total = sum(number for _, number in taken)
    samples = sum(each.samples * number for each, number in taken)
    tokens = sum(each.samples * number * each.tokens_per_sample for each, number in taken)
    flops = sum(each.samples * number * each.flops_per_sample for each, number in taken)
    return replace(
        work[0],
        samples=samples / total,
        tokens_per_sample=tokens / samples,
        flops_per_sample=flops / samples,
    )


class Meter:
    """Mean time per step between two logged steps, and its part spent waiting for data."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Reset the times."""
        self.start = time.perf_counter()
        self.steps = 0
        self.steps_of: Counter[int] = Counter()
        """Steps of each bucket."""
        self.waited = 0.0

    def count(self, bucket: int) -> None:
        """Count a step of a bucket."""
        self.steps += 1
        self.steps_of[bucket] += 1

    def read(self) -> tuple[float, float]:
        """(ms per step, ms of these waiting for data), means since the last call; resets them."""
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
