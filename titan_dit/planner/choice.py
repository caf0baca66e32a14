"""The layout that is recommended: by preference among equals, its memory from a whole fake step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from titan_dit.config.section import UserError
from titan_dit.dry_run.memory import Peak
from titan_dit.dry_run.simpler import word
from titan_dit.plan import RunPlan
from titan_dit.planner import memory as memory_of
from titan_dit.planner.candidates import Space
from titan_dit.planner.fewest import Smallest, fewest, smallest
from titan_dit.planner.hardware import Device
from titan_dit.planner.search import Layout, Outcome, one_line, preferred
from titan_dit.planner.weighing import CountsOf, Model, fullest

NEAREST = 64
"""Where nothing fits, up to so many times the GPUs are tried."""
PeakOf = Callable[[RunPlan, int], Peak]
"""Peak memory of a pipeline rank in a whole fake step."""


@dataclass(frozen=True)
class Choice:
    """What is printed and written."""

    space: Space
    rows: Sequence[Layout]
    """The fastest layout of every mesh, the fastest first."""
    best: Layout
    runner_up: Layout | None
    """The fastest other one."""
    outcome: Outcome
    fewest: Smallest | None
    """The layout on the fewest GPUs."""
    parameters: int
    flops_per_sample: int
    notes: Sequence[str]

    @property
    def device(self) -> Device:
        """The device that is planned for."""
        return self.space.device


def choose(
    space: Space, outcome: Outcome, model: Model, exact: CountsOf, peak_of: PeakOf
) -> Choice:
    """Rehearse what is preferred and the fastest other layout. UserError if nothing fits."""
    device, notes = space.device, list(outcome.notes)
    rows = list(outcome.rows)
    counted: dict[int, Layout] = {}
    confirmed: dict[int, Layout] = {}

    def confirm(order: Callable[[], list[Layout]]) -> Layout | None:
        while found := order():
            first = found[0]
            if id(first) in confirmed:
                return first
            place = next(i for i, row in enumerate(rows) if row is first)
            if id(first) not in counted:
                # Its own counts may make it slower or larger than the next.
                checked, known = with_exact_counts(first, model, exact, device), counted
            else:
                checked, note = rehearsed(first, model, peak_of, device)
                notes.append(note)
                known = confirmed
            if memory_of.fits(checked.needed, device):
                rows[place], known[id(checked)] = checked, checked
            else:
                notes.append(too_large(checked, device))
                del rows[place]
        return None

    def first_choice() -> list[Layout]:
        # Within the error of the fastest: its time has to be exact, and it has to fit.
        confirm(lambda: by_time(rows))
        return preferred(rows, device.error)

    while True:
        best = confirm(first_choice)
        if best is None:
            raise UserError(nothing_fits(space, model, outcome))
        runner_up = confirm(partial(others_by_time, rows, best))
        # Its own counts may have made the runner-up the fastest.
        if confirm(first_choice) is best:
            break
    with torch.device("meta"):
        network = space.base.spec.build()
    return Choice(
        space=space,
        rows=by_time(rows),
        best=best,
        runner_up=runner_up,
        outcome=outcome,
        fewest=fewest(space.config, device, space.fixed, model, (1, space.gpus)),
        parameters=sum(p.numel() for p in network.parameters()),
        flops_per_sample=network.flops_per_sample(space.base.spec.num_tokens),
        notes=notes,
    )


def by_time(rows: Sequence[Layout]) -> list[Layout]:
    """The fastest first."""
    return sorted(rows, key=lambda row: row.estimate.seconds)


def others_by_time(rows: Sequence[Layout], best: Layout) -> list[Layout]:
    """All but the best."""
    return [row for row in by_time(rows) if row is not best]


def with_exact_counts(layout: Layout, model: Model, counts: CountsOf, device: Device) -> Layout:
    """The layout with the estimate and memory of counts that were not derived."""
    exact = counts(layout.plan)
    held, needed, rank = fullest(model, layout.plan, exact, device)
    estimate = model.estimate(layout.plan, exact, device)
    return replace(layout, estimate=estimate, held=held, needed=needed, rank=rank)


def rehearsed(layout: Layout, model: Model, peak_of: PeakOf, device: Device) -> tuple[Layout, str]:
    """A layout with the memory of a whole fake step, and a note."""
    sizes = layout.plan.sizes
    try:
        peak = peak_of(layout.plan, layout.rank)
    except (UserError, ImportError) as error:
        return replace(layout), f"{sizes}: memory is composed only: {one_line(error)}"
    held = {kind: float(size) for kind, size in peak.bytes.items()}
    needed = model.needed(held, layout.plan, device)
    composed, whole = layout.needed.allocated, needed.allocated
    note = (
        f"{sizes}: {whole:.2f} GiB in a whole fake step, {composed:.2f} composed "
        f"({composed / whole - 1:+.1%})"
    )
    return replace(layout, held=held, needed=needed, is_rehearsed=True), note


def too_large(layout: Layout, device: Device) -> str:
    """Why a layout was dropped after its fake step."""
    return (
        f"{layout.plan.sizes}, microbatches of {layout.candidate.microbatch_size}: needs "
        f"{layout.needed.total:.1f} GiB, more than the {device.memory_gib:.1f} of {device.name}"
    )


def nothing_fits(space: Space, model: Model, outcome: Outcome) -> str:
    """What would fit: other values of fixed keys, or more GPUs."""
    device, gpus = space.device, space.gpus
    if not outcome.tally.candidates:
        return f"--gpus {gpus}: no layout can run this model and batch. {space.why_empty() or ''}"
    wanted = " ".join(f"--fix {key}={word(space.fixed_value(key))}" for key in sorted(space.fixed))
    head = f"--gpus {gpus} --device {device.name}: no layout{f' with {wanted}' * bool(wanted)} fits"
    least = smallest(space.config, device, space.fixed, model, gpus)
    if least:
        head += (
            f"; the smallest, {least.candidate.sizes} with [remat] mode="
            f'"{least.candidate.mode}", needs {least.needed.total:.1f} of '
            f"{device.memory_gib:.1f} GiB"
        )
    fixes = "; or ".join(ways(space, model)) or "take a device with more memory"
    return f"{head}. {fixes[0].upper()}{fixes[1:]}."


def ways(space: Space, model: Model) -> Iterator[str]:
    """What would make a layout fit."""
    device, gpus, config = space.device, space.gpus, space.config
    for key in ("remat.mode", "training.microbatch_size"):
        if key in space.fixed:
            free = space.fixed - {key}
            found = smallest(config, device, free, model, gpus)
            if found and memory_of.fits(found.needed, device):
                value = found.candidate.mode if key == "remat.mode" else 1
                yield f"set --fix {key}={value}"
    more = fewest(config, device, space.fixed, model, (gpus + 1, NEAREST * gpus))
    if more:
        yield (
            f"take --gpus {more.gpus}, which hold it ({more.candidate.sizes}, [remat] mode="
            f'"{more.candidate.mode}", microbatches of {more.candidate.microbatch_size})'
        )
