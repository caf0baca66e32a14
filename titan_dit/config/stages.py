"""The stages of a run: one config for each, derived from the config of the run.

A stage's config is the run's with the keys of its [[stages]] table set, and [training] steps the
step of the run at which it ends. It is derived from the run's config, never from another stage's:
a key that only an earlier stage sets is the run's again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from titan_dit.config import catalog, did_you_mean
from titan_dit.config.config_file import (
    Tables,
    build,
    known_keys,
    put_keys,
    renamed,
    to_tables,
)
from titan_dit.config.job import JobConfig
from titan_dit.config.section import UserError
from titan_dit.config.training import TrainingConfig, steps_beside_stages

CHANGING = (
    *("data", "model", "objective", "training", "optimizer", "lr_scheduler"),
    *("parallel", "pipeline", "activation_checkpoint", "compile"),
    *("text", "sampling", "generation", "validation", "fid"),
)
"""Sections whose keys a stage may set."""
OF_THE_RUN = {
    "model": ("name",),
    "objective": (
        *("name", "prediction", "noise_schedule", "steps", "learn_sigma"),
        *("direction", "time_scale"),
    ),
    "optimizer": ("name", "groups"),
    "training": ("steps", "epochs", "stages", "frozen", "deterministic", "gc_every"),
}
"""Keys of these sections that belong to the whole run, not to a stage: weights, moments and steps
continue."""


def number_after(training: TrainingConfig, step: int) -> int:
    """The stage, from 0, that takes the step after `step`; the last one if the run is over."""
    ends = training.stage_ends
    return next((number for number, end in enumerate(ends) if step < end), len(ends) - 1)


def number_of(training: TrainingConfig, step: int) -> int:
    """The stage, from 0, that takes `step`, from 1 on, or that begins with the run."""
    return number_after(training, max(0, step - 1))


def config_of(config: JobConfig, number: int) -> JobConfig:
    """The config of a stage, from 0, of the run's config; without stages the run's.

    Raises UserError for a wrong key.
    """
    training = config.training
    if not training.stages:
        return config
    tables = to_tables(config)
    with naming(config, number):
        for section, keys in keys_of(training.stages[number], tables).items():
            name = keys.pop("name", None)
            if name is not None:
                table = tables.get(section, {})
                tables[section] = renamed(section, table, name, catalog.variant)
            put_keys(tables, section, keys, catalog.variant)
        tables["training"]["steps"] = training.stage_ends[number]
        return build(tables, catalog.variant)


def keys_of(stage: Mapping[str, Any], tables: Tables) -> Tables:
    """Section -> keys that a stage sets. Raises UserError for keys of the whole run."""
    found = {name: table for name, table in stage.items() if name != "steps"}
    for name, value in found.items():
        if not isinstance(value, Mapping):
            near = did_you_mean.for_flag(name, known_keys(tables, catalog.variant))
            raise UserError(
                f"{name}: unknown key. A stage has steps, and keys with their section, such as "
                f"optimizer.lr = 1e-4.{near}"
            )
    for section, keys in found.items():
        if section in tables and section not in CHANGING:
            raise UserError(
                f"[{section}] is of the whole run. Set {', '.join(keys)} in [{section}], outside "
                "the stages."
            )
        for key in keys:
            if key in OF_THE_RUN.get(section, ()):
                fix = "Each stage has steps = ..." if section == "training" else "Leave it out"
                raise UserError(f"[{section}] {key} is of the whole run. {fix}.")
    # Copies: the run's config stays as it is.
    return {section: dict(keys) for section, keys in found.items()}


def configs_of(config: JobConfig) -> Iterator[JobConfig]:
    """The config of every stage, in order; without stages the run's. Raises UserError."""
    training = config.training
    if training.stages and training.steps != training.stage_ends[-1]:
        raise steps_beside_stages(training)
    if training.stages and not config.checkpoint.every:
        raise UserError(
            "[checkpoint] every=0, but a stage hands its weights on by a checkpoint. Set every to "
            "a number of steps."
        )
    yield from (config_of(config, number) for number in range(len(training.stage_ends)))


@contextmanager
def naming(config: JobConfig, number: int) -> Iterator[None]:
    """Name the stage, from 0, in a UserError of the block, if the run has several."""
    try:
        yield
    except UserError as error:
        if not config.training.stages or str(error).startswith("[[stages]]"):
            raise
        raise UserError(f"[[stages]] {number + 1}: {error}") from None


def alone(config: JobConfig) -> JobConfig:
    """A stage's config as a run of its own, for dry runs and plans."""
    training = config.training
    steps = training.num_steps - training.begin if training.stages else training.steps
    return replace(config, training=replace(training, steps=steps, stages=()))


def line_of(training: TrainingConfig, number: int) -> str:
    """Console text of a stage: "stage 2 of 3, steps 2001 to 3000"."""
    ends = (0, *training.stage_ends)
    first, last = ends[number] + 1, ends[number + 1]
    return f"stage {number + 1} of {len(training.stages)}, steps {first} to {last}"
