"""`python -m titan_dit pipeline plan`: a better order for what a run has measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from titan_dit.checkpoint import run_checkpoints
from titan_dit.checkpoint.store import location
from titan_dit.commands.flags import PLAN_PIPELINE, PipelinePlanFlags
from titan_dit.config import config_file, dotted_names
from titan_dit.config.layout import ParallelConfig, PipelineConfig
from titan_dit.config.section import UserError, show
from titan_dit.observe import console
from titan_dit.pipeline.schedules import files, placement
from titan_dit.pipeline.schedules.files import MeasuredCosts
from titan_dit.pipeline.schedules.planned_order import PAYS, PlannedOrder, plan_order
from titan_dit.pipeline.schedules.schedule import Order
from titan_dit.pipeline.schedules.simulator import Simulation, simulate
from titan_dit.system import run_files

JITTER, DRAWS = 0.1, 5
"""Standard deviation of the log of a random factor on all times, and number of draws: they show the
gain that is left with jitter."""
FEW_RANKS = 8
"""Up to so many, each rank's peak is printed."""


def main(options: PipelinePlanFlags) -> None:
    """Write the order, and print what it gains."""
    out = Path(options.out)
    if out.suffix != ".csv":
        raise UserError(f"[{PLAN_PIPELINE}] out={out}: name a .csv file.")
    if out.exists():
        raise UserError(
            f"[{PLAN_PIPELINE}] out={out} is there already. Delete it, or name another."
        )
    run = run_checkpoints.resolve(location(options.run)).run
    if not isinstance(run, Path):
        raise UserError(
            f"[{PLAN_PIPELINE}] run={run}: profiles are on a disk, not in an object store. Give "
            "the run's folder."
        )
    file = files.newest_costs(run)
    costs = files.read_costs(file)
    pipeline, order = planned_order(run, costs, file, options.trust)
    found = plan_order(
        order,
        costs.stage_ranks,
        costs.num_microbatches,
        costs.seconds.__getitem__,
        costs.latency,
        options.memory,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    of = f"{pipeline.schedule}, {costs.num_ranks} ranks, {costs.num_microbatches} microbatches"
    files.write_order(out, found.order, [f"{of}, memory {options.memory:g}, from {file}"])
    console.say(
        f"{file}: {of}; a step took {ms(costs.step_s)}, simulated {ms(as_run(costs).makespan)}"
    )
    for line in table(found, out.name, varied(order, costs), varied(found.order, costs)):
        console.say(line)
    console.say(verdict(found, out))


def planned_order(
    run: Path, costs: MeasuredCosts, file: Path, trust: bool
) -> tuple[PipelineConfig, Order]:
    """The order of the run's schedule. Raises UserError if the costs are of another layout."""
    config = run / run_files.CONFIG
    if not config.is_file():
        raise UserError(f"--run {run}: no {run_files.CONFIG}. {run_checkpoints.WANTED}")
    tables = config_file.of_run(config)
    dotted_names.check_trusted(tables, f"--run {run}", trust, (PipelineConfig.section,))
    pipeline = PipelineConfig(**tables.get(PipelineConfig.section, {}))
    pp = ParallelConfig(**tables.get(ParallelConfig.section, {})).pp
    stages = pp * placement.stages_per_rank(pipeline.schedule, pipeline.virtual_stages)
    ranks = tuple(placement.rank_of_stage(pipeline.schedule, stage, pp) for stage in range(stages))
    order = placement.pipeline_order(
        pipeline.schedule,
        num_ranks=pp,
        num_microbatches=costs.num_microbatches,
        virtual_stages=pipeline.virtual_stages,
    )
    measured = all(action in costs.seconds for actions in order for action in actions)
    if ranks != costs.stage_ranks or not measured:
        raise UserError(
            f"{file} is of another layout: its stages are on ranks {list(costs.stage_ranks)}, but "
            f"{config} has [parallel] pp={pp}, [pipeline] schedule={show(pipeline.schedule)} and "
            f"virtual_stages={pipeline.virtual_stages}. Profile the run again: --profile.enabled "
            "true."
        )
    return pipeline, order


def as_run(costs: MeasuredCosts) -> Simulation:
    """The simulated step of the order that was measured."""
    return simulate(costs.order, costs.seconds.__getitem__, latency=costs.latency)


def varied(order: Order, costs: MeasuredCosts) -> float:
    """The mean step of an order whose times vary at random."""
    return statistics.mean(
        simulate(
            order, costs.seconds.__getitem__, latency=costs.latency, jitter=JITTER, seed=seed
        ).makespan
        for seed in range(DRAWS)
    )


def table(found: PlannedOrder, name: str, *steps_varied: float) -> list[str]:
    """The planned order beside the new one; `steps_varied`: see `varied`."""
    rows = [
        ("simulated", "planned", name),
        ("step", *(ms(x.makespan) for x in (found.before, found.after))),
        (f"step, times vary by {JITTER:.0%}", *map(ms, steps_varied)),
        ("idle", *(f"{x.idle_fraction:.1%}" for x in (found.before, found.after))),
        ("peak activations", *(peaks(x.peak_activations) for x in (found.before, found.after))),
    ]
    first, second, third = (max(map(len, column)) for column in zip(*rows, strict=True))
    return [f"{a:{first}}  {b:>{second}}  {c:>{third}}" for a, b, c in rows]


def peaks(held: Sequence[int]) -> str:
    """The peak of each rank; of many ranks, the range."""
    if len(held) <= FEW_RANKS:
        return " ".join(map(str, held))
    return f"{min(held)} to {max(held)}"


def ms(seconds: float) -> str:
    """Milliseconds as text."""
    return f"{1000 * seconds:,.1f} ms"


def verdict(found: PlannedOrder, out: Path) -> str:
    """Advice on the command to run next."""
    if found.pays:
        return (
            f"wrote {out}: {found.gain:.2f} x as fast as planned, simulated. Run it with "
            f"--pipeline.order {out}"
        )
    return (
        f"wrote {out}, the planned order: no other is {PAYS - 1:.0%} faster within this "
        "memory. Stay with --pipeline.order planned"
    )
