"""Checks of [pipeline]: order and memory, and the transport that run-time order takes."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from titan_dit.config import did_you_mean
from titan_dit.config.layout import PipelineConfig
from titan_dit.config.section import UserError, show
from titan_dit.pipeline.schedules.files import ORDER_REMEDY
from titan_dit.pipeline.schedules.proof import check
from titan_dit.pipeline.schedules.schedule import Order, num_microbatches_of, num_stages_of
from titan_dit.plan import RunPlan
from titan_dit.ranks.hosts import address_of, interfaces
from titan_dit.ranks.torch_range import pip_install

NAMES = ("planned", "run_time")


def check_order(plan: RunPlan) -> None:
    """Raise UserError for an order that is unknown, has a bad file or runtime, or goes with pp=1.

    Also for `memory` without order="run_time".
    """
    pipeline, pp = plan.pipeline, plan.sizes.pp
    order, memory = show(pipeline.order), show(pipeline.memory)
    if pipeline.order not in NAMES:
        check_path(pipeline.order)
    if pp == 1 and pipeline.order != "planned":
        raise UserError(
            f"[pipeline] order={order} is for a pipeline, but [parallel] pp=1. "
            'Set order = "planned", or pp above 1.'
        )
    if pipeline.memory != 1 and pipeline.order != "run_time":
        raise UserError(
            f'[pipeline] memory={memory} is for order="run_time", but order={order}. '
            'Set memory = 1.0 or order = "run_time".'
        )
    if found := plan.order_of_file:
        check_file(plan, found)
    has_messages = plan.order_file is not None and plan.order_file.has_messages
    if pp > 1 and (pipeline.runtime != "auto" or has_messages):
        _ = plan.runtime  # Raises UserError if it cannot run.


def check_path(name: str) -> None:
    """Raise UserError unless [pipeline] order is a name or an existing FILE.csv."""
    if not name.lower().endswith(".csv"):
        hint = did_you_mean.for_value(name, NAMES)
        raise UserError(
            f'[pipeline] order={show(name)} is not "planned", "run_time" or a FILE.csv.{hint}'
        )
    if not Path(name).is_file():
        raise UserError(
            f"[pipeline] order={show(name)}: there is no such file in {Path.cwd()}. Correct the "
            'path, or set order = "planned".'
        )


def check_file(plan: RunPlan, order: Order) -> None:
    """Raise UserError for an order of other ranks, stages or microbatches, or that deadlocks."""
    if reason := next(misfits(plan, order), None):
        raise UserError(f"[pipeline] order={show(plan.pipeline.order)} {reason}. {ORDER_REMEDY}")
    try:
        check(order, num_stages=plan.num_stages, num_microbatches=plan.num_microbatches)
    except ValueError as error:
        raise UserError(
            f"[pipeline] order={show(plan.pipeline.order)}: {error} {ORDER_REMEDY}"
        ) from None


def check_same_file(plan: RunPlan, gather: Callable[[str], list[str]]) -> None:
    """Raise UserError if the order file differs between hosts. Collective.

    Pipeline messages have no tags, only a sequence. `gather`: all-gather of a value over the ranks.
    All ranks have the same [pipeline] order.
    """
    if not plan.order_file:
        return
    text = "\n".join(" ".join(row) for row in plan.order_file.cells)
    found = gather(hashlib.sha256(text.encode()).hexdigest())
    if others := [rank for rank, digest in enumerate(found) if digest != found[0]]:
        raise UserError(
            f"[pipeline] order={show(plan.pipeline.order)} is another order on rank {others[0]} "
            "than on rank 0. Copy the same file to all hosts."
        )


def misfits(plan: RunPlan, order: Order) -> Iterator[str]:
    """Yield the differences of an order from the plan's ranks, stages, placement, microbatches."""
    pp, schedule = plan.sizes.pp, plan.pipeline.schedule
    if len(order) != pp:
        yield f"is for {len(order)} pipeline ranks, but [parallel] pp={pp}"
    stages = num_stages_of(order)
    if stages != plan.num_stages:
        yield (
            f"is for {stages} stages, but schedule={show(schedule)} with virtual_stages="
            f"{plan.pipeline.virtual_stages} on [parallel] pp={pp} has {plan.num_stages}"
        )
    microbatches = num_microbatches_of(order)
    if microbatches != plan.num_microbatches:
        yield (
            f"is for {microbatches} microbatches, but a step has {plan.num_microbatches} on each "
            "rank ([training] global_batch_size and microbatch_size)"
        )
    for rank, actions in enumerate(order):
        for action in actions:
            if (place := plan.stage_ranks[action.stage]) != rank:
                yield (
                    f"has stage {action.stage} on rank {rank}, but schedule={show(schedule)} on "
                    f"rank {place}"
                )


def order_hint(plan: RunPlan) -> str | None:
    """Console line if run-time order seldom pays here: full backwards at memory 1; else None."""
    memory = plan.pipeline.memory
    if not plan.decides_at_run_time or memory != 1 or plan.splits_backward:
        return None
    return (
        f'[pipeline] order="run_time" seldom pays with schedule={show(plan.pipeline.schedule)} at '
        "memory=1.0: a rank has nothing else to run while it waits. Set memory = 1.5, or "
        'schedule = "interleaved_zero_bubble" (docs/pipelines.md)'
    )


def check_transport(pipeline: PipelineConfig) -> None:
    """Raise UserError for `transport` or `network` without order="run_time".

    Also for `network` unless the transport is nixl.
    """
    keys = {"transport": pipeline.transport, "network": pipeline.network}
    defaults = {"transport": "auto", "network": None}
    set_keys = {key: value for key, value in keys.items() if value != defaults[key]}
    if set_keys and pipeline.order != "run_time":
        shown = ", ".join(f"{key}={show(value)}" for key, value in set_keys.items())
        if pipeline.runtime == "torch":
            raise UserError(
                f'[pipeline] runtime="torch" sends by the process group, but {shown}. Leave out '
                f'{" and ".join(set_keys)}, or set runtime = "auto" and order = "run_time".'
            )
        raise UserError(
            f"[pipeline] {shown}: order={show(pipeline.order)} sends by the process group. Set "
            f'order = "run_time", or leave out {" and ".join(set_keys)}.'
        )
    if pipeline.network and pipeline.transport not in ("auto", "nixl"):
        raise UserError(
            f"[pipeline] network={show(pipeline.network)} is for nixl, but transport="
            f'{show(pipeline.transport)}. Set transport = "nixl", or leave network out.'
        )


def check_transport_of_host(pipeline: PipelineConfig) -> None:
    """Raise UserError for transport="nixl" without its package, or for an unknown network."""
    has_nixl, install = find_spec("nixl") is not None, pip_install("'titan_dit[rdma]'")
    if pipeline.transport == "nixl" and not has_nixl:
        raise UserError(
            '[pipeline] transport="nixl": the package nixl is not installed. Run '
            f'{install}, or set transport = "auto".'
        )
    if not pipeline.network:
        return
    if not has_nixl:
        raise UserError(
            f"[pipeline] network={show(pipeline.network)} is for nixl, which is not installed. "
            f"Run {install}, or leave network out."
        )
    names = [name for _, name in socket.if_nameindex()]  # Also those without an IPv4 address.
    if pipeline.network not in names and address_of(pipeline.network) is None:
        known = ", ".join(f"{name} ({address})" for name, address in interfaces().items())
        raise UserError(
            f"[pipeline] network={show(pipeline.network)} is neither an interface nor an address "
            f"of this host, which has {known}. Set network to one of them."
        )
