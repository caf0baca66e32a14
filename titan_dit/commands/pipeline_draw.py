"""`python -m titan_dit pipeline draw`: a picture of a schedule, planned above run-time order."""

from __future__ import annotations

from pathlib import Path

from titan_dit.commands.flags import DRAW_PIPELINE, PipelineDrawFlags
from titan_dit.config.section import UserError
from titan_dit.observe import console
from titan_dit.pipeline import timeline
from titan_dit.pipeline.schedules import placement, planned_order
from titan_dit.pipeline.schedules.schedule import Action, Kind, Order, schedule_of
from titan_dit.pipeline.schedules.simulator import Simulation, simulate

TOOK = {
    Kind.FORWARD: 1.0,
    Kind.BACKWARD: 2.0,
    Kind.BACKWARD_INPUT: 1.0,
    Kind.BACKWARD_WEIGHT: 1.0,
}
"""Forwards that an action of all layers of a rank takes."""


def main(options: PipelineDrawFlags) -> None:
    """Draw, and print the simulated steps."""
    out = Path(options.out)
    if out.suffix != ".png":
        raise UserError(f"[{DRAW_PIPELINE}] out={out}: name a .png file.")
    drawn = Drawn(options)
    shown = drawn.simulations()
    timeline.draw(out, shown, drawn.stage_ranks)
    planned = next(iter(shown.values())).makespan
    for name, one in shown.items():
        peaks = " ".join(map(str, one.peak_activations))
        gain = planned / one.makespan
        console.say(
            f"{name}: {one.makespan:.2f} {timeline.UNIT}, {gain:.3f} x as fast as planned, "
            f"{one.idle_fraction:.1%} idle, peak activations {peaks}"
        )
    console.say(f"drew {out}")


class Drawn:
    """The pipeline that the flags describe."""

    def __init__(self, options: PipelineDrawFlags) -> None:
        self.options = options
        default = 2 if schedule_of(options.schedule).interleaved else 1
        virtual = options.virtual_stages or default
        self.per_rank = placement.stages_per_rank(options.schedule, virtual)
        self.order = placement.pipeline_order(
            options.schedule,
            num_ranks=options.ranks,
            num_microbatches=options.microbatches,
            virtual_stages=virtual,
        )
        self.stage_ranks = [
            placement.rank_of_stage(options.schedule, stage, options.ranks)
            for stage in range(options.ranks * self.per_rank)
        ]

    def cost(self, action: Action) -> float:
        """Time of an action, without jitter."""
        took = TOOK[action.kind] / self.per_rank
        if lengths := self.options.lengths:
            took *= lengths[action.microbatch % len(lengths)]
        if slowness := self.options.slowness:
            took *= slowness[self.stage_ranks[action.stage] % len(slowness)]
        return took

    def simulations(self) -> dict[str, Simulation]:
        """The simulations to draw, by name: planned order first."""
        memory = self.options.memory
        found = {
            "planned": self.simulate(self.order),
            f"run_time, memory {memory:g}": self.simulate(self.order, memory),
        }
        if self.options.plan:
            ranks, count = self.stage_ranks, self.options.microbatches
            latency = self.options.latency
            made = planned_order.plan_order(self.order, ranks, count, self.cost, latency, memory)
            found[f"FILE.csv of pipeline plan, memory {memory:g}"] = self.simulate(made.order)
        return found

    def simulate(self, order: Order, memory: float | None = None) -> Simulation:
        """Simulate with jitter."""
        return simulate(
            order,
            self.cost,
            latency=self.options.latency,
            jitter=self.options.jitter,
            seed=self.options.seed,
            memory=memory,
        )
