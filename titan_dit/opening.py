"""Opens the parts of a run: plan, dataset and objective, checked before the model takes any memory.

`plan_run` needs neither ranks nor data, `open_source` and `open_objective` no ranks. Training, the
dry run, the planner, `evaluate` and `replay` open their parts by these.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from titan_dit import __version__
from titan_dit.build import BuiltNetwork
from titan_dit.checks import check_plan, layout, validate
from titan_dit.checks.device import (
    attention_hint,
    attention_kernel,
    check_memory,
    format_hint,
    rank_memory,
    with_kernel,
)
from titan_dit.checks.parts import (
    check_optimizer,
    check_source,
    num_trained,
    optimizer_lines,
    validate_parts,
)
from titan_dit.checks.pipeline import check_same_file, order_hint
from titan_dit.config import stages
from titan_dit.config.config_file import Tables, to_tables
from titan_dit.config.dotted_names import origins
from titan_dit.config.job import JobConfig
from titan_dit.config.section import UserError, few, show
from titan_dit.data import buckets
from titan_dit.data.base import DataFacts, Field, SampleOrder, Source
from titan_dit.data.held_out import held_out_rows
from titan_dit.data.latent_facts import FeatureFacts, LatentFacts
from titan_dit.execution import Executor
from titan_dit.hooks import Hooks
from titan_dit.objectives.base import DataShare, Objective
from titan_dit.optim import lr_schedule
from titan_dit.optim.ema import EMA
from titan_dit.parallel.mesh import refitted
from titan_dit.plan import RunPlan, resolve, with_buckets
from titan_dit.ranks.process_group import Ranks, World, set_deterministic, started_ranks
from titan_dit.recovery import kept_keys, resume, run_identity
from titan_dit.system.launched_as import LaunchedAs
from titan_dit.validation.validation_set import (
    ValidationSet,
    Validator,
    open_checked,
    open_set,
)

if TYPE_CHECKING:
    from titan_dit.validation.evaluation import Evaluation

VERSIONS = {"titan_dit": __version__, "torch": torch.__version__}
OF_A_HOST = (("pipeline", "network"),)
"""Keys that may differ between ranks: each host names its own."""
OF_SIZES = (
    *("latent_size", "latent_frames", "text_tokens", "sequence_length"),
    *("rope_theta", "dropout"),
)
"""Keys of [model] that a stage may set: its sizes, and what goes with them."""


def settled(config: JobConfig) -> JobConfig:
    """The config with keys of [model] that are not set taken from the data, before any plan.

    Raises UserError if the data is not there.
    """
    return replace(config, model=config.objective.settled_model(config.model, config.data))


def plan_run(
    config: JobConfig,
    num_ranks: int,
    *,
    resuming: bool = False,
    device: torch.device | None = None,
) -> RunPlan:
    """The plan of a run that passes all checks of its config. Raises UserError.

    `resuming`: see `RunPlan`. With `device` that device is checked, too, and its attention kernel
    chosen. Needs neither ranks nor data.
    """
    plan = resolve(config, num_ranks, resuming)
    validate(config, plan, device)
    return plan if device is None else with_kernel(plan, device)


def settled_stages(config: JobConfig) -> list[JobConfig]:
    """The config of every stage, settled, in order; without stages the run's. Raises UserError.

    The weights go on, so all stages need parameters of the same names and shapes; and the number of
    tokens of a sample, of the largest bucket, must not fall.
    """
    found, weights = list[JobConfig](), dict[str, torch.Size]()
    for number, each in enumerate(stages.configs_of(config)):
        with stages.naming(config, number):
            each = settled(each)
            if config.training.stages:
                check_rates(each)
                check_size(found[-1] if found else each, each)
                weights = check_weights(weights, each)
                check_meaning(found[0] if found else each, each)
        found.append(each)
    return found


def check_rates(config: JobConfig) -> None:
    """Raise UserError if a stage, or a run without stages, cannot have its learning rates."""
    lr_schedule.check(config.lr_scheduler, config.training.num_steps - config.training.begin)


def check_size(before: JobConfig, config: JobConfig) -> None:
    """Raise UserError if samples of a stage have fewer tokens than in the stage before."""
    was, now = (each.objective.model_spec(each.model).num_tokens for each in (before, config))
    if now < was:
        raise UserError(
            f"its samples have {now} tokens, those of the stage before {was}. Stages go from small "
            "samples to large ones: put this one first."
        )


def check_weights(before: Mapping[str, torch.Size], config: JobConfig) -> dict[str, torch.Size]:
    """The shapes of a stage's parameters. Raises UserError unless they are those of `before`."""
    with torch.device("meta"):
        model = config.objective.model_spec(config.model).build()
    now = {name: parameter.shape for name, parameter in model.named_parameters()}
    changed = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    if before and changed:
        was, found = (list(each.get(changed[0], ())) or "none" for each in (before, now))
        raise UserError(
            f"[model] name={show(config.model.name)}: the parameter {changed[0]} is {was} in the "
            f"first stage and {found} in this one, so its weights cannot go on. Leave the keys of "
            "[model] that change it alone; positions that are no parameters (rotary, sin-cos) fit "
            "every size."
        )
    return now


def check_meaning(first: JobConfig, config: JobConfig) -> None:
    """Raise UserError if a stage changes a key of [model] by which its weights mean other things.

    Parameters of equal names and shapes are split into heads, for example, by keys alone. Keys of a
    user's own network are not known, and not checked.
    """
    if ":" in config.model.name:
        return
    was, now = vars(first.model), vars(config.model)
    for key in sorted(key for key in now.keys() - set(OF_SIZES) if now[key] != was[key]):
        raise UserError(
            f"[model] {key}={show(now[key])}, but {show(was[key])} in the first stage: its weights "
            "would mean other things. Leave it out; a stage may set "
            f"{few([name for name in OF_SIZES if name in now])}."
        )


def check_launch(config: JobConfig) -> None:
    """Raise UserError if a stage of the run cannot start on the ranks that were launched.

    For every rank before the rendezvous, so that a wrong launch fails at once on all ranks.
    """
    for number, each in enumerate(settled_stages(config)):
        with stages.naming(config, number):
            check_stage_launch(each)


def check_stage_launch(config: JobConfig) -> None:
    """`check_launch` of one stage, or of a run without stages. Raises UserError."""
    # Only rank 0 looks if the run has started: a shared disk may show others less.
    is_first = LaunchedAs.here().is_first
    resuming = not is_first or resume.has_started(config.job, config.checkpoint)
    plan = resolve(config, started_ranks(), resuming)
    try:
        layout.check_world(plan)
    except UserError as error:
        hint = "To try this layout without devices, add --dry-run."
        raise UserError(f"{error} {hint}") from None
    validate(config, plan)
    memory = rank_memory(on_host=config.offload.parameters)
    check_memory(plan, config.optimizer, config.ema, *memory)


@dataclass(frozen=True)
class DataExample:
    """Facts and fields of a dataset, from which an objective is built; it need not be there."""

    facts: DataFacts
    fields: Mapping[str, Field]


def example_of(config: JobConfig) -> DataExample:
    """The objective's example of a dataset; without one [data] is opened."""
    if found := config.objective.example(config.model):
        return DataExample(*with_example_features(config, *found))
    source = open_source(config)
    return DataExample(source.facts, source.fields)


def with_example_features(
    config: JobConfig, facts: DataFacts, fields: Mapping[str, Field]
) -> tuple[DataFacts, Mapping[str, Field]]:
    """An example of a dataset with the features that [repa] takes, if it is set."""
    repa = config.repa
    if not repa.block or not isinstance(facts, LatentFacts):
        return facts, fields
    assert repa.dim
    grid = config.objective.token_grid(config.model)
    features = FeatureFacts(name="", digest="", grid=grid, dim=repa.dim)
    found = replace(facts, features=features)
    return found, found.fields(fields["latent"].dtype)


def open_source(config: JobConfig) -> Source:
    """Open [data], as [text] reads it; rank 0 checks the files for all ranks. Collective."""
    data, multiple = config.data, config.objective.text_multiple(config.model)
    source = data.open_surveyed(Ranks().run_on_first(data.survey))
    check_source(source, data.name)
    if config.repa.block and config.repa.network is None:
        source = source.with_features()
    if config.objective.takes_clips(config.model):
        source = source.as_clips()
    if config.text.mode == "online":
        source = source.as_ids()
    return source.in_text_groups(multiple) if multiple else source


def plan_buckets(config: JobConfig, plan: RunPlan, source: Source) -> RunPlan:
    """The plan with a checked plan for each bucket of the data; unchanged without buckets.

    Raises UserError for a bucket that does not fit the layout.
    """
    found, count = checked_buckets(config, plan, source.facts), len(source.bucket_rows)
    if count != len(found.each_bucket):
        raise UserError(
            f"[data] name={show(config.data.name)} holds {count} buckets, but [objective] "
            f"name={show(config.objective.name)} has models for {len(found.each_bucket)}. Choose "
            "data of one shape, or define `sized_models` (docs/extending.md)."
        )
    return found


def checked_buckets(config: JobConfig, plan: RunPlan, facts: DataFacts) -> RunPlan:
    """`plan_buckets` by the facts of a dataset. Raises UserError with the bucket's name."""
    found = with_buckets(plan, config, facts)
    for each in found.buckets:
        try:
            check_plan(each)
        except UserError as error:
            raise UserError(f"bucket {each.bucket}: {error}") from None
    return found


def rows_of_a_rank(plan: RunPlan, source: Source) -> dict[str, int]:
    """Name of each bucket -> samples of a rank's batch; "" if all data has one shape."""
    names = source.bucket_names if plan.buckets else ("",)
    pairs = zip(names, plan.each_bucket, strict=True)
    return {name: each.padded_samples_per_rank for name, each in pairs}


def bucket_facts(config: JobConfig) -> LatentFacts | None:
    """Facts with the buckets of [data], where it is there and has several; for dry runs."""
    multiple = config.objective.text_multiple(config.model)
    # A section of the user's need not know of captions.
    counts = config.data.bucket_counts(*((multiple,) if multiple else ()))
    example = config.objective.example(config.model) if counts else None
    if not example or not isinstance(example[0], LatentFacts):
        return None
    shapes, text = (tuple(each) for each in zip(*counts, strict=True))
    found = replace(
        example[0],
        shape=max(shapes, key=math.prod),
        bucket_shapes=shapes,
        bucket_counts=tuple(counts.values()),
        bucket_text=text if any(text) else (),
    )
    return found.as_clips() if config.objective.takes_clips(config.model) else found


def largest_bucket(config: JobConfig, plan: RunPlan) -> JobConfig:
    """The config for the bucket with most tokens in a microbatch, which takes most memory.

    Unchanged unless [data] is there and has several.
    """
    facts = bucket_facts(config)
    if facts is None:
        return config
    models = [model for _, model in config.objective.sized_models(config.model, facts)]
    plans = checked_buckets(config, plan, facts).buckets
    tokens = [each.microbatch_size * each.attended_per_rank for each in plans]
    return replace(config, model=models[tokens.index(max(tokens))])


def bucket_lines(config: JobConfig, plan: RunPlan) -> Iterator[str]:
    """Console lines of a dry run about the buckets of data that is there: steps, tokens and FLOPs.

    Raises UserError for a bucket that does not fit the layout.
    """
    facts = bucket_facts(config)
    if facts is None:
        return
    found, counts = checked_buckets(config, plan, facts).buckets, facts.bucket_counts
    with torch.device("meta"):
        model = plan.spec.build()
    steps = [rows / each.global_batch_size for each, rows in zip(found, counts, strict=True)]
    work = []
    for each, number in zip(found, steps, strict=True):
        flops = model.flops_per_sample(each.spec.num_attended_tokens) * each.global_batch_size
        work.append(flops)
        yield (
            f"bucket  {shown(each)}; {number / sum(steps):.1%} of the steps, {flops:.3g} FLOP "
            f"each, {each.num_microbatches} microbatches of {each.microbatch_size} on a rank"
        )
    mean = sum(map(operator.mul, work, steps)) / sum(steps)
    yield (
        f"note    the rest is of the bucket with most tokens in a microbatch; a mean step has "
        f"{mean:.3g} FLOP"
    )


def training_order(
    config: JobConfig, plan: RunPlan, source: Source, held_out: tuple[int, ...]
) -> SampleOrder:
    """The order of a run's samples. Raises UserError for buckets without a BucketOrder."""
    given = config.job.seed, held_out, config.job.data_order
    if not plan.buckets:  # An order of the user's need not know of sizes.
        return source.order(*given)
    found = source.order(*given, [each.global_batch_size for each in plan.buckets])
    if not isinstance(found, buckets.BucketOrder) or len(found.buckets) != len(plan.buckets):
        raise UserError(
            f"[data] name={show(config.data.name)} holds {len(plan.buckets)} buckets, but its "
            "`order` returns no titan_dit.data.buckets.BucketOrder of them. Return one: a step "
            "takes samples of one bucket."
        )
    return found


def open_objective(
    config: JobConfig, plan: RunPlan, data: Source | DataExample, *, previews: bool = False
) -> Objective:
    """The objective for a dataset, checked with the model, the data and the optimizer.

    Reads the first row of a source. `previews`: the objective must implement `preview`. Raises
    UserError.
    """
    objective = config.objective.build(config.model, data.facts)
    if config.repa.block:
        objective = objective.aligned(config.repa)
    source = data if isinstance(data, Source) else None
    if source is not None:
        source.check_holds(objective.takes)
    name = config.data.name
    if source is None or not plan.buckets:
        validate_parts(plan, objective, data.fields, name, source, previews=previews)
    else:
        for number, bucket in enumerate(plan.buckets):
            fields, row = source.bucket_fields(number), source.bucket_rows[number].start
            validate_parts(bucket, objective, fields, name, source, row, previews=previews)
    check_optimizer(plan, objective, config.optimizer)
    if source is not None:
        objective.open_text(config.text)
    return objective


def rows_held_out(config: JobConfig, source: Source) -> tuple[int, ...]:
    """The rows of [data] that are kept for validation; rank 0 chooses them. Collective."""
    job = config.job
    count = config.validation.held_out_of(has_part=config.data.has_validation_part)
    return Ranks().run_on_first(lambda: held_out_rows(source, job.seed, count, job.data_order))


@dataclass(frozen=True)
class OpenedRun:
    """The checked parts of a training run; nothing is on the device yet."""

    config: JobConfig
    plan: RunPlan
    hooks: Hooks
    source: Source
    objective: Objective
    sample_order: SampleOrder
    validation_set: ValidationSet | None
    evaluation: Evaluation | None
    identity: run_identity.Identity
    stage: int = 0
    """Number of the stage, from 0."""

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run, with all stages."""
        return self.config.training.stage_ends[-1]

    @property
    def stage_line(self) -> str | None:
        """Console text of the stage; None if the run has no stages."""
        training = self.config.training
        return stages.line_of(training, self.stage) if training.stages else None

    def lines(self, built: BuiltNetwork, device: torch.device, step: int) -> Iterator[str]:
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
            f"{plan.spec.tokens_shown}, {built.flops_per_sample / 1e9:.3g} GFLOP per sample "
            "and step"
        )
        about, held_out = self.source.facts.about, self.identity.num_held_out
        apart = f" ({held_out} of them for validation)" if held_out else ""
        count = f"{len(self.source):,} samples{apart}"
        yield f"data    {config.data.name}: {count}{f', {about}' if about else ''}"
        yield from self.source.lines(self.sample_order)
        yield from optimizer_lines(plan, self.objective, config.optimizer)
        steps, sizes = self.steps, {each.global_batch_size for each in plan.each_bucket}
        batch = "to ".join(f"{size} " for size in sorted({min(sizes), max(sizes)}))
        if plan.buckets:
            yield f"buckets {few([shown(each) for each in plan.buckets], between='; ')}"
            yield from small_buckets(self.sample_order)
        if self.stage_line:
            yield self.stage_line
        yield f"steps   {step} of {steps} done, {batch}samples each"
        if step >= steps:
            yield (
                f"nothing left to do: [training] steps={steps} are done. To go on, raise "
                f"--training.steps (or epochs); for another run, --job.name"
            )
        yield f"output  {config.job.folder}"
        saves = resume.saves_of(config.job, config.checkpoint, config.ema, steps)
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
            found |= Validator(
                validation_set=self.validation_set,
                objective=self.objective,
                executor=executor,
                share=share,
                seed=seed,
                batch_sizes=rows_of_a_rank(self.plan, self.source),
                alive=alive,
            ).losses_with_averages(ema)
        if self.evaluation and scores:
            with ema.swapped_in():
                found |= self.evaluation.scores(
                    executor.predict, config.sampling, seed, share, alive
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

    def hints(self, built: BuiltNetwork, device: torch.device) -> Iterator[str]:
        """Console warnings about slow or unusual settings. Reads samples: call on one rank."""
        yield from built.notes
        yield from self.objective.hints(self.source)
        found = (
            attention_hint(self.plan, device, built.flops_per_sample),
            format_hint(self.plan.precision, device),
            order_hint(self.plan),
        )
        yield from (hint for hint in found if hint)


def small_buckets(order: SampleOrder) -> Iterator[str]:
    """Console lines about buckets that hold fewer rows than a step."""
    assert isinstance(order, buckets.BucketOrder)
    for bucket in order.buckets:
        if (rows := bucket.num_training_rows) < bucket.batch_size:
            yield (
                f"hint    the bucket {bucket.name} has {rows} samples to train on, a step "
                f"{bucket.batch_size}: they repeat within it. Merge it with another one, or set "
                "fewer tokens_per_step"
            )


def shown(plan: RunPlan) -> str:
    """A bucket for the console: "4x64x64: 1024 latent tokens a sample, 16 samples a step"."""
    tokens, size = plan.spec.num_tokens, plan.global_batch_size
    return f"{plan.bucket}: {tokens} latent tokens a sample, {size} samples a step"


def open_evaluation(
    config: JobConfig, objective: Objective, device: torch.device
) -> Evaluation | None:
    """The feature network and the reference of [fid]; None if disabled. Collective."""
    if not config.fid.every:
        return None
    # Imported late: readers of pictures, which a run without it does not need.
    from titan_dit.validation import evaluation

    return evaluation.open_evaluation(config.fid, config.sampling, objective, device)


@dataclass(frozen=True)
class Parts:
    """The plan, the dataset and the objective of a stage, which fit each other."""

    plan: RunPlan
    source: Source
    objective: Objective


def open_parts(config: JobConfig, world: World, *, resuming: bool) -> Parts:
    """Open the parts of a stage, or of a run without stages. Collective. Raises UserError."""
    plan = plan_run(config, world.size, resuming=resuming, device=world.device)
    check_same_file(plan, world.gather)
    source = open_source(config)
    plan = plan_buckets(config, plan, source)
    objective = open_objective(config, plan, source, previews=bool(config.sampling.every))
    if config.sampling.every:
        objective.check_preview(config.sampling, config.generation)
    return Parts(plan, source, objective)


def try_stage(config: JobConfig, world: World, *, resuming: bool) -> None:
    """Open a later stage as far as that is cheap: its parts, and what it validates on. Collective.

    Raises UserError. Not opened are what previews draw with, and the feature network of [fid].
    """
    parts, fid = open_parts(config, world, resuming=resuming), config.fid
    held_out = rows_held_out(config, parts.source)
    training_order(config, parts.plan, parts.source, held_out)
    open_set(config.validation, config.data, parts.source, held_out, config.job, config.text)
    if fid.every and fid.reference and not Path(fid.reference).exists():
        raise UserError(f"[fid] reference={show(fid.reference)} is not there.")


def open_run(run: JobConfig, world: World, stage: int = 0, *, goes_on: bool = False) -> OpenedRun:
    """Resolve, check and open everything; does not write to the run directory. Collective.

    `run`: the config of the run. If it has several stages, this opens one, from 0, and tries the
    later ones: a stage that does not fit is refused before the first step. `goes_on`: this process
    has trained an earlier stage, and has tried the later ones already.
    """
    config = settled(stages.config_of(run, stage))
    check_same_config(config, world.gather)
    settings = resume.of_a_later_stage(config.checkpoint) if goes_on else config.checkpoint
    kept = kept_keys.settled(config.job, config.ema, settings)
    run, config = (replace(each, job=kept[0], ema=kept[1]) for each in (run, config))
    job = config.job
    if config.training.deterministic:
        set_deterministic()
    # Rank 0's view decides, as in `resume`.
    resuming = world.gather(resume.has_started(job, settings))[0]
    hooks = Hooks(job.hooks, world.is_first)
    hooks.raise_failure(world.gather)
    for later in range(stage + 1, 0 if goes_on else len(run.training.stages)):
        with stages.naming(run, later):
            try_stage(settled(stages.config_of(run, later)), world, resuming=resuming)
    parts = open_parts(config, world, resuming=resuming)
    plan, source, objective = parts.plan, parts.source, parts.objective
    objective.open_drawing(config.sampling, source, Ranks().run_on_first, job.folder)
    held_out = rows_held_out(config, source)
    sample_order = training_order(config, plan, source, held_out)
    of_epochs = buckets.rows_and_sizes(sample_order, plan.global_batch_size)
    config = replace(config, training=config.training.resolved(of_epochs))
    check_rates(config)
    return OpenedRun(
        config=config,
        plan=plan,
        hooks=hooks,
        source=source,
        objective=objective,
        sample_order=sample_order,
        validation_set=open_checked(
            config.validation, config.data, source, held_out, job, world, config.text
        ),
        evaluation=open_evaluation(config, objective, world.device),
        identity=run_identity.Identity(
            to_tables(config),
            source.facts.as_json(),
            len(held_out),
            to_tables(run) if run.training.stages else {},
        ),
        stage=stage,
    )


def check_same_config(config: JobConfig, gather: Callable[[Any], list[Any]]) -> None:
    """Raise UserError, with the first difference, if a rank's config differs from rank 0's.

    Collective. `gather`: all-gather of a value over the ranks.
    """
    mine = shared_keys(config)
    digests = gather(hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest())
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if not others:
        return
    # The whole config travels only if there is something to report.
    tables, rank = gather(mine), others[0]
    section, key, first, other, more = next(differences(tables[0], tables[rank]))
    also = f" ({more} more keys differ)" if more else ""
    raise UserError(
        f"[{section}] {key}={show(first)} on rank 0, but {show(other)} on rank {rank}{also}. "
        "Launch the same command and config file on all hosts."
    )


def differences(first: Tables, other: Tables) -> Iterator[tuple[str, str, Any, Any, int]]:
    """Keys with different values: section, key, both values, how many follow."""
    keys = [
        (section, key)
        for section, table in first.items()
        for key in dict.fromkeys([*table, *other.get(section, {})])
        if table.get(key) != other.get(section, {}).get(key)
    ]
    for number, (section, key) in enumerate(keys, start=1):
        yield section, key, first[section].get(key), other[section].get(key), len(keys) - number


def shared_keys(config: JobConfig) -> Tables:
    """The config as tables without the keys of `OF_A_HOST`."""
    tables = to_tables(config)
    return {
        section: {key: value for key, value in table.items() if (section, key) not in OF_A_HOST}
        for section, table in tables.items()
    }
