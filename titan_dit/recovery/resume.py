"""Where a run starts from, and whether it may."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from titan_dit.checkpoint import checkpoint
from titan_dit.checkpoint.checkpoint import Damaged, read_record
from titan_dit.checkpoint.run_checkpoints import Checkpoints, step_of
from titan_dit.checkpoint.staging import Tensors
from titan_dit.checkpoint.store import MANIFEST, Place, place, store_of
from titan_dit.config import catalog
from titan_dit.config.config_file import (
    FORMAT,
    Tables,
    build,
    changes,
    of_record,
    read_toml,
    to_tables,
)
from titan_dit.config.job import RunConfig
from titan_dit.config.operation import CheckpointConfig
from titan_dit.config.section import UserError
from titan_dit.launcher.failure import is_started_anew
from titan_dit.launcher.ranks import Ranks
from titan_dit.optim.ema import EMA

WHAT_WEIGHTS_ARE = ("name", "prediction", "noise_schedule", "steps", "learn_sigma")
"""Keys of [objective] that say what a network predicts."""


def folder_of(run: RunConfig) -> Path:
    """The run directory."""
    return Path(run.dir or f"outputs/{run.name}")


def checkpoints_of(run: RunConfig, settings: CheckpointConfig) -> Checkpoints:
    """The checkpoints of a run, wherever they lie."""
    return Checkpoints(place(settings.dir or folder_of(run) / "checkpoints"), settings)


def has_begun(run: RunConfig, settings: CheckpointConfig) -> bool:
    """Whether this is a run that goes on, so that it may come back on other ranks.

    It is once it has taken a step, even if it ended before its first checkpoint. Raises UserError
    where `never` is refused: before anything can fail that is tried again.
    """
    if wanted(settings.resume) == "never":
        candidates(checkpoints_of(run, settings), "never")
        return False
    rows = folder_of(run) / "metrics.jsonl"
    has_rows = rows.is_file() and rows.stat().st_size > 0
    return has_rows or checkpoints_of(run, settings).newest() is not None


def wanted(resume: str) -> str:
    """[checkpoint] resume, for these ranks: `never` is for the first ones that a job starts.

    Those that its launchers start after a failure, or with other nodes, go on from what is saved.
    """
    return "auto" if resume == "never" and is_started_anew() else resume


@dataclass(frozen=True)
class Start:
    """Where a run goes on from."""

    path: Place | None = None
    """A checkpoint whose every file was compared with its digest; None starts from step 0."""
    record: dict[str, Any] = field(default_factory=dict)
    damaged: dict[Place, str] = field(default_factory=dict)
    """Newer ones that were passed over, and what is wrong with them."""

    def told(self) -> list[str]:
        """What to say of the damaged ones."""
        ones = [*self.damaged, self.path]
        return [
            f"{path} is damaged: {what}; going on from the one before it: {before}"
            for (path, what), before in zip(self.damaged.items(), ones[1:], strict=True)
        ]


def starting_point(checkpoints: Checkpoints, resume: str) -> Start:
    """The newest whole checkpoint among those that [checkpoint] resume asks for.

    Every rank calls; they share the work of verifying. Raises UserError, on every rank, where what
    was asked for cannot be had: a run with damaged checkpoints only does not start afresh.
    """
    return first_undamaged(lambda: candidates(checkpoints, wanted(resume)))


def newest_before(checkpoints: Checkpoints, step: int) -> Start:
    """The newest whole checkpoint of a run from before a step; every rank calls."""
    return first_undamaged(
        lambda: [path for path in own_newest_first(checkpoints) if step_of(path) < step]
    )


def first_undamaged(choose: Callable[[], list[Place]]) -> Start:
    """The first of some checkpoints whose every file is as its digest says."""
    ranks = Ranks()
    damaged: dict[Place, str] = {}
    # The first rank's view decides: a shared disk may show a new folder to some ranks first.
    for path in ranks.first(choose):
        record, what = ranks.first(functools.partial(readable, path))
        if not what:
            what = ", ".join(checkpoint.damaged_files(path, record, ranks))
        if not what:
            return Start(path, record, damaged)
        damaged[path] = what
    if damaged:
        listed = "; ".join(f"{path} is damaged: {what}" for path, what in damaged.items())
        raise UserError(
            f"[checkpoint] {listed}. There is none before it, and nothing was changed. Give "
            "another with --checkpoint.resume PATH, or start a new run with --job.name."
        )
    return Start()


def candidates(checkpoints: Checkpoints, resume: str) -> list[Place]:
    """The checkpoints that [checkpoint] resume asks for, in the order of preference.

    Another run's checkpoint initialises this run; one of its own rolls it back. Either happens
    once: the same command resumes from what it has saved since.
    """
    own = own_newest_first(checkpoints)
    if resume == "auto":
        return own
    if resume == "never":
        if own:
            raise UserError(
                f'[checkpoint] resume="never", but {checkpoints.folder} holds checkpoints up to '
                f"step {step_of(own[0])}. Give the new run a name of its own (--job.name), or "
                "delete the old one."
            )
        return []
    records = (readable(path)[0] for path in own)
    newest: dict[str, Any] = next((record for record in records if record), {})
    if newest and newest["config"]["checkpoint"]["resume"] == resume:
        return own
    path = place(resume)
    read_record(path)  # Named here if it is no checkpoint.
    return [path] if is_own(checkpoints, path) else own or [path]


def check_not_elsewhere(run: RunConfig, settings: CheckpointConfig) -> None:
    """Refuse to begin anew where the run, by its config.toml, has checkpoints in another folder.

    Raises UserError.
    """
    file = folder_of(run) / "config.toml"
    table = read_toml(file).get("checkpoint", {}) if file.is_file() else {}
    was = checkpoints_of(run, replace(settings, dir=str(table.get("dir", ""))))
    if was.folder != checkpoints_of(run, settings).folder and (newest := was.newest()):
        raise UserError(
            f"[checkpoint] dir: there is no checkpoint in {checkpoints_of(run, settings).folder}, "
            f"but the run has {newest}. Move the folder, go on from that one with "
            f"--checkpoint.resume {newest}, or start a new run with --job.name."
        )


def own_newest_first(checkpoints: Checkpoints) -> list[Place]:
    """The run's own checkpoints, damaged ones included.

    A disk shows a folder under its final name when it is whole; one without a manifest has lost it.
    In an object store, it was never finished.
    """
    renames = store_of(checkpoints.folder).renames
    return (checkpoints.named() if renames else checkpoints.whole())[::-1]


def readable(path: Place) -> tuple[dict[str, Any], str]:
    """A checkpoint's record, and what is wrong with its manifest."""
    if not store_of(path).has(path / MANIFEST):
        return {}, f"{MANIFEST} is missing"
    try:
        return read_record(path), ""
    except Damaged:
        return {}, MANIFEST


def is_own(checkpoints: Checkpoints, path: Place) -> bool:
    """Whether a checkpoint lies in the run's own folder."""
    return path.resolve().parent == checkpoints.folder.resolve()


def set_aside_newer(checkpoints: Checkpoints, start: Start) -> None:
    """When a run goes on from an older checkpoint of its own, rename the newer ones.

    They are damaged, or belong to a future that the run will not have. Nothing is deleted, and
    what the run saves at those steps finds its place free.
    """
    if start.path is None or not is_own(checkpoints, start.path):
        return
    store = store_of(checkpoints.folder)
    # Going back to one that was set aside itself, the one of the same step makes room as well.
    others = [p for p in own_newest_first(checkpoints) if p.name != start.path.name]
    newer = [p for p in others if step_of(p) >= start.record["step"]]
    taken = set(store.names(checkpoints.folder))
    for path in newer:
        why = "damaged" if path in start.damaged else "set-aside"
        names = (f"{path.name}.{why}-{i}" for i in itertools.count(1))
        store.rename(path, next(name for name in names if name not in taken))


@dataclass(frozen=True)
class Identity:
    """What a run's mathematics depend on; checkpoints of one run agree on it."""

    config: Tables
    """The resolved config."""
    data: Mapping[str, Any]
    """`DataFacts.as_json`, with the digest of the contents."""
    num_held_out: int
    """Rows of the dataset that are left out of training, for validation."""

    def as_record(self) -> dict[str, Any]:
        """Its keys of a checkpoint's record."""
        return {"config": self.config, "config_format": FORMAT, "data": dict(self.data)}


def check_same_mathematics(path: Place, record: Mapping[str, Any], identity: Identity) -> None:
    """Refuse to resume with another model, objective, dataset, seed, batch or optimizer.

    Imported weights belong to no run: only the model and what it predicts must be the same.
    """
    # Built again: keys that did not exist then get their defaults, as they do now.
    before = build(of_record(record), catalog.variant)
    changed = list(changes(to_tables(before), identity.config))
    held_out = before.validation.num_held_out, identity.num_held_out
    if record.get("imported", False):
        kept = ("[model] ", *(f"[objective] {key}:" for key in WHAT_WEIGHTS_ARE))
        changed = [change for change in changed if change.startswith(kept)]
    else:
        if record["data"]["digest"] != identity.data["digest"]:
            changed.append("[data]: its contents are not those that the checkpoint was trained on")
        if held_out[0] != held_out[1]:
            changed.append(
                f"[validation] samples (rows that leave [data]): {held_out[0]} -> {held_out[1]}"
            )
    if changed:
        raise UserError(
            f"[checkpoint] {path} was made by another run:\n  "
            + "\n  ".join(changed)
            + "\nUndo the change, start a new run with --job.name, or insist with "
            "--checkpoint.allow_changes true."
        )


def load(
    path: Place,
    record: Mapping[str, Any],
    tensors: Tensors,
    ema: EMA,
    *,
    verified: bool = False,
) -> None:
    """Fill a run's tensors from its checkpoint; averages that it lacks begin at the weights."""
    saved = {str(decay) for decay in record["config"]["ema"]["decays"]}
    kept = {decay: average for decay, average in ema.averages.items() if decay in saved}
    checkpoint.load(path, {**tensors, "ema": kept}, verified=verified)
    ema.restart(except_for=saved)


def load_imported(
    path: Place,
    record: Mapping[str, Any],
    tensors: Tensors,
    ema: EMA,
    *,
    verified: bool = False,
) -> None:
    """Fill a new run's tensors from imported weights; every average begins at the imported one.

    Most files of weights are without AdamW's moments: it starts anew then.
    """
    if ema.averages and ema.config.warmup:
        raise UserError(
            f"[ema] warmup=true would forget the average that {path} brings within a few steps. "
            "Set --ema.warmup false."
        )
    (saved,) = (str(decay) for decay in record["config"]["ema"]["decays"])
    # What the objective has of its own is in no file of weights, and begins as it is.
    wanted = {**tensors, "model": of_the_model(tensors["model"]), "ema": {}}
    if ema.averages:
        wanted["ema"] = {saved: of_the_model(next(iter(ema.averages.values())))}
    if not checkpoint.holds(path, "optimizer"):
        del wanted["optimizer"]
    checkpoint.load(path, wanted, verified=verified)
    ema.spread()


def of_the_model(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the parameters of an objective's own modules."""
    return {name: t for name, t in tensors.items() if not name.startswith("objective.")}
