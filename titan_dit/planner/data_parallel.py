"""Messages over data-parallel ranks: what a step gathers and reduces, and what of it hides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from titan_dit.parallel.mesh import FILL, AxisSizes, axes
from titan_dit.plan import RunPlan
from titan_dit.planner import rates
from titan_dit.planner.links import Network
from titan_dit.planner.rates import Runtime
from titan_dit.planner.work import Blocks, Counts, Message, blocks_of


class Compute(NamedTuple):
    """Seconds of a microbatch, copies of FSDP included."""

    embed_forward: float
    block_forward: Mapping[str, float]
    """Kind -> seconds of a block."""
    head_forward: float
    embed_backward: float
    block_backward: Mapping[str, float]
    head_backward: float


def of_blocks(blocks: Blocks, seconds: Mapping[str, float]) -> float:
    """Seconds of consecutive blocks; `seconds`: of one of each kind."""
    return sum(count * seconds[kind] for kind, count in blocks)


class Gather(NamedTuple):
    """Seconds of a gather of a unit."""

    sent: float
    """Seconds of the all-gather."""
    fetched: float = 0.0
    """Seconds of the copy of this rank's shard from the host, before it."""


KEPT = Gather(0.0)
"""The gather of a unit that is gathered already."""


class Reduction(NamedTuple):
    """Seconds of the reduction of a unit's gradients."""

    shards: float
    """Seconds over FSDP's group."""
    copies: float
    """Seconds over the replicas of its shards, which follow."""
    stored: float = 0.0
    """Seconds of the copy of the reduced shard to the host, which comes last."""


NOTHING = Reduction(0.0, 0.0)


class Overlap:
    """Timelines side by side, in seconds since a microbatch began: computing, messages, copies.

    `hides`: messages are sent while the rank computes. `apart`: messages between replicas use
    another link than those of FSDP. `fetches_ahead`: copies from the host have a stream of their
    own, as FSDP2's copy-in has if it gathers; else the rank does not compute meanwhile.
    """

    def __init__(self, *, hides: bool, apart: bool, fetches_ahead: bool = True) -> None:
        self.hides, self.apart, self.fetches_ahead = hides, apart and hides, fetches_ahead
        self.now = 0.0
        """Time up to which the rank has computed."""
        self.free = 0.0
        """Time at which the link has sent everything."""
        self.copied = 0.0
        """Time at which the link between replicas has sent everything."""
        self.fetched = 0.0
        """Time at which all copies from the host have arrived."""
        self.stored = 0.0
        """Time at which all copies to the host have."""
        self.waited = 0.0

    def gather(self, at: float, gather: Gather) -> float:
        """A gather whose copy from the host may start `at` this time; returns its end."""
        if not gather.fetched:
            return self.send(at, gather.sent)
        if self.fetches_ahead:
            self.fetched = max(self.fetched, at) + gather.fetched
        else:
            self.fetched = self.wait(self.now + gather.fetched)
        return self.send(self.fetched, gather.sent)

    def send(self, at: float, seconds: float) -> float:
        """A message that may start `at` this time; returns its end."""
        if not seconds:
            return at
        self.free = max(self.free, at if self.hides else self.now) + seconds
        return self.free if self.hides else self.wait(self.free)

    def reduce(self, reduction: Reduction) -> None:
        """Reduce gradients that are ready: over FSDP's group, then over the replicas.

        FSDP2 copies them to the host in the stream of the last of these, which the next reduction
        of the same kind waits for.
        """
        begun = self.now if reduction.copies else max(self.now, self.stored)
        end = self.send(begun, reduction.shards)
        if self.apart:
            end = self.copied = max(self.copied, end) + reduction.copies
        else:
            end = self.send(end, reduction.copies)
        if reduction.stored:
            self.stored = max(self.stored, end) + reduction.stored

    def finish(self) -> float:
        """Wait for all messages and copies; returns the time."""
        return self.wait(max(self.free, self.copied, self.stored))

    def wait(self, until: float) -> float:
        """Compute nothing until then; returns the time."""
        self.waited += max(0.0, until - self.now)
        self.now = max(self.now, until)
        return self.now

    def forward(
        self, compute: Compute, root: Gather, units: Sequence[tuple[Blocks, Gather]]
    ) -> None:
        """A forward; `units`: (blocks, their gather) of every unit.

        A gather starts when the unit before the last one starts to compute: FSDP2 then frees the
        buffer of that one's gather.
        """
        begun = self.now
        self.wait(self.gather(begun, root))
        starts = [begun, begun]
        arrived = self.gather(begun, units[0][1]) if units else 0.0
        self.now += compute.embed_forward
        for index, (blocks, _) in enumerate(units):
            self.wait(arrived)
            starts.append(self.now)
            if index + 1 < len(units):
                arrived = self.gather(starts[-2], units[index + 1][1])
            self.now += of_blocks(blocks, compute.block_forward)
        self.now += compute.head_forward

    def forward_of_issued(
        self, compute: Compute, root: float, units: Sequence[tuple[Blocks, float]]
    ) -> None:
        """A forward whose gathers were issued before; `units`: (blocks, end of their gather)."""
        self.wait(root)
        self.now += compute.embed_forward
        for blocks, arrived in units:
            self.wait(arrived)
            self.now += of_blocks(blocks, compute.block_forward)
        self.now += compute.head_forward

    def backward(
        self,
        compute: Compute,
        units: Sequence[tuple[Blocks, Gather]],
        reductions: Sequence[Reduction],
    ) -> None:
        """A backward; a unit's gather starts with the unit computed before it."""
        given = list(zip(units, reductions, strict=True))[::-1]
        arrived = self.gather(self.now, given[0][0][1]) if given else 0.0
        self.now += compute.head_backward
        for index, ((blocks, _), reduction) in enumerate(given):
            self.wait(arrived)
            if index + 1 < len(given):
                arrived = self.gather(self.now, given[index + 1][0][1])
            self.now += of_blocks(blocks, compute.block_backward)
            self.reduce(reduction)
        self.now += compute.embed_backward


class FSDPUnit(NamedTuple):
    """A unit of FSDP: parameters that are gathered and reduced together."""

    parameters: float
    """Elements on a tp rank."""
    trained: float
    """Elements with gradients."""
    blocks: Blocks
    """Blocks in it; () for the root unit."""
    quantized: float = 0.0
    """Bytes of quantised weights."""


class StageShape(NamedTuple):
    """The blocks of a stage, and its ends. Stages of equal shape take equal time."""

    blocks: Blocks
    is_first: bool
    is_last: bool


def shard_axis(sizes: AxisSizes) -> str:
    """The name of FSDP's group in the dry run's traffic."""
    return " x ".join(a for a in axes("fsdp") if a == FILL or getattr(sizes, a) > 1)


def replica_axis(sizes: AxisSizes) -> str:
    """The name of the replicas' group in the dry run's traffic."""
    names = axes("copies")
    return " x ".join([a for a in names if getattr(sizes, a) > 1] or names)


@dataclass(frozen=True)
class DataParallel:
    """The data-parallel messages of a layout."""

    plan: RunPlan
    counts: Counts
    links: Network
    runtime: Runtime
    copies_take_time: bool = True
    """False: copies of [offload] parameters between host and device take no time."""

    @cached_property
    def shards(self) -> int:
        """Ranks of FSDP's group, or of the replicas of `Runtime.sharding`."""
        return self.plan.sizes.product("fsdp")

    @cached_property
    def splits(self) -> int:
        """Ranks that a parameter and its update are cut over."""
        return 1 if self.runtime.sharding == "replicas" else self.shards

    @cached_property
    def gather_bytes(self) -> int:
        """Bytes per parameter of an all-gather."""
        return self.runtime.gather_bytes or self.plan.dtype.itemsize

    @cached_property
    def gradient_bytes(self) -> int:
        """Bytes per gradient of a reduction."""
        return max(self.runtime.gradient_bytes, 8 * (self.plan.precision.dtype == "fp64"))

    @cached_property
    def shapes(self) -> tuple[StageShape, ...]:
        """The shape of every stage."""
        kinds, stages = self.plan.spec.kinds, self.plan.stage_layers
        held = [blocks_of(kinds[layers.start : layers.stop]) for layers in stages]
        last = len(held) - 1
        return tuple(StageShape(blocks, i == 0, i == last) for i, blocks in enumerate(held))

    @cached_property
    def _units(self) -> dict[StageShape, tuple[FSDPUnit, list[FSDPUnit]]]:
        return {}

    def units(self, shape: StageShape) -> tuple[FSDPUnit, list[FSDPUnit]]:
        """The FSDP units of a stage: the root unit (perhaps empty), then its blocks' units."""
        if shape not in self._units:
            self._units[shape] = self._new_units(shape)
        return self._units[shape]

    def _new_units(self, shape: StageShape) -> tuple[FSDPUnit, list[FSDPUnit]]:
        counts, embed, head = self.counts, self.counts.embed, self.counts.head
        # The last of several stages has a copy of what it shares with the first.
        copied = self.counts.tied * (not shape.is_first)
        root = FSDPUnit(
            shape.is_first * embed.parameters + shape.is_last * (head.parameters + copied),
            shape.is_first * embed.trained + shape.is_last * (head.trained + copied),
            (),
        )
        kinds = [kind for kind, count in shape.blocks for _ in range(count)]
        units = counts.units(kinds, self.plan.parallel.blocks_per_fsdp_unit)
        return root, [
            FSDPUnit(
                counts.sum(unit, "parameters"),
                counts.sum(unit, "trained"),
                unit,
                counts.sum(unit, "quantized"),
            )
            for unit in units
        ]

    def held_units(self, pipeline_rank: int) -> Iterator[FSDPUnit]:
        """The units of a pipeline rank's stages."""
        for stage in self.plan.stages_of(pipeline_rank):
            root, blocks = self.units(self.shapes[stage])
            yield from (root, *blocks)

    def gathers(self, unit: FSDPUnit) -> Iterator[Message]:
        """The messages of one all-gather of a unit."""
        if self.splits > 1 and unit.parameters:
            whole = unit.parameters * self.gather_bytes + unit.quantized
            sent = (self.splits - 1) / self.splits * whole
            yield Message(shard_axis(self.plan.sizes), "all-gather", sent)

    def reductions(self, unit: FSDPUnit) -> Iterator[Message]:
        """The messages of one reduction of a unit's gradients."""
        whole = unit.trained * self.gradient_bytes
        shards, copies = self.shards, self.plan.sizes.product("copies")
        if whole and shards > 1:
            times, name = (2, "all-reduce") if self.splits == 1 else (1, "reduce-scatter")
            sent = times * (shards - 1) / shards * whole
            yield Message(shard_axis(self.plan.sizes), name, sent)
        if whole and copies > 1:
            sent = 2 * (copies - 1) / copies * whole / self.splits
            yield Message(replica_axis(self.plan.sizes), "all-reduce", sent)

    @property
    def on_host(self) -> bool:
        """[offload] parameters."""
        return self.plan.offload.parameters

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of an element of a shard, and of its gradient."""
        return 2 if self.plan.precision.weights == "bf16" else self.gradient_bytes

    def fetched(self, unit: FSDPUnit) -> float:
        """Bytes that a gather of a unit copies from the host: this rank's shards, before a cast."""
        if not self.on_host:
            return 0.0
        return (unit.parameters * self.weight_bytes + unit.quantized) / self.shards

    def stored(self, unit: FSDPUnit) -> float:
        """Bytes that a reduction of a unit's gradients copies to the host."""
        return unit.trained * self.weight_bytes / self.shards if self.on_host else 0.0

    def host_traffic(self, pipeline_rank: int = 0) -> tuple[float, float]:
        """Bytes that a rank copies in a step (from the host, to it) for [offload] parameters."""
        units = [*self.held_units(pipeline_rank)]
        from_host = sum(self.num_gathers(unit) * self.fetched(unit) for unit in units)
        return from_host, sum(map(self.stored, units))

    def copy_s(self, nbytes: float) -> float:
        """Seconds of a copy between host and device."""
        if not nbytes or not self.copies_take_time:
            return 0.0
        return rates.host_s(nbytes, self.links.device)

    def gather_s(self, unit: FSDPUnit) -> Gather:
        """Seconds of one gather of a unit."""
        return Gather(
            sum(map(self.links.seconds, self.gathers(unit))), self.copy_s(self.fetched(unit))
        )

    def reduce_s(self, unit: FSDPUnit) -> Reduction:
        """Seconds of one reduction of a unit."""
        took, replicas = dict.fromkeys((True, False), 0.0), replica_axis(self.plan.sizes)
        for message in self.reductions(unit):
            took[message.axis == replicas] += self.links.seconds(message)
        stored = self.copy_s(self.stored(unit))
        return Reduction(shards=took[False], copies=took[True], stored=stored)

    @cached_property
    def is_apart(self) -> bool:
        """True if FSDP's group and the replicas use different links."""
        shard = self.links.group(shard_axis(self.plan.sizes))
        return shard.nodes == 1 and self.links.group(replica_axis(self.plan.sizes)).nodes > 1

    def overlap(self) -> Overlap:
        """New timelines of a rank."""
        # A pipeline gathers by `unshard(async_op=True)`, in the stream that computes. A single
        # shard is copied where the unit begins.
        ahead = self.shards > 1 and self.plan.sizes.pp == 1
        return Overlap(hides=self.runtime.overlaps_data, apart=self.is_apart, fetches_ahead=ahead)

    def frees(self, unit: FSDPUnit) -> bool:
        """True if a unit is freed after forward, and gathered again for backward."""
        plan = self.plan
        if self.runtime.sharding != "fsdp" or plan.sizes.pp > 1:
            return False
        when = plan.parallel.reshard_after_forward
        gathers = self.shards > 1 or self.on_host
        return when == "always" or (when == "auto" and bool(unit.blocks) and gathers)

    def num_gathers(self, unit: FSDPUnit) -> int:
        """How often a step gathers a unit."""
        count = 1 if self.plan.sizes.pp > 1 else self.plan.num_microbatches
        return count * (1 + self.frees(unit))

    def copied(self, unit: FSDPUnit) -> tuple[float, float]:
        """Bytes that FSDP reads and writes in a step for a unit: around gathers, and gradients.

        A gather casts the shards and copies the parameters out of its buffer; gradients are added
        up over microbatches in fp32 and copied into the buffer of their reduction. Without the
        casts once a step, which are in `Part.update`.
        """
        if self.runtime.sharding == "replicas" or self.runtime.update_bytes is not None:
            return 0.0, 0.0
        count, cast, held = self.plan.num_microbatches, self.gather_bytes, self.gradient_bytes
        passes = self.num_gathers(unit)
        gathered = float(passes * 2 * cast) if self.splits > 1 or self.on_host else 0.0
        if cast != held:
            gathered += (passes - 1) * (held + cast) / self.splits
        # The first gradient is cast if the sums have another format.
        added = float((count - 1) * (cast + 2 * held))
        if count > 1 and cast != held:
            added += (cast + held) * (1 - 1 / self.splits)
        is_sent = self.on_host or self.shards * self.plan.sizes.product("copies") > 1
        kept = cast if count == 1 else held
        into = kept + held if is_sent else 0
        return gathered * unit.parameters, (added + into) * unit.trained

    def traffic(self, pipeline_rank: int = 0) -> Counter[Message]:
        """Messages of a rank in a step, with how often."""
        found: Counter[Message] = Counter()
        count = 1 if self.plan.sizes.pp > 1 else self.plan.num_microbatches
        reduced = count if self.runtime.reduces_each_microbatch else 1
        for unit in self.held_units(pipeline_rank):
            for message in self.gathers(unit):
                found[message] += self.num_gathers(unit)
            for message in self.reductions(unit):
                found[message] += reduced
        return found

    def step_s(self, compute: Compute) -> float:
        """Seconds of all microbatches without a pipeline: computing, and waiting for messages."""
        count = self.plan.num_microbatches
        every = self.runtime.reduces_each_microbatch
        last = self.microbatch_s(compute, reduces=True)
        if count == 1:
            return last
        return last + (count - 1) * (last if every else self.microbatch_s(compute, reduces=False))

    def microbatch_s(self, compute: Compute, *, reduces: bool) -> float:
        """Seconds of a forward and backward of the whole model, with waiting for messages."""
        root, blocks = self.units(self.shapes[0])
        link = self.overlap()
        link.forward(compute, self.gather_s(root), [(u.blocks, self.gather_s(u)) for u in blocks])
        again = [(u.blocks, self.gather_s(u) if self.frees(u) else KEPT) for u in blocks]
        reductions = [self.reduce_s(u) if reduces else NOTHING for u in blocks]
        if self.frees(root):
            link.wait(link.gather(link.now, self.gather_s(root)))
        link.backward(compute, again, reductions)
        link.reduce(self.reduce_s(root) if reduces else NOTHING)
        return link.finish()

    def before_s(self, computing: Mapping[int, Compute]) -> float:
        """Seconds that the first forwards of a pipeline rank wait for all-gathers.

        `computing`: stage -> seconds of its parts, in the order of their forwards. All all-gathers
        are issued at once, before the first forward.
        """
        link = self.overlap()
        issued = {}
        for stage in computing:
            root, blocks = self.units(self.shapes[stage])
            arrived, *each = (link.gather(0.0, self.gather_s(unit)) for unit in (root, *blocks))
            issued[stage] = arrived, list(zip((unit.blocks for unit in blocks), each, strict=True))
        for stage, compute in computing.items():
            shape = self.shapes[stage]
            own = compute._replace(
                embed_forward=shape.is_first * compute.embed_forward,
                head_forward=shape.is_last * compute.head_forward,
            )
            link.forward_of_issued(own, *issued[stage])
        return link.waited

    def after_s(self, stage: int, compute: Compute) -> float:
        """Seconds that a pipeline rank waits for reductions after the last backward of a stage."""
        root, blocks = self.units(self.shapes[stage])
        reductions, link = [self.reduce_s(unit) for unit in blocks], self.overlap()
        if self.runtime.sharding == "fsdp":
            # Ours reduces once the backward is over, the root unit first.
            for one in (self.reduce_s(root), *reductions):
                link.reduce(one)
        else:
            link.backward(compute, [(unit.blocks, KEPT) for unit in blocks], reductions)
            link.reduce(self.reduce_s(root))
        link.finish()
        return link.waited
