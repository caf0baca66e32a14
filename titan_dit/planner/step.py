"""Predict the time of a training step on a device, as terms that add up to it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

from titan_dit.config.job import JobConfig
from titan_dit.config.layout import OffloadConfig
from titan_dit.config.section import UserError, show
from titan_dit.optim.sections import AdamWConfig
from titan_dit.pipeline.schedules.schedule import Kind
from titan_dit.plan import RunPlan
from titan_dit.planner import rates
from titan_dit.planner.data_parallel import Compute, DataParallel, FSDPUnit, StageShape, of_blocks
from titan_dit.planner.hardware import Device
from titan_dit.planner.links import Network
from titan_dit.planner.pipeline import Durations, pass_times
from titan_dit.planner.rates import OURS, Runtime
from titan_dit.planner.work import Counts, Message, Part, Product, Work, number_of

Terms: TypeAlias = Mapping[str, float]
"""Seconds by term, see `rates.seconds`."""


def total(*weighted: tuple[float, Terms]) -> dict[str, float]:
    """Sum of terms, each with a factor: (factor, terms)."""
    found: dict[str, float] = {}
    for times, terms in weighted:
        for name, value in terms.items():
            found[name] = found.get(name, 0.0) + times * value
    return found


@dataclass(frozen=True)
class Passes:
    """Seconds of a part's or a stage's passes on one microbatch, by term."""

    forward: Terms = field(default_factory=dict)
    backward: Terms = field(default_factory=dict)
    weight: Terms = field(default_factory=dict)
    """The second half of a split backward."""
    input: Terms = field(default_factory=dict)
    """The first half of a split backward. Only stages have it; for parts it is empty."""

    @staticmethod
    def sum(weighted: Iterable[tuple[float, Passes]]) -> Passes:
        """Sum of passes, each with a factor: (factor, passes)."""
        given = list(weighted)
        return Passes(
            total(*((times, each.forward) for times, each in given)),
            total(*((times, each.backward) for times, each in given)),
            total(*((times, each.weight) for times, each in given)),
        )


@dataclass(frozen=True)
class PartPasses:
    """The passes of a model's parts, of one microbatch."""

    embed: Passes
    blocks: Mapping[str, Passes]
    """Kind -> the passes of a block."""
    head: Passes
    prepare: Terms


@dataclass(frozen=True)
class Setting:
    """The arguments of the parts' times. Layouts that differ in pp and dp only share them."""

    counts: Counts = field(compare=False)
    links: Network = field(compare=False)
    counts_id: int
    """id() of `counts`, which lives as long as this object: no other counts have the same id."""
    device: Device
    groups: tuple[object, ...]
    """The groups of tp and cp."""
    fused: tuple[bool, bool, bool]
    """True where elementwise operators are fused: in blocks, in embed and head, in `prepare`."""
    dropout: bool
    """`Runtime.attention_dropout`."""
    splits: bool
    """True if the schedule splits backward."""
    offloads: bool
    """[offload] activations."""


def check_offload(config: OffloadConfig, device: Device) -> None:
    """Raise UserError for an [offload] that has no price."""
    key = "parameters" if config.parameters else "activations"
    if (config.parameters or config.activations) and not device.host_gb_per_s:
        raise UserError(
            f"[offload] {key}=true has no price on {device.name}, whose file has no link to "
            "the host. Set host_gb_per_s in a file of your own, such as 51.2 for PCIe 5.0 x16, or "
            "leave it out here."
        )
    if config.parameters and not device.host_memory_gb_per_s:
        raise UserError(
            f"[offload] parameters=true has no price on {device.name}, whose file does not say how "
            "fast the host takes the optimizer's steps. Set host_memory_gb_per_s in a file of your "
            "own, such as 450 for two CPUs with 8 channels of DDR5-4400, or leave it out here."
        )


def check_host_steps(config: JobConfig) -> None:
    """Raise UserError for an update whose CPU time is not bound by its memory traffic."""
    if not config.offload.parameters:
        return
    if type(config.optimizer) is not AdamWConfig:
        raise UserError(
            f"[offload] parameters=true has a price in plan for AdamW alone, not for [optimizer] "
            f"name={show(config.optimizer.name)}, whose steps on a CPU were not measured. Set "
            'name = "adamw", or leave parameters out here; `train --dry-run` counts its memory.'
        )
    if config.precision.weights == "bf16":
        raise UserError(
            '[offload] parameters=true has no price in plan with [precision] weights="bf16", whose '
            'random rounding on a CPU was not measured. Set weights = "fp32", or leave parameters '
            "out here; `train --dry-run` counts its memory."
        )


def part_passes(
    plan: RunPlan, counts: Counts, device: Device, links: Network, runtime: Runtime
) -> PartPasses:
    """The parts' passes under a plan."""
    compiled = plan.compile
    fused = compiled.enabled, compiled.enabled and compiled.ends, compiled.objective
    groups = links.group("tp"), links.group("cp"), min(plan.world_size, device.gpus_per_node)
    setting = Setting(
        counts=counts,
        links=links,
        counts_id=id(counts),
        device=device,
        groups=groups,
        fused=fused if runtime.is_fused is None else (runtime.is_fused,) * 3,
        dropout=runtime.attention_dropout,
        splits=plan.splits_backward,
        offloads=plan.offload.activations,
    )
    return _part_passes(setting)


@functools.lru_cache(maxsize=128)
def _part_passes(setting: Setting) -> PartPasses:
    counts, (blocks, ends, prepare) = setting.counts, setting.fused
    of_blocks = {k: _passes(part, setting, fused=blocks) for k, part in counts.blocks.items()}
    if setting.offloads:
        of_blocks = {
            kind: with_copies(each, counts.blocks[kind], setting.device)
            for kind, each in of_blocks.items()
        }
    return PartPasses(
        embed=_passes(counts.embed, setting, fused=ends),
        blocks=of_blocks,
        head=_passes(counts.head, setting, fused=ends),
        prepare=rates.seconds(counts.prepare, setting.device, setting.links, fused=prepare),
    )


def _passes(part: Part, setting: Setting, *, fused: bool) -> Passes:
    def took(work: Work) -> Terms:
        return rates.seconds(work, setting.device, setting.links, fused=fused)

    forward, backward = part.forward, part.backward
    if setting.dropout:
        forward, backward = with_dropout(forward, forward), with_dropout(backward, forward)
    if not setting.splits:
        return Passes(took(forward), took(backward))
    whole, weight = took(backward), dict(took(weight_half(backward)))
    # The host may be ahead: a half waits for it no longer than the whole does.
    weight["launches"] = min(weight["launches"], whole["launches"])
    return Passes(took(forward), whole, weight)


def with_copies(passes: Passes, block: Part, device: Device) -> Passes:
    """A block's passes, beside which its activations are copied to the host, and back.

    Each direction has the whole link: forward only copies out, backward only back.
    """
    copying = rates.host_s(block.kept - block.small, device)

    def beside(terms: Terms) -> Terms:
        return {**terms, "host link": max(0.0, copying - seconds(terms))}

    return replace(passes, forward=beside(passes.forward), backward=beside(passes.backward))


def weight_half(backward: Work) -> Work:
    """The second half of a split backward: the products for the gradients of weights."""
    own = {product: n for product, n in backward.products.items() if product.is_weight_gradient}
    return Work(products=own, operators=sum(own.values()), kernels=sum(own.values()))


def with_dropout(work: Work, forward: Work) -> Work:
    """A pass of unfused attention with dropout of its probabilities.

    Two batched products have the probabilities between them. Dropout reads and writes those, with a
    mask of one byte each. A backward has two such pairs, and the forward's pair if it is
    recomputed.
    """
    batched = [p for p in forward.products if p.batch > 1]
    between = sum(
        forward.products[p] * p.batch * p.m * max(p.n, p.k) * (2 * width(p.dtype) + 1) / 2
        for p in batched
    )
    pairs = sum(count for p, count in work.products.items() if p.batch > 1)
    own = sum(forward.products[p] for p in batched)
    if not own:
        return work
    # Backward's two pairs are one dropout.
    passes = 1 if work is forward else max(1, round(pairs / own) - 1)
    return replace(work, moved=work.moved + passes * between, fused=work.fused + passes * between)


def width(dtype: str) -> int:
    """Bytes of an element."""
    return rates.ITEM_BYTES[dtype]


def with_link(terms: Terms, lengthened: float) -> dict[str, float]:
    """Terms with the seconds by which copies between host and device lengthen a step."""
    return total((1.0, terms), (lengthened, {"host link": 1.0} if lengthened else {}))


NORM_BYTES = 8
"""Bytes of the gradients' sum of squares, fp64."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The predicted time of a step."""

    seconds: float
    terms: Mapping[str, float]
    """Seconds by term; they add up to `seconds`. Computing ("products", "attention", "elementwise",
    "tp", "cp", "launches") is that of the pipeline rank with the most of it. "bubble": its waiting
    for other stages if messages take no time. "host link": how much longer than a block's passes
    the copies of [offload] activations take, and how much those of [offload] parameters lengthen
    the step. "stage messages", "data parallel", "tied weights": how much these do. "gradient
    norm": its all-reduce. "optimizer": with clipping and EMA, of the rank with the most
    parameters; with [offload] parameters mostly the host's time, in which the device waits.
    "frozen": the text encoder of [text] mode =
    "online"."""
    critical: int
    """The pipeline rank with the most computing."""
    idle: tuple[float, ...]
    """By pipeline rank: share of the pass spent waiting for other stages, messages included."""


def samples_per_s(estimate: Estimate, plan: RunPlan) -> float:
    """Samples per second of all ranks."""
    return plan.global_batch_size / estimate.seconds


def mfu(estimate: Estimate, plan: RunPlan, device: Device, flops_per_sample: float) -> float:
    """Model FLOPs, recomputation excluded, over the peak of all devices in [precision] dtype.

    `flops_per_sample`: see `Model.flops_per_sample`.
    """
    peak = 1e12 * device.peak_tflops[plan.precision.dtype] * plan.world_size
    return flops_per_sample * samples_per_s(estimate, plan) / peak


def estimate(plan: RunPlan, counts: Counts, device: Device, runtime: Runtime = OURS) -> Estimate:
    """The time of a training step. UserError if the device lacks a format or a link."""
    step = StepTime(plan, counts, device, runtime)
    terms, critical, idle = step.passes()
    terms["gradient norm"], terms["optimizer"] = step.norm_s, step.update_s
    if plan.frozen.flops:
        terms["frozen"] = step.frozen_s
    return Estimate(seconds=sum(terms.values()), terms=terms, critical=critical, idle=idle)


def bound(plan: RunPlan, counts: Counts, device: Device, runtime: Runtime = OURS) -> float:
    """Lower bound of `estimate` in seconds, without simulating the pipeline."""
    step = StepTime(plan, counts, device, runtime)
    least = step.least() if plan.sizes.pp > 1 else sum(step.local()[0].values())
    return least + step.norm_s + step.update_s + step.frozen_s


class StepTime:
    """The terms of a step's time, each computed when it is asked for."""

    def __init__(self, plan: RunPlan, counts: Counts, device: Device, runtime: Runtime) -> None:
        """Raises UserError if the device's file lacks a value that the layout needs."""
        check_offload(plan.offload, device)
        self.plan, self.counts, self.device, self.runtime = plan, counts, device, runtime
        self.links = Network(plan.sizes, device)
        self.parts: PartPasses = part_passes(plan, counts, device, self.links, runtime)
        self.data = DataParallel(plan, counts, self.links, runtime)
        self.ranks = range(plan.sizes.pp)
        self.held = [plan.stages_of(rank) for rank in self.ranks]
        """The stages of every pipeline rank."""

    @cached_property
    def frozen_s(self) -> float:
        """Seconds of the frozen modules on a rank's share of samples, or of gathering them."""
        plan, frozen = self.plan, self.plan.frozen
        if not frozen.flops:
            return 0.0
        samples = -(-plan.samples_per_rank // plan.sizes.model)
        rows, width = float(samples * frozen.tokens), float(frozen.width)
        dtype = "bf16" if frozen.element_bytes == 2 else "fp32"
        # One product of all their FLOPs, as wide as a token.
        inner = samples * frozen.flops / (2 * rows * width)
        computing = rates.product_s(Product(1, rows, width, inner, dtype), self.device)
        data = plan.sizes.data
        if data == 1:
            return computing
        axis = "dp_shard" if plan.sizes.dp_shard > 1 else "dp_replicate"
        sent = (data - 1) * frozen.bytes_on(data)
        return max(computing, self.links.seconds(Message(axis, "all-gather", sent)))

    @cached_property
    def stages(self) -> tuple[Passes, ...]:
        """The passes of every stage, for one microbatch."""
        made = {shape: self.stage(shape) for shape in set(self.data.shapes)}
        return tuple(made[shape] for shape in self.data.shapes)

    def stage(self, shape: StageShape) -> Passes:
        """The passes of a stage. FSDP's copies are spread over the microbatches."""
        plan, parts = self.plan, self.parts
        own = [(float(count), parts.blocks[kind]) for kind, count in shape.blocks]
        own += [(1.0, parts.embed)] * shape.is_first + [(1.0, parts.head)] * shape.is_last
        copied = Passes(*map(elementwise, self.copies_s(shape)))
        found = Passes.sum([*own, (1 / plan.num_microbatches, copied)])
        if plan.splits_backward:
            # The first stage has no input gradient: all its work is the second half.
            second = found.backward if shape.is_first else found.weight
            first = total((1.0, found.backward), (-1.0, second))
            return replace(found, weight=second, input=first)
        return found

    def copies_s(self, shape: StageShape) -> tuple[float, float]:
        """Seconds of a step in which FSDP copies a stage's (parameters, gradients)."""
        root, blocks = self.data.units(shape)
        sums = [sum(pair) for pair in zip(*map(self.data.copied, (root, *blocks)), strict=True)]
        gathered, reduced = (rates.moved_s(nbytes, self.device) for nbytes in sums)
        return gathered, reduced

    def passes(self) -> tuple[dict[str, float], int, tuple[float, ...]]:
        """(terms of the forwards and backwards, the critical rank, the idle share of each rank)."""
        return self.pipelined() if self.plan.sizes.pp > 1 else self.local()

    def local(self) -> tuple[dict[str, float], int, tuple[float, ...]]:
        """`passes` without a pipeline."""
        count, [stage] = self.plan.num_microbatches, self.stages
        terms = total((count, stage.forward), (count, stage.backward))
        computing = sum(terms.values())
        terms = total((1.0, terms), (count, self.parts.prepare))
        both = self.data, self.without_copies
        whole, sent = (data.step_s(self.compute(0, data)) for data in both)
        terms["data parallel"] = sent - computing
        return with_link(terms, whole - sent), 0, (0.0,)

    @cached_property
    def without_copies(self) -> DataParallel:
        """`data`, whose copies of [offload] parameters take no time; without them itself."""
        on_host = self.plan.offload.parameters
        return replace(self.data, copies_take_time=False) if on_host else self.data

    def compute(self, stage: int, data: DataParallel) -> Compute:
        """Seconds of a stage's parts. FSDP's copies are spread over its blocks."""
        count, shape = self.plan.num_microbatches, self.data.shapes[stage]
        num = number_of(shape.blocks)
        gathered, reduced = (copies / count / num for copies in self.copies_s(shape))
        embed, blocks, head = self.parts.embed, self.parts.blocks, self.parts.head
        linked = {kind: self.link_s(data, shape, kind) for kind in blocks}
        return Compute(
            embed_forward=seconds(embed.forward),
            block_forward={k: seconds(block.forward) + gathered for k, block in blocks.items()},
            head_forward=seconds(head.forward),
            embed_backward=seconds(embed.backward),
            block_backward={
                k: max(seconds(block.backward) + reduced, linked[k]) for k, block in blocks.items()
            },
            head_backward=seconds(head.backward),
        )

    def link_s(self, data: DataParallel, shape: StageShape, kind: str) -> float:
        """Seconds of copies from the host in a block's backward: its activations and weights.

        0 unless [offload] brings both: either has the link for itself.
        """
        own = self.plan.offload
        _, units = data.units(shape)
        if not (own.activations and own.parameters) or not any(map(data.frees, units)):
            return 0.0
        block = self.counts.blocks[kind]
        weights = FSDPUnit(block.parameters, 0.0, (), block.quantized)
        return data.copy_s(block.kept - block.small + data.fetched(weights))

    def pipelined(self) -> tuple[dict[str, float], int, tuple[float, ...]]:
        """`passes` with a pipeline."""
        plan, count = self.plan, self.plan.num_microbatches
        computing = Durations(costs=self.costs())
        computed = pass_times(plan, computing)
        critical = max(self.ranks, key=lambda rank: computed.busy[rank])
        own = [self.stages[stage] for stage in self.held[critical]]
        terms = total(
            *((count, each.forward) for each in own), *((count, each.backward) for each in own)
        )
        terms["bubble"] = computed.makespan - sum(terms.values())
        terms = total((1.0, terms), (count, self.parts.prepare))
        sending = self.with_messages(computing)
        sent = pass_times(plan, sending)
        terms["stage messages"] = sent.makespan - computed.makespan
        reducing = self.with_data(sending, self.without_copies)
        reduced = pass_times(plan, reducing)
        terms["data parallel"] = reduced.makespan - sent.makespan
        terms["tied weights"] = self.tied(reducing) - reduced.makespan
        # A blocking message is no computing, although its rank is busy.
        idle = (1 - busy / sent.makespan for busy in computed.busy)
        if plan.offload.parameters:
            copied = pass_times(plan, self.with_data(sending, self.data))
            terms = with_link(terms, copied.makespan - reduced.makespan)
        return terms, critical, tuple(idle)

    def with_data(self, times: Durations, data: DataParallel) -> Durations:
        """The times, with the gathers before a pass and the reductions after it."""
        return replace(
            times,
            ready=tuple(
                data.before_s({s: self.compute(s, data) for s in own}) for own in self.held
            ),
            after={s: data.after_s(s, self.compute(s, data)) for s in range(len(self.stages))},
        )

    def costs(self) -> dict[tuple[Kind, int], float]:
        """Seconds of every action by (kind, stage)."""
        kinds = (
            (Kind.FORWARD, "forward"),
            (Kind.BACKWARD, "backward"),
            (Kind.BACKWARD_INPUT, "input"),
            (Kind.BACKWARD_WEIGHT, "weight"),
        )
        return {
            (kind, number): seconds(getattr(stage, name))
            for number, stage in enumerate(self.stages)
            for kind, name in kinds
        }

    def channels(self) -> list[tuple[tuple[Kind, int], tuple[int, int]]]:
        """((kind, stage) of an action, (source, target) rank of its output) between ranks."""
        ranks, last = self.plan.stage_ranks, len(self.stages) - 1
        found = [((Kind.FORWARD, s), (ranks[s], ranks[s + 1])) for s in range(last)]
        for kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            found += [((kind, s), (ranks[s], ranks[s - 1])) for s in range(1, last + 1)]
        return [(action, pair) for action, pair in found if pair[0] != pair[1]]

    def message_s(self, source: int, target: int) -> float:
        """Seconds of a microbatch's message from one pipeline rank to another."""
        nbytes, tp = self.counts.stream, self.plan.sizes.tp
        if not self.runtime.scattered_messages or tp == 1:
            return self.links.stage_s(nbytes, source, target)
        gather = Message("tp", "all-gather", (tp - 1) / tp * nbytes)
        return self.links.stage_s(nbytes / tp, source, target) + self.links.seconds(gather)

    def with_messages(self, times: Durations) -> Durations:
        """The times, with messages between stages."""
        took = {pair: self.message_s(*pair) for pair in {pair for _, pair in self.channels()}}
        if not self.runtime.blocking_messages:
            return replace(times, latency=took, in_turn=True)
        # Its receive is over as soon as its send: both directions of a link work at once.
        costs = dict(times.costs)
        for action, pair in self.channels():
            costs[action] += took[pair]
        return replace(times, costs=costs)

    def tied(self, times: Durations) -> float:
        """Seconds until a pass ends with the messages of tied weights, see `parallel.tied`."""
        plan, tied = self.plan, self.counts.tied
        owner, holder = plan.stage_ranks[0], plan.stage_ranks[-1]
        if not tied or owner == holder:
            return pass_times(plan, times).makespan
        gradients = tied * self.data.gradient_bytes / self.data.splits
        back = self.links.stage_s(gradients, holder, owner)
        if self.runtime.sharding == "replicas":
            # Both hold the weight, and add up its gradients.
            ends = list(pass_times(plan, times).ends)
            ends[owner] = ends[holder] = max(ends[owner], ends[holder]) + back
            return max(ends)
        weights = tied * plan.dtype.itemsize / self.data.splits
        ready = list(times.ready)
        ready[holder] += self.links.stage_s(weights, owner, holder)
        ends = list(pass_times(plan, replace(times, ready=tuple(ready))).ends)
        ends[owner] = max(ends[owner], ends[holder] + back)
        return max(ends)

    @property
    def norm_s(self) -> float:
        """Seconds of the gradient norm's all-reduce over all ranks."""
        world = self.plan.world_size
        sent = 2 * (world - 1) / world * NORM_BYTES
        return self.links.seconds(Message("all", "all-reduce", sent))

    @cached_property
    def update_s(self) -> float:
        """Seconds of clipping, optimizer and EMA on the pipeline rank with the most of them."""
        counts = self.counts
        embed, head = self.part_update_s(counts.embed), self.part_update_s(counts.head)
        blocks = {kind: self.part_update_s(part) for kind, part in counts.blocks.items()}
        return max(
            sum(
                shape.is_first * embed + of_blocks(shape.blocks, blocks) + shape.is_last * head
                for shape in (self.data.shapes[stage] for stage in stages)
            )
            for stages in self.held
        )

    def part_update_s(self, part: Part) -> float:
        """Seconds of the update of a rank's shard of a part."""
        splits = self.data.splits
        if self.runtime.update_bytes is not None:
            return rates.moved_s(self.runtime.update_bytes * part.trained / splits, self.device)
        # Shards are as many tensors as the whole, and take as many kernels. Sums over tp are sent
        # before gradients are sharded.
        update = part.update - part.on_host if self.plan.offload.parameters else part.update
        same = {name: getattr(update, name) for name in ("messages", "operators", "kernels")}
        work = replace(update.times(1 / splits), **same)
        taken = seconds(rates.seconds(work, self.device, self.links, fused=False))
        if self.plan.offload.parameters:
            # The host has waited for the last gradient, and the device waits for the host.
            taken += rates.host_step_s(part.on_host.moved / splits, self.device)
        return taken

    def least(self) -> float:
        """Lower bound of a pipeline's pass: the longest chain through one rank.

        A rank computes all its microbatches after the first one has reached it. Unless backward is
        split, the last one then has to go back to the first stage.
        """
        plan, count = self.plan, self.plan.num_microbatches
        took = self.with_messages(Durations(costs=self.costs()))
        pairs = list(pairwise(plan.stage_ranks))
        sends = [took.latency.get(pair, 0.0) for pair in pairs]
        backs = [took.latency.get(pair[::-1], 0.0) for pair in pairs]
        after = self.data.after_s(0, self.compute(0, self.data))
        splits, costs = plan.splits_backward, took.costs
        longest = 0.0
        for own in self.held:
            before = range(min(own))
            whole = sum(costs[Kind.FORWARD, s] + costs[Kind.BACKWARD, s] for s in own)
            chain = sum(costs[Kind.FORWARD, s] + sends[s] for s in before) + count * whole
            if not splits:
                chain += sum(costs[Kind.BACKWARD, s] + backs[s] for s in before) + after
            longest = max(longest, chain)
        return longest + count * seconds(self.parts.prepare)


def seconds(terms: Terms) -> float:
    """The sum of the terms."""
    return sum(terms.values())


def elementwise(value: float) -> Terms:
    """Seconds of copies, as terms."""
    return {"elementwise": value}
