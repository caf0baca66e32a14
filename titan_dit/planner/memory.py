"""The peak memory of every pipeline rank by formula: no mesh, no dry run, below a millisecond.

The most that a rank holds is sought among moments of a step, with and without a pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch

from titan_dit.config.job import JobConfig
from titan_dit.config.parameter_groups import groups_of
from titan_dit.dry_run.memory import StorageKind
from titan_dit.dry_run.pipeline import most_held
from titan_dit.optim.sections import MuonConfig
from titan_dit.optim.stochastic_rounding import PIECE
from titan_dit.parallel.compute_copies import CHUNK, suits
from titan_dit.pipeline.pipelined import RECEIVES_AHEAD
from titan_dit.pipeline.schedules.placement import pipeline_order
from titan_dit.pipeline.schedules.schedule import (
    Action,
    Kind,
    Order,
    inputs_of,
    output_of,
    peak_activations,
    ranks_of,
    reader_of,
)
from titan_dit.plan import RunPlan
from titan_dit.planner.hardware import Device
from titan_dit.planner.rates import OURS, Runtime
from titan_dit.planner.work import Blocks, Counts, Part, blocks_of, number_of

PARTS = ("embed", "block", "head")


@dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """Optimizer tensors per element of embed, a block and the head. The defaults: AdamW, no EMA."""

    embed: float = 2.0
    """Tensors of the optimizer per trained element of embed; AdamW has two."""
    block: float = 2.0
    """Tensors of the optimizer per trained element of the blocks; the mean if they are of several
    kinds."""
    head: float = 2.0
    averages: int = 0
    """Number of EMAs; each holds all elements."""
    matrices: float = 0.0
    """Share of the blocks' trained elements that Muon orthogonalises."""
    num_matrices: float = 0.0
    """Number of a block's tensors that Muon orthogonalises; the mean over blocks."""
    shard_work: float = 0.0
    """Temporary bytes of Muon's step at its peak, per element of this rank's shards."""
    whole_work: float = 0.0
    """Temporary bytes of Muon's step at its peak, per element of the matrices that this rank owns
    whole."""
    received_work: float = 0.0
    """Temporary bytes of Muon's step at its peak, per element of the shards received from other
    ranks."""


ADAMW = OptimizerState()


def state_of(config: JobConfig) -> OptimizerState:
    """The state of [optimizer] and [ema] for a config's model; builds it on the meta device."""
    with torch.device("meta"):
        model = config.objective.model_spec(config.model).build()
    shapes: dict[str, dict[str, Sequence[int]]] = {part: {} for part in PARTS}
    frozen = groups_of((name for name, _ in model.named_parameters()), config.optimizer.groups)
    for name, parameter in model.named_parameters():
        part = name.partition(".")[0].removesuffix("s")
        is_trained = name not in frozen or not frozen[name].frozen
        if part in shapes and is_trained:
            shapes[part][name] = tuple(parameter.shape)
    embed, block, head = (moments_per_element(config, shapes[part]) for part in PARTS)
    state = OptimizerState(embed=embed, block=block, head=head, averages=len(config.ema.names))
    optimizer = config.optimizer
    if not isinstance(optimizer, MuonConfig):
        return state
    own = {n: shape for n, shape in shapes["block"].items() if optimizer.takes(n, shape)}
    share = elements(own.values()) / max(1, elements(shapes["block"].values()))
    state = replace(state, matrices=share, num_matrices=len(own) / len(model.blocks))
    return with_muon_work(state, optimizer, own) if own else state


def moments_per_element(config: JobConfig, shapes: dict[str, Sequence[int]]) -> float:
    """Mean number of the optimizer's tensors per element."""
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    held = sum(config.optimizer.num_moments(n, shapes[n]) * size for n, size in sizes.items())
    return held / max(1, sum(sizes.values()))


def elements(shapes: Iterable[Sequence[int]]) -> int:
    """Elements of several tensors."""
    return sum(math.prod(shape) for shape in shapes)


def with_muon_work(
    state: OptimizerState, config: MuonConfig, shapes: dict[str, Sequence[int]]
) -> OptimizerState:
    """Add the bytes per element at the peak of Muon's step: when the results are scattered.

    At that point the step is in memory in fp32 and in the iterations' format. Results are whole
    matrices, held twice: as tensors, and in one message. Tall matrices were copied to transpose
    them, and the stack of the last shape is still there.
    """
    width = 2.0 if config.ns_dtype == "bf16" else 4.0
    sizes: dict[tuple[int, int, int], int] = {}
    for name, (rows, columns) in shapes.items():
        count = config.projections(name)
        shape = count, rows // count, columns
        sizes[shape] = sizes.get(shape, 0) + rows * columns
    total = sum(sizes.values())
    tall = sum(size for (count, a, b), size in sizes.items() if count == 1 and a > b)
    last = [*sizes.values()][-1]
    return replace(
        state,
        shard_work=4 + width,
        whole_work=width * (2 + (tall + last) / total),
        received_work=width,
    )


class MemoryUse(NamedTuple):
    """Bytes at one moment by kind, besides the state and the inputs."""

    gathered: float = 0.0
    unreduced: float = 0.0
    gradients: float = 0.0
    activations: float = 0.0
    temporary: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How FSDP shards a rank's parameters, and in which formats it gathers and sums."""

    width: int
    """Bytes of an element in the compute format."""
    sum_width: int
    """Bytes of an element of sums, reductions, optimizer and EMA."""
    weight_width: int
    """Bytes of an element of this rank's shards, and of their gradients."""
    shards: int
    has_copies: bool
    """Replicas hold the same shards."""
    reshards: bool
    """Units free their parameters after forward."""
    reshards_root: bool
    """True if embed and head free their parameters after forward, too."""
    prefetch: int
    """Units gathered ahead on request; 0: FSDP2's implicit prefetch."""
    accumulates: bool
    """There are several microbatches."""
    in_float8: Mapping[str, float] = field(default_factory=dict)
    """Kind -> share of a block's parameters that are gathered in float8."""
    ahead: int | None = None
    """[offload] ahead; None if activations stay on the device."""
    on_host: bool = False
    """[offload] parameters."""

    @property
    def is_alone(self) -> bool:
        """Nothing is sharded: parameters are only cast."""
        return self.shards == 1

    def gathered(self, counts: Counts, blocks: Blocks) -> float:
        """Bytes of blocks' gathered parameters."""
        numbers = sum(
            count * counts.blocks[kind].parameters * self.width_of(kind) for kind, count in blocks
        )
        return numbers + counts.sum(blocks, "quantized")

    def width_of(self, kind: str) -> float:
        """Bytes of a gathered element of a block."""
        return self.width - self.in_float8.get(kind, 0.0) * (self.width - 1)

    @property
    def fresh(self) -> float:
        """1 if a microbatch's gradients are tensors of their own, beside the sums."""
        return float(self.width < self.sum_width or not self.accumulates)

    @property
    def own_copy(self) -> float:
        """Share of a unit's gathered bytes that an all-gather adds: this rank's cast shard."""
        return 1 / self.shards if self.width < self.weight_width else 0.0

    @property
    def reduced(self) -> float:
        """Bytes per element of a reduction's output. Replicas without shards divide into a copy."""
        divided = 1 if self.is_alone and self.has_copies else 0
        return self.sum_width * (1 / self.shards + divided)


class KeptBlocks:
    """Bytes that consecutive blocks keep of a microbatch on the device.

    With [offload] activations the tensors of `ahead` blocks and of the running one are there, see
    `parallel.offload`. A block saves its input, which `Part.kept` counts for the part before it:
    embed keeps as much as the first of these blocks saves.
    """

    def __init__(self, counts: Counts, blocks: Blocks, ahead: int | None) -> None:
        moved = {k: 0.0 if ahead is None else b.kept - b.small for k, b in counts.blocks.items()}
        each = [kind for kind, count in blocks for _ in range(count)]
        self.count, self.ahead = len(each), ahead or 0
        self.whole = [0.0, *accumulate(counts.blocks[kind].kept for kind in each)]
        """[i]: bytes of the first i blocks."""
        self.moved = [0.0, *accumulate(moved[kind] for kind in each)]
        """[i]: bytes of the first i blocks that [offload] copies to the host."""

    def before(self, number: int) -> float:
        """Bytes of the blocks before block `number` while it runs; `count` stands for the head."""
        return self.whole[number] - self.moved[max(0, number - self.ahead)]

    def during(self, number: int) -> float:
        """`before`, with the block's own bytes."""
        return self.before(number) + self.whole[number + 1] - self.whole[number]

    @property
    def waiting(self) -> float:
        """Bytes of all blocks while other microbatches run."""
        return self.whole[-1] - self.moved[-1]

    @property
    def leaving(self) -> float:
        """Bytes of the last blocks that stay until the stage's next forward."""
        return self.before(self.count) - self.waiting


def joined(units: Sequence[Blocks]) -> Blocks:
    """The blocks of units."""
    return tuple(blocks for unit in units for blocks in unit)


def sharded_memory(counts: Counts, units: Sequence[Blocks], how: Sharding) -> Iterator[MemoryUse]:
    """Yield the memory at moments of a step's last forward and backward under FSDP2."""
    yield from _forward(counts, units, how)
    yield from _backward(counts, units, how)


def _forward(counts: Counts, units: Sequence[Blocks], how: Sharding) -> Iterator[MemoryUse]:
    embed, head = counts.embed, counts.head
    root = how.width * (embed.parameters + head.parameters)
    sums = _sums(counts, units, how)
    # The output of an all-gather is kept until the next unit's has been copied from its own.
    buffer = 0.0 if how.is_alone else root
    gathered, held, begun = root, KeptBlocks(counts, joined(units), how.ahead), 0
    yield MemoryUse(gathered + buffer, sums, 0.0, embed.kept + embed.forward_peak)
    for number, unit in enumerate(units):
        own = how.gathered(counts, unit)
        if not how.is_alone:
            kept = embed.kept + held.before(begun)
            yield MemoryUse(gathered + buffer + own * (1 + how.own_copy), sums, 0.0, kept)
            buffer = own
        ahead = _ahead(counts, units[number + 1 : number + 1 + how.prefetch], how)
        for kind, count in unit:
            begun += count
            kept = embed.kept + held.during(begun - 1) + counts.blocks[kind].forward_peak
            yield MemoryUse(gathered + own + buffer + ahead, sums, 0.0, kept)
        gathered += 0.0 if how.reshards else own
    kept = embed.kept + held.before(begun) + head.kept
    yield MemoryUse(gathered + buffer, sums, 0.0, kept + head.forward_peak)


def _backward(counts: Counts, units: Sequence[Blocks], how: Sharding) -> Iterator[MemoryUse]:
    embed, head = counts.embed, counts.head
    width, wide = how.width, how.sum_width
    root, root_trained = embed.parameters + head.parameters, embed.trained + head.trained
    held = KeptBlocks(counts, joined(units), how.ahead)
    left = held.count
    """Blocks whose backward is not over."""
    kept = embed.kept + held.before(left)
    whole = sum(how.gathered(counts, unit) for unit in units)
    resident = width * root + (0.0 if how.reshards else whole)
    gathers = how.reshards and not how.is_alone
    # Before the backward of a unit, the one before it in forward is gathered ahead.
    ahead = _ahead(counts, units[-1:], how) if gathers else 0.0
    again = width * root if how.reshards_root and not how.is_alone else 0.0
    sums, gradients = _sums(counts, units, how), 0.0
    yield MemoryUse(resident + again, sums, 0.0, kept + head.kept)
    fresh = how.fresh
    made = sums + fresh * head.backward_gradients
    yield MemoryUse(resident + ahead, made, 0.0, kept + head.kept, head.backward_peak)
    # The gradient of tied weights waits for embed's share of it.
    of_head = how.fresh * width * (head.trained + counts.tied)
    reducing = 0.0
    """The input of the last reduce-scatter, kept until the next one."""
    for number in reversed(range(len(units))):
        unit = units[number]
        own, trained = how.gathered(counts, unit), counts.sum(unit, "trained")
        if how.reshards:
            if gathers:
                yield MemoryUse(resident + ahead + own, sums + of_head + reducing, gradients, kept)
            resident += own
        before = units[max(0, number - max(1, how.prefetch)) : number]
        ahead = _ahead(counts, before, how) if gathers else 0.0
        ended = 0.0
        """Trained elements of the unit's blocks whose backward is over."""
        for kind, count in reversed(unit):
            block = counts.blocks[kind]
            for done in {0, count - 1}:
                made = of_head + reducing
                made += fresh * (width * (ended + block.trained * done) + block.backward_gradients)
                kept = embed.kept + held.during(left - done - 1)
                yield MemoryUse(resident + ahead, sums + made, gradients, kept, block.backward_peak)
            left -= count
            kept = embed.kept + held.before(left)
            ended += count * block.trained
        resident -= own
        made, summed = width * trained, wide * trained
        reducing = summed
        # The gradients are copied into the buffer that is reduced.
        yield MemoryUse(
            resident + ahead,
            sums + of_head + reducing + (0.0 if how.accumulates else made),
            gradients,
            kept,
            counts.stream,
        )
        sums -= summed if how.accumulates else 0.0
        yield MemoryUse(
            resident + ahead,
            sums + of_head + reducing,
            gradients + how.reduced * trained,
            kept,
            counts.stream,
        )
        gradients += how.weight_width * trained / how.shards
    made = sums + of_head + reducing + fresh * embed.backward_gradients
    yield MemoryUse(resident, made, gradients, kept, embed.backward_peak)
    made = 0.0 if how.accumulates else width * root_trained
    yield MemoryUse(0.0, sums + made + wide * root_trained, gradients)
    yield MemoryUse(0.0, wide * root_trained, gradients + how.reduced * root_trained)


def _ahead(counts: Counts, units: Sequence[Blocks], how: Sharding) -> float:
    """Outputs of all-gathers that no block uses yet."""
    return 0.0 if how.is_alone else sum(how.gathered(counts, unit) for unit in units)


def _sums(counts: Counts, units: Sequence[Blocks], how: Sharding) -> float:
    """Gradients of earlier microbatches, which are reduced with the last one's."""
    return how.sum_width * trained_of(counts, units) if how.accumulates else 0.0


def trained_of(counts: Counts, units: Sequence[Blocks]) -> float:
    """Trained elements of embed, head and blocks."""
    blocks = sum(counts.sum(unit, "trained") for unit in units)
    return counts.embed.trained + counts.head.trained + blocks


def single_rank_memory(counts: Counts, blocks: Blocks, how: Sharding) -> Iterator[MemoryUse]:
    """Yield the memory at moments of a step's last microbatch on one rank, without FSDP."""
    embed, head = counts.embed, counts.head
    is_cast = how.width < how.sum_width
    parameters = embed.parameters + head.parameters + counts.sum(blocks, "parameters")
    trained = trained_of(counts, [blocks])
    gathered = how.width * parameters if is_cast else 0.0
    sums = how.sum_width * trained if how.accumulates else 0.0

    def at(made: float, activations: float, part: Part | None = None) -> MemoryUse:
        """The memory in the backward of `part`, with the gradients of `made` elements."""
        temporary = part.backward_peak if part else 0.0
        # In the weights' own format they are added to the sums one by one.
        own = how.fresh * (how.width * made + (part.backward_gradients if part else 0.0))
        if is_cast:
            return MemoryUse(gathered, own, sums, activations, temporary)
        return MemoryUse(gathered, 0.0, sums + own, activations, temporary)

    yield at(0.0, embed.kept + embed.forward_peak)
    held, left = KeptBlocks(counts, blocks, how.ahead), 0
    for kind, count in blocks:
        left += count
        yield at(0.0, embed.kept + held.during(left - 1) + counts.blocks[kind].forward_peak)
    kept = embed.kept + held.before(left) + head.kept
    yield at(0.0, kept + head.forward_peak)
    yield at(0.0, kept, head)
    made = head.trained + counts.tied
    for kind, count in reversed(blocks):
        block = counts.blocks[kind]
        for done in {0, count - 1}:
            kept = embed.kept + held.during(left - done - 1)
            yield at(made + done * block.trained, kept, block)
        made += count * block.trained
        left -= count
    yield at(made, embed.kept, embed)
    if is_cast:
        chunk = min(trained, CHUNK)
        if how.accumulates:
            yield MemoryUse(0.0, how.width * trained, sums + how.sum_width * chunk)
        else:
            yield MemoryUse(0.0, how.width * chunk, how.sum_width * trained)


GRADIENT_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "float8": 2}
"""Bytes of a gradient element, by the format of its product. Gradients of float8 are kept in
bf16."""


class InFlight(NamedTuple):
    """The microbatches that a rank holds during an action, counted per stage of the rank."""

    kind: Kind
    place: int
    """Index of the action's stage among the rank's stages."""
    held: tuple[int, ...]
    """Microbatches whose activations are held: before a forward, else with the action's own."""
    halves: tuple[int, ...]
    """Microbatches of `held` whose input gradients are computed already."""
    summed: tuple[bool, ...]
    """True for a stage that has gradients of an earlier microbatch."""
    last: bool
    """True if the stage's gradients are reduced after this action."""
    messages: int
    """Streams that were received for the next actions, or are held because they were sent last. A
    sent output is not counted: its microbatch keeps it."""


@lru_cache(maxsize=4096)
def highest_of_schedule(
    schedule: str, pp: int, microbatches: int, virtual_stages: int
) -> tuple[tuple[InFlight, ...], ...]:
    """`highest_in_flight` of a schedule's own order."""
    return highest_in_flight(
        pipeline_order(
            schedule,
            num_ranks=pp,
            num_microbatches=microbatches,
            virtual_stages=virtual_stages,
        )
    )


@lru_cache(maxsize=4096)
def exceeded(schedule: str, pp: int, microbatches: int, virtual_stages: int) -> tuple[bool, ...]:
    """Per pipeline rank: True if each of its highest states is covered by one of the rank before.

    The memory of such a rank need not be computed.
    """
    flights = highest_of_schedule(schedule, pp, microbatches, virtual_stages)
    return tuple(
        rank > 0 and all(any(_is_above(other, own) for other in flights[rank - 1]) for own in each)
        for rank, each in enumerate(flights)
    )


def _is_above(first: InFlight, second: InFlight) -> bool:
    alike = first.kind is second.kind and first.place == second.place and first.last == second.last
    return alike and _covers(first, second)


def highest_in_flight(order: Order) -> tuple[tuple[InFlight, ...], ...]:
    """The maximal moments of each rank: none is exceeded in every number by another one."""
    rank_of = ranks_of(order)
    return tuple(_highest(_moments(actions, rank_of, rank)) for rank, actions in enumerate(order))


def _moments(actions: Sequence[Action], rank_of: dict[int, int], rank: int) -> Iterator[InFlight]:
    stages = sorted({action.stage for action in actions})
    place_of = {stage: place for place, stage in enumerate(stages)}
    held, halves = [0] * len(stages), [0] * len(stages)
    summed = [False] * len(stages)
    left = [sum(a.kind is Kind.FORWARD and a.stage == stage for a in actions) for stage in stages]
    arrives = [
        any(rank_of[message.stage] != rank for message in inputs_of(action, len(rank_of)))
        for action in actions
    ]
    sent = False
    """True if the rank's last message was a gradient."""
    for number, action in enumerate(actions):
        place, kind = place_of[action.stage], action.kind
        ends = kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
        left[place] -= ends
        ahead = sum(arrives[number + 1 : number + 1 + RECEIVES_AHEAD])
        now = tuple(held), tuple(halves), tuple(summed)
        yield InFlight(kind, place, *now, ends and not left[place], ahead + sent)
        if rank_of.get(reader_of(output_of(action)), rank) != rank:
            sent = kind is not Kind.FORWARD
        if kind is Kind.FORWARD:
            held[place] += 1
        elif kind is Kind.BACKWARD_INPUT:
            halves[place] += 1
        else:
            held[place] -= 1
            halves[place] -= kind is Kind.BACKWARD_WEIGHT
            summed[place] = True


def _highest(moments: Iterator[InFlight]) -> tuple[InFlight, ...]:
    """Drop moments that another one of the same action equals or exceeds in every number."""
    groups: dict[tuple[Kind, int, bool], list[InFlight]] = {}
    every = sorted(set(moments), key=_size, reverse=True)
    for moment in every:
        kept = groups.setdefault((moment.kind, moment.place, moment.last), [])
        if not any(_covers(other, moment) for other in kept):
            kept.append(moment)
    return tuple(moment for kept in groups.values() for moment in kept)


def _numbers(moment: InFlight) -> tuple[int, ...]:
    return (*moment.held, *moment.halves, *moment.summed, moment.messages)


def _size(moment: InFlight) -> int:
    return sum(_numbers(moment))


def _covers(first: InFlight, second: InFlight) -> bool:
    return all(a >= b for a, b in zip(_numbers(first), _numbers(second), strict=True))


@dataclass(frozen=True, kw_only=True)
class StageParts:
    """A stage of this rank."""

    counts: Counts
    units: tuple[Blocks, ...]
    """The blocks of each FSDP unit."""
    has_embed: bool
    has_head: bool
    has_copy: bool
    """True if the stage computes with a copy of the first stage's weights."""
    whole_table: float = 0.0
    """Result of `whole_table`."""
    ahead: int | None = None
    """As in `Sharding`."""

    @cached_property
    def blocks(self) -> Blocks:
        """All its blocks."""
        return blocks_of([kind for unit in self.units for kind, n in unit for _ in range(n)])

    @cached_property
    def parameters(self) -> float:
        """Elements on a tp rank, with the copy."""
        return self._elements("parameters")

    @cached_property
    def trained(self) -> float:
        """Elements with gradients on a tp rank, with the copy."""
        return self._elements("trained")

    @cached_property
    def largest_unit(self) -> Blocks:
        """The blocks of its largest FSDP unit."""
        return max(self.units, key=lambda unit: self.counts.sum(unit, "parameters"))

    @property
    def copied(self) -> float:
        """Elements of the copy."""
        return self.counts.tied * self.has_copy

    @cached_property
    def unreduced(self) -> float:
        """Elements of the gradients before they are reduced."""
        return self.trained + self.has_embed * self.whole_table

    @property
    def root(self) -> float:
        """Gradient elements outside the blocks, before they are reduced."""
        return self.unreduced - self.counts.sum(self.blocks, "trained")

    def _elements(self, key: str) -> float:
        counts = self.counts
        found = counts.sum(self.blocks, key)
        found += getattr(counts.embed, key) * self.has_embed
        found += getattr(counts.head, key) * self.has_head
        return float(found + counts.tied * self.has_copy)

    @cached_property
    def entered(self) -> float:
        """Bytes that a microbatch keeps before the first block."""
        return self.counts.embed.kept if self.has_embed else self.counts.stream

    @cached_property
    def of_blocks(self) -> KeptBlocks:
        """Bytes that its blocks keep of a microbatch."""
        return KeptBlocks(self.counts, self.blocks, self.ahead)

    @cached_property
    def kept(self) -> float:
        """Bytes that a microbatch keeps on the device until its backward."""
        counts, blocks = self.counts, self.entered + self.of_blocks.waiting
        return blocks + counts.head.kept * self.has_head

    @cached_property
    def forward_high(self) -> float:
        """Peak bytes of a forward's own microbatch."""
        counts, found, held, begun = self.counts, 0.0, self.of_blocks, 0
        if self.has_embed:
            found = self.entered + counts.embed.forward_peak
        for kind, count in self.blocks:
            begun += count
            kept = self.entered + held.during(begun - 1)
            found = max(found, kept + counts.blocks[kind].forward_peak)
        if not self.has_head:
            return found
        return max(found, self.kept + held.leaving + counts.head.forward_peak)

    @cached_property
    def half(self) -> float:
        """Extra bytes that a microbatch keeps between its input and its weight gradients."""
        counts = self.counts
        if self.has_embed:  # The first stage computes no input gradients: all waits.
            return counts.stream
        # The head's: a loss over a vocabulary writes them over its logits; others are small.
        return sum(count * of_products(counts.blocks[kind]) for kind, count in self.blocks)

    @property
    def highest_backward(self) -> float:
        """The largest `Part.backward_peak` of its blocks."""
        return max(self.counts.blocks[kind].backward_peak for kind, _ in self.blocks)

    def backward(self, how: Sharding, is_summed: bool) -> Iterator[MemoryUse]:
        """Moments of a full backward. Activations are relative to what its microbatch keeps."""
        counts, held, made = self.counts, self.of_blocks, 0.0
        left = held.count
        is_cast = how.width < how.sum_width
        # In the weights' own format gradients are added to the sums one by one.
        width = float(how.width if is_cast or not is_summed else 0)
        fresh = float(width > 0)
        sums = 0.0 if is_summed else float(how.sum_width)
        if self.has_head:
            own = fresh * counts.head.backward_gradients
            yield MemoryUse(0.0, own, 0.0, held.leaving, counts.head.backward_peak)
            made = width * (counts.head.trained + counts.tied * self.has_copy)
        # Its output is held to the end; a block's gradients are counted in place of its output.
        output, summed = 0.0 if self.has_head else counts.stream, 0.0
        is_last = True
        for unit in reversed(self.units):
            own = 0.0
            """Trained elements of the unit's blocks whose backward is over."""
            for kind, count in reversed(unit):
                block = counts.blocks[kind]
                for done in {0, count - 1}:
                    found = made + width * (own + done * block.trained)
                    found += fresh * block.backward_gradients + sums * summed
                    ended = 0.0 if is_last and not done else output
                    activations = ended + self.entered + held.during(left - done - 1) - self.kept
                    yield MemoryUse(0.0, found, 0.0, activations, block.backward_peak)
                own += count * block.trained
                left -= count
                is_last = False
            summed += own
        blocks = sums * counts.sum(self.blocks, "trained")
        if self.has_embed:
            found = made + blocks + fresh * counts.embed.backward_gradients
            # Alone on its stage, it adds no part of a table to the head's.
            high = counts.embed.backward_peak
            high -= how.width * counts.tied if self.whole_table else 0.0
            yield MemoryUse(0.0, found, 0.0, self.entered - self.kept + output, high)
        # Those outside the blocks are summed at the end.
        own = (width + sums * is_cast) * self.root
        yield MemoryUse(0.0, blocks + own, 0.0, output - self.kept)


def whole_table(counts: Counts, tp: int, width: int) -> float:
    """Elements by which the gradient of embed exceeds its parameters on a tp rank.

    A table whose rows are split over tp has a gradient with all rows until it is reduced, unless
    the head adds its own to it.
    """
    embed = counts.embed
    if not counts.tied:
        return max(0.0, embed.backward_gradients / width - embed.trained)
    is_whole = embed.backward_peak >= tp * width * counts.tied
    return (tp - 1) * counts.tied if is_whole else 0.0


def of_products(part: Part) -> float:
    """Bytes of the output gradients from which a part computes its weights' gradients."""
    return sum(
        count * product.batch * product.m * product.k * GRADIENT_BYTES[product.dtype]
        for product, count in part.backward.products.items()
        if product.is_weight_gradient
    )


def pipeline_memory(
    flights: Sequence[InFlight],
    stages: Sequence[StageParts],
    how: Sharding,
    growth: float,
    sending: float,
) -> Iterator[MemoryUse]:
    """Yield the memory at moments of a step on a pipeline rank.

    `growth`: activations over those of the planned order. `sending`: bytes of a message that
    belongs to no action.
    """
    gathered = sum(
        how.width * (stage.parameters - stage.counts.sum(stage.blocks, "parameters"))
        + how.gathered(stage.counts, stage.blocks)
        for stage in stages
    )
    stream = stages[0].counts.stream
    for flight in flights:
        summed = sum(
            stage.unreduced
            for stage, is_summed in zip(stages, flight.summed, strict=True)
            if is_summed
        )
        held = sum(count * each.kept for count, each in zip(flight.held, stages, strict=True))
        held += leaving(flight, stages)
        halves = sum(count * each.half for count, each in zip(flight.halves, stages, strict=True))
        for own in _own(flight, stages[flight.place], how):
            activations = held + flight.messages * stream + own.activations
            yield MemoryUse(
                gathered + own.gathered,
                how.sum_width * summed + own.unreduced,
                own.gradients,
                activations * growth + sending,
                halves + own.temporary,
            )


def leaving(flight: InFlight, stages: Sequence[StageParts]) -> float:
    """Bytes of other microbatches whose copies to the host are waited for, see `parallel.offload`.

    A stage's last forward leaves them; a forward of the stage takes their place block by block.
    """
    found = 0.0
    for place, (count, stage) in enumerate(zip(flight.held, stages, strict=True)):
        held, is_own = stage.of_blocks, place == flight.place
        if is_own and flight.kind is Kind.FORWARD and held.count > held.ahead:
            continue
        others = count - (is_own and flight.kind is not Kind.FORWARD)
        found += held.leaving * (others > 0)
    return found


def _own(flight: InFlight, stage: StageParts, how: Sharding) -> Iterator[MemoryUse]:
    """Bytes that an action adds to what the rank holds."""
    is_summed, counts = flight.summed[flight.place], stage.counts
    if flight.kind is Kind.FORWARD:
        yield MemoryUse(activations=stage.forward_high)
        return
    arrived = 0.0 if stage.has_head else counts.stream
    """The gradient of the stage's output."""
    whole = how.width * stage.unreduced
    if flight.kind is Kind.BACKWARD:
        moments = stage.backward(how, is_summed)
        yield from (each._replace(activations=each.activations + arrived) for each in moments)
    elif flight.kind is Kind.BACKWARD_INPUT and not stage.has_embed:
        # The graph is kept for the second half: nothing is freed.
        if stage.has_head:
            yield MemoryUse(temporary=counts.head.backward_peak)
        yield MemoryUse(activations=arrived, temporary=stage.half + stage.highest_backward)
    elif flight.kind is Kind.BACKWARD_WEIGHT and stage.has_embed:
        yield from stage.backward(how, is_summed)
    elif flight.kind is Kind.BACKWARD_WEIGHT:
        yield MemoryUse(unreduced=whole)
    if flight.last:
        sums = 0.0 if is_summed else how.sum_width * stage.unreduced
        largest = stage.largest_unit
        gone = stage.kept + (stage.half if flight.kind is Kind.BACKWARD_WEIGHT else 0.0)
        # Each unit frees its parameters, then copies its gradients to reduce them.
        units = (
            (how.width * stage.root, stage.root),
            (how.gathered(counts, largest), counts.sum(largest, "trained")),
        )
        for freed, reduced in units:
            yield MemoryUse(-freed, sums + how.sum_width * reduced, 0.0, -gone)


GIB, MIB_OF_GIB = 2**30, 2**10
WIDTH = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of an element."""


def memory(
    plan: RunPlan,
    counts: Counts,
    runtime: Runtime = OURS,
    state: OptimizerState = ADAMW,
    *,
    only_fullest: bool = False,
) -> list[dict[StorageKind, float]]:
    """Peak bytes by kind, of every pipeline rank. `state`: see `state_of`.

    `only_fullest`: a rank that holds no more than the one before it is not computed, and gets that
    one's bytes.
    """
    how = sharding_of(plan, runtime)
    how = replace(how, in_float8=in_float8(plan, counts, how))
    if plan.sizes.pp == 1:
        rank = (
            StageParts(
                counts=counts,
                units=(blocks_of(plan.spec.kinds),),
                has_embed=True,
                has_head=True,
                has_copy=False,
            ),
        )
        return [at_peak(plan, rank, _local(plan, counts, how), how, runtime, state)]
    flights, growth = in_flight(plan)
    found: list[dict[StorageKind, float]] = []
    before: list[StageParts] = []
    skipped = exceeded_ranks(plan) if only_fullest else ()
    for pipeline_rank, flight in enumerate(flights):
        stages = stages_of(plan, counts, how, pipeline_rank)
        if pipeline_rank in skipped and are_alike(stages, before):
            found.append(found[-1])
            continue
        before = stages
        sending = sent_copy(plan, counts, how) if pipeline_rank == 0 else 0.0
        moments = pipeline_memory(flight, stages, how, growth[pipeline_rank], sending)
        found.append(at_peak(plan, stages, moments, how, runtime, state))
    return found


def _local(plan: RunPlan, counts: Counts, how: Sharding) -> Iterator[MemoryUse]:
    """Moments without a pipeline."""
    if suits(plan.world_size, plan.precision) and not how.on_host:
        return single_rank_memory(counts, blocks_of(plan.spec.kinds), how)
    units = counts.units(plan.spec.kinds, plan.parallel.blocks_per_fsdp_unit)
    return sharded_memory(counts, units, how)


def sharding_of(plan: RunPlan, runtime: Runtime) -> Sharding:
    """The sharding of a plan's ranks, see `parallel.fsdp.shard`."""
    sizes, wanted = plan.sizes, plan.parallel.reshard_after_forward
    replicas = sizes.product("copies")
    shards = sizes.product("fsdp")
    if runtime.sharding == "replicas":
        shards, replicas = sizes.cp, replicas * sizes.dp_shard
    width = WIDTH[plan.precision.dtype]
    on_host = plan.offload.parameters
    alone = shards == 1 and not on_host
    keeps = sizes.pp > 1 or (alone and wanted == "auto") or runtime.sharding == "gradients"
    return Sharding(
        width=width,
        sum_width=max(width, WIDTH["fp32"]),
        weight_width=WIDTH["bf16"]
        if plan.precision.weights == "bf16"
        else max(width, WIDTH["fp32"]),
        shards=shards,
        has_copies=replicas > 1,
        reshards=not keeps and wanted != "never",
        reshards_root=not keeps and wanted == "always",
        prefetch=plan.parallel.prefetch or 0,
        accumulates=plan.num_microbatches > 1,
        ahead=plan.offload.ahead if plan.offload.activations else None,
        on_host=on_host,
    )


def in_float8(plan: RunPlan, counts: Counts, how: Sharding) -> dict[str, float]:
    """Kind -> share of a block's parameters that FSDP gathers in float8 (`float8.convert`)."""
    if plan.precision.float8 != "tensorwise":
        return {}
    return {kind: share_in_float8(block, how.shards) for kind, block in counts.blocks.items()}


def share_in_float8(block: Part, shards: int) -> float:
    """Share of a block's parameters that are gathered in float8."""
    weights = {
        product: number * product.n * product.k
        for product, number in block.forward.products.items()
    }
    found = sum(
        elements
        for product, elements in weights.items()
        if product.dtype == "float8" and product.n % shards == 0
    )
    return found / sum(weights.values())


def at_peak(
    plan: RunPlan,
    stages: Sequence[StageParts],
    moments: Iterator[MemoryUse],
    how: Sharding,
    runtime: Runtime,
    state: OptimizerState,
) -> dict[StorageKind, float]:
    """Bytes by kind at the moment of a rank with the largest sum, with its state."""
    counts = stages[0].counts
    held = state_bytes(stages, how, state)
    held[StorageKind.INPUTS] = counts.static + counts.inputs * plan.samples_per_rank
    held[StorageKind.FROZEN] = plan.frozen.bytes_on(plan.sizes.data)
    trained = sum(stage.trained - stage.copied for stage in stages) / how.shards
    update = MemoryUse(
        gradients=how.weight_width * trained, temporary=optimizer_work(plan, stages, how, state)
    )
    if how.on_host:
        # Gradients go there, too, and the optimizer works there.
        held[StorageKind.HOST] += update.gradients + update.temporary
        moments, update = (each._replace(gradients=0.0) for each in moments), MemoryUse()
    every = [*moments, update]
    if runtime.state_bytes is not None:
        elements = sum(stage.parameters for stage in stages) / how.shards
        held |= given_state(elements, runtime, how)
        gathers = runtime.sharding != "replicas"
        every = [
            moment._replace(
                gathered=moment.gathered if gathers else 0.0,
                unreduced=moment.unreduced if gathers else 0.0,
                gradients=held[StorageKind.GRADIENTS],
            )
            for moment in every
        ]
    peak = max(every, key=sum)
    held |= {
        StorageKind.GATHERED: peak.gathered,
        StorageKind.UNREDUCED: peak.unreduced,
        StorageKind.GRADIENTS: peak.gradients,
        StorageKind.ACTIVATIONS: peak.activations,
        StorageKind.TEMPORARY: peak.temporary,
    }
    return held


def state_bytes(
    stages: Sequence[StageParts], how: Sharding, state: OptimizerState
) -> dict[StorageKind, float]:
    """Bytes of a rank's shards of weights, optimizer and EMA, and of its buffers."""
    width = how.sum_width / how.shards
    parameters = optimizer = averaged = buffers = quantized = 0.0
    for stage in stages:
        counts = stage.counts
        parts = [(counts.blocks[kind], state.block, count) for kind, count in stage.blocks]
        parts += [(counts.embed, state.embed, int(stage.has_embed))]
        parts += [(counts.head, state.head, int(stage.has_head))]
        parameters += stage.parameters
        averaged += stage.trained - stage.copied
        quantized += counts.sum(stage.blocks, "quantized")
        optimizer += sum(part.trained * moments * count for part, moments, count in parts)
        buffers += sum(part.buffers * count for part, _, count in parts)
    weights = (how.weight_width * parameters + quantized) / how.shards
    beside = {
        StorageKind.OPTIMIZER: width * optimizer,
        StorageKind.EMA: width * averaged * state.averages,
    }
    if how.on_host:
        kept = {StorageKind.HOST: weights + sum(beside.values())}
        return {StorageKind.PARAMETERS: buffers, **dict.fromkeys(beside, 0.0), **kept}
    return {StorageKind.PARAMETERS: weights + buffers, **beside}


def given_state(elements: float, runtime: Runtime, how: Sharding) -> dict[StorageKind, float]:
    """Bytes of another trainer's state by kind, from their given sum."""
    assert runtime.state_bytes is not None
    weights = min(float(how.width), runtime.state_bytes)
    gradients = min(float(runtime.gradient_bytes), runtime.state_bytes - weights)
    return {
        StorageKind.PARAMETERS: weights * elements,
        StorageKind.GRADIENTS: gradients * elements,
        StorageKind.OPTIMIZER: (runtime.state_bytes - weights - gradients) * elements,
    }


def optimizer_work(
    plan: RunPlan, stages: Sequence[StageParts], how: Sharding, state: OptimizerState
) -> float:
    """Temporary bytes of the optimizer's step."""
    blocks = sum(number_of(stage.blocks) for stage in stages)
    in_fp32 = 0.0
    if plan.precision.weights == "bf16":
        elements = sum(stage.trained - stage.copied for stage in stages) / how.shards
        # Weights and gradients of a piece; Muon's groups are updated as a whole.
        in_fp32 = 8.0 * (elements if state.matrices else min(elements, PIECE))
    if not state.matrices or not blocks:
        return in_fp32
    trained = sum(stage.counts.sum(stage.blocks, "trained") for stage in stages)
    elements = state.matrices * trained
    owners = how.shards * plan.sizes.tp
    number = blocks * state.num_matrices
    # A rank owns whole matrices.
    own = min(1.0, -(-number // owners) / number) * plan.sizes.tp
    received = state.received_work if owners > 1 else 0.0
    work = elements * ((state.shard_work + received) / how.shards + state.whole_work * own)
    return work + in_fp32


def sent_copy(plan: RunPlan, counts: Counts, how: Sharding) -> float:
    """Bytes of tied weights that the first rank casts to send; held to the end of a step."""
    first, last = plan.stage_ranks[0], plan.stage_ranks[-1]
    if first == last or how.width == how.sum_width:
        return 0.0
    return how.width * counts.tied / how.shards


def stages_of(plan: RunPlan, counts: Counts, how: Sharding, pipeline_rank: int) -> list[StageParts]:
    """The stages of a pipeline rank."""
    last, found = plan.num_stages - 1, []
    for stage in plan.stages_of(pipeline_rank):
        layers = plan.stage_layers[stage]
        kinds = plan.spec.kinds[layers.start : layers.stop]
        found.append(
            StageParts(
                counts=counts,
                units=counts.units(kinds, plan.parallel.blocks_per_fsdp_unit),
                has_embed=stage == 0,
                has_head=stage == last,
                has_copy=stage == last,
                whole_table=whole_table(counts, plan.sizes.tp, how.width),
                ahead=how.ahead,
            )
        )
    return found


def in_flight(plan: RunPlan) -> tuple[tuple[tuple[InFlight, ...], ...], tuple[float, ...]]:
    """(moments of each rank, factor of its activations in a run-time order)."""
    count = plan.num_microbatches
    if plan.order_of_file is not None:
        return highest_in_flight(plan.order(count)), (1.0,) * plan.sizes.pp
    pipeline = plan.pipeline
    found = highest_of_schedule(pipeline.schedule, plan.sizes.pp, count, pipeline.virtual_stages)
    if not plan.decides_at_run_time:
        return found, (1.0,) * plan.sizes.pp
    planned = peak_activations(plan.order(count))
    most = most_held(plan, count)
    return found, tuple(most / own for most, own in zip(most, planned, strict=True))


def exceeded_ranks(plan: RunPlan) -> frozenset[int]:
    """Pipeline ranks that never hold more than the rank before.

    Empty for an order from a file and for a run-time order.
    """
    if plan.order_of_file is not None or plan.decides_at_run_time:
        return frozenset()
    order = plan.pipeline.schedule, plan.sizes.pp, plan.num_microbatches
    above = exceeded(*order, plan.pipeline.virtual_stages)
    return frozenset(rank for rank, is_above in enumerate(above) if is_above)


def are_alike(stages: Sequence[StageParts], others: Sequence[StageParts]) -> bool:
    """True if two ranks of a plan have equal stages."""

    def kinds(each: Sequence[StageParts]) -> list[tuple[object, ...]]:
        return [(s.blocks, s.has_embed, s.has_head, s.has_copy) for s in each]

    return kinds(stages) == kinds(others)


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Device memory of a rank in GiB."""

    allocated: float
    """Tensors: torch's `max_memory_allocated`."""
    reserved: float
    """The caching allocator's memory, fragments included: `max_memory_reserved`."""
    context: float
    """CUDA context, kernels and libraries."""
    communicators: float
    """NCCL's buffers."""

    @property
    def total(self) -> float:
        """GiB that nvidia-smi shows."""
        return self.reserved + self.context + self.communicators


def on_device(held: Mapping[StorageKind, float]) -> float:
    """Bytes in device memory: the sum of `held` without HOST."""
    return sum(size for kind, size in held.items() if kind is not StorageKind.HOST)


def device_memory(held: Mapping[StorageKind, float], plan: RunPlan, device: Device) -> DeviceMemory:
    """Device memory of a rank with these bytes of tensors."""
    overhead, allocated = device.overhead, on_device(held) / GIB
    return DeviceMemory(
        allocated=allocated,
        reserved=allocated * overhead.allocator,
        context=overhead.context_mib / MIB_OF_GIB,
        communicators=overhead.communicator_mib * len(communicators(plan)) / MIB_OF_GIB,
    )


def fits(found: DeviceMemory, device: Device) -> bool:
    """True if a rank fits the device."""
    return found.total <= device.memory_gib


def communicators(plan: RunPlan) -> tuple[str, ...]:
    """The axes above 1 along which a rank communicates, and "all" for the gradient norm."""
    sizes = asdict(plan.sizes)
    found = [name for name, size in sizes.items() if size > 1]
    return (*found, "all") if found else ()
