"""Where a run starts from, and whether it may."""

from __future__ import annotations

import itertools
from pathlib import Path

from titan_dit.config_file import Tables, changes
from titan_dit.section import UserError
from titan_dit.state.checkpoint import Checkpoints, read_record, step_of


def starting_point(checkpoints: Checkpoints, resume: str) -> Path | None:
    """The checkpoint that [checkpoint] resume asks for; None starts from step 0.

    A path into another run is where a fresh run begins; one of its own, where it goes back to.
    Either happens once: what the same command has saved since, it goes on from.
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
    if newest and read_record(newest)["config"]["checkpoint"]["resume"] == resume:
        return newest
    path = Path(resume)
    read_record(path)  # Named here if it is no checkpoint.
    return path if is_own(checkpoints, path) else newest or path


def is_own(checkpoints: Checkpoints, path: Path) -> bool:
    """Whether a checkpoint lies in the run's own folder."""
    return path.resolve().parent == checkpoints.folder.resolve()


def set_aside_newer(checkpoints: Checkpoints, path: Path | None) -> None:
    """When a run goes back to an older checkpoint of its own, rename the newer ones.

    They belong to a future that the run will not have; nothing is deleted.
    """
    if path is None or not is_own(checkpoints, path):
        return
    for newer in checkpoints.whole():
        if step_of(newer) > step_of(path):
            asides = (newer.with_name(f"{newer.name}.set-aside-{i}") for i in itertools.count(1))
            newer.rename(next(aside for aside in asides if not aside.exists()))


def check_same_mathematics(
    path: Path,
    configs: tuple[Tables, Tables],
    data_digests: tuple[str, str],
    imported: bool = False,
) -> None:
    """Refuse to go on with another model, objective, dataset, seed, batch or optimizer.

    Both pairs: (of the checkpoint, of now). `imported` weights are of no run: the model alone must
    be the same.
    """
    changed = list(changes(*configs))
    if imported:
        changed = [change for change in changed if change.startswith("[model]")]
    elif data_digests[0] != data_digests[1]:
        changed.append("[data]: its contents are not those that the checkpoint was trained on")
    if changed:
        raise UserError(
            f"[checkpoint] {path} was made by another run:\n  "
            + "\n  ".join(changed)
            + "\nUndo the change, start a new run with --job.name, or insist with "
            "--checkpoint.allow_changes true."
        )
