"""Opens a run: plan, dataset and objective, checked before the model takes any memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from titan_dit import __version__
from titan_dit.checks import validate
from titan_dit.checks.device import attention_hint, attention_kernel, format_hint, with_kernel
from titan_dit.checks.parts import (
    check_optimizer,
    check_source,
    num_trained,
    optimizer_lines,
    validate_parts,
)
from titan_dit.checks.pipeline import check_same_file, order_hint
from titan_dit.checks.same_config import check_same_config
from titan_dit.config import config_file
from titan_dit.config.dotted_names import origins
from titan_dit.config.job import JobConfig
from titan_dit.data.base import SampleOrder, Source
from titan_dit.data.held_out import held_out_rows
from titan_dit.execution.base import Executor
from titan_dit.execution.build import Built
from titan_dit.hooks import Hooks
from titan_dit.launcher.process_group import World, set_deterministic
from titan_dit.launcher.ranks import Ranks
from titan_dit.objectives.base import DataShare, Objective
from titan_dit.optim import lr_schedule
from titan_dit.optim.ema import EMA
from titan_dit.parallel.mesh import refitted
from titan_dit.plan import RunPlan, resolve
from titan_dit.recovery import kept_keys, restore, resume, run_identity
from titan_dit.validation.validation_set import ValidationSet, losses_of_all, open_checked

if TYPE_CHECKING:
    from titan_dit.validation.evaluation import Evaluation

VERSIONS = {"titan_dit": __version__, "torch": torch.__version__}


@dataclass(frozen=True)
class Opened:
    """The checked parts of a run; nothing is on the device yet."""

    config: JobConfig
    plan: RunPlan
    hooks: Hooks
    source: Source
    objective: Objective
    epochs: SampleOrder
    validation_set: ValidationSet | None
    evaluation: Evaluation | None
    identity: run_identity.Identity

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.config.training.num_steps

    def lines(self, built: Built, device: torch.device, step: int) -> Iterator[str]:
        """The first console lines: software, layout, model, data, steps, folder, user code."""
        config, plan, precision = self.config, self.plan, self.plan.precision
        yield from refitted(plan.parallel, plan.sizes)
        software = ", ".join(f"{name} {version}" for name, version in VERSIONS.items())
        where = f"{plan.sizes} on {device.type}"
        asked, kernel = config.precision.attention, attention_kernel(plan, device)
        attention = asked if asked == kernel else f"{asked} ({kernel})"
        yield f"{software}: {where}, {precision}, attention {attention}"
        yield (
            f"model   {plan.model_name}: {built.num_parameters:,} parameters, "
            f"{plan.spec.num_tokens} tokens, {built.flops_per_sample / 1e9:.3g} GFLOP per sample "
            "and step"
        )
        about, held_out = self.source.facts.about, self.identity.num_held_out
        apart = f" ({held_out} of them for validation)" if held_out else ""
        count = f"{len(self.source):,} samples{apart}"
        yield f"data    {config.data.name}: {count}{f', {about}' if about else ''}"
        yield from optimizer_lines(plan, self.objective, config.optimizer)
        steps, batch = self.steps, plan.global_batch_size
        yield f"steps   {step} of {steps} done, {batch} samples each"
        if step >= steps:
            yield (
                f"nothing left to do: [training] steps={steps} are done. To go on, raise "
                f"--training.steps (or epochs); for another run, --job.name"
            )
        yield f"output  {config.job.folder}"
        saves = restore.saves_of(config.job, config.checkpoint, config.ema, steps)
        # Averages are of trained parameters.
        averaged = num_trained(plan, self.objective, config.optimizer)
        yield from saves.snapshot_lines(averaged)
        yield from origins(self.parts())
        yield from self.hooks.origins()

    def measured(
        self,
        executor: Executor,
        share: DataShare,
        ema: EMA,
        due: Callable[[int], bool],
        alive: Callable[[], None],
    ) -> dict[str, float]:
        """Losses on the validation set, and scores of the first EMA's pictures, if due."""
        config, found = self.config, dict[str, float]()
        seed = config.job.seed
        scores = self.evaluation is not None and due(config.fid.every)
        if self.validation_set and (due(config.validation.every) or not scores):
            found |= losses_of_all(
                self.validation_set,
                self.objective,
                executor,
                share,
                ema,
                alive,
                seed,
                batch_size=self.plan.padded_samples_per_rank,
            )
        if self.evaluation and scores:
            with ema.swapped_in():
                found |= self.evaluation.scores(
                    self.objective,
                    executor.predict,
                    config.sampling,
                    seed,
                    share,
                    alive,
                )
        return found

    def parts(self) -> dict[str, object]:
        """The parts that may come from a user's module, by section."""
        config, plan = self.config, self.plan
        parts = {"model": config.model, "objective": config.objective, "data": config.data}
        parts["optimizer"] = config.optimizer
        if plan.sizes.pp > 1 and ":" in plan.pipeline.schedule:
            parts["pipeline"] = plan.pipeline.schedule
        if plan.tensor_plan_function:
            parts["parallel"] = plan.tensor_plan_function
        return parts | dict(self.objective.imported(config.sampling))

    def hints(self, built: Built, device: torch.device) -> Iterator[str]:
        """Console warnings about slow or unusual settings. Reads samples: call on one rank."""
        yield from built.notes
        yield from self.objective.hints(self.source)
        found = (
            attention_hint(self.plan, device, built.flops_per_sample),
            format_hint(self.plan.precision, device),
            order_hint(self.plan),
        )
        yield from (hint for hint in found if hint)


def open_evaluation(
    config: JobConfig, objective: Objective, device: torch.device
) -> Evaluation | None:
    """The feature network and the reference of [fid]; None if disabled. Collective."""
    if not config.fid.every:
        return None
    # Imported late: readers of pictures, which a run without it does not need.
    from titan_dit.validation import evaluation

    return evaluation.open_evaluation(config.fid, config.sampling, objective, device)


def open_run(config: JobConfig, world: World) -> Opened:
    """Resolve, check and open everything; does not write to the run directory. Collective."""
    check_same_config(config, world.gather)
    kept = kept_keys.settled(config.job, config.ema, config.checkpoint)
    config = replace(config, job=kept[0], ema=kept[1])
    job, data, validation = config.job, config.data, config.validation
    if config.training.deterministic:
        set_deterministic()
    # Rank 0's view decides, as in `resume`.
    resuming = world.gather(resume.has_started(job, config.checkpoint))[0]
    plan = resolve(config, world.size, resuming)
    validate(config, plan, world.device)
    check_same_file(plan, world.gather)
    plan = with_kernel(plan, world.device)
    hooks = Hooks(job.hooks, world.is_main)
    hooks.raise_failure(world.gather)
    on_first = Ranks().run_on_first
    source = data.open_surveyed(on_first(data.survey))
    check_source(source, data.name)
    objective = config.objective.build(config.model, source.facts)
    validate_parts(
        plan, objective, source.fields, data.name, source, previews=bool(config.sampling.every)
    )
    if config.sampling.every:
        objective.check_preview(config.sampling, config.generation)
    check_optimizer(plan, objective, config.optimizer)
    count = validation.held_out_of(has_part=data.has_validation_part)
    held_out = on_first(lambda: held_out_rows(source, job.seed, count, job.data_order))
    epochs = source.order(job.seed, held_out, job.data_order)
    training = config.training.resolved(epochs.num_rows)
    config = replace(config, training=training)
    lr_schedule.check(config.lr_scheduler, training.num_steps)
    return Opened(
        config,
        plan,
        hooks,
        source,
        objective,
        epochs,
        open_checked(validation, data, source, held_out, job, job.folder, world),
        open_evaluation(config, objective, world.device),
        run_identity.Identity(config_file.to_tables(config), source.facts.as_json(), len(held_out)),
    )
