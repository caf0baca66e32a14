"""The best layouts of a config: best first, by lower bounds on a step's time."""

from __future__ import annotations

import heapq
import math
import operator
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import NamedTuple

from titan_dit.config.section import UserError
from titan_dit.dry_run.memory import StorageKind
from titan_dit.parallel.mesh import AxisSizes
from titan_dit.pipeline.schedules.placement import stages_per_rank
from titan_dit.pipeline.schedules.schedule import schedule_of
from titan_dit.plan import RunPlan
from titan_dit.planner import memory as memory_of
from titan_dit.planner import rates, step
from titan_dit.planner.candidates import MODES, Candidate, Space
from titan_dit.planner.counts import FP32, CountsOf
from titan_dit.planner.hardware import Device
from titan_dit.planner.links import Network
from titan_dit.planner.memory import GIB, DeviceMemory
from titan_dit.planner.step import Estimate
from titan_dit.planner.work import Counts, Part, Work
from titan_dit.system.progress import ProgressLine


class WorkKey(NamedTuple):
    """Values on which a block's work on a microbatch depends."""

    tp: int
    cp: int
    cp_method: str
    sequence_parallel: bool
    mode: str
    float8: str
    microbatch_size: int


class Busy(NamedTuple):
    """Lower bounds in seconds, for one microbatch on a rank of a tp x cp group."""

    forward: float
    """Forward of one block; the mean if they are of several kinds."""
    backward: float
    ends: float
    """Forward and backward of embed and head."""

    def plus(self, other: Busy) -> Busy:
        """The sum."""
        return Busy(*map(operator.add, self, other))

    def above(self, other: Busy) -> Busy:
        """The difference to `other`, at least 0 each."""
        return Busy(*(max(0.0, a - b) for a, b in zip(self, other, strict=True)))


NO_TIME = Busy(0.0, 0.0, 0.0)
CP_TERMS = ("cp", "attention")
"""Terms that cp increases at any tp."""


def work_key(candidate: Candidate) -> WorkKey:
    """The key of candidates with equal work."""
    return WorkKey(*(getattr(candidate, name) for name in WorkKey._fields))


def coarser_than(candidate: Candidate) -> Iterator[Candidate]:
    """Splits with no more work than the candidate's, the cheapest to rehearse first.

    The last one is the candidate's own. float8 stays as it is: it halves the time of products.
    """
    ranks = candidate.dp_shard * candidate.tp * candidate.cp
    plain = candidate._replace(tp=1, cp=1, mode="none", dp_shard=ranks)
    yield plain
    if candidate.mode != "none":
        yield plain._replace(mode=candidate.mode)
    if candidate.tp > 1 and (candidate.cp > 1 or candidate.mode != "none"):
        yield candidate._replace(cp=1, mode="none", dp_shard=ranks // candidate.tp)
    if candidate.cp > 2 or (candidate.cp > 1 and (candidate.tp > 1 or candidate.mode != "none")):
        yield candidate._replace(tp=1, cp=2, mode="none", dp_shard=ranks // 2)
    if candidate.tp > 1 or candidate.cp > 1:
        yield candidate


KnownSplits = Sequence[tuple[Candidate, Counts]]
"""Coarser splits of a candidate with their counts: the first ones of `coarser_than`."""


def busy_of(known: KnownSplits, sample: Candidate, plan: RunPlan, device: Device) -> Busy:
    """Lower bounds of `sample`, from coarser splits with known counts; `plan` is the sample's.

    With tp the base is that tp's work. The increase by recomputation and by cp, both measured
    without tp, is added to it.
    """
    links = Network(plan.sizes, device)
    fused = plan.compile.enabled

    def took(one: tuple[Candidate, Counts], terms: Sequence[str] = ()) -> Busy:
        coarse, counts = one
        share = coarse.tp * coarse.cp / (sample.tp * sample.cp)

        def seconds(*works: Work) -> float:
            found = (rates.seconds(work, device, links, fused=fused) for work in works)
            # The host may run ahead of one part and fall behind in another.
            return share * sum(
                value
                for each in found
                for term, value in each.items()
                if (term in terms if terms else term != "launches")
            )

        ends, kinds = (counts.embed, counts.head), Counter(plan.spec.kinds)

        def mean(of_part: Callable[[Part], Work]) -> float:
            took = (n * seconds(of_part(counts.blocks[kind])) for kind, n in kinds.items())
            return sum(took) / kinds.total()

        return Busy(
            mean(lambda part: part.forward),
            mean(lambda part: part.backward),
            seconds(*(work for end in ends for work in (end.forward, end.backward))),
        )

    if work_key(known[-1][0]) == work_key(sample):
        return took(known[-1])
    plain = took(known[0])
    base, more = plain, NO_TIME
    for one in known[1:]:
        split = one[0].tp, one[0].cp
        if split == (1, 1):
            more = more.plus(took(one).above(plain))
        elif split == (sample.tp, 1):
            base = took(one)
        else:
            more = more.plus(took(one, CP_TERMS).above(took(known[0], CP_TERMS)))
    return base.plus(more)


def floor_of(busy: Busy, candidate: Candidate, model: RunPlan) -> float:
    """Lower bound of a step in seconds: the mean over ranks, or the chain through the last rank."""
    layers, batch = model.spec.num_layers, model.global_batch_size
    count = batch / (candidate.num_data_ranks * candidate.microbatch_size)
    block, pp = busy.forward + busy.backward, candidate.pp
    mean = count * (layers * block + busy.ends) / pp
    if pp == 1 or not model.spec.alike:
        return mean
    stages = stages_per_rank(candidate.schedule, candidate.virtual_stages)
    least = layers // (pp * stages)
    # A microbatch comes to the last rank through all others, and has to go back.
    schedule = schedule_of(candidate.schedule)
    filled = busy.forward if schedule.splits_backward else block
    others = 0 if schedule.v_shaped else pp - 1
    return max(mean, count * stages * least * block + others * least * filled)


def least_bytes(counts: Counts, coarse: Candidate, fine: Candidate, model: RunPlan) -> float:
    """Lower bound of the device bytes of the first pipeline rank.

    The sum of fp32 weights, sharded (none with [offload] parameters), and the activations of
    min(pp, microbatches) forwards, of one in V-shaped schedules. With pp > 1 and FSDP also the
    gathered weights, unless float8, and with more microbatches than pp, not V-shaped, as many bytes
    of unreduced gradients. `counts`: of the coarser split `coarse` with the same recomputation.
    """
    blocks = counts.blocks.values()
    # Of several kinds, the first stage may hold any number.
    layers = model.spec.num_layers // fine.pp if model.spec.alike else 1
    elements = layers * min(one.parameters for one in blocks) * coarse.tp / fine.tp
    on_host = model.offload.parameters
    held = 0.0 if on_host else FP32 * elements / (fine.dp_shard * fine.cp)
    flights = 1.0
    if fine.pp > 1:
        shared = fine.dp_shard * fine.cp > 1
        held += model.dtype.itemsize * elements if shared and fine.float8 == "off" else 0.0
        count = model.global_batch_size / (fine.num_data_ranks * fine.microbatch_size)
        v_shaped = schedule_of(fine.schedule).v_shaped
        flights = 1.0 if v_shaped else min(fine.pp, count)
        if shared and count > fine.pp and not v_shaped:
            # After its first backward the rank has the gradients of all its weights, unreduced.
            held += model.dtype.itemsize * elements
    share = coarse.tp * coarse.cp / (fine.tp * fine.cp)
    offloads = model.offload.activations
    kept = min(one.small if offloads else one.kept for one in blocks)
    return held + flights * layers * kept * share


def scaled(counts: Counts, coarse: Candidate, fine: Candidate) -> Counts:
    """Counts of a coarser split as a lower bound on those of a finer one, memory included."""
    share = coarse.tp * coarse.cp / (fine.tp * fine.cp)
    tensors = coarse.tp / fine.tp

    def part(own: Part) -> Part:
        return replace(
            own,
            forward=own.forward.times(share),
            backward=own.backward.times(share),
            update=own.update.times(tensors),
            on_host=own.on_host.times(tensors),
            parameters=own.parameters * tensors,
            trained=own.trained * tensors,
            kept=own.kept * share,
            storages=tuple(size * share for size in own.storages),
            forward_peak=own.forward_peak * share,
            backward_peak=min(own.backward_peak, own.backward_peak * share),
            backward_gradients=own.backward_gradients * tensors,
        )

    return replace(
        counts.each(part),
        prepare=counts.prepare.times(share),
        inputs=counts.inputs * share,
        stream=counts.stream * share,
        tied=counts.tied * tensors,
    )


BytesByKind = Mapping[StorageKind, float]
ROUNDS = 3
"""After ROUNDS * pp microbatches no schedule but gpipe has more in flight."""


@dataclass(frozen=True)
class CostModel:
    """The functions that a search calls for a layout; tests replace them."""

    counts: CountsOf
    estimate: Callable[[RunPlan, Counts, Device], Estimate] = step.estimate
    bound: Callable[[RunPlan, Counts, Device], float] = step.bound
    memory: Callable[[RunPlan, Counts], Sequence[BytesByKind]] = memory_of.memory
    needed: Callable[[BytesByKind, RunPlan, Device], DeviceMemory] = memory_of.device_memory


class Fullest(NamedTuple):
    """The pipeline rank that needs most memory."""

    held: BytesByKind
    needed: DeviceMemory
    rank: int


def fullest(model: CostModel, plan: RunPlan, counts: Counts, device: Device) -> Fullest:
    """The pipeline rank that needs most memory, and what it holds."""
    shorter = shortened(plan)
    rest = counts.inputs * (plan.samples_per_rank - shorter.samples_per_rank)
    found = []
    for rank, held in enumerate(model.memory(shorter, counts)):
        whole = {**held, StorageKind.INPUTS: held[StorageKind.INPUTS] + rest}
        found.append(Fullest(whole, model.needed(whole, plan, device), rank))
    return max(found, key=lambda one: one.needed.total)


def tp_crosses_nodes(sizes: AxisSizes, device: Device) -> bool:
    """True if a tp group has ranks on several nodes: predictions of such steps are too fast."""
    return Network(sizes, device).group("tp").nodes > 1


def shortened(plan: RunPlan) -> RunPlan:
    """The plan with fewer microbatches, with the same number in flight.

    Long orders take long to read.
    """
    most = ROUNDS * plan.sizes.pp
    fixed = plan.pipeline.schedule == "gpipe" or plan.order_of_file is not None
    if plan.sizes.pp == 1 or fixed or plan.num_microbatches <= most:
        return plan
    batch = most * plan.microbatch_size * plan.sizes.data
    return replace(plan, global_batch_size=batch, wanted_microbatch_size=plan.microbatch_size)


@dataclass(frozen=True)
class PredictedLayout:
    """A candidate that fits, with its predicted step and memory."""

    candidate: Candidate
    plan: RunPlan
    estimate: Estimate
    held: BytesByKind
    """Peak bytes by kind, of the pipeline rank that needs most."""
    needed: DeviceMemory
    rank: int
    """The pipeline rank that needs most."""
    is_rehearsed: bool = False
    """True if the memory was measured in a whole fake step."""


@dataclass
class Tally:
    """Counts of a search, and its CPU seconds."""

    candidates: int = 0
    bounded: int = 0
    """Candidates with a bound from counts of their own."""
    weighed: int = 0
    """Candidates whose memory was computed."""
    too_large: int = 0
    """Candidates that do not fit."""
    estimated: int = 0
    seconds: float = 0.0

    def after(self, other: Tally) -> Tally:
        """The sums of two searches over the same candidates, whose number is `self.candidates`."""
        found = Tally(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))
        return replace(found, candidates=self.candidates)


@dataclass
class SearchResult:
    """The layouts that a search found."""

    rows: list[PredictedLayout]
    """The fastest layout of every mesh, the fastest first."""
    tally: Tally
    notes: list[str] = field(default_factory=list)


def mesh_key(candidate: Candidate) -> tuple[object, ...]:
    """Key of a row of the table: the sizes of the axes, and the cp method."""
    return (*candidate.per_axis, candidate.cp_method if candidate.cp > 1 else "")


def memory_key(candidate: Candidate) -> object:
    """Key of layouts whose composed memory errs alike: mesh, recomputation, float8."""
    return mesh_key(candidate), candidate.mode, candidate.float8


def equally_fast(rows: Sequence[PredictedLayout], error: float) -> list[PredictedLayout]:
    """Rows whose time is within the error of the fastest."""
    best = min(row.estimate.seconds for row in rows)
    return [row for row in rows if row.estimate.seconds <= best * (1 + error)]


SLACK = 1e-9
"""Relative tolerance: bounds and estimates are sums in different orders."""
RECOMPUTE_LESS: Mapping[str, Sequence[str]] = {
    "none": (),
    "attention": ("none",),
    "selective": ("none",),
    "full": ("none", "attention", "selective"),
}
"""[activation_checkpoint] mode -> modes that recompute less. If one of those fits, it is faster."""


class Item(NamedTuple):
    """A candidate in the queue, which is ordered by the fields in turn."""

    is_split: bool
    """True with tp or cp. Candidates without come first: few rehearsals find a good layout."""
    bound: float
    extra: int
    """Number of the [activation_checkpoint] mode in MODES: modes that recompute more come later."""
    number: int
    level: int
    """Coarser splits that `bound` has used; beyond the last, `bound` is `step.bound` of its own
    counts."""
    candidate: Candidate


class Search:
    """A search over a space of layouts."""

    def __init__(
        self,
        space: Space,
        device: Device,
        model: CostModel,
        *,
        shows: bool = False,
        too_large: Mapping[object, float] | None = None,
    ) -> None:
        """`shows`: print progress on stderr.

        `too_large`: `memory_key` -> GiB of composed memory from which on layouts do not fit.
        """
        self.space, self.device, self.model = space, device, model
        self.known_too_large = too_large or {}
        self.batch = space.base.global_batch_size
        self.tally = Tally()
        self.rows: dict[object, PredictedLayout] = {}
        self.times: list[float] = []
        self.notes: list[str] = []
        self.fitting: set[Candidate] = set()
        self.known: dict[WorkKey, Counts | None] = {}
        self.busy: dict[tuple[WorkKey, int], Busy | None] = {}
        self.fits: dict[Candidate, bool] = {}
        """Candidates with microbatches of one sample -> True if they fit."""
        self.queue: list[Item] = []
        self.top = 0
        self.plain: float | None = None
        """Seconds of the fastest layout without tp and cp."""
        self.left_out = False
        """True once `_could_win` has ruled out a candidate."""
        self.fewest = len(Candidate._fields)
        """Smallest number of mesh axes among the rows within the error of the fastest."""
        self.shown, self.next_look = 0, 0.0
        self.progress = ProgressLine(1, "layouts", what="plan") if shows else None

    def run(self, top: int = 10) -> SearchResult:
        """The fastest layouts of `top` meshes, and those that may be preferred within the error.

        Each is the fastest layout of its mesh that fits. With tp or cp only candidates of
        `_could_win` count.
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
        return SearchResult(rows, self.tally, notes=self.notes)

    def _matters(self, bound: float, candidate: Candidate) -> bool:
        """False if the candidate cannot become a row that is shown or preferred."""
        times, top = self.times, self.top
        row = self.rows.get(mesh_key(candidate))
        if not times:
            return True
        if row is not None and bound >= row.estimate.seconds:
            return False
        if any(
            candidate._replace(mode=mode) in self.fitting for mode in RECOMPUTE_LESS[candidate.mode]
        ):
            return False
        if len(times) < top or bound <= times[top - 1] * (1 + SLACK):
            return True
        is_equal = bound <= times[0] * (1 + self.device.error) * (1 + SLACK)
        return is_equal and candidate.num_axes <= self.fewest

    def _could_win(self, bound: float, candidate: Candidate) -> bool:
        """False if tp or cp cannot beat the fastest layout without them by more than the error.

        Then they count as equally fast, and the one with fewer axes is chosen without a rehearsal.
        """
        if candidate.tp * candidate.cp == 1 or self.plain is None:
            return True
        is_simpler = candidate.num_axes < self.fewest
        return is_simpler or bound * (1 + self.device.error) < self.plain

    def _take(self, item: Item) -> None:
        """Raise the lower bound of a candidate, or compute its memory and time."""
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
        """Lower bound from the first `level` + 1 coarser splits; None if it cannot fit or run."""
        key = work_key(candidate), level
        if key not in self.busy:
            if level and work_key(coarser[level]) not in self.known:
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
        return None if busy is None else floor_of(busy, candidate, self.space.base)

    def _is_too_large(self, candidate: Candidate, coarse: Candidate) -> bool:
        """True if weights and activations alone do not fit, by a coarser split. Costs little."""
        counts = self.known.get(work_key(coarse))
        if counts is None or coarse.mode != candidate.mode:
            return False
        least = least_bytes(counts, coarse, candidate, self.space.base)
        return least > GIB * self.device.memory_gib

    def _fits_with_one_sample(self, candidate: Candidate) -> bool:
        """False if microbatches of one sample do not fit: then no larger one does."""
        least = candidate._replace(microbatch_size=1)
        share = self.batch // candidate.num_data_ranks
        # A single microbatch accumulates no gradients: it may fit where smaller ones do not.
        is_single = candidate.microbatch_size == share
        if least == candidate or is_single or "training.microbatch_size" in self.space.fixed:
            return True
        if least not in self.fits:
            counts = self._counts(least)
            if counts is None:
                return True
            needed = fullest(self.model, self.space.plan(least), counts, self.device).needed
            self.fits[least] = memory_of.fits(needed, self.device)
        return self.fits[least]

    def _bound(self, candidate: Candidate, counts: Counts | None) -> float | None:
        """Lower bound of a step in seconds, by these counts; None without counts."""
        if counts is None:
            return None
        self.tally.bounded += 1
        return self.model.bound(self.space.plan(candidate), counts, self.device)

    def _before_rehearsal(self, candidate: Candidate, known: list[Candidate]) -> float | None:
        """The highest bound from scaled counts of coarser splits; None if these do not fit."""
        bounds = [0.0]
        for coarse in known:
            counts = self._counts(coarse)
            if counts is None or self._is_too_large(candidate, coarse):
                return None
            shares = scaled(counts, coarse, candidate)
            plan = self.space.plan(candidate)
            if coarse.mode == candidate.mode:
                needed = fullest(self.model, plan, shares, self.device).needed
                if not memory_of.fits(needed, self.device):
                    return None
            bounds.append(self._bound(candidate, shares) or 0.0)
        return max(bounds)

    def _counts(self, candidate: Candidate) -> Counts | None:
        """Counts of a candidate; None if the model cannot run so, or a library is missing."""
        bucket, size = work_key(candidate), candidate.microbatch_size
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
        """Compute memory and time of a candidate; keep it if it is the fastest of its mesh."""
        counts, plan = self._counts(candidate), self.space.plan(candidate)
        assert counts is not None
        self.tally.weighed += 1
        held, needed, rank = fullest(self.model, plan, counts, self.device)
        most = self.known_too_large.get(memory_key(candidate), math.inf)
        if not memory_of.fits(needed, self.device) or needed.total >= most:
            self.tally.too_large += 1
            return
        self.fitting.add(candidate)
        estimate = self.model.estimate(plan, counts, self.device)
        self.tally.estimated += 1
        mesh = mesh_key(candidate)
        row = self.rows.get(mesh)
        if row is None or estimate.seconds < row.estimate.seconds:
            self.rows[mesh] = PredictedLayout(candidate, plan, estimate, held, needed, rank)
            self.times = sorted(one.estimate.seconds for one in self.rows.values())
            if candidate.tp * candidate.cp == 1:
                self.plain = min(self.plain or estimate.seconds, estimate.seconds)
            alike = equally_fast(list(self.rows.values()), self.device.error)
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
