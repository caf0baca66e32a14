"""The best layouts of a config: best first, by lower bounds on a step's time.

A candidate's bound is first that of coarser splits (`floors.py`), then `step.bound` with counts of
its own. Its memory is composed and its step estimated only if no layout that was found is as fast
as its bound. Layouts without tp and cp come first: they need the fewest rehearsals.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from titan_dit.config.section import UserError
from titan_dit.planner import memory as memory_of
from titan_dit.planner.candidates import MODES, Candidate, Space
from titan_dit.planner.floors import (
    Bucket,
    Busy,
    bucket_of,
    busy_of,
    coarser_than,
    floor_of,
    least_bytes,
    scaled,
)
from titan_dit.planner.hardware import Device
from titan_dit.planner.layout import Layout, Outcome, Tally, equals, kind_of, mesh_of
from titan_dit.planner.weighing import Model, fullest
from titan_dit.planner.work import Counts
from titan_dit.system.progress import ProgressLine

GIB = 2**30
SLACK = 1e-9
"""Relative: bounds and estimates are sums in another sequence."""
LESS: Mapping[str, Sequence[str]] = {
    "none": (),
    "attention": ("none",),
    "selective": ("none",),
    "full": ("none", "attention", "selective"),
}
"""[remat] mode -> those that compute less again: where one of them fits, it is faster."""


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

    def __init__(
        self,
        space: Space,
        device: Device,
        model: Model,
        *,
        shows: bool = False,
        too_large: Mapping[object, float] | None = None,
    ) -> None:
        """`shows`: progress on stderr.

        `too_large`: by `kind_of`, GiB of composed memory from which on layouts did not fit.
        """
        self.space, self.device, self.model = space, device, model
        self.known_too_large = too_large or {}
        self.batch, self.layers = space.base.global_batch_size, space.base.spec.num_layers
        self.tally = Tally()
        self.rows: dict[object, Layout] = {}
        self.times: list[float] = []
        self.notes: list[str] = []
        self.fitting: set[Candidate] = set()
        self.known: dict[Bucket, Counts | None] = {}
        self.busy: dict[tuple[Bucket, int], Busy | None] = {}
        self.fits: dict[Candidate, bool] = {}
        """Candidates with microbatches of one sample."""
        self.queue: list[Item] = []
        self.top = 0
        self.plain: float | None = None
        """Seconds of the fastest layout without tp and cp."""
        self.left_out = False
        """`_could_win` has ruled out candidates."""
        self.fewest = len(Candidate._fields)
        """The fewest axes of a row within the error of the fastest."""
        self.shown, self.next_look = 0, 0.0
        self.progress = ProgressLine(1, "layouts", what="plan") if shows else None

    def run(self, top: int = 10) -> Outcome:
        """The fastest `top` meshes, and all that may be preferred to them within the error.

        Each is the fastest layout of its mesh that fits. Of tp and cp only what `_could_win`.
        """
        began, self.top = time.process_time(), top
        for number, candidate in enumerate(self.space):
            is_split, extra = candidate.tp * candidate.cp > 1, MODES.index(candidate.mode)
            self.queue.append(Item(is_split, 0.0, extra, number, -1, candidate))
        self.tally.candidates = len(self.queue)
        heapq.heapify(self.queue)
        while self.queue:
            item = heapq.heappop(self.queue)
            if self._matters(item.bound, item.candidate):
                if self._could_win(item.bound, item.candidate):
                    self._take(item)
                else:
                    self.left_out = True
            self._show()
        if self.progress:
            self.progress.end()
        self.tally.seconds = time.process_time() - began
        rows = sorted(self.rows.values(), key=lambda row: row.estimate.seconds)
        if self.left_out:
            self.notes.append(
                "layouts with tp or cp that cannot be faster by more than the error of "
                f"{self.device.error:.0%} are left out: --fix parallel.tp=2 shows some"
            )
        return Outcome(rows, self.tally, notes=self.notes)

    def _matters(self, bound: float, candidate: Candidate) -> bool:
        """False if the candidate cannot become a row that is shown or preferred."""
        times, top = self.times, self.top
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

    def _could_win(self, bound: float, candidate: Candidate) -> bool:
        """False for tp or cp that could be faster than a layout without by the error at most.

        Both would count as equal, and it has no fewer axes: it needs no rehearsal.
        """
        if candidate.tp * candidate.cp == 1 or self.plain is None:
            return True
        is_simpler = candidate.num_axes < self.fewest
        return is_simpler or bound * (1 + self.device.error) < self.plain

    def _take(self, item: Item) -> None:
        """Sharpen the bound of a candidate, or weigh and estimate it."""
        candidate, level = item.candidate, item.level + 1
        coarser = list(coarser_than(candidate))
        if level < len(coarser):
            bound = self._floor(candidate, coarser, level)
            if self._is_too_large(candidate, coarser[level]):
                self.tally.too_large += 1
                return
        elif level == len(coarser):
            if not self._fits_with_one_sample(candidate):
                self.tally.too_large += 1
                return
            bound = self._bound(candidate, self._counts(candidate))
        else:
            self._decide(candidate)
            return
        if bound is not None:
            heapq.heappush(self.queue, item._replace(bound=max(item.bound, bound), level=level))

    def _floor(self, candidate: Candidate, coarser: list[Candidate], level: int) -> float | None:
        """The floor by a split and those before it; None if the candidate cannot fit or run."""
        key = bucket_of(candidate), level
        if key not in self.busy:
            if level and bucket_of(coarser[level]) not in self.known:
                sharper = self._before_rehearsal(candidate, coarser[:level])
                if sharper is None or not self._matters(sharper, candidate):
                    return sharper
                if not self._could_win(sharper, candidate):
                    self.left_out = True
                    return None
            found = [(one, self._counts(one)) for one in coarser[: level + 1]]
            known = [(one, counts) for one, counts in found if counts is not None]
            plan = self.space.plan(candidate)
            whole = len(known) == len(found)
            self.busy[key] = busy_of(known, candidate, plan, self.device) if whole else None
        busy = self.busy[key]
        return None if busy is None else floor_of(busy, candidate, self.layers, self.batch)

    def _is_too_large(self, candidate: Candidate, coarse: Candidate) -> bool:
        """True if not even weights and activations fit, by a coarser split; in microseconds."""
        counts = self.known.get(bucket_of(coarse))
        if counts is None or coarse.mode != candidate.mode:
            return False
        least = least_bytes(counts, coarse, candidate, self.space.base)
        return least > GIB * self.device.memory_gib

    def _fits_with_one_sample(self, candidate: Candidate) -> bool:
        """False if not even microbatches of one sample fit: asked once for all sizes."""
        least = candidate._replace(microbatch_size=1)
        share = self.batch // (candidate.dp_replicate * candidate.dp_shard)
        # A single microbatch accumulates no gradients: it may fit where smaller ones do not.
        is_single = candidate.microbatch_size == share
        if least == candidate or is_single or "training.microbatch_size" in self.space.fixed:
            return True
        if least not in self.fits:
            counts = self._counts(least)
            if counts is None:
                return True
            _, needed, _ = fullest(self.model, self.space.plan(least), counts, self.device)
            self.fits[least] = memory_of.fits(needed, self.device)
        return self.fits[least]

    def _bound(self, candidate: Candidate, counts: Counts | None) -> float | None:
        """`step.bound` by these counts."""
        if counts is None:
            return None
        self.tally.bounded += 1
        return self.model.bound(self.space.plan(candidate), counts, self.device)

    def _before_rehearsal(self, candidate: Candidate, known: list[Candidate]) -> float | None:
        """The highest bound by the shares of coarser splits; None if not even these fit."""
        bounds = [0.0]
        for coarse in known:
            counts = self._counts(coarse)
            if counts is None or self._is_too_large(candidate, coarse):
                return None
            shares = scaled(counts, coarse, candidate)
            plan = self.space.plan(candidate)
            if coarse.mode == candidate.mode:
                _, needed, _ = fullest(self.model, plan, shares, self.device)
                if not memory_of.fits(needed, self.device):
                    return None
            bounds.append(self._bound(candidate, shares) or 0.0)
        return max(bounds)

    def _counts(self, candidate: Candidate) -> Counts | None:
        """Counts of a candidate; None if the model cannot run so, or a library is missing."""
        bucket, size = bucket_of(candidate), candidate.microbatch_size
        if bucket not in self.known:
            plan = self.space.plan(candidate)
            # Of a coarser split a data-parallel rank may have fewer samples in a step.
            batch = size * plan.sizes.data
            plan = replace(plan, global_batch_size=batch, wanted_microbatch_size=size)
            try:
                self.known[bucket] = self.model.counts(plan)
            except (UserError, ImportError) as error:
                self.known[bucket] = None
                if (note := f"layouts left out: {one_line(error)}") not in self.notes:
                    self.notes.append(note)
        return self.known[bucket]

    def _decide(self, candidate: Candidate) -> None:
        """Weigh and estimate a candidate; keep the fastest of a mesh."""
        counts, plan = self._counts(candidate), self.space.plan(candidate)
        assert counts is not None
        self.tally.weighed += 1
        held, needed, rank = fullest(self.model, plan, counts, self.device)
        most = self.known_too_large.get(kind_of(candidate), math.inf)
        if not memory_of.fits(needed, self.device) or needed.total >= most:
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
            if candidate.tp * candidate.cp == 1:
                self.plain = min(self.plain or estimate.seconds, estimate.seconds)
            alike = equals(list(self.rows.values()), self.device.error)
            self.fewest = min(one.candidate.num_axes for one in alike)

    def _show(self) -> None:
        self.shown += 1
        began = time.monotonic()
        if self.progress is None or began < self.next_look:
            return
        left = sum(self._matters(item.bound, item.candidate) for item in self.queue)
        self.progress.total = self.shown + left
        best = f", best {1e3 * self.times[0]:,.0f} ms" if self.times else ""
        self.progress(self.shown, f"{self.tally.estimated} estimated{best}")
        now = time.monotonic()
        self.next_look = now + max(self.progress.every, 50 * (now - began))


def one_line(error: BaseException) -> str:
    """An error's text on one line."""
    return " ".join(str(error).split()) or type(error).__name__
