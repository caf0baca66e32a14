"""Calibration: fits the efficiencies of a device to steps that were timed.

At most six coefficients are fitted, by damped least squares on the logarithms of the times: a step
of 1 ms counts as much as one of a minute. A weak prior keeps the old value of a coefficient on
which no row depends.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from titan_dit.config.section import UserError
from titan_dit.opening import VERSIONS
from titan_dit.plan import RunPlan
from titan_dit.planner.counts import Rehearsals
from titan_dit.planner.hardware import Device, Overhead, device_of, names, write
from titan_dit.planner.measured import (
    MeasuredStep,
    another_device,
    device_named,
    measured_on_gpu,
    measured_run,
    warnings,
)
from titan_dit.planner.rates import OURS, Runtime
from titan_dit.planner.step import estimate
from titan_dit.planner.work import Counts

Vector = npt.NDArray[np.float64]

EFFICIENCIES = ("products", "attention", "moved", "inner", "node")
COEFFICIENTS = (*EFFICIENCIES, "launch_us")
"""Coefficients that a fit may change: the fields of `hardware.Efficiency`, and `launch_us`."""
PRIOR = 0.15
"""Weight of a coefficient's distance from its old value, in logarithms, beside the rows' errors."""
STEP, CONVERGED = 0.02, 1e-3
"""Step of the finite differences; the fit ends at a change below CONVERGED. Both in logarithms."""
MEANS = {
    "products": "matrix products faster than the device's peak_tflops",
    "attention": "attention faster than the device's peak_tflops",
    "moved": "elementwise kernels faster than copy_gb_per_s",
    "inner": "collectives inside a node faster than inner_gb_per_s",
    "node": "collectives between nodes faster than the node's NICs",
}


class ImplausibleFitError(UserError):
    """The rows need an efficiency above 1."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step that was timed."""

    name: str
    plan: RunPlan
    counts: Counts
    seconds: float
    runtime: Runtime = OURS
    same: str = ""
    """Name that is equal for rows of the same measured case. They are left out together."""


def predicted(case: Case, device: Device) -> float:
    """Seconds of a step by the planner."""
    return estimate(case.plan, case.counts, device, case.runtime).seconds


def errors(cases: Sequence[Case], device: Device) -> list[float]:
    """Predicted over measured, minus 1."""
    return [predicted(case, device) / case.seconds - 1 for case in cases]


def coefficients(device: Device) -> dict[str, float]:
    """The device's value of every name in COEFFICIENTS."""
    return {**asdict(device.efficiency), "launch_us": device.launch_us}


def with_coefficients(device: Device, values: Mapping[str, float]) -> Device:
    """A copy of a device with these efficiencies and `launch_us`; other names are ignored."""
    shares = {key: value for key, value in values.items() if key in EFFICIENCIES}
    launch_us = values.get("launch_us", device.launch_us)
    return replace(device, efficiency=replace(device.efficiency, **shares), launch_us=launch_us)


def fit(
    cases: Sequence[Case],
    device: Device,
    keys: Sequence[str] = COEFFICIENTS,
    prior: float = PRIOR,
) -> Device:
    """The device with the coefficients `keys` that fit the cases best.

    Raises ImplausibleFitError if an efficiency would be above 1: a row, or a number of the device,
    is then wrong.
    """
    if not cases:
        raise UserError("--calibrate: no row to calibrate on. Give a JSON of gpu.py, or runs.")
    own = coefficients(device)
    # A device whose launches take no time, such as an ideal one, keeps that.
    keys = [key for key in keys if own[key] > 0]
    start = np.log([own[key] for key in keys])

    def at(x: Vector) -> Device:
        return with_coefficients(device, dict(zip(keys, np.exp(x).tolist(), strict=True)))

    def misfit(x: Vector) -> Vector:
        there = at(x)
        rows = [math.log(predicted(case, there) / case.seconds) for case in cases]
        return np.array([*rows, *(prior * (x - start))])

    found, slopes = least_squares(misfit, start)
    refuse_above_one(dict(zip(keys, np.exp(found).tolist(), strict=True)), cases, slopes, device)
    return at(found)


def refuse_above_one(
    values: Mapping[str, float], cases: Sequence[Case], slopes: Vector, device: Device
) -> None:
    """Raise an error if an efficiency is above 1, with the rows that depend on it most."""
    for column, (key, value) in enumerate(values.items()):
        if key in EFFICIENCIES and value > 1:
            order = np.argsort(-np.abs(slopes[: len(cases), column]))
            rows = ", ".join(cases[row].name for row in order[:3])
            raise ImplausibleFitError(
                f"--calibrate: the rows need {key} = {value:.2f}, above 1: {MEANS[key]}. Of all "
                f"rows {rows} decide it. Check that they ran on {device.name}, that its file has "
                "the right peaks and links, and that their layout is the one that was timed."
            )


def least_squares(
    misfit: Callable[[Vector], Vector], start: Vector, most: int = 15
) -> tuple[Vector, Vector]:
    """Levenberg-Marquardt: (the minimum of misfit @ misfit, the slopes there).

    A step that does not reduce the sum is repeated with ten times the damping. At most `most` steps
    are tried.
    """
    x, damping = start.copy(), 1e-3
    now = misfit(x)
    slopes = slopes_of(misfit, x, now)
    for _ in range(most):
        gradient, curvature = slopes.T @ now, slopes.T @ slopes
        change = np.linalg.solve(curvature + damping * np.eye(len(x)), -gradient)
        # Half an order of magnitude at once is as far as a slope may be trusted.
        change = np.clip(change, -1, 1)
        there = misfit(x + change)
        if there @ there < now @ now:
            x, now, damping = x + change, there, damping / 10
            slopes = slopes_of(misfit, x, now)
        else:
            damping *= 10
        if np.abs(change).max() < CONVERGED:
            break
    return x, slopes


def slopes_of(misfit: Callable[[Vector], Vector], x: Vector, now: Vector) -> Vector:
    """Forward differences, [rows, coefficients]."""
    return np.array([(misfit(x + STEP * unit) - now) / STEP for unit in np.eye(len(x))]).T


def leave_one_out(
    cases: Sequence[Case], device: Device, keys: Sequence[str] = COEFFICIENTS
) -> dict[str, float | None]:
    """Each case's error in a fit of all other cases, by name; equal cases are left out together.

    The error of a single case is that of the device as given. An error is None if the other cases
    need an efficiency above 1.
    """
    found: dict[str, float | None] = {}
    for same in dict.fromkeys(case.same or case.name for case in cases):
        out = [case for case in cases if (case.same or case.name) == same]
        rest = [case for case in cases if case not in out]
        try:
            fitted = fit(rest, device, keys) if rest else device
        except ImplausibleFitError:
            found |= {case.name: None for case in out}
            continue
        found |= {case.name: error for case, error in zip(out, errors(out, fitted), strict=True)}
    return found


def calibrated(
    cases: Sequence[Case],
    device: Device,
    keys: Sequence[str] = COEFFICIENTS,
    versions: Mapping[str, str] | None = None,
) -> Device:
    """`fit`, with the rows, versions and median leave-one-out error of a device file.

    If no row has a leave-one-out error, the device keeps its error.
    """
    fitted, left_out = fit(cases, device, keys), leave_one_out(cases, device, keys)
    known = [abs(error) for error in left_out.values() if error is not None]
    rows = {
        case.name: (
            f"measured {1e3 * case.seconds:.4g} ms, fitted {1e3 * predicted(case, fitted):.4g} ms, "
            f"left out {as_text(left_out[case.name])}"
        )
        for case in cases
    }
    now, before = coefficients(fitted), coefficients(device)
    sources = {
        (f"efficiency.{key}" if key in EFFICIENCIES else key): f"calibrated, {len(cases)} rows"
        for key in now
        if now[key] != before[key]
    }
    if known:
        of = "each row" if len(known) == len(left_out) else f"{len(known)} of {len(left_out)} rows"
        sources["error"] = f"median with {of} left out"
    return replace(
        fitted,
        error=min(1.0, statistics.median(known)) if known else device.error,
        sources={**device.sources, **sources},
        versions=dict(versions or {}),
        rows=rows,
    )


def as_text(error: float | None) -> str:
    """A leave-one-out error as text."""
    return (
        "unknown: the other rows need an efficiency above 1" if error is None else f"{error:+.1%}"
    )


def calibrate(
    gpu_json: Path | None,
    runs: Sequence[Path],
    out: Path,
    device: Device | None = None,
    trust: bool = False,
) -> list[str]:
    """Fit a device to measured steps and write its file; returns console lines.

    `gpu_json` is a report of benchmarks/gpu.py, `runs` are run directories. The fit starts from
    `device`; without it, from the device that `gpu_json` names. `trust`: import the modules that
    their configs name. Raises UserError, also if a step was measured on another device.
    """
    found = [*(measured_on_gpu(gpu_json, trust) if gpu_json else ())]
    found += [measured_run(run, "--calibrate", trust) for run in runs]
    start = device or known_device([one.device for one in found])
    for one in found:
        if other := another_device(one, start):
            raise UserError(
                f"--calibrate {one.name}: {other}. Calibrate each device on steps of its own, or "
                "give --device the file of theirs."
            )
    found = [on_device(one, start) for one in found]
    others = {one.name: text for one in found if (text := one.left_out or other_layers(one))}
    found = [one for one in found if one.name not in others]
    cases = cases_of(found)
    fitted = calibrated(cases, start, versions=all_versions(found))
    fitted = replace(fitted, name=out.stem, overhead=allocator_of(found, fitted.overhead))
    write(fitted, out)
    return [
        *(line for one in found for line in warnings(one)),
        *mixed_versions(found),
        *(f"left out {name}: {text}" for name, text in others.items()),
        f"calibrated on {len(cases)} steps, from {start.name}",
        *changes(start, fitted),
        *(f"  {name}: {text}" for name, text in fitted.rows.items()),
        f"error    {fitted.error:.1%}: {fitted.sources.get('error', 'as it was')}",
        f"wrote {out}: plan with --device {out}",
    ]


def on_device(one: MeasuredStep, device: Device) -> MeasuredStep:
    """The step with a plan for this device; gpu.py logs the name of its own, runs do not."""
    return replace(one, plan=replace(one.plan, device=one.plan.device or device.torch_name))


def other_layers(one: MeasuredStep) -> str | None:
    """A phrase if the config now plans float8 in other layers than were measured; None if not."""
    if one.in_float8 is None:
        return None
    now = {name.split(".", 2)[2] for name in Rehearsals(one.config).in_float8(one.plan)}
    if now == one.in_float8:
        return None
    return (
        f"it was measured with float8 in {', '.join(sorted(one.in_float8)) or 'no layer'}, its "
        f"config now has it in {', '.join(sorted(now)) or 'none'}"
    )


def all_versions(found: Sequence[MeasuredStep]) -> dict[str, str]:
    """Versions that the steps were measured with, by name; several are joined: "2.12.0, 2.13.0"."""
    every: dict[str, set[str]] = {}
    for one in found:
        for name, text in one.versions.items():
            every.setdefault(name, set()).add(text)
    return {name: ", ".join(sorted(texts)) for name, texts in every.items()}


def mixed_versions(found: Sequence[MeasuredStep]) -> Iterator[str]:
    """A warning for every version that differs between the steps, or is unknown for some."""
    for name, texts in all_versions(found).items():
        if "," in texts:
            yield f"warning: the steps were measured with {name} {texts}: expect a larger error"
    for one in found:
        if unknown := [name for name in VERSIONS if name not in one.versions]:
            yield (
                f"warning: {one.name} does not say its {' and '.join(unknown)}: a run has them in "
                "its checkpoints"
            )


def cases_of(found: Sequence[MeasuredStep]) -> list[Case]:
    """Measured steps as cases, each with its rehearsed counts."""
    return [
        Case(
            name=one.name,
            plan=one.plan,
            counts=Rehearsals(one.config).counts(one.plan),
            seconds=1e-3 * one.step_ms,
        )
        for one in found
    ]


def known_device(measured_on: Sequence[str]) -> Device:
    """The packaged device of the first non-empty name, as torch reports it. Raises UserError."""
    on = next(filter(None, measured_on), "")
    name = device_named(on)
    if name is None:
        what = f"{on!r} is no device of the package" if on else "runs do not log their device"
        raise UserError(f"--calibrate: {what}. Add --device, one of {', '.join(names())}.")
    return device_of(name)


def allocator_of(found: Sequence[MeasuredStep], overhead: Overhead) -> Overhead:
    """The overhead, with the measured ratio of reserved to allocated memory if it is known."""
    shares = [
        one.reserved_gib / one.allocated_gib
        for one in found
        if one.reserved_gib and one.allocated_gib
    ]
    if not shares:
        return overhead
    return replace(overhead, allocator=max(1.0, statistics.median(shares)))


def changes(before: Device, after: Device) -> Iterator[str]:
    """A line for every coefficient: its fitted value, and the value before."""
    old, new = coefficients(before), coefficients(after)
    old["allocator"], new["allocator"] = before.overhead.allocator, after.overhead.allocator
    for key, value in new.items():
        note = f"was {old[key]:.3g}" if f"{value:.3g}" != f"{old[key]:.3g}" else "unchanged"
        yield f"  {key:10} {value:.3g} ({note})"
