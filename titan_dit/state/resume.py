"""Where a run starts from, and whether it may."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_dit import config_file
from titan_dit.config import UserError
from titan_dit.state.checkpoint import Checkpoints, step_of


def starting_point(checkpoints: Checkpoints, resume: str) -> Path | None:
    """The checkpoint that [checkpoint] resume asks for; None starts from step 0.

    A path into another run is where a fresh run begins; once the run has checkpoints of its own,
    it goes on from those, so that the same command continues it.
    """
    newest = checkpoints.newest()
    if resume == "auto":
        return newest
    if resume == "never":
        if newest:
            raise UserError(
                f'[checkpoint] resume="never", but {checkpoints.folder} holds checkpoints up to '
                f"step {step_of(newest)}. Give the new run a name of its own (--job.name), or "
                "delete the old one."
            )
        return None
    path = Path(resume)
    if path.resolve().parent == checkpoints.folder.resolve():
        return path
    return newest or path


def set_aside_newer(checkpoints: Checkpoints, path: Path | None) -> None:
    """When a run goes back to an older checkpoint of its own, rename the newer ones.

    They belong to a future that the run will not have; nothing is deleted.
    """
    for newer in checkpoints.whole():
        if path and newer.parent.resolve() == path.resolve().parent and newer.name > path.name:
            newer.rename(newer.with_name(newer.name + ".set-aside"))


def check_same_mathematics(
    path: Path, record: Mapping[str, Any], tables: config_file.Tables, data_digest: str
) -> None:
    """Refuse to go on with another model, objective, dataset, seed, batch or optimizer."""
    changed = list(config_file.changes(record["config"], tables))
    if record["data"]["digest"] != data_digest:
        changed.append("[data]: its contents are not those that the checkpoint was trained on")
    if changed:
        raise UserError(
            f"[checkpoint] {path} was made by another run:\n  "
            + "\n  ".join(changed)
            + "\nUndo the change, start a new run with --job.name, or insist with "
            "--checkpoint.allow_changes true."
        )
