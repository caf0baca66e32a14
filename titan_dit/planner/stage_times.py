"""What the actions of a stage take: its embed, blocks and head on a device, term by term."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from titan_dit.plan import RunPlan
from titan_dit.planner import rates
from titan_dit.planner.hardware import Device
from titan_dit.planner.links import Links
from titan_dit.planner.runtime import Runtime
from titan_dit.planner.work import Counts, Part, Work

Terms: TypeAlias = Mapping[str, float]
"""Seconds by term, see `rates.seconds`."""


def total(*weighted: tuple[float, Terms]) -> dict[str, float]:
    """The sum of (times, terms)."""
    found: dict[str, float] = {}
    for times, terms in weighted:
        for name, value in terms.items():
            found[name] = found.get(name, 0.0) + times * value
    return found


@dataclass(frozen=True)
class Passes:
    """Seconds of a part or stage and microbatch, by term."""

    forward: Terms = field(default_factory=dict)
    backward: Terms = field(default_factory=dict)
    weight: Terms = field(default_factory=dict)
    """The second half of a split backward."""
    input: Terms = field(default_factory=dict)
    """The first half; of a part it is what the second leaves."""

    @staticmethod
    def sum(weighted: Iterable[tuple[float, Passes]]) -> Passes:
        """The sum of (times, passes)."""
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
    block: Passes
    head: Passes
    prepare: Terms


@dataclass(frozen=True)
class Setting:
    """What the times of parts depend on; equal for layouts that differ along pp and dp only."""

    counts: Counts = field(compare=False)
    links: Links = field(compare=False)
    counts_id: int
    """`counts` lives as long as this, so no other ones have its id."""
    device: Device
    groups: tuple[object, ...]
    """The groups of tp and cp."""
    fused: tuple[bool, bool, bool]
    """Elementwise operators of blocks, of embed and head, of `prepare`."""
    dropout: bool
    """See `Runtime.attention_dropout`."""
    splits: bool
    """Backward is split."""


def part_passes(
    plan: RunPlan, counts: Counts, device: Device, links: Links, runtime: Runtime
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
    )
    return _part_passes(setting)


@functools.lru_cache(maxsize=128)
def _part_passes(setting: Setting) -> PartPasses:
    counts, (blocks, ends, prepare) = setting.counts, setting.fused
    return PartPasses(
        embed=_passes(counts.embed, setting, fused=ends),
        block=_passes(counts.block, setting, fused=blocks),
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


def weight_half(backward: Work) -> Work:
    """The second half of a split backward: the products for the gradients of weights."""
    own = {product: n for product, n in backward.products.items() if product.is_weight_gradient}
    return Work(products=own, operators=sum(own.values()), kernels=sum(own.values()))


def with_dropout(work: Work, forward: Work) -> Work:
    """A pass with dropout of the probabilities of unfused attention, once for every such pair.

    The pair of batched products has the probabilities between them. Dropout reads and writes them,
    with a mask of one byte. A backward has a pair for each operand, and forward's, if it is
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
