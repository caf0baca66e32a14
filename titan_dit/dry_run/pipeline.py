"""Numbers that follow from the pipeline's order: microbatches, held activations, idle time."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from titan_dit.config.section import UserError
from titan_dit.pipeline.schedules.decider import windows
from titan_dit.pipeline.schedules.schedule import Action, Kind, peak_activations
from titan_dit.pipeline.schedules.simulator import Simulation, simulate, stage_costs
from titan_dit.plan import RunPlan

MOST_MICROBATCHES = 16
"""Maximum microbatches to run, or 4 per pipeline rank if more. Only gpipe has more in flight."""


def microbatches_to_run(plan: RunPlan, count: int) -> tuple[int, int]:
    """Two numbers of microbatches to run: the fewest possible, and the fewest with the full peak.

    The full peak is that of `count`. The second number is limited by MOST_MICROBATCHES.
    """
    pp = plan.sizes.pp
    if pp == 1:
        # From the second microbatch on, accumulated gradients are in memory, too.
        return 1, min(count, 2)
    wanted = [*map(fullest, plan.order(count))]
    fewer = None
    for number in range(1, count):
        try:
            order = plan.order(number)
        except UserError:
            continue
        is_full = [*map(fullest, order)] == wanted
        enough = is_full or number >= max(MOST_MICROBATCHES, 4 * pp)
        # Two different counts give the traffic of one more microbatch.
        if enough and fewer is not None:
            return fewer, number
        fewer = number if fewer is None else fewer
    return count if fewer is None else fewer, count


def fullest(actions: Sequence[Action]) -> set[tuple[int, ...]]:
    """The maximal states of a rank's memory during its actions (the Pareto front).

    A state has three numbers per stage: microbatches with activations, those of them whose input
    gradients are done, and 1 if gradients of earlier microbatches are in memory.
    """
    now = {stage: [0, 0, 0] for stage in sorted({action.stage for action in actions})}
    moments: set[tuple[int, ...]] = set()
    for kind, stage, _ in actions:
        held = now[stage]
        if kind is Kind.FORWARD:
            held[0] += 1
        elif kind is Kind.BACKWARD_INPUT:
            held[1] += 1
        moments.add(tuple(number for each in now.values() for number in each))
        if kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            held[0] -= 1
            held[1] -= kind is Kind.BACKWARD_WEIGHT
            held[2] = 1
    found: set[tuple[int, ...]] = set()
    for moment in sorted(moments, key=sum, reverse=True):
        if not any(all(map(operator.ge, other, moment)) for other in found):
            found.add(moment)
    return found


def growth_of(plan: RunPlan, run: int, count: int) -> list[float]:
    """Per pipeline rank: peak activations with `count` microbatches over those with `run`.

    A run-time order is assumed to fill each rank's window.
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
    costs = stage_costs([plan.spec.cost(layers) for layers in plan.stage_layers])
    return simulate(plan.order(count), costs, jitter=jitter, memory=memory)
