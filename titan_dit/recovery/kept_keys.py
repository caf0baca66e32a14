"""Resolves keys of [job] and [ema] that are left open: a started run keeps its own."""

from __future__ import annotations

from titan_dit.config.config_file import Tables, of_record, of_run
from titan_dit.config.job import NEW_RUN, JobSection
from titan_dit.config.operation import CheckpointConfig
from titan_dit.config.training import EMAConfig
from titan_dit.ranks.process_group import Ranks
from titan_dit.recovery import resume
from titan_dit.system import run_files

IMPORTED: Tables = {"ema": {"warmup": False}}
"""Kept keys after imported weights: these belong to no run, but have an average."""


def settled(
    run: JobSection, ema: EMAConfig, settings: CheckpointConfig
) -> tuple[JobSection, EMAConfig]:
    """Return [job] without any "auto", and [ema] with `warmup`.

    Collective: rank 0's view of the disk decides.
    """
    if ema.warmup is not None and all(getattr(run, key) != "auto" for key in NEW_RUN):
        return run, ema
    job, warmup = Ranks().run_on_first(lambda: kept(run, settings))
    return run.settled(job), ema.settled(warmup)


def kept(run: JobSection, settings: CheckpointConfig) -> tuple[dict[str, str], bool | None]:
    """Return the started run's own values of the keys that are left open; ({}, None) for a new run.

    They are in the checkpoint that [checkpoint] resume selects; before the first one, in the run's
    config.toml.
    """
    of_checkpoint, of_folder = tables_of_checkpoint(run, settings), tables_of_folder(run, settings)
    job = of_checkpoint.get("job") or of_folder.get("job", {})
    ema = of_checkpoint.get("ema") or of_folder.get("ema", {})
    return {key: job[key] for key in NEW_RUN if job.get(key, "auto") != "auto"}, ema.get("warmup")


def tables_of_checkpoint(run: JobSection, settings: CheckpointConfig) -> Tables:
    """Return the config of the newest readable checkpoint to resume from; {} without one."""
    record = resume.newest_record(run, settings)
    if record.get("imported"):
        return IMPORTED
    return of_record(record) if record else {}


def tables_of_folder(run: JobSection, settings: CheckpointConfig) -> Tables:
    """Return RUN/config.toml if the run has taken a step."""
    file = run.folder / run_files.CONFIG
    if not file.is_file() or not resume.has_started(run, settings):
        return {}
    return of_run(file)
