"""Console output of a dry run: memory, traffic, and the devices that a rank fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from titan_dit.checks.device import rank_memory
from titan_dit.checks.pipeline import order_hint
from titan_dit.dry_run.fake_step import RankReport, Report
from titan_dit.dry_run.memory import StorageKind
from titan_dit.dry_run.pipeline import most_held, simulated
from titan_dit.pipeline.schedules.schedule import peak_activations
from titan_dit.plan import RunPlan

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
DEVICE_WORDS = {
    StorageKind.PARAMETERS: "this rank's shards of the weights, or the bytes of [lora] base",
    StorageKind.GRADIENTS: "gradients of the shards",
    StorageKind.OPTIMIZER: "the optimizer's state",
    StorageKind.EMA: "averages of the weights, fp32",
    StorageKind.GATHERED: "weights gathered from other ranks, or copies in the compute dtype",
    StorageKind.UNREDUCED: "gradients before they are summed over ranks or cast to fp32",
    StorageKind.ACTIVATIONS: "what forward keeps for backward",
    StorageKind.INPUTS: "the batch, its noise and targets",
    StorageKind.FROZEN: "shards of the frozen text encoder, which runs before forward",
    StorageKind.TEMPORARY: "working memory of backward, recomputation and optimizer",
    StorageKind.HOST: "host memory of [offload], not in the peak",
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


def memory_terms(kinds: Iterable[StorageKind]) -> Iterator[str]:
    """A line for every column of the memory table."""
    yield from aligned({**{str(kind): DEVICE_WORDS[kind] for kind in kinds}, "peak": PEAK})


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
        size, _ = rank_memory()
        known = {f"here: {torch.cuda.get_device_name()}": (size or 0) / GIB, **known}
    for name, gib in known.items():
        usable, needed = USABLE * gib, peak / GIB
        fits = "yes" if needed <= usable else "no"
        yield [name, f"{usable:.1f}", f"{needed:.2f}", fits]


LESS = (
    "more ranks, a larger dp_shard, --activation_checkpoint.mode full, or a smaller "
    "--training.microbatch_size"
)
JITTER = 0.3
"""Standard deviation of the log of action times in the simulation of unequal microbatches."""
UNITS = {"GiB": 2**30, "MiB": 2**20}


def lines(report: Report) -> Iterator[str]:
    """The report, line by line."""
    unit = "MiB" if max(rank.peak.total for rank in report.ranks) < UNITS["GiB"] else "GiB"
    yield from head(report)
    yield ""
    yield f"peak memory, {unit}:"
    yield from memory(report, UNITS[unit])
    yield ""
    yield f"sent by a rank per step, {unit} (calls):"
    yield from traffic(report, UNITS[unit])
    yield ""
    recomputed = report.plan.activation_checkpoint.mode != "none"
    without = " (without recomputation)" if recomputed else ""
    yield f"FLOPs of a rank per step{without}:"
    yield from work(report)
    if report.plan.sizes.pp > 1:
        yield f"  idle  {IDLE}"
    yield ""
    yield "devices, GiB (usable: 0.9 of what torch reports; step time: see `plan`):"
    header, *rows = verdicts(report.peak)
    yield from table(header, rows)
    yield ""
    yield verdict(report, unit)
    if all(row[3] == "no" for row in rows):
        yield f"note    no known device holds it: {LESS}"


def head(report: Report) -> Iterator[str]:
    """Layout, model, batch, FLOPs, pipeline and notes."""
    plan, sizes = report.plan, report.plan.sizes
    world = sizes.data * sizes.model
    where = f"{plural(world, 'rank')} ({sizes})"
    yield f"dry run of {plan.name}: {where}, {plan.precision.dtype}"
    yield (
        f"model   {plan.model_name}: {report.num_parameters:,} parameters, {plan.spec.tokens_shown}"
    )
    yield (
        f"batch   {plan.global_batch_size} samples over {plural(sizes.data, 'data rank')}, "
        f"{plural(report.num_microbatches, 'microbatch', 'es')} of {report.microbatch_size} each"
    )
    yield (
        f"work    {number(report.flops_per_sample)} per sample, "
        f"{number(report.flops_per_sample * plan.global_batch_size)} per step of all ranks"
    )
    if sizes.pp > 1:
        idle = sum(rank.idle for rank in report.ranks) / len(report.ranks)
        yield (
            f"pipe    {plan.pipeline.schedule}, "
            f"{sum(len(rank.layers) for rank in report.ranks)} stages; idle {idle:.1%} of the step"
        )
        yield f"runtime {plan.runtime.line}"
        yield from order(plan, report.num_microbatches)
    yield from report.ranks[0].notes
    if report.num_run < report.num_microbatches:
        rest = "memory and traffic of the rest are extrapolated"
        if plan.pipeline.schedule != "gpipe" or sizes.pp == 1:
            rest = "the rest do not raise the peak; their traffic is extrapolated"
        yield f"note    {report.num_run} microbatches were run: {rest}"
    if sizes.cp > 1 and plan.parallel.cp_method == "ring":
        yield "note    without the keys and values in flight in ring attention"
    if plan.compile.enabled:
        yield "note    without torch.compile (keeps 17 instead of 20 x hidden per token and layer)"


def order(plan: RunPlan, count: int) -> Iterator[str]:
    """Windows and simulated idle time of a run-time order, beside the planned one."""
    if not plan.decides_at_run_time:
        return
    memory = plan.pipeline.memory
    held, planned = (
        "/".join(map(str, sorted(set(counts), reverse=True)))
        for counts in (most_held(plan, count), peak_activations(plan.order(count)))
    )
    even, varied, varied_planned = (
        simulated(plan, count, jitter=jitter, memory=within).idle_fraction
        for jitter, within in ((0.0, memory), (JITTER, memory), (JITTER, None))
    )
    yield (
        f"order   run_time, up to {held} activations of a stage on a rank (planned {planned}); "
        f"idle {even:.1%}; with {JITTER:.0%} jitter {varied:.1%} (planned {varied_planned:.1%})"
    )
    if hint := order_hint(plan):
        yield f"note    {hint}"


def memory(report: Report, unit: int) -> Iterator[str]:
    """One row per pipeline rank, one column per kind in use."""
    kinds = [kind for kind in StorageKind if any(rank.peak.bytes[kind] for rank in report.ranks)]
    rows = [
        [
            *title(rank),
            *(f"{rank.peak.bytes[kind] / unit:.2f}" for kind in kinds),
            f"{rank.peak.total / unit:.2f}",
        ]
        for rank in report.ranks
    ]
    yield from table(["rank", "layers", *kinds, "peak"], rows)
    yield from memory_terms(kinds)


def traffic(report: Report, unit: int) -> Iterator[str]:
    """One row per pipeline rank, one column per axis and operation."""
    keys = sorted({key for rank in report.ranks for key in rank.traffic.calls})
    rows = [
        [
            *title(rank),
            *(
                f"{rank.traffic.bytes[key] / unit:.2f} ({rank.traffic.calls[key]})"
                if rank.traffic.calls[key]
                else "-"
                for key in keys
            ),
        ]
        for rank in report.ranks
    ]
    if not keys:
        yield "  nothing: world size 1"
        return
    yield from table(["rank", "layers", *(f"{axis} {name}" for axis, name in keys)], rows)
    yield from operations(name for _, name in keys)


def work(report: Report) -> Iterator[str]:
    """Parameters, FLOPs and pipeline bubble of every pipeline rank."""
    rows = [
        [*title(rank), f"{rank.parameters:,}", number(rank.flops), f"{rank.idle:.1%}"]
        for rank in report.ranks
    ]
    yield from table(["rank", "layers", "parameters", "FLOPs", "idle"], rows)


def verdict(report: Report, unit: str) -> str:
    """The memory that a device needs."""
    most = max(report.ranks, key=lambda rank: rank.peak.total)
    return (
        f"a device needs {most.peak.total / UNITS[unit]:.2f} {unit} (rank {most.rank}, "
        f"{most.peak.phase}), plus overhead of driver, allocator and communication"
    )


def title(rank: RankReport) -> list[str]:
    """The first columns of every table."""
    spans = (f"{part[0]}-{part[-1]}" if len(part) > 1 else f"{part[0]}" for part in rank.layers)
    return [str(rank.rank), " ".join(spans)]


def plural(count: int, word: str, ending: str = "s") -> str:
    """`1 rank`, `2 ranks`."""
    return f"{count} {word}{ending if count != 1 else ''}"


def number(value: float) -> str:
    """1.386e14 as "138.6 TFLOP"."""
    for limit, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G")):
        if value >= limit:
            return f"{value / limit:.4g} {letter}FLOP"
    return f"{value:.4g} FLOP"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Columns as wide as their widest cell, flush right."""
    cells = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        yield "  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
