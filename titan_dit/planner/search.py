"""The best layouts of a config: best first, by lower bounds on a step's time.

A candidate's bound is first that of coarser splits (`floors.py`), then `step.bound` with counts of
its own. Its memory is composed and its step estimated only if no layout that was found is as fast as
its bound. Layouts without tp and cp come first: they need the fewest rehearsals.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from titan_dit.config.section import UserError
from titan_dit.dry_run.memory import StorageKind
from titan_dit.plan import RunPlan
from titan_dit.planner import memory as memory_of
from titan_dit.planner import step
from titan_dit.planner.candidates import MODES, Candidate, Space
from titan_dit.planner.floors import (
    Bucket,
    Busy,
    bucket_of,
    busy_of,
    coarser_than,
    floor_of,
    scaled,
)
from titan_dit.planner.hardware import Device
from titan_dit.planner.memory import Needed
from titan_dit.planner.step import Estimate
from titan_dit.planner.work import Counts
from titan_dit.system.progress import ProgressLine

CountsOf = Callable[[RunPlan], Counts]
Held = Mapping[StorageKind, float]
SLACK = 1e-9
"""Relative: bounds and estimates are sums in another sequence."""
LESS: Mapping[str, Sequence[str]] = {
    "none": (),
    "attention": ("none",),
    "selective": ("none",),
    "full": ("none", "attention", "selective"),
}
"""[remat] mode -> those that compute less again: where one of them fits, it is faster."""
SHOWN_EVERY = 200
"""Candidates between two looks at what is left."""


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


@dataclass
class Tally:
    """What a search did."""

    candidates: int = 0
    bounded: int = 0
    """Candidates with a bound from counts of their own."""
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
    notes: list[str] = field(default_factory=list)


class Item(NamedTuple):
    """A candidate in the queue; the fields are compared in their sequence."""

    is_split: bool
    """With tp or cp. Without, few rehearsals find a first good layout."""
    bound: float
    extra: int
    """[remat] modes that compute more come later."""
    number: int
    level: int
    """How far `coarser_than` was followed; beyond it, the bound is that of its own counts."""
    candidate: Candidate


class Search:
    """A search over a space of layouts."""

    def __init__(self, space: Space, device: Device, model: Model, *, shows: bool = False) -> None:
        """`shows`: progress on stderr."""
        self.space, self.device, self.model = space, device, model
        self.batch, self.layers = space.base.global_batch_size, space.base.spec.num_layers
        self.tally = Tally()
        self.rows: dict[object, Layout] = {}
        self.times: list[float] = []
        self.notes: list[str] = []
        self.fitting: set[Candidate] = set()
        self.known: dict[Bucket, Counts | None] = {}
        self.busy: dict[tuple[Bucket, int], Busy | None] = {}
        self.queue: list[Item] = []
        self.fewest = len(Candidate._fields)
        """The fewest axes of a row within the error of the fastest."""
        self.shown = 0
        self.progress = ProgressLine(1, "layouts", what="plan") if shows else None

    def run(self, top: int = 10) -> Outcome:
        """The fastest `top` meshes, and all that may be preferred to them within the error.

        Each is the fastest layout of its mesh that fits.
        """
        began = time.process_time()
        for number, candidate in enumerate(self.space):
            is_split, extra = candidate.tp * candidate.cp > 1, MODES.index(candidate.mode)
            self.queue.append(Item(is_split, 0.0, extra, number, -1, candidate))
        self.tally.candidates = len(self.queue)
        heapq.heapify(self.queue)
        while self.queue:
            item = heapq.heappop(self.queue)
            if self._matters(item.bound, item.candidate, top):
                self._take(item)
            self._show(top)
        if self.progress:
            self.progress.end()
        self.tally.seconds = time.process_time() - began
        rows = sorted(self.rows.values(), key=lambda row: row.estimate.seconds)
        return Outcome(rows, self.tally, notes=self.notes)

    def _matters(self, bound: float, candidate: Candidate, top: int) -> bool:
        """False if the candidate cannot become a row that is shown or preferred."""
        times = self.times
        row = self.rows.get(mesh_of(candidate))
        if not times:
            return True
        if row is not None and bound >= row.estimate.seconds:
            return False
        if any(candidate._replace(mode=mode) in self.fitting for mode in LESS[candidate.mode]):
            return False
        if len(times) < top or bound <= times[top - 1] * (1 + SLACK):
            return True
        is_equal = bound <= times[0] * (1 + self.device.error) * (1 + SLACK)
        return is_equal and candidate.num_axes <= self.fewest

    def _take(self, item: Item) -> None:
        """Sharpen the bound of a candidate, or weigh and estimate it."""
        candidate, level = item.candidate, item.level + 1
        coarser = list(coarser_than(candidate))
        if level < len(coarser):
            if level and not self._may_fit(candidate, coarser[level - 1], coarser[level]):
                return
            busy = self._busy(candidate, coarser[level], level)
            if busy is None:
                return
            bound = floor_of(busy, candidate, self.layers, self.batch)
        elif level == len(coarser):
            plan = self.space.plan(candidate)
            counts = self._counts(candidate)
            if counts is None:
                return
            bound = self.model.bound(plan, counts, self.device)
            self.tally.bounded += 1
        else:
            self._decide(candidate)
            return
        heapq.heappush(self.queue, item._replace(bound=max(item.bound, bound), level=level))

    def _busy(self, candidate: Candidate, coarse: Candidate, level: int) -> Busy | None:
        key = bucket_of(candidate), level
        if key not in self.busy:
            counts, plan = self._counts(coarse), self.space.plan(candidate)
            self.busy[key] = counts and busy_of(counts, coarse, candidate, plan, self.device)
        return self.busy[key]

    def _counts(self, candidate: Candidate) -> Counts | None:
        """Counts of a candidate; None if the model cannot run so, or a library is missing."""
        bucket = bucket_of(candidate)
        if bucket not in self.known:
            try:
                self.known[bucket] = self.model.counts(self.space.plan(candidate))
            except (UserError, ImportError) as error:
                self.known[bucket] = None
                if (note := f"layouts left out: {one_line(error)}") not in self.notes:
                    self.notes.append(note)
        return self.known[bucket]

    def _may_fit(self, candidate: Candidate, coarse: Candidate, finer: Candidate) -> bool:
        """False if not even the memory of a coarser split's shares fits; before a rehearsal."""
        if bucket_of(finer) in self.known or coarse.mode != candidate.mode:
            return True
        counts = self.known.get(bucket_of(coarse))
        if counts is None:
            return True
        plan = self.space.plan(candidate)
        _, needed, _ = fullest(self.model, plan, scaled(counts, coarse, candidate), self.device)
        return memory_of.fits(needed, self.device)

    def _decide(self, candidate: Candidate) -> None:
        """Weigh and estimate a candidate; keep the fastest of a mesh."""
        counts, plan = self._counts(candidate), self.space.plan(candidate)
        assert counts is not None
        self.tally.weighed += 1
        held, needed, rank = fullest(self.model, plan, counts, self.device)
        if not memory_of.fits(needed, self.device):
            self.tally.too_large += 1
            return
        self.fitting.add(candidate)
        estimate = self.model.estimate(plan, counts, self.device)
        self.tally.estimated += 1
        mesh = mesh_of(candidate)
        row = self.rows.get(mesh)
        if row is None or estimate.seconds < row.estimate.seconds:
            self.rows[mesh] = Layout(candidate, plan, estimate, held, needed, rank)
            self.times = sorted(one.estimate.seconds for one in self.rows.values())
            alike = equals(list(self.rows.values()), self.device.error)
            self.fewest = min(one.candidate.num_axes for one in alike)

    def _show(self, top: int) -> None:
        if self.progress is None:
            return
        self.shown += 1
        if self.shown % SHOWN_EVERY:
            return
        left = sum(self._matters(item.bound, item.candidate, top) for item in self.queue)
        self.progress.total = self.shown + left
        best = f", best {1e3 * self.times[0]:,.0f} ms" if self.times else ""
        self.progress(self.shown, f"{self.tally.estimated} estimated{best}")


def mesh_of(candidate: Candidate) -> tuple[object, ...]:
    """What one row of the table is about: the sizes of the axes, and the cp method."""
    return (*candidate[:5], candidate.cp_method if candidate.cp > 1 else "")


def fullest(
    model: Model, plan: RunPlan, counts: Counts, device: Device
) -> tuple[Held, Needed, int]:
    """Memory of the pipeline rank that needs most, and the rank."""
    ranks = [
        (held, model.needed(held, plan, device), rank)
        for rank, held in enumerate(model.memory(plan, counts))
    ]
    return max(ranks, key=lambda rank: rank[1].total)


def equals(rows: Sequence[Layout], error: float) -> list[Layout]:
    """Rows within the error of the fastest."""
    best = min(row.estimate.seconds for row in rows)
    return [row for row in rows if row.estimate.seconds <= best * (1 + error)]


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
