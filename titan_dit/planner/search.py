"""The best layouts of a config: best first, by lower bounds on a step's time.

Candidates that share a block's work (split, recomputation, float8, microbatch size) are a `Bucket`.
Its floor is what the blocks and ends compute on all ranks together, divided by the ranks: no
pipeline or data-parallel layout is faster. Floors of splits that were not rehearsed come from
coarser ones, whose work they can only add to. A bucket is opened, a candidate's memory composed and
its step estimated only if nothing found is faster than its bound.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from titan_dit.config.section import UserError
from titan_dit.dry_run.memory import StorageKind
from titan_dit.plan import RunPlan
from titan_dit.planner import memory as memory_of
from titan_dit.planner import rates, step
from titan_dit.planner.candidates import Candidate, Space
from titan_dit.planner.hardware import Device
from titan_dit.planner.links import Links
from titan_dit.planner.memory import Needed
from titan_dit.planner.step import Estimate
from titan_dit.planner.work import Counts, Part, Work
from titan_dit.system.progress import ProgressLine

CountsOf = Callable[[RunPlan], Counts]
Held = Mapping[StorageKind, float]
SLACK = 1e-9
"""Relative: bounds and estimates are sums in another sequence."""


@dataclass(frozen=True)
class Model:
    """What a search asks about a layout; tests replace it."""

    counts: CountsOf
    estimate: Callable[[RunPlan, Counts, Device], Estimate] = step.estimate
    bound: Callable[[RunPlan, Counts, Device], float] = step.bound
    memory: Callable[[RunPlan, Counts], Sequence[Held]] = memory_of.memory
    needed: Callable[[Held, RunPlan, Device], Needed] = memory_of.needed


@dataclass(frozen=True)
class Layout:
    """A candidate that fits, with its predicted step and memory."""

    candidate: Candidate
    plan: RunPlan
    estimate: Estimate
    held: Held
    """Bytes by kind of the pipeline rank that needs most, at its peak."""
    needed: Needed
    rank: int
    """That pipeline rank."""
    is_rehearsed: bool = False
    """Its memory is that of a whole fake step."""


class Bucket(NamedTuple):
    """Candidates whose blocks do the same work on a microbatch."""

    tp: int
    cp: int
    cp_method: str
    sequence_parallel: bool
    mode: str
    float8: str
    microbatch_size: int


@dataclass
class Tally:
    """What a search did."""

    candidates: int = 0
    opened: int = 0
    bounded: int = 0
    weighed: int = 0
    """Candidates whose memory was composed."""
    too_large: int = 0
    """Those that do not fit."""
    estimated: int = 0
    seconds: float = 0.0


@dataclass
class Outcome:
    """The layouts that were found."""

    rows: list[Layout]
    """The fastest of every mesh, the fastest first."""
    tally: Tally
    smallest: Layout | None = None
    """Of those that do not fit, the one that needs least; without an estimate of its own."""
    notes: list[str] = field(default_factory=list)


class Search:
    """A search over a space of layouts."""

    def __init__(self, space: Space, device: Device, model: Model, *, shows: bool = False) -> None:
        """`shows`: progress on stderr."""
        self.space, self.device, self.model = space, device, model
        self.tally = Tally()
        self.buckets = self._sorted_in()
        self.rows: dict[object, Layout] = {}
        self.notes: list[str] = []
        self.refused: set[Bucket] = set()
        self.order = itertools.count()
        self.heap: list[tuple[float, int, int, Bucket, Candidate | None]] = []
        self.progress = ProgressLine(1, "layouts", what="plan") if shows else None

    def run(self, top: int = 10) -> Outcome:
        """The fastest `top` meshes, and all that may be preferred to them within the error.

        Each is the fastest layout of its mesh that fits. Raises UserError if nothing can run.
        """
        began = time.process_time()
        for bucket in self.buckets:
            self._push(0.0, -1, bucket, None)
        while self.heap:
            bound, _, level, bucket, candidate = heapq.heappop(self.heap)
            if bound > self._limit(top):
                break
            if candidate is not None:
                self._decide(bound, candidate, top)
            elif self._may_matter(bound, self.buckets[bucket], top):
                self._refine(bound, level + 1, bucket)
            self._show(bound, top)
        if self.progress:
            self.progress.end()
        self.tally.seconds = time.process_time() - began
        rows = sorted(self.rows.values(), key=lambda row: row.estimate.seconds)
        return Outcome(rows, self.tally, notes=self.notes)

    def _sorted_in(self) -> dict[Bucket, list[Candidate]]:
        found: dict[Bucket, list[Candidate]] = {}
        for candidate in self.space:
            found.setdefault(bucket_of(candidate), []).append(candidate)
            self.tally.candidates += 1
        return found

    def _push(self, bound: float, level: int, bucket: Bucket, item: Candidate | None) -> None:
        heapq.heappush(self.heap, (bound, next(self.order), level, bucket, item))

    def _times(self) -> list[float]:
        return sorted(row.estimate.seconds for row in self.rows.values())

    def _limit(self, top: int) -> float:
        """No slower layout is shown or preferred."""
        times = self._times()
        if not times:
            return float("inf")
        last = times[top - 1] if len(times) >= top else float("inf")
        return max(last, times[0] * (1 + self.device.error)) * (1 + SLACK)

    def _fewest(self) -> int:
        """The fewest axes of a row within the error of the fastest."""
        return min(row.candidate.num_axes for row in equals(self.rows.values(), self.device.error))

    def _may_matter(self, bound: float, candidates: Sequence[Candidate], top: int) -> bool:
        """False if none of these can become a row that is shown or preferred."""
        times = self._times()
        if len(times) < top or bound <= times[top - 1]:
            return True
        return min(one.num_axes for one in candidates) <= self._fewest()

    def _refine(self, bound: float, level: int, bucket: Bucket) -> None:
        """A sharper floor of a bucket; after the last one, bounds of its candidates."""
        sample = self.buckets[bucket][0]
        coarser = list(coarser_than(sample))
        if level < len(coarser):
            floor = self._floor(sample, coarser[level])
            if floor is None:
                self._push(bound, level, bucket, None)
            else:
                self._push(max(bound, floor), level, bucket, None)
            return
        self.tally.opened += 1
        for candidate in self.buckets[bucket]:
            plan = self.space.plan(candidate)
            counts = self._counts(plan, bucket)
            if counts is None:
                return
            own = self.model.bound(plan, counts, self.device)
            self.tally.bounded += 1
            self._push(max(bound, own), level, bucket, candidate)

    def _counts(self, plan: RunPlan, bucket: Bucket) -> Counts | None:
        """Counts of a bucket; None if the model cannot run so, or a library is missing."""
        try:
            return self.model.counts(plan)
        except (UserError, ImportError) as error:
            if (note := f"{bucket.float8}: {one_line(error)}") not in self.notes:
                self.notes.append(note)
            return None

    def _floor(self, sample: Candidate, coarse: Candidate) -> float | None:
        """Seconds of a step's blocks and ends, from the counts of a coarser split."""
        counts = self._counts(self.space.plan(coarse), bucket_of(coarse))
        if counts is None:
            return None
        share = coarse.tp * coarse.cp / (sample.tp * sample.cp)
        plan = self.space.plan(sample)
        links = Links(plan.sizes, self.device)
        batch, ranks = plan.global_batch_size, self.space.gpus
        steps = batch / sample.microbatch_size * sample.tp * sample.cp / ranks
        is_fused = plan.compile.enabled
        seconds = 0.0
        for part, times in parts(counts, plan.spec.num_layers):
            for work in (part.forward, part.backward):
                seconds += times * busy_s(work, self.device, links, is_fused)
        return seconds * share * steps

    def _decide(self, bound: float, candidate: Candidate, top: int) -> None:
        """Weigh and estimate a candidate, unless it cannot matter; keep the fastest of a mesh."""
        mesh = mesh_of(candidate)
        row = self.rows.get(mesh)
        if row is not None and bound >= row.estimate.seconds:
            return
        if not self._may_matter(bound, (candidate,), top):
            return
        found = self.weighed(candidate)
        if found is None:
            return
        plan, counts, held, needed, rank = found
        estimate = self.model.estimate(plan, counts, self.device)
        self.tally.estimated += 1
        if row is None or estimate.seconds < row.estimate.seconds:
            self.rows[mesh] = Layout(candidate, plan, estimate, held, needed, rank)

    def weighed(
        self, candidate: Candidate
    ) -> tuple[RunPlan, Counts, Held, Needed, int] | None:
        """A candidate's plan, counts and memory if it fits."""
        plan = self.space.plan(candidate)
        counts = self._counts(plan, bucket_of(candidate))
        if counts is None:
            return None
        self.tally.weighed += 1
        held, needed, rank = fullest(self.model, plan, counts, self.device)
        if not memory_of.fits(needed, self.device):
            self.tally.too_large += 1
            return None
        return plan, counts, held, needed, rank

    def _show(self, bound: float, top: int) -> None:
        if self.progress is None:
            return
        limit = self._limit(top)
        done = self.tally.bounded + self.tally.opened
        left = sum(item[0] <= limit for item in self.heap[:1000])
        self.progress.total = done + max(left, 1)
        best = min(self._times(), default=0.0)
        note = f"{self.tally.estimated} estimated, best {1e3 * best:,.0f} ms" if best else ""
        self.progress(done, note)


def bucket_of(candidate: Candidate) -> Bucket:
    """The bucket of a candidate."""
    return Bucket(*(getattr(candidate, name) for name in Bucket._fields))


def mesh_of(candidate: Candidate) -> tuple[object, ...]:
    """What one row of the table is about: the sizes of the axes, and the cp method."""
    return (*candidate[:5], candidate.cp_method if candidate.cp > 1 else "")


def coarser_than(candidate: Candidate) -> Iterator[Candidate]:
    """Splits that do no more work in total, the cheapest to rehearse first.

    Without float8 products take twice as long, so the coarse split has the same format.
    """
    ranks = candidate.dp_shard * candidate.tp * candidate.cp
    plain = candidate._replace(tp=1, cp=1, mode="none", dp_shard=ranks)
    yield plain
    if candidate.mode != "none":
        yield plain._replace(mode=candidate.mode)
    if candidate.tp > 1:
        yield candidate._replace(cp=1, mode="none", dp_shard=ranks // candidate.tp)
    if candidate.cp > 1:
        yield candidate._replace(tp=1, cp=2, mode="none", dp_shard=ranks // 2)


def parts(counts: Counts, layers: int) -> Iterator[tuple[Part, int]]:
    """Each part and how often a model has it."""
    yield counts.embed, 1
    yield counts.block, layers
    yield counts.head, 1


def busy_s(work: Work, device: Device, links: Links, fused: bool) -> float:
    """Seconds of work on the device, without waiting for the host."""
    terms = rates.seconds(work, device, links, fused=fused)
    return sum(seconds for term, seconds in terms.items() if term != "launches")


def fullest(
    model: Model, plan: RunPlan, counts: Counts, device: Device
) -> tuple[Held, Needed, int]:
    """Memory of the pipeline rank that needs most, and the rank."""
    ranks = [
        (held, model.needed(held, plan, device), rank)
        for rank, held in enumerate(model.memory(plan, counts))
    ]
    return max(ranks, key=lambda rank: rank[1].total)


def equals(rows: Sequence[Layout] | object, error: float) -> list[Layout]:
    """Rows within the error of the fastest."""
    found = list(rows)  # type: ignore[call-overload]
    best = min(row.estimate.seconds for row in found)
    return [row for row in found if row.estimate.seconds <= best * (1 + error)]


def preferred(rows: Sequence[Layout], error: float) -> list[Layout]:
    """Rows in the sequence of preference.

    Those within the error of the fastest count as equal: fewest axes first, then least memory. The
    others follow by time.
    """
    if not rows:
        return []
    alike = equals(rows, error)
    alike.sort(key=lambda row: (row.candidate.num_axes, row.needed.total))
    rest = [row for row in rows if row not in alike]
    return alike + sorted(rest, key=lambda row: row.estimate.seconds)


def with_exact_counts(layout: Layout, model: Model, counts: CountsOf, device: Device) -> Layout:
    """The layout with the estimate and memory of counts that were not derived."""
    exact = counts(layout.plan)
    held, needed, rank = fullest(model, layout.plan, exact, device)
    estimate = model.estimate(layout.plan, exact, device)
    return replace(layout, estimate=estimate, held=held, needed=needed, rank=rank)


def one_line(error: BaseException) -> str:
    """An error's text on one line."""
    return " ".join(str(error).split()) or type(error).__name__
