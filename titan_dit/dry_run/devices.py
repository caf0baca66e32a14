"""Known devices, whether a rank fits them, and explanations of the dry run's tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from titan_dit.dry_run import estimate
from titan_dit.dry_run.memory import StorageKind

GIB = 2**30
DEVICES_GIB = {
    "RTX 4090, 24 GB": 23.5,  # 23.52 (sgl-project/sglang#12496), 23.64 (ali-vilab/VGen#104)
    "A100, 40 GB": 39.3,  # 39.38, 39.49, 39.56
    "L40S, 48 GB": 44.3,  # 44.42 (stepfun-ai/Step-Video-T2V#8); 44.34, 44.39
    "A100, H100, 80 GB": 79.0,  # 79.10 to 79.19
    "H20, 96 GB": 95.0,  # 95.09 (zwq2018/embodied_reasoner#10); 95.00, 95.22
    "H200, 141 GB": 139.7,  # 139.80 (Stas Bekman, Machine Learning Engineering), 139.81
    "B200, 180 GB": 178.3,  # 178.35 (the same book), 178.36
    "MI300X, 192 GB": 191.6,  # 191.69, 191.98
    "B300, 288 GB": 267.6,  # 267.69; nvidia-smi: 275,040 MiB, 268.6 GiB
}
"""GiB of each device: what torch reports as `total_memory`, or "total capacity" when out of memory.

Drivers differ a little: each figure is below the smallest that was found. The comments hold figures
of public issues or, without a name, of other people's logs. None was measured here.
"""
USABLE = 0.9
"""Usable share of the memory; the rest is for the driver, NCCL's buffers and fragmentation."""
WORDS = {
    StorageKind.PARAMETERS: "this rank's shards of the weights, fp32",
    StorageKind.GRADIENTS: "gradients of the shards, fp32",
    StorageKind.OPTIMIZER: "the optimizer's state, fp32",
    StorageKind.EMA: "averages of the weights, fp32",
    StorageKind.GATHERED: "weights gathered from other ranks, or copies in the compute dtype",
    StorageKind.UNREDUCED: "gradients before they are summed over ranks or cast to fp32",
    StorageKind.ACTIVATIONS: "what forward keeps for backward",
    StorageKind.INPUTS: "the batch, its noise and targets",
    StorageKind.TEMPORARY: "working memory of backward, recomputation and optimizer",
}
PEAK = "the highest sum within a step, which the device must hold"
SENT = {
    "all-gather": "each rank gets the parts of all ranks",
    "reduce-scatter": "the sum over ranks, of which each keeps a part",
    "all-reduce": "the sum over ranks, on each of them",
    "all-to-all": "each rank sends a different part to each other rank",
    "broadcast": "one rank's tensor, sent to all ranks",
    "send": "activations, gradients and tied weights, to other pipeline stages",
    "ring": "keys and values, from rank to rank",
}
IDLE = "share of the step that the rank waits for other pipeline stages"


def words(kinds: Iterable[StorageKind]) -> Iterator[str]:
    """A line for every column of the memory table."""
    yield from aligned({**{str(kind): WORDS[kind] for kind in kinds}, "peak": PEAK})


def operations(names: Iterable[str]) -> Iterator[str]:
    """A line for every operation of the traffic table."""
    used = set(names)
    yield from aligned({name: meaning for name, meaning in SENT.items() if name in used})


def aligned(rows: Mapping[str, str]) -> Iterator[str]:
    """A line of name and meaning for each row."""
    width = max(map(len, rows), default=0)
    for name, meaning in rows.items():
        yield f"  {name:{width}}  {meaning}"


def verdicts(peak: int) -> Iterator[list[str]]:
    """Rows (device, usable GiB, needed GiB, fits), the header first."""
    yield ["device", "usable", "needed", "fits"]
    known = dict(DEVICES_GIB)
    if torch.cuda.is_available():
        size, _ = estimate.rank_memory()
        known = {f"here: {torch.cuda.get_device_name()}": (size or 0) / GIB, **known}
    for name, gib in known.items():
        usable, needed = USABLE * gib, peak / GIB
        fits = "yes" if needed <= usable else "no"
        yield [name, f"{usable:.1f}", f"{needed:.2f}", fits]
