"""Where a run goes on: at the checkpoint that it resumes from or rolls back to.

The trainer calls `resumed` and `rolled_back`, at the end. Above them, in this order: which
checkpoint, its tensors, the record of rollbacks, and `Progress`.

A rollback follows too many consecutive bad steps. Their samples are skipped from then on.
`RUN/rollbacks.json` records this at once, because the run may end before its next checkpoint.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from titan_dit.checkpoint import checkpoint, run_checkpoints
from titan_dit.checkpoint.averages import Snapshots, averages_in
from titan_dit.checkpoint.record import Damaged, read_record
from titan_dit.checkpoint.run_checkpoints import Checkpoints, step_of
from titan_dit.checkpoint.staging import TensorTree
from titan_dit.checkpoint.store import MANIFEST, Location, location, store_of
from titan_dit.config import schema, user_text
from titan_dit.config.config_file import read_toml
from titan_dit.config.job import JobSection
from titan_dit.config.operation import CheckpointConfig, FaultsConfig
from titan_dit.config.parameter_groups import listed
from titan_dit.config.section import UserError, show
from titan_dit.config.training import EMAConfig, LoRAConfig
from titan_dit.data.order import SampleRange
from titan_dit.models import lora
from titan_dit.optim.ema import EMA
from titan_dit.ranks.failure import is_restarted
from titan_dit.ranks.process_group import Ranks
from titan_dit.recovery import run_identity
from titan_dit.recovery.ledger import Ledger, Skipped
from titan_dit.system import run_files
from titan_dit.system.files import write_json


def checkpoints_of(run: JobSection, settings: CheckpointConfig) -> Checkpoints:
    """The checkpoints of a run, in its directory or [checkpoint] dir."""
    return Checkpoints(location(settings.dir or run.folder / run_files.CHECKPOINTS), settings)


def has_started(run: JobSection, settings: CheckpointConfig) -> bool:
    """Return True if the run has taken a step; it may then resume on another number of ranks.

    A run that ended before its first checkpoint counts, too. Raises UserError if resume is `never`
    but there are checkpoints: early, before any error that the launcher would retry.
    """
    if effective_resume(settings.resume) == "never":
        candidates(checkpoints_of(run, settings), "never")
        return False
    rows = run.folder / run_files.METRICS
    has_rows = rows.is_file() and rows.stat().st_size > 0
    return has_rows or checkpoints_of(run, settings).newest() is not None


def effective_resume(resume: str) -> str:
    """[checkpoint] resume as it acts now: `never` becomes `auto` for restarted ranks.

    `never` holds for a job's first launch; restarted ranks resume from that job's checkpoints.
    """
    return "auto" if resume == "never" and is_restarted() else resume


def of_a_later_stage(settings: CheckpointConfig) -> CheckpointConfig:
    """The settings by which a process that has trained a stage goes on with the next one.

    The checkpoints are its own, so resume `never` becomes `auto`, as for restarted ranks.
    """
    return replace(settings, resume="auto") if settings.resume == "never" else settings


@dataclass(frozen=True)
class Start:
    """The starting point of a run."""

    path: Location | None = None
    """A verified checkpoint; None starts from step 0."""
    record: dict[str, Any] = field(default_factory=dict)
    damaged: dict[Location, str] = field(default_factory=dict)
    """Newer damaged checkpoints -> their damaged files."""

    def messages(self) -> list[str]:
        """Console lines about the damaged checkpoints."""
        ones = [*self.damaged, self.path]
        return [
            f"{path} is damaged: {what}; falling back to the previous one: {before}"
            for (path, what), before in zip(self.damaged.items(), ones[1:], strict=True)
        ]


def starting_point(checkpoints: Checkpoints, resume: str) -> Start:
    """Return the newest undamaged checkpoint that [checkpoint] resume selects. Collective.

    The ranks share the verification. Raises UserError on every rank if all candidates are damaged:
    such a run does not start from step 0.
    """
    return first_undamaged(lambda: candidates(checkpoints, effective_resume(resume)))


def newest_before(checkpoints: Checkpoints, step: int) -> Start:
    """Return the newest undamaged checkpoint before `step`. Collective."""
    return first_undamaged(
        lambda: [path for path in own_newest_first(checkpoints) if step_of(path) < step]
    )


def first_undamaged(choose: Callable[[], list[Location]], key: str = "resume") -> Start:
    """Return the first undamaged checkpoint of `choose()`, which rank 0 calls. Collective."""
    ranks = Ranks()
    damaged: dict[Location, str] = {}
    # Rank 0's view decides: a shared disk may show a new folder to some ranks earlier.
    for path in ranks.run_on_first(choose):
        record, what = ranks.run_on_first(partial(readable, path))
        if not what:
            what = ", ".join(checkpoint.damaged_files(path, record, ranks))
        if not what:
            return Start(path, record, damaged)
        damaged[path] = what
    if damaged:
        lines = "; ".join(f"{path} is damaged: {what}" for path, what in damaged.items())
        raise UserError(
            f"[checkpoint] {lines}. There is no older checkpoint, and nothing was changed. Give "
            f"another one with --checkpoint.{key} PATH, or start a new run with --job.name."
        )
    return Start()


def candidates(checkpoints: Checkpoints, resume: str) -> list[Location]:
    """The checkpoints that `resume` (auto, never or a path) selects, in order of preference.

    A path names a run, its checkpoints folder (its newest) or one checkpoint. One of this run rolls
    this run back; one of another run initialises this run. Either happens once: afterwards the same
    command resumes from this run's newest checkpoint.
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
    named = run_checkpoints.resolve(location(resume))
    paths = [named.checkpoint] if named.checkpoint else own_newest_first(named.checkpoints)
    if not paths:
        raise named.none_found("[checkpoint] resume")
    if named.checkpoint:
        read_record(named.checkpoint)  # Raises if it is not a checkpoint.
    return paths if is_own(checkpoints, paths[0]) else own or paths


def newest_record(run: JobSection, settings: CheckpointConfig) -> dict[str, Any]:
    """The record of the newest readable checkpoint to resume from; {} without one."""
    paths = candidates(checkpoints_of(run, settings), effective_resume(settings.resume))
    records = (readable(path)[0] for path in paths)
    return next((record for record in records if record), {})


def newest_step(run: JobSection, settings: CheckpointConfig) -> int:
    """The step of `newest_record`; 0 without one, and of imported weights, which are of no run."""
    record = newest_record(run, settings)
    return 0 if record.get("imported") else int(record.get("step", 0))


def check_not_elsewhere(run: JobSection, settings: CheckpointConfig) -> None:
    """Raise UserError if the run's config.toml names another folder that has checkpoints.

    Otherwise the run would silently restart from step 0.
    """
    file = run.folder / run_files.CONFIG
    table = read_toml(file).get("checkpoint", {}) if file.is_file() else {}
    was = checkpoints_of(run, replace(settings, dir=str(table.get("dir", ""))))
    if was.folder != checkpoints_of(run, settings).folder and (newest := was.newest()):
        raise UserError(
            f"[checkpoint] dir: there is no checkpoint in {checkpoints_of(run, settings).folder}, "
            f"but the run has {newest}. Move the folder, resume from that one with "
            f"--checkpoint.resume {newest}, or start a new run with --job.name."
        )


def own_newest_first(checkpoints: Checkpoints) -> list[Location]:
    """The run's own checkpoints, damaged ones included.

    On a disk a folder without a manifest is damaged, because the rename came after the manifest.
    In an object store it is an unfinished save and is left out.
    """
    renames = store_of(checkpoints.folder).renames
    return (checkpoints.folders() if renames else checkpoints.complete())[::-1]


def readable(path: Location) -> tuple[dict[str, Any], str]:
    """(record, ""), or ({}, what is wrong with the manifest)."""
    if not store_of(path).has(path / MANIFEST):
        return {}, f"{MANIFEST} is missing"
    try:
        return read_record(path), ""
    except Damaged as error:
        return {}, f"{MANIFEST}: {error.what}"


def is_own(checkpoints: Checkpoints, path: Location) -> bool:
    """True if a checkpoint is in the run's own checkpoint folder."""
    return path.resolve().parent == checkpoints.folder.resolve()


def set_aside_newer(checkpoints: Checkpoints, start: Start) -> None:
    """Rename the checkpoints newer than `start` if it is one of the run's own.

    They are damaged or were rolled back. Nothing is deleted, and the run can save those steps
    again.
    """
    if start.path is None or not is_own(checkpoints, start.path):
        return
    store = store_of(checkpoints.folder)
    # If `start` was set aside itself, the checkpoint of the same step is renamed, too.
    others = [p for p in own_newest_first(checkpoints) if p.name != start.path.name]
    newer = [p for p in others if step_of(p) >= start.record["step"]]
    taken = set(store.names(checkpoints.folder))
    for path in newer:
        why = "damaged" if path in start.damaged else "set-aside"
        names = (f"{path.name}.{why}-{i}" for i in itertools.count(1))
        store.rename(path, next(name for name in names if name not in taken))


def check_base(path: Location, record: Mapping[str, Any], base: str) -> None:
    """Raise UserError if a checkpoint holds the frozen weights in another format than [lora] base.

    Bytes of int8 and of float8 have the same shapes.
    """
    was = LoRAConfig.of_table(record["config"].get("lora", {})).base
    if was != base:
        raise UserError(
            f"[lora] base={show(base)}, but the frozen weights of {path} are {show(was)}. Set base "
            f"= {show(was)}, or start a new run at its weights with --checkpoint.init."
        )


def check_adapters(path: Location, record: Mapping[str, Any], model: Mapping[str, Tensor]) -> None:
    """Raise UserError if a checkpoint has other adapters than the model. Collective.

    `model`: this rank's parameters, by name.
    """
    own = set().union(*Ranks().gather([name for name in model if lora.is_adapter(name)]))
    if not own and not record["config"].get("lora", {}).get("rank"):
        return
    keys = (key for key in checkpoint.contents(path) if key.startswith("model."))
    saved = {key.removeprefix("model.") for key in keys if lora.is_adapter(key)}
    new_run = "start a new run at its weights with --checkpoint.init."
    if left := sorted(saved - own):
        raise UserError(
            f"[checkpoint] {path} has adapters that [lora] does not: {listed(left)}. Set its rank "
            f"and targets, or {new_run}"
        )
    if missing := sorted(own - saved):
        raise UserError(
            f"[checkpoint] {path} does not have all adapters of [lora]: {listed(missing)}. Set its "
            f"rank and targets, or {new_run}"
        )


def load(path: Location, record: Mapping[str, Any], tensors: TensorTree, ema: EMA) -> None:
    """Load a verified checkpoint in place; an average that it lacks starts at the weights."""
    saved = averages_in(record)
    kept = {key: found for key, found in tensors["ema"].items() if found and key in saved}
    checkpoint.load(path, {**tensors, "ema": kept}, verified=True)
    ema.restart(except_for=kept)


def load_imported(path: Location, record: Mapping[str, Any], tensors: TensorTree, ema: EMA) -> None:
    """Load imported weights into a new run; EMAs start at the imported average, else at these.

    The optimizer's tensors start at zero unless the checkpoint has them.
    """
    if ema.averages and ema.config.warmup:
        raise UserError(
            f"[ema] warmup=true would overwrite the average imported from {path} within a few "
            "steps. Leave the key out, or set --ema.warmup false."
        )
    saved = averages_in(record)
    # An objective's own modules are in no weight file; they keep their initial values.
    parts = {**tensors, "model": checkpoint.of_the_network(tensors["model"]), "ema": {}}
    if ema.averages and saved:
        parts["ema"] = {saved[0]: checkpoint.of_the_network(next(iter(ema.averages.values())))}
    if not checkpoint.holds(path, "optimizer"):
        del parts["optimizer"]
    checkpoint.load(path, parts, verified=True)
    if saved:
        ema.copy_first_to_all()
    else:
        ema.restart()


def without_missing(path: Location, tensors: TensorTree) -> tuple[TensorTree, list[str]]:
    """Leave out what a checkpoint may lack; console lines about it.

    Missing moments are set to zero, as in a new run; `load` starts missing averages at the weights.
    A checkpoint has neither for parameters that were frozen. Missing parameters of an objective's
    own modules, such as the projector of [repa], stay as they are: initial in a run that resumes.
    Collective: the lines are about all ranks.
    """
    saved, kept, missing = checkpoint.contents(path), dict[str, Any](), set[str]()
    for name, state in tensors["optimizer"].items():
        known = {key: t for key, t in state.items() if f"optimizer.{name}.{key}" in saved}
        kept |= {name: known} if known else {}
        for key in state.keys() - known.keys():
            state[key].detach().zero_()  # A rollback undoes steps that have changed it.
            missing.add(key)
    missing = set().union(*Ranks().gather(missing))
    lines = []
    if missing:
        lines = [f"{path} has no {', '.join(sorted(missing))} of some parameters: zero there"]
    model = checkpoint.without_own(tensors["model"], saved)
    fresh = set().union(*Ranks().gather(tensors["model"].keys() - model.keys()))
    if fresh:
        lines.append(f"{path} has no {listed(sorted(fresh))}: as in this run before loading")
    averages = {
        key: {name: tensor for name, tensor in average.items() if f"ema.{key}.{name}" in saved}
        for key, average in tensors["ema"].items()
    }
    return {"model": model, "optimizer": kept, "ema": averages}, lines


ROLLBACKS_SCHEMA = {
    "skipped": schema.Rows((schema.COUNT, schema.COUNT, str)),
    "in_vain": schema.COUNT,
    "reached": schema.COUNT,
}


@dataclass(frozen=True)
class BadStreak:
    """The consecutive bad steps that cause a rollback."""

    first: int
    last: int
    numbers: SampleRange
    """(first, end) of the sample numbers that they drew."""

    def message(self, path: object) -> str:
        """A line for a run that went back to the checkpoint at `path`."""
        first, end = self.numbers
        return (
            f"rolled back from step {self.last} to {path}: samples {first} to {end - 1} are skipped"
        )

    def as_skipped(self) -> Skipped:
        """The ledger entry of their samples."""
        reason = f"steps {self.first} to {self.last} were bad"
        return Skipped(*self.numbers, reason)


@dataclass(frozen=True)
class Rollbacks:
    """A run's rollbacks, stored in its directory."""

    skipped: tuple[Skipped, ...] = ()
    in_vain: int = 0
    """Consecutive rollbacks without progress past `reached`."""
    reached: int = 0
    """The last bad step of any rollback."""

    def with_rollback(self, bad: BadStreak) -> Rollbacks:
        """Return the rollbacks with one more."""
        in_vain = self.in_vain + 1 if bad.first <= self.reached else 1
        return Rollbacks((*self.skipped, bad.as_skipped()), in_vain, max(self.reached, bad.last))

    def write(self, folder: Path) -> None:
        """Write `rollbacks.json` atomically and durably."""
        values = {**vars(self), "skipped": [list(vars(entry).values()) for entry in self.skipped]}
        write_json(folder / run_files.ROLLBACKS, values)


def read_rollbacks(folder: Path) -> Rollbacks:
    """Read a run's rollbacks; none if there is no file."""
    file = folder / run_files.ROLLBACKS
    if not file.is_file():
        return Rollbacks()
    with file.open("rb") as opened:  # A disk that fails is no damaged file.
        content = opened.read(user_text.MAX_BYTES + 1)
    try:
        values = user_text.parse_json(content)
        schema.check(values, ROLLBACKS_SCHEMA, "")
    except ValueError as error:
        raise UserError(
            f"[faults] {file} is damaged: {str(error).strip(' .')}. Restore the "
            "file, or start a new run with --job.name."
        ) from None
    return Rollbacks(
        tuple(Skipped(*entry) for entry in values["skipped"]), values["in_vain"], values["reached"]
    )


def record_rollback(
    folder: Path, checkpoints: Checkpoints, config: FaultsConfig, bad: BadStreak, start: Start
) -> Rollbacks:
    """Roll back to `start`: rename newer checkpoints and record the rollback. Rank 0 only.

    Raises UserError and changes nothing if rollback is disabled, no checkpoint precedes the bad
    steps, or the last `max_rollbacks` rollbacks brought no progress.
    """
    rollbacks, limit = read_rollbacks(folder).with_rollback(bad), config.max_rollbacks
    lower = "lower [optimizer] lr with --checkpoint.allow_changes true"
    older = "resume from an older checkpoint with --checkpoint.resume PATH"
    if limit == 0:
        fix = f"Allow rollbacks: --faults.max_rollbacks 3; or {lower}."
        raise UserError(rollback_refusal(folder, config, bad, "max_rollbacks=0", fix))
    if start.path is None:
        reason = f"no checkpoint from before step {bad.first}"
        raise UserError(
            rollback_refusal(folder, config, bad, reason, "Lower [optimizer] lr in a new run.")
        )
    if rollbacks.in_vain > limit:
        reason = f"max_rollbacks={limit} brought no progress"
        fix = f"{lower.capitalize()}, or {older}."
        raise UserError(rollback_refusal(folder, config, bad, reason, fix))
    # Rename first: after a kill in between, the run repeats the bad steps and rolls back again.
    set_aside_newer(checkpoints, start)
    rollbacks.write(folder)
    return rollbacks


def rollback_refusal(
    folder: Path, config: FaultsConfig, bad: BadStreak, reason: str, fix: str
) -> str:
    """The error message of a run that cannot roll back: why (`reason`) and what to do (`fix`)."""
    return (
        f"[faults] max_consecutive_bad_steps={config.max_consecutive_bad_steps}: the last "
        f"{bad.last - bad.first + 1} steps up to step {bad.last} had a non-finite loss or gradient "
        f"or a spike, and the run cannot roll back: {reason}. {fix} The samples: "
        f"python -m titan_dit replay --run {folder} --step {bad.first}. See docs/bad-numbers.md."
    )


@dataclass(frozen=True)
class Progress:
    """Progress after a step, equal on all ranks; the default is step 0."""

    step: int = 0
    cursor: int = 0
    """First sample number of the next step."""
    ledger: Ledger = field(default_factory=Ledger)
    """Status of the samples before the cursor."""
    guard: Mapping[str, Any] = field(default_factory=dict)
    """The values of `Guard.state`."""
    samples_per_step: tuple[int, ...] = ()
    """Samples of a step of each bucket; () if all data has one shape."""
    stage_cursor: int = 0
    """The cursor at which the stage of the step began."""

    @classmethod
    def of(cls, record: Mapping[str, Any], rollbacks: Rollbacks | None = None) -> Progress:
        """Read from a checkpoint's record; an empty record is step 0.

        Adds the skipped ranges of later `rollbacks`. Old records have only `nan_steps`, no guard.
        """
        ledger = Ledger.of(record)
        return cls(
            record.get("step", 0),
            record.get("cursor", 0),
            ledger.skip(rollbacks.skipped) if rollbacks else ledger,
            {"nan_steps": record.get("nan_steps", 0), **record.get("guard", {})},
            tuple(record.get("samples_per_step", ())),
            record.get("stage_cursor", 0),
        )

    def at_new_stage(self) -> Progress:
        """The progress of a stage that begins after this step.

        Its samples are others: bad steps in a row and the mean norm that spikes are held against
        are counted anew, so a rollback never undoes steps of an earlier stage.
        """
        anew = {"in_a_row": 0, "streak": None, "average": 0.0, "num_good": 0}
        return replace(self, stage_cursor=self.cursor, guard={**self.guard, **anew})

    def check_buckets(self, samples_per_step: tuple[int, ...]) -> None:
        """Raise UserError unless a run's steps are of these sizes; () without buckets.

        Others would skip some samples of a bucket and repeat others.
        """
        if self.cursor > self.stage_cursor and self.samples_per_step != samples_per_step:
            was, now = (show(list(sizes)) for sizes in (self.samples_per_step, samples_per_step))
            raise UserError(
                f"[training] samples of a step, by bucket: {was} in the checkpoint, {now} in this "
                "run. The order of samples depends on them. Set global_batch_size, or "
                "tokens_per_step and batch_multiple, as they were; or start a new run at its "
                "weights with --checkpoint.init."
            )

    def as_record(self, num_rows: int) -> dict[str, Any]:
        """The keys that `of` reads; `num_rows`: samples of an epoch of the stage."""
        buckets = {"samples_per_step": list(self.samples_per_step)}
        stage = {"stage_cursor": self.stage_cursor} if self.stage_cursor else {}
        return (
            (buckets if self.samples_per_step else {})
            | stage
            | {
                "step": self.step,
                "cursor": self.cursor,
                "nan_steps": self.guard["nan_steps"],
                "guard": dict(self.guard),
                "ledger": self.ledger.as_json(self.cursor, num_rows, self.stage_cursor),
            }
        )


Say: TypeAlias = Callable[..., None]
"""Prints console lines."""


def saves_of(
    run: JobSection, settings: CheckpointConfig, ema: EMAConfig, steps: int
) -> Checkpoints:
    """The checkpoints of a run that trains, with the snapshots of its averages."""
    checkpoints = checkpoints_of(run, settings)
    checkpoints.snapshots = Snapshots(checkpoints, ema, steps)
    return checkpoints


def resumed(
    checkpoints: Checkpoints,
    run: JobSection,
    settings: CheckpointConfig,
    identity: run_identity.Identity,
    tensors: TensorTree,
    ema: EMA,
    say: Say,
) -> Progress | None:
    """Load the checkpoint selected by [checkpoint] resume; None to start at step 0. Collective.

    Raises UserError if the checkpoint does not match `identity`, unless allow_changes is set. A
    change that would train on held-out rows is always refused.
    """
    start, ranks = starting_point(checkpoints, settings.resume), Ranks()
    path, record = start.path, start.record
    if path is None:
        ranks.run_on_first(lambda: check_not_elsewhere(run, settings))
        checkpoints.forget_snapshots_after(0)
        return None
    say(*start.messages())
    run_identity.check_held_out(path, record, identity)
    own = is_own(checkpoints, path)
    if not settings.allow_changes:
        advice = partial(run_identity.ways_out, path, tensors["model"], own=own)
        run_identity.check_same_mathematics(path, record, identity, advice)
    check_base(path, record, identity.config["lora"]["base"])
    check_adapters(path, record, tensors["model"])
    has_moments = record.get("imported") and checkpoint.holds(path, "optimizer")
    if settings.allow_changes or has_moments:
        # The checkpoint may be of another optimizer, or of a run with frozen parameters.
        tensors, lines = without_missing(path, tensors)
        held = {name: dtype for name, (_, dtype) in checkpoint.contents(path).items()}
        model = {f"model.{name}": weight for name, weight in tensors["model"].items()}
        say(*lines, *lines_of_rounding(model, held))
    load_weights = load_imported if record.get("imported") else load
    load_weights(path, record, tensors, ema)
    rollbacks = read_rollbacks(run.folder) if own else Rollbacks()
    progress = Progress.of(record, ranks.gather(rollbacks)[0])
    ranks.run_on_first(lambda: set_aside_newer(checkpoints, start))
    checkpoints.forget_snapshots_after(progress.step)
    say(f"resumed from {path}", *run_identity.lines_of_new_keys(record, identity))
    return progress


def lines_of_rounding(model: Mapping[str, Tensor], saved: Mapping[str, torch.dtype]) -> list[str]:
    """Console line about bf16 weights whose `saved` format, by name, is another; or none."""
    in_bf16 = (name for name, weight in model.items() if weight.dtype == torch.bfloat16)
    if all(saved.get(name, torch.bfloat16) == torch.bfloat16 for name in in_bf16):
        return []
    return ['[precision] weights="bf16": loaded fp32 weights are rounded to the nearest bf16 once']


def rolled_back(
    checkpoints: Checkpoints,
    run: JobSection,
    config: FaultsConfig,
    bad: BadStreak,
    tensors: TensorTree,
    ema: EMA,
    say: Say,
) -> Progress:
    """Load the newest checkpoint before the bad steps, or raise UserError. Collective."""
    checkpoints.wait()
    start = newest_before(checkpoints, bad.first)
    # Only the first rank changes the disk; if it cannot, all ranks raise.
    rollbacks = Ranks().run_on_first(
        lambda: record_rollback(run.folder, checkpoints, config, bad, start)
    )
    assert start.path
    checkpoints.forget_snapshots_after(start.record["step"])
    # The checkpoint may be of another optimizer: the run was then resumed with allow_changes.
    tensors, lines = without_missing(start.path, tensors)
    load(start.path, start.record, tensors, ema)
    say(*start.messages(), bad.message(start.path), *lines)
    return Progress.of(start.record, rollbacks)
