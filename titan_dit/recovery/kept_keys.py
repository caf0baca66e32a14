"""Resolves "auto" in [job]: a started run keeps its data order and its initial weights."""

from __future__ import annotations

from typing import Any

from titan_dit.config.config_file import of_record, of_run
from titan_dit.config.job import NEW_RUN, RunConfig
from titan_dit.config.operation import CheckpointConfig
from titan_dit.launcher.ranks import Ranks
from titan_dit.recovery import resume


def settled(run: RunConfig, settings: CheckpointConfig) -> RunConfig:
    """Return [job] without any "auto". Collective: rank 0's view of the disk decides."""
    if all(getattr(run, key) != "auto" for key in NEW_RUN):
        return run
    return run.settled(Ranks().run_on_first(lambda: kept(run, settings)))


def kept(run: RunConfig, settings: CheckpointConfig) -> dict[str, str]:
    """Return the started run's own values of the keys that "auto" resolves; {} for a new run.

    They are in the checkpoint that [checkpoint] resume selects; before the first one, in the run's
    config.toml. Imported weights belong to no run.
    """
    job = table_of_checkpoint(run, settings) or table_of_folder(run, settings)
    return {key: job[key] for key in NEW_RUN if job.get(key, "auto") != "auto"}


def table_of_checkpoint(run: RunConfig, settings: CheckpointConfig) -> dict[str, Any]:
    """Return [job] of the newest readable checkpoint to resume from; {} without one."""
    checkpoints = resume.checkpoints_of(run, settings)
    for path in resume.candidates(checkpoints, resume.wanted(settings.resume)):
        record, _ = resume.readable(path)
        if record:
            return {} if record.get("imported") else of_record(record).get("job", {})
    return {}


def table_of_folder(run: RunConfig, settings: CheckpointConfig) -> dict[str, Any]:
    """Return [job] of RUN/config.toml if the run has taken a step."""
    file = resume.folder_of(run) / "config.toml"
    if not file.is_file() or not resume.has_started(run, settings):
        return {}
    return of_run(file).get("job", {})
