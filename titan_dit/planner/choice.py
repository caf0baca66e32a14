"""The layout that is recommended: by preference among equals, its memory from a whole fake step.

Also the fewest GPUs that hold a run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from titan_dit.config.job import JobConfig
from titan_dit.config.section import UserError
from titan_dit.dry_run.fake_step import take_fake_step
from titan_dit.dry_run.memory import Peak, StorageKind
from titan_dit.dry_run.simpler import word
from titan_dit.models.base import ModelConfig
from titan_dit.opening import DataExample
from titan_dit.plan import RunPlan
from titan_dit.planner import memory as memory_of
from titan_dit.planner.candidates import KEYS, MODES, Candidate, Space
from titan_dit.planner.counts import CountsOf
from titan_dit.planner.hardware import Device
from titan_dit.planner.memory import DeviceMemory
from titan_dit.planner.search import (
    BytesByKind,
    CostModel,
    PredictedLayout,
    Search,
    SearchResult,
    Tally,
    equally_fast,
    fullest,
    memory_key,
    one_line,
)
from titan_dit.planner.step import Estimate


def peak_of(config: JobConfig, data: DataExample, plan: RunPlan, rank: int) -> Peak:
    """The peak memory of pipeline rank `rank` in a whole fake step."""
    found = take_fake_step(
        plan,
        # A new objective: a step places its modules.
        config.objective.build(config.model, data.facts),
        data.fields,
        config.training,
        config.optimizer,
        config.ema,
        ranks=(rank,),
    )
    return found.ranks[0].peak


SEARCHED_AXES = ("parallel.tp", "parallel.pp", "parallel.dp_shard")
"""Axes that the search for the fewest GPUs varies. Replicas and larger microbatches save no memory
that these do not. cp is tried last, if activations are most of the memory."""


class SmallestLayout(NamedTuple):
    """The layout that needs the least memory on a number of GPUs."""

    gpus: int
    candidate: Candidate
    needed: DeviceMemory
    held: BytesByKind

    @property
    def is_mostly_activations(self) -> bool:
        """True if activations and temporary tensors are more than half of the rank's bytes."""
        own = self.held[StorageKind.ACTIVATIONS] + self.held[StorageKind.TEMPORARY]
        return own > memory_of.on_device(self.held) / 2


def gpu_counts(device: Device, first: int, last: int) -> Iterator[int]:
    """Numbers of GPUs to try: 1, 2, 4, ... up to a node, then twice as many nodes each.

    Only those from `first` on; the last one is `last`.
    """
    count = 1
    while count < last:
        if count >= first:
            yield count
        following = 2 * count
        node = device.gpus_per_node
        count = node if count < node < following else following
    yield last


def fewest(
    config: JobConfig,
    device: Device,
    fixed: Collection[str],
    model: CostModel,
    gpus: tuple[int, int],
) -> SmallestLayout | None:
    """The layout on the smallest number of GPUs, within `gpus` (from, to), that holds the run.

    None if no number does.
    """
    for count in gpu_counts(device, *gpus):
        found = smallest(config, device, fixed, model, count)
        if found and memory_of.fits(found.needed, device):
            return found
    return None


def smallest(
    config: JobConfig, device: Device, fixed: Collection[str], model: CostModel, gpus: int
) -> SmallestLayout | None:
    """The first layout found that fits on `gpus` GPUs, else the one that needs the least memory.

    None if no layout is valid. cp is varied only if none fits and activations dominate.
    """
    found = smallest_of(SEARCHED_AXES, config, device, fixed, model, gpus)
    if found is None or memory_of.fits(found.needed, device) or not found.is_mostly_activations:
        return found
    return smallest_of((*SEARCHED_AXES, "parallel.cp"), config, device, fixed, model, gpus) or found


def smallest_of(
    axes: Collection[str],
    config: JobConfig,
    device: Device,
    fixed: Collection[str],
    model: CostModel,
    gpus: int,
) -> SmallestLayout | None:
    """`smallest` of all sizes of some axes."""
    best: SmallestLayout | None = None
    modes = (
        [config.activation_checkpoint.mode]
        if "activation_checkpoint.mode" in fixed
        else list(reversed(MODES))
    )
    for mode in modes:
        for candidate, space in small_layouts(axes, config, device, fixed, gpus, mode):
            plan = space.plan(candidate)
            try:
                counts = model.counts(plan)
            except (UserError, ImportError):
                continue
            held, needed, _ = fullest(model, plan, counts, device)
            if best is None or needed.total < best.needed.total:
                best = SmallestLayout(gpus, candidate, needed, held)
            if memory_of.fits(needed, device):
                return best
    return best


def small_layouts(
    axes: Collection[str],
    config: JobConfig,
    device: Device,
    fixed: Collection[str],
    gpus: int,
    mode: str,
) -> Iterator[tuple[Candidate, Space]]:
    """Layouts with one sample a microbatch and one replica, unless these are fixed."""
    values = {
        "parallel.dp_replicate": 1,
        "parallel.cp": 1,
        "parallel.reshard_after_forward": "auto",
        "parallel.sequence_parallel": True,
        "pipeline.schedule": "1f1b",
        "pipeline.virtual_stages": 1,
        "training.microbatch_size": 1,
        "activation_checkpoint.mode": mode,
        "precision.float8": "off",
    }
    for key, value in values.items():
        if key not in fixed:
            section, _, name = key.partition(".")
            changed = replace(getattr(config, section), **{name: value})
            config = replace(config, **{section: changed})
    free = [key for key in axes if key not in fixed]
    space = Space(config, gpus, device, [key for key in KEYS if key not in free])
    for candidate in sorted(space, key=lambda one: (one.cp, one.tp, one.pp)):
        yield candidate, space


MAX_TIMES_GPUS = 64
"""If nothing fits, numbers of GPUs up to MAX_TIMES_GPUS times the given one are tried."""
MAX_SEARCHES = 5
"""Maximum number of searches. Each one excludes the layouts that turned out too large before."""
PeakOf = Callable[[RunPlan, int], Peak]
"""Peak memory of a pipeline rank in a whole fake step."""
TimeOf = Callable[[RunPlan, ModelConfig], Estimate]
"""The time of a step of one bucket: by its plan, and the model for its samples."""


@dataclass(frozen=True)
class BucketTime:
    """A step of one bucket with the recommended layout."""

    plan: RunPlan
    share: float
    """Share of the run's steps."""
    estimate: Estimate
    flops_per_sample: int


@dataclass(frozen=True)
class Recommendation:
    """The result of a search: the recommended layout, the others, and figures for the report."""

    space: Space
    rows: Sequence[PredictedLayout]
    """The fastest layout of every mesh, the fastest first."""
    best: PredictedLayout
    runner_up: PredictedLayout | None
    """The fastest other one."""
    outcome: SearchResult
    fewest: SmallestLayout | None
    """The layout on the fewest GPUs."""
    parameters: int
    flops_per_sample: int
    notes: Sequence[str]
    buckets: Sequence[BucketTime] = ()
    """A step of every bucket; empty if all data has one shape."""

    @property
    def device(self) -> Device:
        """The device that is planned for."""
        return self.space.device

    @property
    def mean_seconds(self) -> float:
        """Seconds of a step, in the mean over the buckets."""
        if not self.buckets:
            return self.best.estimate.seconds
        return sum(each.share * each.estimate.seconds for each in self.buckets)


@dataclass(frozen=True)
class Dropped:
    """A row that does not fit with exact counts or in a fake step. Others of its mesh may fit."""

    candidate: Candidate
    most: float
    """GiB of composed memory above which other layouts of its kind do not fit either."""
    why: str


def search(
    space: Space,
    model: CostModel,
    exact: CountsOf,
    peak_of: PeakOf,
    top: int,
    *,
    shows: bool = False,
) -> Recommendation:
    """Search and rehearse, again without what does not fit. UserError if nothing fits."""
    too_large: dict[object, float] = {}
    dropped: list[Dropped] = []
    tally = Tally()
    peaks: dict[tuple[str, int], Peak] = {}

    def known_peak_of(plan: RunPlan, rank: int) -> Peak:
        key = repr(plan), rank
        if key not in peaks:
            peaks[key] = peak_of(plan, rank)
        return peaks[key]

    for _ in range(MAX_SEARCHES):
        found = Search(space, space.device, model, shows=shows, too_large=too_large).run(top)
        tally = found.tally.after(tally)
        rows = Shortlist(found, model, exact, known_peak_of)
        best, runner_up = rows.best(space.device)
        dropped += rows.dropped
        if not rows.dropped:
            break
        for one in rows.dropped:
            key = memory_key(one.candidate)
            too_large[key] = min(one.most, too_large.get(key, one.most))
    if best is None:
        raise UserError(nothing_fits(space, model, found, dropped))
    notes = [*(one.why for one in dropped), *rows.notes]
    return recommendation(
        space, model, replace(found, tally=tally, notes=notes), rows, best, runner_up
    )


class Shortlist:
    """The rows of a search. A row is rehearsed when asked for, and dropped if it does not fit."""

    def __init__(
        self, outcome: SearchResult, model: CostModel, exact: CountsOf, peak_of: PeakOf
    ) -> None:
        self.rows, self.model = list(outcome.rows), model
        self.exact, self.peak_of = exact, peak_of
        self.counted: dict[int, PredictedLayout] = {}
        """id(row) -> rows with exact counts, which may be slower or larger than the next row."""
        self.confirmed: dict[int, PredictedLayout] = {}
        """id(row) -> rows with the memory of a fake step."""
        self.composed = {row.candidate: row.needed.total for row in outcome.rows}
        self.dropped: list[Dropped] = []
        self.notes = list(outcome.notes)

    def first(
        self, device: Device, order: Callable[[], list[PredictedLayout]]
    ) -> PredictedLayout | None:
        """The first layout of an order that passes `check`; None if none does."""
        while found := order():
            if id(found[0]) in self.confirmed:
                return found[0]
            self.check(found[0], device)
        return None

    def check(self, row: PredictedLayout, device: Device) -> None:
        """First call: count a row exactly. Second: rehearse its memory. Drops a row too large."""
        if id(row) not in self.counted:
            known = self.counted
            try:
                checked = with_exact_counts(row, self.model, self.exact, device)
            except (UserError, ImportError) as error:
                self.drop(row, 1.0, f"{row.plan.sizes}: {one_line(error)}")
                return
        else:
            known = self.confirmed
            checked, note = rehearsed(row, self.model, self.peak_of, device)
            self.notes.append(note)
        if memory_of.fits(checked.needed, device):
            place = next(i for i, each in enumerate(self.rows) if each is row)
            self.rows[place], known[id(checked)] = checked, checked
        else:
            self.drop(row, device.memory_gib / checked.needed.total, too_large(checked, device))

    def drop(self, row: PredictedLayout, share: float, why: str) -> None:
        """Leave out a row. Its composed memory times `share` bounds that of others of its kind."""
        self.rows = [each for each in self.rows if each is not row]
        most = share * self.composed[row.candidate]
        self.dropped.append(Dropped(row.candidate, most, why))

    def best(self, device: Device) -> tuple[PredictedLayout | None, PredictedLayout | None]:
        """(the recommended layout, the fastest other one); None if nothing fits."""

        def order() -> list[PredictedLayout]:
            # Within the error of the fastest: its time has to be exact, and it has to fit.
            self.first(device, lambda: by_time(self.rows))
            return preferred(self.rows, device.error)

        while best := self.first(device, order):
            runner_up = self.first(device, lambda: others_by_time(self.rows, best))
            # Its own counts may have made the runner-up the fastest.
            if self.first(device, order) is best:
                return best, runner_up
        return None, None


def recommendation(
    space: Space,
    model: CostModel,
    outcome: SearchResult,
    rows: Shortlist,
    best: PredictedLayout,
    runner_up: PredictedLayout | None,
) -> Recommendation:
    """The result of a search, with the fewest GPUs that hold the run."""
    with torch.device("meta"):
        network = space.base.spec.build()
    return Recommendation(
        space=space,
        rows=by_time(rows.rows),
        best=best,
        runner_up=runner_up,
        outcome=outcome,
        fewest=fewest(space.config, space.device, space.fixed, model, (1, space.gpus)),
        parameters=sum(p.numel() for p in network.parameters()),
        flops_per_sample=network.flops_per_sample(space.base.spec.num_attended_tokens),
        notes=outcome.notes,
    )


def with_buckets_timed(
    choice: Recommendation, models: Sequence[ModelConfig], rows: Sequence[int], timed: TimeOf
) -> Recommendation:
    """The result with a step of every bucket by the recommended layout.

    `models`, `rows`: the model for each bucket, and its rows. A sample of twice the tokens takes
    more than twice the time: attention's is quadratic.
    """
    space, found = choice.space, list[BucketTime]()
    bases = space.base.each_bucket
    steps = [count / each.global_batch_size for each, count in zip(bases, rows, strict=True)]
    estimates: dict[tuple[object, ...], Estimate] = {}
    for base, model, number in zip(bases, models, steps, strict=True):
        plan = space.plan(choice.best.candidate, base)
        # Buckets of as many tokens take as long, whatever their sides.
        work = plan.spec.num_tokens, plan.spec.num_attended_tokens, plan.global_batch_size
        if work not in estimates:
            estimates[work] = timed(plan, model)
        with torch.device("meta"):
            network = plan.spec.build()
        flops = network.flops_per_sample(plan.spec.num_attended_tokens)
        found.append(BucketTime(plan, number / sum(steps), estimates[work], flops))
    return replace(choice, buckets=found)


def preferred(rows: Sequence[PredictedLayout], error: float) -> list[PredictedLayout]:
    """Rows in the sequence of preference.

    Those within the error of the fastest count as equal: fewest axes first, then without tp and
    cp, then least memory. The others follow by time.
    """
    if not rows:
        return []
    alike = equally_fast(rows, error)

    def rank(row: PredictedLayout) -> tuple[int, bool, float]:
        one = row.candidate
        return one.num_axes, one.tp * one.cp > 1, row.needed.total

    alike.sort(key=rank)
    rest = [row for row in rows if row not in alike]
    return alike + sorted(rest, key=lambda row: row.estimate.seconds)


def by_time(rows: Sequence[PredictedLayout]) -> list[PredictedLayout]:
    """The rows by estimated step time, the fastest first."""
    return sorted(rows, key=lambda row: row.estimate.seconds)


def others_by_time(rows: Sequence[PredictedLayout], best: PredictedLayout) -> list[PredictedLayout]:
    """All rows but the best, the fastest first."""
    return [row for row in by_time(rows) if row is not best]


def with_exact_counts(
    layout: PredictedLayout, model: CostModel, counts: CountsOf, device: Device
) -> PredictedLayout:
    """The layout with the estimate and memory of counts that were not derived."""
    exact = counts(layout.plan)
    held, needed, rank = fullest(model, layout.plan, exact, device)
    estimate = model.estimate(layout.plan, exact, device)
    return replace(layout, estimate=estimate, held=held, needed=needed, rank=rank)


def rehearsed(
    layout: PredictedLayout, model: CostModel, peak_of: PeakOf, device: Device
) -> tuple[PredictedLayout, str]:
    """(the layout with the memory of a whole fake step, a note)."""
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


def too_large(layout: PredictedLayout, device: Device) -> str:
    """Why a layout was dropped after its fake step."""
    return (
        f"{layout.plan.sizes}, microbatches of {layout.candidate.microbatch_size}: needs "
        f"{layout.needed.total:.1f} GiB, more than the {device.memory_gib:.1f} of {device.name}"
    )


def nothing_fits(
    space: Space, model: CostModel, outcome: SearchResult, dropped: Sequence[Dropped]
) -> str:
    """The error if no layout fits. It names the fix: free a fixed key, or take more GPUs."""
    device, gpus = space.device, space.gpus
    if not outcome.tally.candidates:
        return f"--gpus {gpus}: no layout can run this model and batch. {space.why_empty() or ''}"
    wanted = " ".join(f"--fix {key}={word(space.fixed_value(key))}" for key in sorted(space.fixed))
    head = f"--gpus {gpus} --device {device.name}: no layout{f' with {wanted}' * bool(wanted)} fits"
    least = smallest(space.config, device, space.fixed, model, gpus)
    if dropped and least and memory_of.fits(least.needed, device):
        head += f", though some do by composed memory; {dropped[0].why}"
    elif least:
        head += (
            f"; the smallest, {least.candidate.sizes} with [activation_checkpoint] mode="
            f'"{least.candidate.mode}", needs {least.needed.total:.1f} of '
            f"{device.memory_gib:.1f} GiB"
        )
    fix = "; or ".join(fixes(space, model)) or "take a device with more memory"
    return f"{head}. {fix[0].upper()}{fix[1:]}."


def fixes(space: Space, model: CostModel) -> Iterator[str]:
    """Fixes that make a layout fit, as clauses of an error."""
    device, gpus, config = space.device, space.gpus, space.config
    for key in ("activation_checkpoint.mode", "training.microbatch_size"):
        if key in space.fixed:
            free = space.fixed - {key}
            found = smallest(config, device, free, model, gpus)
            if found and memory_of.fits(found.needed, device):
                value = found.candidate.mode if key == "activation_checkpoint.mode" else 1
                yield f"set --fix {key}={value}"
    more = fewest(config, device, space.fixed, model, (gpus + 1, MAX_TIMES_GPUS * gpus))
    if more:
        yield (
            f"take --gpus {more.gpus}, which hold it ({more.candidate.sizes}, "
            f'[activation_checkpoint] mode="{more.candidate.mode}", '
            f"microbatches of {more.candidate.microbatch_size})"
        )
