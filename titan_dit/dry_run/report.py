"""Console output of a dry run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from titan_dit.checks.pipeline_order import order_hint
from titan_dit.dry_run import devices
from titan_dit.dry_run.fake_step import RankReport, Report
from titan_dit.dry_run.memory import StorageKind
from titan_dit.dry_run.pipeline import most_held, simulated
from titan_dit.plan import RunPlan
from titan_dit.schedules.action import peak_activations

LESS = "more ranks, a larger dp_shard, --remat.mode full, or a smaller --training.microbatch_size"
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
    recomputed = report.plan.remat.mode != "none"
    without = " (without recomputation)" if recomputed else ""
    yield f"FLOPs of a rank per step{without}:"
    yield from work(report)
    if report.plan.sizes.pp > 1:
        yield f"  idle  {devices.IDLE}"
    yield ""
    yield "devices, GiB (usable: 0.9 of what torch reports; step time: see `plan`):"
    header, *rows = devices.verdicts(report.peak)
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
        f"model   {plan.model_name}: {report.num_parameters:,} parameters, "
        f"{plan.spec.num_tokens} tokens"
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
        yield from order(plan, report.num_microbatches)
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
    yield from devices.words(kinds)


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
    yield from devices.operations(name for _, name in keys)


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
