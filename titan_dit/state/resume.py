"""Where a run starts from, and whether it may."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_dit.config import CheckpointConfig, RunConfig
from titan_dit.config_file import Tables, changes
from titan_dit.section import UserError
from titan_dit.state import checkpoint
from titan_dit.state.checkpoint import Checkpoints, Tensors, read_record, step_of
from titan_dit.state.ema import EMA

WHAT_WEIGHTS_ARE = ("name", "prediction", "schedule", "steps", "learn_sigma")
"""Keys of [objective] that say what a network predicts."""


def has_begun(run: RunConfig, settings: CheckpointConfig) -> bool:
    """Whether this is a run that goes on, so that it may come back on other ranks.

    It is once it has written its config, even if it ended before its first checkpoint.
    """
    folder = folder_of(run)
    checkpoints = Checkpoints(folder / "checkpoints", settings.keep)
    begun = (folder / "config.toml").is_file() or checkpoints.newest() is not None
    return begun and settings.resume != "never"


def folder_of(run: RunConfig) -> Path:
    """The run directory."""
    return Path(run.dir or f"outputs/{run.name}")


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

    Both pairs: (of the checkpoint, of now). `imported` weights are of no run: what they are and
    predict must be the same, and nothing else.
    """
    changed = list(changes(*configs))
    if imported:
        kept = ("[model] ", *(f"[objective] {key}:" for key in WHAT_WEIGHTS_ARE))
        changed = [change for change in changed if change.startswith(kept)]
    elif data_digests[0] != data_digests[1]:
        changed.append("[data]: its contents are not those that the checkpoint was trained on")
    if changed:
        raise UserError(
            f"[checkpoint] {path} was made by another run:\n  "
            + "\n  ".join(changed)
            + "\nUndo the change, start a new run with --job.name, or insist with "
            "--checkpoint.allow_changes true."
        )


def load(path: Path, record: Mapping[str, Any], tensors: Tensors, ema: EMA) -> None:
    """Fill a run's tensors from its checkpoint; averages that it lacks begin at the weights."""
    saved = {str(decay) for decay in record["config"]["ema"]["decays"]}
    kept = {decay: average for decay, average in ema.averages.items() if decay in saved}
    checkpoint.load(path, {**tensors, "ema": kept})
    ema.restart(except_for=saved)


def load_imported(path: Path, record: Mapping[str, Any], tensors: Tensors, ema: EMA) -> None:
    """Fill a new run's tensors from imported weights; every average begins at the imported one.

    Most files of weights are without AdamW's moments: it starts anew then.
    """
    if ema.averages and ema.config.warmup:
        raise UserError(
            f"[ema] warmup=true would forget the average that {path} brings within a few steps. "
            "Set --ema.warmup false."
        )
    (saved,) = (str(decay) for decay in record["config"]["ema"]["decays"])
    wanted = {**tensors, "ema": {}}
    if ema.averages:
        wanted["ema"] = {saved: next(iter(ema.averages.values()))}
    if not checkpoint.holds(path, "optimizer"):
        del wanted["optimizer"]
    checkpoint.load(path, wanted)
    ema.spread()
