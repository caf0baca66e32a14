"""The report of `plan`: its text and its JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from titan_dit.dry_run import report
from titan_dit.dry_run.memory import StorageKind
from titan_dit.dry_run.report import number, plural, table
from titan_dit.planner.candidates import KEYS
from titan_dit.planner.choice import BucketTime, Recommendation
from titan_dit.planner.hardware import Device
from titan_dit.planner.memory import GIB
from titan_dit.planner.search import PredictedLayout, equally_fast, tp_crosses_nodes
from titan_dit.planner.step import mfu, samples_per_s

ACROSS = "tp across nodes"
"""Mark of a layout whose tp groups leave a node."""
RULE = "fewest axes, then no tp or cp, then least memory"
"""Order of preference of `choice.preferred`."""
LEAST_SHARE = 0.0005
"""Terms below it are left out of the table."""


def lines(choice: Recommendation, top: int, name: str) -> Iterator[str]:
    """The report, line by line; `name` is the config's, for the command."""
    yield from head(choice)
    yield ""
    yield f"the fastest layouts that were found, one for each mesh; ms {margin(choice.device)}:"
    yield from layouts(choice, top)
    yield ""
    yield from verdict(choice)
    yield ""
    yield "where the time goes, ms:"
    yield from terms(choice)
    yield from loses(choice)
    yield ""
    yield from buckets(choice)
    yield from memory(choice)
    yield ""
    yield from cost(choice)
    yield from (f"note    {note}" for note in (*choice.notes, *cautions(choice, top)))
    yield f"run     {command(choice, name)}"


def cautions(choice: Recommendation, top: int) -> Iterator[str]:
    """Lines if float8 was not the config's, or tp of a layout shown leaves a node."""
    if choice.best.candidate.float8 not in ("off", choice.space.config.precision.float8):
        yield "float8 changes the numerics (docs/float8.md): --fix precision.float8=off keeps bf16"
    if any(tp_crosses_nodes(row.plan.sizes, choice.device) for row in shown(choice, top)):
        yield (
            f"{ACROSS}: groups leave their node of {choice.device.gpus_per_node}; predictions of "
            "such layouts are the least certain, mostly too fast (docs/planner.md)"
        )


def margin(device: Device) -> str:
    """The error of a step's time."""
    return f"+- {device.error:.0%}"


def head(choice: Recommendation) -> Iterator[str]:
    """One line each for the model, the batch, the device and the search."""
    space, device = choice.space, choice.device
    plan, tally = space.base, choice.outcome.tally
    nodes = -(-space.gpus // device.gpus_per_node)
    yield f"plan of {plan.name}: {plural(space.gpus, 'GPU')} in {plural(nodes, 'node')}"
    yield (
        f"model   {plan.model_name}: {choice.parameters:,} parameters, "
        f"{plan.spec.tokens_shown}, {number(choice.flops_per_sample)} per sample"
    )
    yield f"batch   {plan.global_batch_size} samples, {steps(choice)}"
    peak = device.peak_tflops[plan.precision.dtype]
    link = f"{device.inner(device.gpus_per_node):g} GB/s" if device.gpus_per_node > 1 else "no link"
    yield (
        f"device  {device.name}: {device.memory_gib:g} GiB, {peak:g} TFLOP/s "
        f"{plan.precision.dtype}, {device.gpus_per_node} a node with {link}, "
        f"{plural(device.nics_per_node, 'NIC')} of {device.nic_gb_per_s:g} GB/s; {origin(device)}"
    )
    yield (
        f"search  {tally.candidates:,} layouts, {tally.bounded:,} bounded, {tally.weighed:,} "
        f"weighed ({tally.too_large:,} too large), {tally.estimated:,} estimated in "
        f"{tally.seconds:.0f} s"
    )


def origin(device: Device) -> str:
    """A phrase: calibrated, or from a data sheet."""
    if device.rows:
        return f"calibrated, {margin(device)}"
    return f"from a data sheet, not calibrated, {margin(device)}"


def steps(choice: Recommendation) -> str:
    """The length of the run, in steps or epochs, as text."""
    training = choice.space.config.training
    if training.steps:
        return f"{training.steps:,} steps"
    return f"{training.epochs:g} epochs"


def shown(choice: Recommendation, top: int) -> list[PredictedLayout]:
    """The fastest layouts, and the recommended one and the runner-up if they are slower."""
    rows = list(choice.rows[:top])
    own = [row for row in (choice.best, choice.runner_up) if row is not None]
    return rows + [row for row in own if not any(row is each for each in rows)]


def layouts(choice: Recommendation, top: int) -> Iterator[str]:
    """The table of the fastest meshes."""
    header = ["", "layout", "microbatches", "schedule", "remat", "float8", "ms", "samples/s"]
    header += ["MFU", "allocated", "needed"]
    alike = equally_fast(choice.rows, choice.device.error)
    rows = []
    for row in shown(choice, top):
        mark = "*" if row is choice.best else "=" if row in alike else ""
        rows.append([mark, *cells_of(row, choice)])
    yield from table(header, rows)
    yield "  *  recommended   =  within the error of the fastest   allocated, needed: GiB a GPU"


def cells_of(row: PredictedLayout, choice: Recommendation) -> list[str]:
    """A row of the table."""
    one, plan, seconds = row.candidate, row.plan, row.estimate.seconds
    share = mfu(row.estimate, plan, choice.device, choice.flops_per_sample)
    return [
        title(row, choice.device),
        f"{plan.num_microbatches} x {one.microbatch_size}",
        schedule(row),
        one.mode,
        one.float8,
        milliseconds(seconds),
        f"{samples_per_s(row.estimate, plan):,.1f}",
        f"{share:.3f}",
        f"{row.needed.allocated:.1f}{'' if row.is_rehearsed else ' composed'}",
        f"{row.needed.total:.1f}",
    ]


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds, with three digits or more."""
    ms = 1e3 * seconds
    return f"{ms:,.{0 if ms >= 100 else 1 if ms >= 10 else 2}f}"


def title(row: PredictedLayout, device: Device) -> str:
    """A layout in words: its mesh, other keys of [parallel], whether tp leaves a node."""
    one, words = row.candidate, [str(row.plan.sizes)]
    if one.cp > 1:
        words.append(one.cp_method)
    if one.tp > 1 and not one.sequence_parallel:
        words.append("without sequence_parallel")
    if one.reshard_after_forward != "auto":
        words.append(f"reshard {one.reshard_after_forward}")
    if tp_crosses_nodes(row.plan.sizes, device):
        words.append(ACROSS)
    return ", ".join(words)


def schedule(row: PredictedLayout) -> str:
    """The pipeline schedule and its stages per rank."""
    one = row.candidate
    if one.pp == 1:
        return "-"
    return f"{one.schedule} v{one.virtual_stages}" if one.virtual_stages > 1 else one.schedule


def verdict(choice: Recommendation) -> Iterator[str]:
    """Lines: the recommended layout, and why it is preferred to the fastest."""
    best, fastest, device = choice.best, choice.rows[0], choice.device
    alike = len(equally_fast(choice.rows, device.error))
    ms = milliseconds(best.estimate.seconds)
    yield f"best    {title(best, device)}: {ms} ms {margin(device)}"
    if best is fastest:
        why = "the fastest"
    else:
        behind = best.estimate.seconds / fastest.estimate.seconds - 1
        why = (
            f"{behind:.1%} behind the fastest, {title(fastest, device)}, which is within the error"
        )
    rule = f"; of {alike} equals it is preferred: {RULE}" if alike > 1 else ""
    yield f"        {why}{rule}"


def terms(choice: Recommendation) -> Iterator[str]:
    """Each term of the best layout, its share, and the runner-up's."""
    best, other = choice.best.estimate, choice.runner_up.estimate if choice.runner_up else None
    names = dict.fromkeys([*best.terms, *(other.terms if other else ())])
    header = ["term", "best", "share", *(["runner-up"] if other else [])]
    rows = []
    for name in names:
        own, its = best.terms.get(name, 0.0), other.terms.get(name, 0.0) if other else 0.0
        if max(abs(own), abs(its)) < LEAST_SHARE * best.seconds:
            continue
        row = [name, f"{1e3 * own:,.1f}", f"{own / best.seconds:.1%}"]
        rows.append([*row, *([f"{1e3 * its:,.1f}"] if other else [])])
    whole = ["step", f"{1e3 * best.seconds:,.1f}", "100.0%"]
    rows.append([*whole, *([f"{1e3 * other.seconds:,.1f}"] if other else [])])
    yield from table(header, rows)


def loses(choice: Recommendation) -> Iterator[str]:
    """A line: the term in which the runner-up loses most."""
    if choice.runner_up is None:
        return
    best, other = choice.best.estimate, choice.runner_up.estimate
    its = title(choice.runner_up, choice.device)
    more = {
        name: other.terms.get(name, 0.0) - best.terms.get(name, 0.0)
        for name in dict.fromkeys([*best.terms, *other.terms])
    }
    worst = max(more, key=lambda name: more[name])
    difference = 1e3 * (other.seconds - best.seconds)
    yield (
        f"runner-up {its}: {difference:+,.1f} ms; it loses {1e3 * more[worst]:,.1f} ms in {worst}"
        if more[worst] > 0
        else f"runner-up {its}: {difference:+,.1f} ms; it loses in no term"
    )


def buckets(choice: Recommendation) -> Iterator[str]:
    """Lines: the time of a step of each bucket, and their mean; none if all data has one shape."""
    if not choice.buckets:
        return
    yield f"a step by bucket, ms {margin(choice.device)}; a sample's time grows faster than tokens:"
    header = ["bucket", "tokens", "samples", "steps", "ms", "ms a sample", "MFU"]
    rows = []
    for each in choice.buckets:
        plan, seconds = each.plan, each.estimate.seconds
        share = mfu(each.estimate, plan, choice.device, each.flops_per_sample)
        rows.append(
            [
                plan.bucket,
                f"{plan.spec.num_tokens:,}",
                f"{plan.global_batch_size:,}",
                f"{each.share:.1%}",
                milliseconds(seconds),
                milliseconds(seconds / plan.global_batch_size),
                f"{share:.3f}",
            ]
        )
    rows.append(["mean", "", "", "100.0%", milliseconds(choice.mean_seconds), "", ""])
    yield from table(header, rows)
    yield ""


def memory(choice: Recommendation) -> Iterator[str]:
    """Lines: bytes by kind of the fullest rank, and the memory that the device needs."""
    best = choice.best
    how = "a whole fake step" if best.is_rehearsed else "composed from a block's counts"
    yield f"memory of the fullest GPU, GiB ({how}):"
    held = {str(kind): size / GIB for kind, size in best.held.items() if size >= 0.005 * GIB}
    needed = best.needed
    rows = [[kind, f"{size:.2f}"] for kind, size in held.items()]
    rows += [
        ["allocated", f"{needed.allocated:.2f}"],
        ["reserved by the allocator", f"{needed.reserved:.2f}"],
        ["needed, with context and NCCL", f"{needed.total:.2f}"],
        [f"{choice.device.name} has", f"{choice.device.memory_gib:.2f}"],
    ]
    if size := best.held.get(StorageKind.HOST, 0):
        ranks = min(choice.space.gpus, choice.device.gpus_per_node)
        rows.append([f"host memory of {plural(ranks, 'such GPU')}", f"{ranks * size / GIB:.2f}"])
    yield from table(["kind", "GiB"], rows)
    kinds = [kind for kind in best.held if str(kind) in held]
    yield from report.memory_terms(kinds)


def cost(choice: Recommendation) -> Iterator[str]:
    """GPU-hours, and the fewest GPUs."""
    training, gpus = choice.space.config.training, choice.space.gpus
    seconds = choice.mean_seconds
    if training.steps:
        hours = training.steps * seconds / 3600
        days = f" ({hours / 24:,.1f} days)" if hours >= 24 else ""
        yield (
            f"cost    {hours * gpus:,.0f} GPU-hours for {training.steps:,} steps: {hours:,.1f} h"
            f"{days} on {plural(gpus, 'GPU')}, without data, checkpoints and restarts"
        )
    else:
        per_sample = seconds * gpus / choice.space.base.global_batch_size
        yield (
            f"cost    {1e6 * per_sample / 3600:,.1f} GPU-hours per million samples; the steps of "
            f"{training.epochs:g} epochs depend on the data"
        )
    if least := choice.fewest:
        one = least.candidate
        hold = "GPU holds" if least.gpus == 1 else "GPUs hold"
        across = f" ({ACROSS})" if tp_crosses_nodes(one.sizes, choice.device) else ""
        yield (
            f"fewest  {least.gpus} {hold} it: {one.sizes}{across}, [activation_checkpoint] mode="
            f'"{one.mode}", microbatches of {one.microbatch_size}: {least.needed.total:.1f} GiB '
            "composed"
        )


def command(choice: Recommendation, name: str) -> str:
    """The shell command that trains with the recommended layout."""
    gpus, node = choice.space.gpus, choice.device.gpus_per_node
    own = min(gpus, node)
    where = f"NGPU={own} "
    if gpus > node:
        where += f"NNODES={gpus // node} RDZV_ENDPOINT=HOST:PORT "
    flags = choice.space.flags(choice.best.candidate)
    return f"{where}./run_train.sh --config {name}{' ' + flags if flags else ''}"


def as_json(choice: Recommendation, top: int, name: str) -> dict[str, Any]:
    """The whole report as JSON values."""
    return {
        "config": name,
        "gpus": choice.space.gpus,
        "device": asdict(choice.device),
        "fixed": sorted(choice.space.fixed),
        "parameters": choice.parameters,
        "flops_per_sample": choice.flops_per_sample,
        "search": asdict(choice.outcome.tally),
        "best": of_layout(choice.best, choice),
        "runner_up": of_layout(choice.runner_up, choice) if choice.runner_up else None,
        "buckets": [of_bucket(each, choice) for each in choice.buckets],
        "layouts": [of_layout(row, choice) for row in choice.rows[:top]],
        "fewest_gpus": choice.fewest.gpus if choice.fewest else None,
        "steps": choice.space.config.training.num_steps,
        "gpu_hours": gpu_hours(choice),
        "notes": list(choice.notes),
        "command": command(choice, name),
    }


def gpu_hours(choice: Recommendation) -> float | None:
    """GPU-hours of the config's steps; None if [training] gives epochs."""
    num_steps = choice.space.config.training.num_steps
    if not num_steps:
        return None
    return num_steps * choice.mean_seconds * choice.space.gpus / 3600


def of_layout(row: PredictedLayout, choice: Recommendation) -> dict[str, Any]:
    """A layout, with its time in seconds and its memory in bytes."""
    needed = row.needed
    return {
        "keys": dict(zip(KEYS, row.candidate, strict=True)),
        "tp_crosses_nodes": tp_crosses_nodes(row.plan.sizes, choice.device),
        "microbatches": row.plan.num_microbatches,
        "seconds": row.estimate.seconds,
        "error": choice.device.error,
        "samples_per_s": samples_per_s(row.estimate, row.plan),
        "mfu": mfu(row.estimate, row.plan, choice.device, choice.flops_per_sample),
        "terms": dict(row.estimate.terms),
        "idle": list(row.estimate.idle),
        "bytes": by_kind(row.held),
        "allocated_gib": needed.allocated,
        "reserved_gib": needed.reserved,
        "needed_gib": needed.total,
        "memory_is_rehearsed": row.is_rehearsed,
    }


def of_bucket(one: BucketTime, choice: Recommendation) -> dict[str, Any]:
    """A bucket, with the time of its step in seconds."""
    return {
        "name": one.plan.bucket,
        "tokens": one.plan.spec.num_tokens,
        "samples": one.plan.global_batch_size,
        "steps": one.share,
        "seconds": one.estimate.seconds,
        "mfu": mfu(one.estimate, one.plan, choice.device, one.flops_per_sample),
    }


def by_kind(held: Mapping[Any, float]) -> dict[str, float]:
    """Bytes by the name of their kind."""
    return {str(kind): size for kind, size in held.items()}
