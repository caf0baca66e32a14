"""What a dry run derives from the pipeline's order: microbatches, held activations, idle time."""

from __future__ import annotations

from titan_dit.config.section import UserError
from titan_dit.plan import RunPlan
from titan_dit.schedules.action import Kind, peak_activations
from titan_dit.schedules.decide import windows
from titan_dit.schedules.simulator import Simulation, simulate, stage_costs

MOST_MICROBATCHES = 16
"""Run at most this many or four per pipeline rank. Only gpipe has more in flight."""


def microbatches_to_run(plan: RunPlan, count: int) -> tuple[int, int]:
    """Fewest microbatches that can run; fewest with the peak of `count`, or MOST_MICROBATCHES."""
    pp = plan.sizes.pp
    if pp == 1:
        # From the second microbatch on, accumulated gradients are in memory, too.
        return 1, min(count, 2)
    wanted = peak_activations(plan.order(count))
    fewer = None
    for number in range(1, count):
        try:
            order = plan.order(number)
        except UserError:
            continue
        enough = peak_activations(order) == wanted or number >= max(MOST_MICROBATCHES, 4 * pp)
        # Two different counts give the traffic of one more microbatch.
        if enough and fewer is not None:
            return fewer, number
        fewer = number if fewer is None else fewer
    return count if fewer is None else fewer, count


def growth_of(plan: RunPlan, run: int, count: int) -> list[float]:
    """Per pipeline rank: peak activations with `count` microbatches over those with `run`.

    In a run-time order with `count`, a rank may fill its window.
    """
    if plan.sizes.pp == 1:
        return [1.0]
    of_run = peak_activations(plan.order(run))
    return [whole / part for whole, part in zip(most_held(plan, count), of_run, strict=True)]


def most_held(plan: RunPlan, count: int) -> tuple[int, ...]:
    """Per pipeline rank: the (microbatch, stage) pairs that it may hold with `count` microbatches.

    A window may be larger than all forwards of a step.
    """
    order = plan.order(count)
    memory = plan.pipeline.memory if plan.decides_at_run_time else 1.0
    forwards = (sum(a.kind is Kind.FORWARD for a in actions) for actions in order)
    return tuple(map(min, windows(order, memory), forwards))


def idle_of(plan: RunPlan, count: int) -> list[float]:
    """Pipeline bubble of each rank as a share of the step, from the simulator."""
    if plan.sizes.pp == 1:
        return [0.0]
    simulation = simulated(plan, count)
    return [idle / simulation.makespan for idle in simulation.idle]


def simulated(
    plan: RunPlan, count: int, *, jitter: float = 0.0, memory: float | None = None
) -> Simulation:
    """A simulated step; `jitter` and `memory`: see `simulate`."""
    # Forward, input gradient and weight gradient of a layer cost the same.
    layers = [len(part) for part in plan.stage_layers]
    costs = stage_costs(layers, embed=plan.spec.embed_cost, head=plan.spec.head_cost)
    return simulate(plan.order(count), costs, jitter=jitter, memory=memory)
