"""Whether a rank fits the devices that are known, and the words of the dry run's tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from titan_dit.dry_run import estimate
from titan_dit.dry_run.memory import StorageKind
from titan_dit.dry_run.simpler import GIB, USABLE

DEVICES_GIB = {
    "RTX 4090, 24 GB": 23.5,
    "A100, 40 GB": 39.4,
    "L40S, 48 GB": 44.4,
    "A100, H100, 80 GB": 79.0,
    "H20, 96 GB": 95.0,
    "H200, 141 GB": 140.0,
    "B200, 180 GB": 178.0,
    "MI300X, 192 GB": 191.0,
    "B300, 288 GB": 268.0,
}
"""Memory as torch reports it: below what a device is sold with."""
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
    "reduce-scatter": "a sum over ranks, of which each keeps a part",
    "all-reduce": "a sum over ranks, which all get",
    "all-to-all": "each rank exchanges a part with each other one",
    "broadcast": "one rank's tensor, which all get",
    "send": "activations or their gradients, to the next pipeline stage",
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


def verdicts(peak: int, step_ms: Mapping[str, float] | None = None) -> Iterator[list[str]]:
    """Rows (device, usable GiB, needed GiB, fits, time of a step), the header first.

    `step_ms`: predicted milliseconds by device; a dry run knows none.
    """
    yield ["device", "usable", "needed", "fits", "step time"]
    known = dict(DEVICES_GIB)
    if torch.cuda.is_available():
        size, _ = estimate.rank_memory()
        known = {f"here: {torch.cuda.get_device_name()}": (size or 0) / GIB, **known}
    for name, gib in known.items():
        usable, needed = USABLE * gib, peak / GIB
        time = f"{step_ms[name]:.0f} ms" if step_ms and name in step_ms else "-"
        fits = "yes" if needed <= usable else "no"
        yield [name, f"{usable:.1f}", f"{needed:.2f}", fits, time]
