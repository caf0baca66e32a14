"""Devices, nodes and links as data: hardware/*.toml, or a file of the user's own.

Bandwidths are per direction, in GB/s (1e9 bytes); `copy_gb_per_s` counts bytes read plus written.
Peaks are those of data sheets. What of them is reached is in `Efficiency`, from a calibration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of the peaks that a software reaches, 0 to 1: what a calibration fits."""

    products: float
    """Large matrix products, of the peak."""
    attention: float
    """Fused attention of long sequences, of the peak."""
    moved: float
    """Elementwise kernels, of the copy rate."""
    inner: float
    """Collectives inside a node, of the link."""
    node: float
    """Collectives across nodes, of the link."""


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """Device memory beside torch's tensors: what a calibration of memory fits."""

    context_mib: float
    """CUDA context, kernels and libraries."""
    communicator_mib: float
    """Buffers of one NCCL communicator."""
    allocator: float
    """Reserved over allocated bytes, at least 1: rounding and fragments of the allocator."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device, its node and its links."""

    name: str
    memory_gib: float
    """What torch reports, see `dry_run.devices`."""
    peak_tflops: Mapping[str, float]
    """By format: "fp32", "fp16", "bf16", "float8"; dense."""
    copy_gb_per_s: float
    gpus_per_node: int
    inner_gb_per_s: Mapping[int, float]
    """Bandwidth of a rank inside a node, by the size of its group; see `inner`."""
    inner_latency_us: float
    """Of one hop."""
    nics_per_node: int
    nic_gb_per_s: float
    """Of each."""
    node_latency_us: float
    """Of one hop between nodes."""
    launch_us: float
    """Host time of one kernel."""
    efficiency: Efficiency
    overhead: Overhead
    error: float
    """Relative error to expect of a step's time: from a calibration, else of devices on which
    only the data sheet was known."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Key -> where its number is from."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of a calibration: torch, this project, the driver."""

    def inner(self, ranks: int) -> float:
        """Bandwidth inside a node of a rank in a group of `ranks`: the next smaller known size."""
        known = [size for size in self.inner_gb_per_s if size <= ranks]
        return self.inner_gb_per_s[max(known, default=min(self.inner_gb_per_s))]
