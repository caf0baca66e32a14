"""`python -m titan_dit evaluate`: score a trained run on its validation set, in any layout.

    python -m titan_dit evaluate --run outputs/gpt
    NGPU=4 python -m titan_dit evaluate --run outputs/gpt --parallel.tp 2 --parallel.pp 2
    NGPU=4 python -m titan_dit evaluate --run outputs/dit --reference pictures.npz

With --reference the pictures that the run draws are scored: evaluate_pictures.py.

Without NGPU one process runs per GPU, or a single one on a CPU. The ranks are launched as those of
`train` (docs/launching.md); under another launcher, such as torchrun, each is this command.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from titan_dit.checkpoint.record import read_record
from titan_dit.checkpoint.run_path import find_checkpoint
from titan_dit.checkpoint.saved_weights import Weights
from titan_dit.checkpoint.store import Location, location
from titan_dit.checks import validate
from titan_dit.checks.device import replayable_precision, with_kernel
from titan_dit.checks.parts import validate_parts
from titan_dit.commands import evaluate_pictures, results_file, train
from titan_dit.commands.flags.evaluate import Options
from titan_dit.config import catalog, config_file, dotted_names, flags
from titan_dit.config.job import JobConfig
from titan_dit.config.section import UserError
from titan_dit.data.base import Source
from titan_dit.data.held_out import held_out_rows
from titan_dit.execution.build import build
from titan_dit.launcher import process_group
from titan_dit.launcher.process_group import World
from titan_dit.launcher.ranks import Ranks
from titan_dit.objectives.base import DataShare
from titan_dit.observe import console
from titan_dit.parallel.mesh import Mesh, solve
from titan_dit.plan import resolve
from titan_dit.trained_model import device_of
from titan_dit.validation.validation_set import PREFIX, ValidationSet, losses, open_set

OF_RUN = ("job", "model", "objective", "data", "precision", "ema", "validation")
"""Sections that the run decides. Layout, compilation and the rest are those of the command line."""
IMPORTED = ("model", "objective", "data", "parallel")
"""Those whose names are imported."""
BATCH = 16
WHAT_MODEL_IS = ("tensor_plan",)
"""Keys of [parallel] that belong to the model."""


def main(options: Options, keys: Sequence[str]) -> None:
    """Launch the ranks, or be one of them."""
    if options.out and Path(options.out).suffix != ".json":
        raise UserError(f"--out {options.out}: name a .json file.")
    scores_pictures = evaluate_pictures.check(options, keys)
    train.start_ranks(gpus=(options.device or "cuda") == "cuda")
    with process_group.start(device_of(options.device).type) as world:
        if scores_pictures:
            evaluate_pictures.main(options, world.device)
            return
        found = evaluate(options, keys, world)
        if world.is_main:
            report(found, options.out)


def evaluate(options: Options, keys: Sequence[str], world: World) -> dict[str, Any]:
    """The results: what was scored, and `validation_loss` and others. Collective."""
    first = Ranks().run_on_first
    path = first(lambda: find_checkpoint(location(options.run), options.step))
    batch_size = options.batch_size or BATCH
    record = first(lambda: read_record(path))
    tables = config_file.of_record(record)
    dotted_names.check_trusted(tables, f"--run {path}", options.trust, IMPORTED)
    config = config_of(record, keys, world)
    if world.is_main:
        own = ("model", "objective", "data")
        for line in dotted_names.origins({name: getattr(config, name) for name in own}):
            console.say(line)
    size = solve(config.parallel, world.size)
    # A pipeline runs as many microbatches at once as it has stages.
    config = replace(
        config,
        precision=replayable_precision(config.precision, world.device),
        training=replace(
            config.training,
            microbatch_size=batch_size,
            global_batch_size=batch_size * size.pp * size.data,
        ),
    )
    plan = resolve(config, world.size)
    validate(config, plan, world.device)
    plan = with_kernel(plan, world.device)
    source = config.data.open_surveyed(first(config.data.survey))
    objective = config.objective.build(config.model, source.facts)
    validate_parts(plan, objective, source.fields, config.data.name, source)
    chosen = validation_set(path, record, config, source)
    mesh = Mesh(plan.sizes, world.device.type)
    built = build(plan, objective, mesh, world.device)
    tensors = {name: p.detach() for name, p in built.parameters.items()}
    saved = Weights(path, record, options.weights, options.decay)
    saved.load(tensors)
    share = DataShare(world.device, mesh.data_rank, mesh.sizes.data, mesh.gather_over_data)
    found = losses(
        *(chosen, objective, built.executor, share, lambda: None),
        seed=config.job.seed,
        batch_size=plan.padded_samples_per_rank,
    )
    about = {"checkpoint": str(path), "step": record["step"], "weights": saved.what}
    where = {"samples": len(chosen.rows), "layout": str(mesh.sizes), "device": world.device.type}
    return about | where | found


def config_of(record: Mapping[str, Any], keys: Sequence[str], world: World) -> JobConfig:
    """The run's model, objective, data and precision, with the keys of the command line."""
    tables = config_file.of_record(record)
    kept = {name: dict(tables[name]) for name in OF_RUN if name in tables}
    parallel = tables.get("parallel", {})
    kept["parallel"] = {key: parallel[key] for key in WHAT_MODEL_IS if key in parallel}
    kept["training"] = {"steps": 1, "global_batch_size": world.size}
    kept.get("job", {}).pop("hooks", None)
    kept.setdefault("validation", {})["every"] = 0
    given = flags.split(["--config", "the run's", *keys], (*OF_RUN, "parallel", "pipeline"))[1]
    config = config_file.build(
        config_file.overridden(kept, given, catalog.variant), catalog.variant
    )
    return replace(config, job=config.job.settled())


def validation_set(
    path: Location, record: Mapping[str, Any], config: JobConfig, source: Source
) -> ValidationSet:
    """The set that the run validates on, or that of --validation.path. Collective."""
    validation, job = config.validation, config.job
    has_part = config.data.has_validation_part
    num = validation.held_out_of(has_part=has_part)
    if not (validation.path or has_part):
        check_held_out(path, record, num, source)
    held_out = Ranks().run_on_first(lambda: held_out_rows(source, job.seed, num, job.data_order))
    enabled = replace(validation, every=1)
    found = open_set(enabled, config.data, source, held_out, job)
    assert found is not None
    return found


def check_held_out(path: Location, record: Mapping[str, Any], num: int, source: Source) -> None:
    """Refuse rows of [data] that the run has trained on."""
    before = config_file.of_record(record).get("validation", {})
    of_run = 0 if before.get("path") else before.get("samples", 0)
    if not of_run:
        raise UserError(
            f"--run {path} has held out no samples of its [data] to score. Give another dataset: "
            "--validation.path DIR. Pictures that it draws are scored by --reference DIR."
        )
    if num != of_run:
        raise UserError(
            f"--validation.samples {num}: {path} has held out {of_run} samples and trained on all "
            "others. Leave it out, or give another dataset: --validation.path DIR."
        )
    if source.facts.digest != record["data"].get("digest", ""):
        raise UserError(
            f"[data] differs from the dataset that {path} was trained on (another digest), so its "
            "held-out samples are not known. Restore it, or give --validation.path DIR."
        )


def report(found: Mapping[str, Any], out: str | None) -> None:
    """Print the results, and write them as JSON."""
    console.say(
        f"{found['checkpoint']} ({found['weights']}): {found['samples']:,} samples, "
        f"{found['layout']} on {found['device']}"
    )
    scores = {name: value for name, value in found.items() if name.startswith(PREFIX)}
    results_file.report(found, scores, out)
