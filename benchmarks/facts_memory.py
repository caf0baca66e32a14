"""Memory of the rows of benchmarks/facts: what nvidia-smi showed against the planner's."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from facts_fit import errors_row
from facts_kernels import Held
from facts_rows import Fact, inside_nodes, plan_of, rehearsed, thirds

from titan_dit.config.layout import ActivationCheckpointConfig
from titan_dit.plan import RunPlan
from titan_dit.planner.calibrate import PRIOR, least_squares
from titan_dit.planner.hardware import Device, Overhead
from titan_dit.planner.memory import MIB_OF_GIB, device_memory, memory
from titan_dit.planner.report import ACROSS
from titan_dit.planner.work import Counts


@dataclass(frozen=True)
class Row:
    """A row with what its fullest rank holds."""

    fact: Fact
    plan: RunPlan
    held: Mapping[Any, float]
    """Bytes by kind, without messages in flight."""
    in_flight: float
    """Bytes of messages that the allocator cannot reuse yet."""

    @property
    def measured(self) -> float:
        """MiB."""
        return float(self.fact.row["memory_mib"])

    def total(self, device: Device, *, with_messages: bool = True) -> float:
        """MiB that nvidia-smi would show; an allocator frees what it caches at a full device."""
        held = {**self.held, "messages": self.in_flight * with_messages}
        found = MIB_OF_GIB * device_memory(held, self.plan, device).total
        return min(found, MIB_OF_GIB * device.memory_gib)


def row_of(fact: Fact) -> Row:
    """A row of a trainer like Megatron."""
    plan, how = plan_of(fact), fact.software.held
    assert how is not None
    counts = counts_held(fact, plan, how)
    ranks = memory(plan, counts, fact.software.runtime)
    largest = max(ranks, key=lambda held: sum(held.values()))
    return Row(fact, plan, largest, messages_in_flight(fact, how, counts))


def counts_held(fact: Fact, plan: RunPlan, how: Held) -> Counts:
    """Counts with what the trainer's kernels keep: scores and logits in memory."""
    counts = rehearsed(fact, plan)
    plain = rehearsed(
        fact, replace(plan, activation_checkpoint=ActivationCheckpointConfig(mode="none"))
    ).block
    samples, tp = fact["micro_batch_samples"], fact["tp"]
    scores = samples * fact["heads"] / tp * fact["seq_tokens"] ** 2
    logits = samples * fact["seq_tokens"] * fact["vocab_padded"] / tp
    block = replace(
        counts.block,
        kept=counts.block.kept * (how.buffers if plan.sizes.pp > 1 else 1),
        # One recomputed block is whole in backward.
        forward_peak=plain.kept + how.scores[0] * scores,
        backward_peak=plain.kept + plain.backward_peak + sum(how.scores) * scores,
    )
    head = replace(
        counts.head,
        kept=how.logits[0] * logits,
        forward_peak=0.0,
        backward_peak=how.logits[1] * logits,
    )
    return replace(counts, blocks={"": block}, head=head)


def messages_in_flight(fact: Fact, how: Held, counts: Counts) -> float:
    """Bytes of tp's buffers that wait for the device.

    The host queues `how.queue` kernels. A buffer that another stream uses is free for the allocator
    once the device has come to it. Between stages the host waits, so only one pass is queued.
    """
    if fact["tp"] == 1 or not how.queue:
        return 0.0
    layers = fact["layers"] / fact["pp"]
    # Per layer with full recomputation: 2 messages forward; 4 backward, of which 2 again.
    messages, kernels = (6, how.kernels) if fact["pp"] == 1 else (4, how.backward_kernels)
    return min(messages * layers, how.queue * messages / kernels) * counts.stream


def fit_overhead(rows: Sequence[Row], device: Device) -> Device:
    """The device with context, communicators and allocator fitted to nvidia-smi's figures."""
    own = device.overhead
    start = np.log([own.context_mib, own.communicator_mib, own.allocator - 1])

    def at(x: Any) -> Device:
        context, communicator, share = np.exp(x).tolist()
        found = Overhead(context_mib=context, communicator_mib=communicator, allocator=1 + share)
        return replace(device, overhead=found)

    def misfit(x: Any) -> Any:
        there = at(x)
        errors = [np.log(row.total(there) / row.measured) for row in rows]
        return np.array([*errors, *(PRIOR * (x - start))])

    return at(least_squares(misfit, start)[0])


def memory_tables(
    name: str, facts: Sequence[Fact], device: Device
) -> list[tuple[str, list[dict[str, Any]]]]:
    """(title, rows): fits on every third case, then every row."""
    rows = {fact.name: row_of(fact) for fact in facts}
    inside = inside_nodes(facts, device)
    counted = [rows[fact.name] for fact in inside]
    folds = []
    for number, part in enumerate(thirds(inside), 1):
        chosen = {fact.name for fact in part}
        fitted = fit_overhead([row for row in counted if row.fact.name in chosen], device)
        folds.append((f"third {number}", fitted, chosen))
    lines = [summary("not calibrated", errors_of(counted, device), device)]
    without = [row.total(device, with_messages=False) / row.measured - 1 for row in counted]
    lines.append(summary("not calibrated, no messages in flight", without, device))
    held_out = []
    for title, fitted, chosen in folds:
        own = errors_of([row for row in counted if row.fact.name not in chosen], fitted)
        held_out += own
        lines.append(summary(title, own, fitted))
    lines.append({**dict.fromkeys(lines[0], ""), "fit on": "all thirds", **errors_row(held_out)})
    each = [
        {
            "case": row.fact.name + ("" if row in counted else f" ({ACROSS})"),
            "nvidia-smi MiB": f"{row.measured:,.0f}",
            "not calibrated": prediction(row, device),
            **{
                title: f"({text})" if row.fact.name in chosen else text
                for title, fitted, chosen in folds
                for text in [prediction(row, fitted)]
            },
        }
        for row in rows.values()
    ]
    return [(f"{name}: memory", lines), (f"{name}: memory by row", each)]


def errors_of(rows: Sequence[Row], device: Device) -> list[float]:
    """Predicted over measured, minus 1."""
    return [row.total(device) / row.measured - 1 for row in rows]


def prediction(row: Row, device: Device) -> str:
    """MiB and error."""
    total = row.total(device)
    return f"{total:,.0f} {total / row.measured - 1:+.1%}"


def summary(title: str, errors: Sequence[float], device: Device) -> dict[str, Any]:
    """A line about a fit."""
    own = device.overhead
    return {
        "fit on": title,
        **errors_row(errors),
        "mean": f"{statistics.mean(errors):+.1%}",
        "context MiB": f"{own.context_mib:.0f}",
        "MiB per communicator": f"{own.communicator_mib:.0f}",
        "allocator": f"{own.allocator:.3f}",
    }
