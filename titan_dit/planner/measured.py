"""Steps that were timed: of runs (metrics.jsonl, config.toml), and of benchmarks/gpu.py's JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from titan_dit.checkpoint.record import read_record
from titan_dit.checkpoint.run_checkpoints import find_checkpoint
from titan_dit.checkpoint.store import location
from titan_dit.config import catalog, config_file, dotted_names, stages, user_text
from titan_dit.config.job import JobConfig
from titan_dit.config.section import UserError
from titan_dit.observe.metrics import Row, read_rows
from titan_dit.opening import VERSIONS, settled
from titan_dit.plan import RunPlan, resolve
from titan_dit.planner.counts import Rehearsals
from titan_dit.planner.hardware import Device, names
from titan_dit.planner.memory import GIB, memory, on_device, state_of
from titan_dit.planner.step import check_host_steps, estimate
from titan_dit.system import run_files

PEAK_TOLERANCE = 0.05
"""Devices whose peaks differ by more than this share are different devices."""
MEASURED = "measured"
"""`result` of a row of gpu.py that has figures."""
KEY = ("contender", "model", "tokens", "batch")
"""Columns that name a row of gpu.py."""

COLUMNS = {"samples_per_s", "tflops_per_gpu", "data_wait_ms", "peak_gib"}
"""Columns of metrics.jsonl that are read, besides step_ms."""


@dataclass(frozen=True)
class MeasuredStep:
    """A step that was timed."""

    name: str
    config: JobConfig
    plan: RunPlan
    step_ms: float
    """Milliseconds per step, without waiting for data."""
    allocated_gib: float | None = None
    """Peak of torch's allocated tensors; None if the step did not run on a GPU."""
    reserved_gib: float | None = None
    """Peak that torch's allocator reserved; None if not logged."""
    device: str = ""
    """The device's name as torch reports it; "CPU" for a run on a CPU; empty if not logged."""
    in_float8: frozenset[str] | None = None
    """Names within a block of the linears that were converted to float8; None if not logged."""
    left_out: str = ""
    """The reason why no device is fitted to this step; empty if there is none."""
    peak_tflops: float | None = None
    """The device's peak in [precision] dtype, of which mfu is a share; None if not logged."""
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all ranks."""
        return 1e3 * self.plan.global_batch_size / self.step_ms


def measured_run(run: Path, flag: str = "--run", trust: bool = False) -> MeasuredStep:
    """The median step of a run's rows; of a run resumed on other ranks, of the rows since then.

    `trust`: import the modules that its config names. Raises UserError, with `flag`, without
    metrics.
    """
    tables_file, metrics_file = run / run_files.CONFIG, run / run_files.METRICS
    if not tables_file.is_file():
        raise UserError(
            f"{flag} {run}: no config.toml. Give the directory of a run, such as outputs/NAME."
        )
    rows = [row for row in read_rows(metrics_file) if row.get("step_ms")]
    tables = config_file.of_run(tables_file)
    dotted_names.check_trusted(tables, f"{flag} {run}", trust)
    config = config_file.build(tables, catalog.variant)
    if config.training.stages:  # Of those that have begun the last one.
        number = stages.number_of(config.training, rows[-1]["step"] if rows else 0)
        config = settled(stages.config_of(config, number))
        rows = [row for row in rows if row["step"] > config.training.begin]
        config = stages.alone(config)
    if config.training.tokens_per_step or config.data.bucket_counts():
        raise UserError(
            f"{flag} {run}: its steps are of several buckets, a plan is of one. Give a run of one "
            "shape with global_batch_size."
        )
    try:
        rows, ranks = rows_of_last_world_size(config, rows)
    except KeyError as error:
        raise UserError(
            f"{flag} {run}: a row of metrics.jsonl has no {error.args[0]}. Give a run of this "
            "version."
        ) from None
    # The first row is the first step, which compiles and warms up.
    if not rows[1:]:
        raise UserError(
            f"{flag} {run}: metrics.jsonl has {len(rows)} rows with step_ms, but the median after "
            "the first is needed. Train more steps, or set [metrics] every lower."
        )
    last, versions = rows[-1], versions_of(run)
    peak = last["tflops_per_gpu"] / last["mfu"] if last.get("mfu") else None
    # Without mfu (fp32, an unknown GPU) only a CPU's build of torch says what the device is.
    on_cpu = peak is None and versions.get("torch", "").endswith("+cpu")
    return MeasuredStep(
        name=str(run),
        config=config,
        plan=resolve(config, ranks),
        step_ms=statistics.median(row["step_ms"] - row["data_wait_ms"] for row in rows[1:]),
        # On a CPU the column is the memory of the process.
        allocated_gib=last["peak_gib"] if peak else None,
        device="CPU" if on_cpu else "",
        peak_tflops=peak,
        versions=versions,
    )


def rows_of_last_world_size(config: JobConfig, rows: Sequence[Row]) -> tuple[list[Row], int]:
    """The last rows with equal ranks, and the ranks; KeyError if a row lacks a column.

    Ranks are the FLOP/s of all over those of one (`observe.meter.Throughput.rates`).
    """
    spec = config.objective.model_spec(config.model)
    with torch.device("meta"):
        flops = spec.build().flops_per_sample(spec.num_attended_tokens)
    found: list[Row] = []
    ranks = 0
    for row in reversed(rows):
        if missing := COLUMNS - row.keys():
            raise KeyError(min(missing))
        own = round(row["samples_per_s"] * flops / (row["tflops_per_gpu"] * 1e12))
        ranks = ranks or own
        if own != ranks:
            break
        found.append(row)
    return found[::-1], ranks


def versions_of(run: Path) -> dict[str, str]:
    """Versions in the newest checkpoint of a run; {} if it has none."""
    try:
        found = read_record(find_checkpoint(location(run), None))
    except UserError:
        return {}
    return dict(found.get("versions", {}))


def measured_on_gpu(file: Path, trust: bool = False) -> list[MeasuredStep]:
    """The steps of titan_dit that benchmarks/gpu.py measured, one for each contender and cell.

    `trust`: import the modules that their configs name. Raises UserError for a file of something
    else.
    """
    if not file.is_file():
        raise UserError(
            f"--calibrate {file}: no such file. Write it with benchmarks/gpu.py --out FILE."
        )
    text = user_text.read(file, f"--calibrate {file}")
    try:
        report = user_text.parse_json(text)
    except user_text.BadTextError as error:
        raise UserError(
            f"--calibrate {file}: no report of benchmarks/gpu.py: {error}. Write it with "
            "benchmarks/gpu.py --out FILE."
        ) from None
    try:
        found = list(steps_of(report, f"--calibrate {file}", trust))
    except (AttributeError, KeyError, TypeError, ArithmeticError):  # Another program's JSON.
        found = []
    if not found:
        raise UserError(
            f"--calibrate {file}: no measured step of titan_dit that names its config. Write it "
            "with this version's benchmarks/gpu.py --parts steps --out FILE."
        )
    return found


def steps_of(report: Mapping[str, Any], source: str, trust: bool) -> Iterator[MeasuredStep]:
    """The rows of a report that have a config; several rounds are one step."""
    versions = {name: str(report.get(name, "")) for name in ("titan_dit", "torch", "driver")}
    for entry in report.get("configs", ()):
        key = {name: entry[name] for name in KEY}
        rows = [
            row
            for row in report.get("measured", ())
            if row.get("result") == MEASURED and row.items() >= key.items()
        ]
        if not rows:
            continue
        tables = config_file.in_new_sections(entry["tables"])
        dotted_names.check_trusted(tables, source, trust)
        config = config_file.build(entry["tables"], catalog.variant)
        yield MeasuredStep(
            name="{contender}, {model}, {tokens} tokens, batch {batch}".format(**key),
            config=config,
            plan=replace(resolve(config, 1), device=str(report.get("device", ""))),
            step_ms=statistics.median(lap for row in rows for lap in row["laps_ms"]),
            allocated_gib=highest(rows, "peak_gib"),
            reserved_gib=highest(rows, "reserved_gib"),
            device=str(report.get("device", "")),
            in_float8=frozenset(entry["in_float8"]) if "in_float8" in entry else None,
            left_out=str(entry.get("left_out", "")),
            versions={name: text for name, text in versions.items() if text},
        )


def highest(rows: list[Mapping[str, Any]], column: str) -> float | None:
    """The largest figure of a column; None if no row has one."""
    return max((row[column] for row in rows if row.get(column) is not None), default=None)


def device_named(text: str) -> str | None:
    """The device of the package that a name means, as torch or a file has it; None without one."""
    words = text.lower()
    # "a100_80" is "NVIDIA A100-SXM4-80GB"; the longest match is an h200, not an h20.
    matches = [name for name in names() if all(part in words for part in name.split("_"))]
    return max(matches, key=len, default=None)


def another_device(measured: MeasuredStep, device: Device) -> str | None:
    """A line that says why a step was not measured on this device; None if it may have been."""
    own, its = device_named(device.name), device_named(measured.device)
    if own and measured.device and own != its:
        return f"it was measured on {measured.device}, not on {device.name}"
    dtype = measured.config.precision.dtype
    peak, expected = measured.peak_tflops, device.peak_tflops.get(dtype)
    if peak and expected and abs(peak / expected - 1) > PEAK_TOLERANCE:
        return (
            f"its mfu is a share of {peak:.3g} TFLOP/s in {dtype}, but {device.name} has "
            f"{expected:.3g}"
        )
    return None


def outdated(device: Device) -> Iterator[str]:
    """A warning for every version of a calibration that is not this process's."""
    for name, now in VERSIONS.items():
        if device.rows and (text := device.versions.get(name)) != now:
            yield (
                f"warning: {device.name} was calibrated with {name} {text or '(unknown)'}, this is "
                f"{now}: calibrate again, or expect other errors"
            )


def warnings(measured: MeasuredStep) -> Iterator[str]:
    """A line for every version that differs from this process's."""
    for name in VERSIONS:
        if (text := measured.versions.get(name)) and text != VERSIONS[name]:
            yield (
                f"warning: {measured.name} was measured with {name} {text}, this is "
                f"{VERSIONS[name]}: measure again, or expect other times"
            )


def beside(run: Path, device: Device, trust: bool = False) -> list[str]:
    """The plan of a run on a device beside its metrics; console lines. Raises UserError."""
    found = measured_run(run, trust=trust)
    plan = replace(found.plan, device=device.torch_name)
    check_host_steps(found.config)
    counts = Rehearsals(found.config).counts(plan)
    step = estimate(plan, counts, device)
    other = another_device(found, device)
    lines = [
        *outdated(device),
        *warnings(found),
        *([f"warning: {run}: {other}"] if other else []),
        f"run      {run}: {plan.world_size} ranks, {plan.sizes}; medians of its rows but the first",
        f"device   {device.name}; error to expect {device.error:.0%}",
        compared("ms", 1e3 * step.seconds, found.step_ms),
        compared("samples/s", plan.global_batch_size / step.seconds, found.samples_per_s),
    ]
    if found.allocated_gib is not None:
        ranks = memory(plan, counts, state=state_of(found.config))
        # Metrics are those of rank 0.
        lines.append(compared("GiB", on_device(ranks[0]) / GIB, found.allocated_gib))
    elif found.device:
        lines.append("  GiB: peak_gib of a run on a CPU is its process's, so it is not compared")
    else:
        lines.append("  GiB: without mfu peak_gib may be a process's, so it is not compared")
    shares = sorted(step.terms.items(), key=lambda term: -term[1])
    large = (f"{name} {s / step.seconds:.0%}" for name, s in shares if s >= 0.005 * step.seconds)
    return [*lines, f"  of the planned ms: {', '.join(large)}"]


def compared(unit: str, planned: float, measured: float) -> str:
    """A line of a plan and a measurement."""
    error = planned / measured - 1
    return f"  {unit:10} planned {planned:10.4g}  measured {measured:10.4g}  error {error:+.1%}"
