"""`python -m titan_dit replay`: repeat a training step in one process, sample by sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from titan_dit import init_from
from titan_dit.build import BuiltNetwork, build, prepare_of
from titan_dit.checkpoint import checkpoint
from titan_dit.checkpoint.record import read_record
from titan_dit.checkpoint.run_checkpoints import find_checkpoint, step_of
from titan_dit.checkpoint.run_checkpoints import resolve as named_by
from titan_dit.checkpoint.store import Location, location
from titan_dit.checks.device import replayable_precision
from titan_dit.commands.flags import ReplayFlags
from titan_dit.config import catalog, config_file, dotted_names, stages
from titan_dit.config.job import NEW_RUN, JobConfig, JobSection
from titan_dit.config.layout import CompileConfig, ParallelConfig
from titan_dit.config.operation import CheckpointConfig
from titan_dit.config.section import UserError
from titan_dit.data import loader
from titan_dit.data.base import SampleOrder, Source
from titan_dit.data.buckets import BucketOrder, step_plan
from titan_dit.data.order import LaterOrder, SampleRange, StepPlan, numbers_of, ranges_of
from titan_dit.execution import LocalExecutor, Output, first_of
from titan_dit.objectives.base import Objective
from titan_dit.observe import console, metrics
from titan_dit.opening import (
    open_objective,
    open_source,
    rows_held_out,
    settled,
    training_order,
)
from titan_dit.optim.ema import EMA
from titan_dit.optim.gradient_norm import clip_norm
from titan_dit.optim.optimizer import freeze
from titan_dit.parallel import compile
from titan_dit.parallel.compile import compiles
from titan_dit.parallel.mesh import AxisSizes, Mesh
from titan_dit.plan import RunPlan, resolve, with_buckets
from titan_dit.ranks import process_group
from titan_dit.recovery import bad_steps, ledger, resume, run_identity
from titan_dit.recovery.bad_steps import LossScale
from titan_dit.recovery.resume import Progress
from titan_dit.rng import SampleRNG
from titan_dit.system import run_files
from titan_dit.system.progress import ProgressLine
from titan_dit.trained_model import device_of


@dataclass(frozen=True)
class Replayed:
    """One sample of the repeated step."""

    number: int
    row: str
    """Name of its row, see `Source.row_name`."""
    loss: float
    """Mean over its tokens, by their weights."""
    microbatch: int
    described: Mapping[str, float]
    """The objective's values for it: label, timestep, ..."""
    not_finite: tuple[str, ...]
    """Names of the tensors (fields, inputs, prediction, loss) with NaN or infinity."""


def report(
    samples: Sequence[Replayed], norms: Sequence[tuple[int, int, float]], show: int
) -> Iterator[str]:
    """Yield the lines to print; of the finite samples, the `show` of the highest loss."""
    faulty = [sample for sample in samples if sample.not_finite]
    others = [sample for sample in samples if not sample.not_finite]
    for number, size, norm in norms:
        yield f"microbatch {number}: {size} samples, gradient norm {norm:.6g}"
    yield f"{len(faulty)} of {len(samples)} samples are at fault" + (":" if faulty else "")
    yield from map(line_of, faulty)
    if not faulty and not all(math.isfinite(norm) for _, _, norm in norms):
        yield "Only a gradient overflows: find its sample with --microbatch-size 1."
    if show and others:
        yield f"of the others, the {min(show, len(others))} of the highest loss:"
        yield from map(line_of, sorted(others, key=lambda sample: -sample.loss)[:show])


def line_of(sample: Replayed) -> str:
    """Format one sample."""
    described = "".join(f"{name} {value:.4g}  " for name, value in sample.described.items())
    fault = f"  not finite: {', '.join(sample.not_finite)}" if sample.not_finite else ""
    return (
        f"  sample {sample.number}  {sample.row}  {described}"
        f"loss {sample.loss:.6g}  microbatch {sample.microbatch}{fault}"
    )


def shown(numbers: Sequence[int]) -> str:
    """Format numbers as ranges: "176-191, 200-203"."""
    return ", ".join(f"{first}-{end - 1}" for first, end in ranges_of(numbers))


MICROBATCH = 32
"""Microbatch size if the run's config sets none."""


@dataclass(frozen=True)
class Origin:
    """The sample numbers of a step, and the weights to run it with."""

    numbers: Sequence[int]
    found_in: str
    """Source of the sample numbers."""
    weights: Location | None
    """The newest checkpoint before the step; None for the initial weights."""
    weights_step: int
    stage_cursor: int
    """The cursor at which the step's stage began; 0 without stages."""
    loss_scale: float | None
    """fp16's loss scale at the step, or in the weights' checkpoint; None if neither is known."""


def main(options: ReplayFlags) -> None:
    """Repeat the step and print its samples, non-finite ones first."""
    named = named_by(Path(options.run))
    run = named.run
    if not isinstance(run, Path) or not (run / run_files.CONFIG).is_file():
        raise named.none_found("--run", f"no {run_files.CONFIG} found")
    tables = config_file.of_run(run / run_files.CONFIG)
    dotted_names.check_trusted(tables, f"--run {run}", options.trust)
    config = config_file.build(tables, catalog.variant)
    is_shown = check_taken(run, options.step, config.metrics.every, config.training.num_steps)
    if config.training.stages:
        config = stages.config_of(config, stages.number_of(config.training, options.step))
        config = settled(config)
    saved = tables_of(run, options.step)
    # A run of before the key `objective` compiled only its blocks.
    compile_keys: dict[str, Any] = {"objective": False} | saved.get("compile", {})
    compiled = CompileConfig(**compile_keys)
    config = replace(config, job=job_of(saved, config.job), compile=compiled)
    source = open_source(config)
    held_out = rows_held_out(config, source)
    alone = replace(config, parallel=ParallelConfig())
    plan = with_buckets(resolve(alone, 1, resuming=True), alone, source.facts)
    order = training_order(alone, plan, source, held_out)
    steps = partial(later_steps, order, plan.global_batch_size)
    origin = origin_of(run, options.step, config, source.facts.digest, steps)
    within = origin.numbers[0] - origin.stage_cursor
    bucket = order.located(within)[1] if isinstance(order, BucketOrder) else 0
    of_run = plan.each_bucket[bucket].wanted_microbatch_size
    size = options.microbatch_size or of_run or MICROBATCH
    chosen = chosen_microbatches(len(origin.numbers), size, options.microbatch)
    samples_shown = f"samples {shown(origin.numbers)} (from {origin.found_in})"
    console.say(f"step {options.step} of {run}: {samples_shown}")
    if not is_shown:
        console.say(f"{run} has no record of the step: showing its planned samples")
    behind = options.step - 1 - origin.weights_step
    late = f", {behind} steps older than those of the step" if behind else ", those of the step"
    first = "of [checkpoint] init" if config.checkpoint.init else "as initialized"
    console.say(f"weights {origin.weights or first}{late}")
    own = ("model", "objective", "data")
    for line in dotted_names.origins({name: getattr(config, name) for name in own}):
        console.say(line)
    scaling = LossScale.of(config.precision, torch.device("cpu"))
    if scaling and origin.loss_scale:
        scaling.value.fill_(origin.loss_scale)
    if scaling:
        console.say(f"loss scale {scaling.value.item():g}")
    with process_group.start(device_of(options.device).type) as world:
        alone = on_one_rank(config, size, world.device)
        plan = with_buckets(resolve(alone, 1, resuming=True), alone, source.facts)
        objective = open_objective(alone, plan, source)
        replayer = Replayer(
            seed=config.job.seed,
            objective=objective,
            source=source,
            sample_order=LaterOrder(order, origin.stage_cursor),
            built=rebuilt(config, plan, objective, source, origin, world.device),
            num_samples=len(origin.numbers),
            step=options.step,
            loss_scale=scaling.value.to(world.device) if scaling else None,
        )
        samples, norms = [], []
        progress = ProgressLine(len(chosen), "microbatches")
        for done, number in enumerate(chosen, start=1):
            part = origin.numbers[number * size : (number + 1) * size]
            found, norm = replayer.run(number, part, world.device)
            samples += found
            norms.append((number, len(part), norm))
            progress(done)
        progress.end()
    for line in report(samples, norms, options.show):
        console.say(line)


def check_taken(run: Path, step: int, every: int, steps: int) -> bool:
    """Return True if the run recorded `step`, False if it may have crashed in it.

    `every`: steps between metrics rows; `steps`: length of the whole run. Raises UserError for a
    step that the run cannot have started.
    """
    newest = newest_step(run)
    if step > newest:  # Slow to read: every step of every rank.
        newest = max(newest, *ledger.logged_samples(run), 0)
    started = min(newest + max(1, every), steps)
    if step > max(newest, started):
        taken = f"steps 1 to {newest}" if newest else "no step"
        more = f", and cannot have started any after step {started}" if started > newest else ""
        raise UserError(
            f"--step {step}: by its metrics.jsonl, {run_files.FAULTS} and checkpoints, {run} has "
            f"taken {taken}{more}."
        )
    return step <= newest


def newest_step(run: Path) -> int:
    """Return the newest step in the metrics, checkpoints and fault log; 0 if none."""
    logged: list[int] = [row["step"] for row in metrics.read_rows(run / "metrics.jsonl")]
    saved = [step_of(path) for path in named_by(run).checkpoints.complete()]
    faulty: int = 0
    for line in bad_steps.read_faults(run):
        # Steps undone by a rollback count only if they were repeated.
        faulty = line["to_step"] if "to_step" in line else max(faulty, line["step"])
    return max(0, faulty, *logged, *saved)


def tables_of(run: Path, step: int) -> config_file.Tables:
    """Return the config of a step: of the first checkpoint from it on, else of the newest steps."""
    for path in named_by(run).checkpoints.complete():
        record = resume.readable(path)[0] if step_of(path) >= step else {}
        if record:
            return config_file.of_record(record)
    return config_file.of_run(run / run_files.CONFIG)


def job_of(saved: config_file.Tables, written: JobSection) -> JobSection:
    """Return [job], of RUN/config.toml, with the data order and the initial weights of a step."""
    found: dict[str, Any] = {k: v for k, v in saved.get("job", {}).items() if k in NEW_RUN}
    return replace(written, **found).settled()


def begun_at(run: JobSection, settings: CheckpointConfig) -> Location | None:
    """Return the checkpoint of another run, or of imported weights, that a run went on from."""
    if settings.resume in ("auto", "never"):
        return None
    path = find_checkpoint(location(settings.resume), None, "[checkpoint] resume")
    return None if resume.is_own(resume.checkpoints_of(run, settings), path) else path


def origin_of(
    run: Path,
    step: int,
    config: JobConfig,
    digest: str,
    steps: Callable[[int, tuple[SampleRange, ...]], StepPlan],
) -> Origin:
    """Return a step's samples: from the fault log if it was bad, else from the plan of steps.

    `digest`: of the data. `steps`: the plan of a stage that began at a cursor, without some ranges
    of samples. Raises UserError for other data than that of the run.
    """
    before = [path for path in named_by(run).checkpoints.complete() if step_of(path) < step]
    if not before and (begun := begun_at(config.job, config.checkpoint)):
        before = [begun]
    record = read_record(before[-1]) if before else {}
    progress = Progress.of(record, resume.read_rollbacks(run))
    weights, weights_step = (before[-1] if before else None), progress.step
    if weights_step >= step:
        raise UserError(
            f"--step {step}: {run} went on from {weights}, after step {weights_step}. Give a later "
            "step."
        )
    begin = config.training.begin
    if begin > weights_step:
        raise UserError(
            f"--step {step}: its stage began after step {begin}, and no checkpoint between the two "
            f"is left in {run}. Give a later step, or keep more: [checkpoint] keep."
        )
    if begin and begin == weights_step:
        progress = progress.at_new_stage()
    first = progress.stage_cursor
    # The checkpoint at the end of a stage is of the data of that one.
    has_data = before and not record.get("imported") and (not begin or weights_step > begin)
    trained_on = record["data"]["digest"] if has_data else None
    if trained_on not in (None, digest):
        raise UserError(
            f"[data] of {run} differs from the dataset that the run was trained on (another "
            "digest). Restore that dataset."
        )
    scale = progress.guard.get("loss_scale", {}).get("value")
    lines = bad_steps.read_faults(run)
    # Ignore lines before the last rollback to before the step: the run repeated or skipped it.
    undone = [i for i, line in enumerate(lines) if line.get("to_step", step) < step]
    for line in reversed(lines[undone[-1] + 1 :] if undone else lines):
        if line["step"] == step and line["kind"] != "rollback":
            seen = tuple(numbers_of(line["sample_numbers"]))
            found_in = f"{run_files.FAULTS}: {line['kind']}"
            return Origin(seen, found_in, weights, weights_step, first, line.get("loss_scale"))
    plan = steps(first, progress.ledger.skipped_ranges)
    cursor = progress.cursor
    for _ in range(step - weights_step):
        numbers, cursor, _ = plan(cursor)
    return Origin(tuple(numbers), "the plan of batches", weights, weights_step, first, scale)


def later_steps(
    order: SampleOrder, global_batch_size: int, first: int, skipped: tuple[SampleRange, ...]
) -> StepPlan:
    """The steps of a stage that began at the cursor `first`."""
    return step_plan(LaterOrder(order, first), global_batch_size, skipped)


def chosen_microbatches(num_samples: int, size: int, chosen: int | None) -> Sequence[int]:
    """Return the indices of the microbatches of `size` samples to run: `chosen`, or all if None.

    Raises UserError for a number that the step does not have.
    """
    count = -(-num_samples // size)
    if chosen is None:
        return range(count)
    if chosen >= count:
        raise UserError(
            f"--microbatch {chosen}: {num_samples} samples are {count} microbatches of {size}. Set "
            f"0 to {count - 1}."
        )
    return (chosen,)


def on_one_rank(config: JobConfig, microbatch_size: int, device: torch.device) -> JobConfig:
    """Return the config of a run on one rank: not compiled, in a replayable precision."""
    return replace(
        config,
        parallel=ParallelConfig(),
        compile=CompileConfig(),
        precision=replayable_precision(config.precision, device),
        training=config.training.with_microbatches(microbatch_size),
    )


def rebuilt(
    config: JobConfig,
    plan: RunPlan,
    objective: Objective,
    source: Source,
    origin: Origin,
    device: torch.device,
) -> BuiltNetwork:
    """Build the network with `origin`'s weights on one device.

    It is not compiled, but `prepare` is if the run compiled it: what it draws has the same bits.
    """
    mesh = Mesh(AxisSizes(), device.type)
    built = build(plan, objective, mesh, device)
    if compiles(config.compile):
        try:
            compile.check(replace(config.compile, cuda_graphs=False), device)
            as_in_run = replace(plan, compile=config.compile)
            built = replace(built, prepare=prepare_of(as_in_run, objective, device))
        except UserError as error:
            console.say(f"inputs equal those of the run up to rounding only: {error}")
    freeze(built.parameters, config.optimizer.groups)
    weights = {name: p.detach() for name, p in built.parameters.items()}
    if origin.weights:
        imported = read_record(origin.weights).get("imported")
        # Weights of others have no modules of an objective.
        own = checkpoint.of_the_network(weights) if imported else weights
        checkpoint.load(origin.weights, {"model": own})
    elif config.checkpoint.init:
        tables, facts = config_file.to_tables(config), source.facts.as_json()
        identity = run_identity.Identity(tables, facts, 0)
        ema = EMA({}, config.ema)
        for line in init_from.load(config.checkpoint, identity, weights, ema):
            console.say(line)
    return built


@dataclass(frozen=True)
class Replayer:
    """A step's network and data, to run its microbatches."""

    seed: int
    objective: Objective
    source: Source
    sample_order: SampleOrder
    built: BuiltNetwork
    num_samples: int
    """Samples of the whole step, over which the loss is averaged."""
    step: int
    loss_scale: Tensor | None
    """fp16's loss scale; None in other formats."""

    def run(
        self, microbatch: int, numbers: Sequence[int], device: torch.device
    ) -> tuple[list[Replayed], float]:
        """Run forward and backward of a microbatch; return its samples and gradient norm."""
        rows = self.sample_order.rows(numbers)
        pairs = list(zip(numbers, rows, strict=True))
        inspect, total = self.objective.inspect, float(self.num_samples)
        batch = loader.load_samples(self.source, pairs, inspect, device, total, self.step)
        rng = SampleRNG(self.seed, batch.sample_numbers)
        prepared = self.built.prepare(batch, rng)
        seen: dict[str, Tensor] = {**batch.fields}
        seen |= {f"input {name}": value for name, value in prepared.inputs.items()}
        executor = self.built.executor.for_inputs(prepared.inputs)
        assert isinstance(executor, LocalExecutor)
        of_run = executor.loss

        def loss(output: Output, targets: Mapping[str, Tensor]) -> Tensor:
            per_token = of_run(output, targets)
            seen["prediction"], seen["loss"] = first_of(output).detach(), per_token.detach()
            return per_token

        executor.loss = loss
        executor.step(prepared, self.loss_scale)
        executor.loss = of_run
        parameters = self.built.parameters.values()
        norm = clip_norm(parameters, 0.0, loss_scale=self.loss_scale).item()
        for parameter in parameters:
            parameter.grad = None
        finite = {name: is_finite(value) for name, value in seen.items()}
        described = self.objective.describe(batch.fields, rng)
        plain = {name: value.tolist() for name, value in described.items()}
        losses = sample_losses(seen["loss"], prepared.token_weight).tolist()
        return [
            Replayed(
                number,
                self.source.row_name(row),
                its_loss,
                microbatch,
                described={name: values[i] for name, values in plain.items()},
                not_finite=tuple(name for name in finite if not finite[name][i]),
            )
            for i, ((number, row), its_loss) in enumerate(zip(pairs, losses, strict=True))
        ], norm


def sample_losses(
    per_token: Float[Tensor, "b n"], weight: Float[Tensor, "b _"]
) -> Float[Tensor, " b"]:
    """Mean loss of each sample over its tokens, by weight; 0 without weights.

    As in the loss of a step, a token that is not finite spoils its sample even at weight 0.
    """
    weight = weight.expand_as(per_token)
    total = weight.sum(1)
    return (per_token * weight).sum(1) / total.where(total > 0, 1)


def is_finite(values: Tensor) -> list[bool]:
    """Return True per sample if all its values are finite."""
    found: list[bool] = values.reshape(len(values), -1).isfinite().all(1).tolist()
    return found
