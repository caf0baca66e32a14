"""`python -m titan_dit ema`: make an average of any width from a run's snapshots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titan_dit.checkpoint import checkpoint
from titan_dit.checkpoint.averages import FOLDER, Shapes, Term, shapes_of, write_sum
from titan_dit.checkpoint.run_checkpoints import Checkpoints, NamedRun, resolve, step_of
from titan_dit.checkpoint.store import MANIFEST, Location, location, store_of
from titan_dit.checkpoint.torch_files import CONTENTS as TENSORS
from titan_dit.checkpoint.torch_files import METADATA
from titan_dit.commands.flags import EmaFlags
from titan_dit.config import schema
from titan_dit.config.section import PositiveInt, SigmaRel, UserError
from titan_dit.config.training import power_name
from titan_dit.interop import imported
from titan_dit.observe import console
from titan_dit.optim.ema import Fit, Profile, clock, expressible, fit
from titan_dit.ranks.disk_errors import writing
from titan_dit.ranks.process_group import Ranks
from titan_dit.recovery.ledger import Ledger
from titan_dit.recovery.resume import readable
from titan_dit.system.progress import ProgressLine, count

LARGEST_ERROR = 0.01
"""Largest relative error of a profile; beyond it the snapshots do not make the average."""
SHOWN_STEPS = 8
OF_CHECKPOINT = (MANIFEST, METADATA, TENSORS)
"""Files of a checkpoint without tensors."""


def wrong_groups(groups: object) -> str | None:
    """Message about [optimizer] groups that are no list of tables; None if they are."""
    is_right = isinstance(groups, list | tuple) and all(isinstance(g, dict) for g in groups)
    return None if is_right else "must be a list of tables"


CONFIG = {
    "ema": {"every": PositiveInt, "power": tuple[SigmaRel, ...]},
    "optimizer": {"groups": schema.Maybe(schema.Ruled(schema.ANY, wrong_groups))},
    "lora": schema.Maybe({"rank": schema.Maybe(int)}),
}
"""Sections and keys that are read of a snapshot's config."""


@dataclass(frozen=True)
class Snapshot:
    """One snapshot of a run's averages."""

    path: Location
    record: Mapping[str, Any]

    @property
    def profiles(self) -> list[Profile]:
        """The profiles of its averages: the weight of every step."""
        table, ledger = self.record["config"]["ema"], Ledger.of(self.record)
        skipped = [(entry.first_step, entry.last_step) for entry in ledger.untrained]
        time = clock(self.record["step"], table["every"], skipped)
        return [Profile(time, sigma_rel) for sigma_rel in table["power"]]


def main(options: EmaFlags) -> None:
    """Fit the weights, combine the snapshots, write the checkpoint."""
    target = location(options.out)
    check_target(target)
    named = resolve(location(options.run))
    snapshots = [read(path) for path in found(named, options.step)]
    profiles = [profile for snapshot in snapshots for profile in snapshot.profiles]
    wanted = Profile(profiles[-1].time, options.sigma_rel)
    fitted = fit(profiles, wanted)
    if fitted.error > LARGEST_ERROR:
        raise UserError(not_expressible(options, snapshots, profiles))
    terms = list(terms_of(snapshots, fitted))
    for line in lines(options, snapshots, terms, fitted):
        console.say(line)
    frozen = has_frozen(snapshots[-1].record["config"])
    sums = [(shapes_of(terms), terms), *not_averaged(named.checkpoints, terms, frozen)]
    verify([term.path for _, parts in sums for term in parts])
    total = sum(size_of(shapes) * len(term.weights) for shapes, parts in sums for term in parts)
    progress = ProgressLine(total, "B", what="combined", form=count)
    with writing(f"--out {target}"):
        write_sum(target, "model", sums, record_of(options, snapshots[-1], terms), progress.add)
    progress.end()
    console.say(f"wrote   {target}. Draw from it with sample --run {target}")


def check_target(target: Location) -> None:
    """Raise UserError if --out exists, unless it is what a killed `ema` has left."""
    store = store_of(target)
    names, left = store.names(target), store.names(store.aside(target))
    if store.has(target) or MANIFEST in names or (names and store.renames):
        raise UserError(f"--out {target} exists. Choose another name, or delete it.")
    if others := [n for n in left if n not in OF_CHECKPOINT and ".distcp" not in n]:
        raise UserError(
            f"--out {target}: {store.aside(target)} holds {others[0]}. Delete it, or choose "
            "another name."
        )


def found(named: NamedRun, step: int | None) -> list[Location]:
    """The snapshots up to `step`, oldest first. Raises UserError if there are none."""
    folder = named.checkpoints.folder / FOLDER
    paths = Checkpoints(folder).complete()
    if not paths and not named.folders():
        raise named.none_found("--run", "no snapshots found")
    if not paths:
        raise UserError(
            f"--run {named.given}: no snapshots in {folder}. A run takes them if it has [ema] "
            "power = [0.05, 0.1] and [ema] snapshots and [checkpoint] every above 0."
        )
    steps = list(map(step_of, paths))
    if step is None:
        return paths
    if step not in steps:
        more = f", ... {steps[-1]}" if len(steps) > SHOWN_STEPS else ""
        have = ", ".join(map(str, steps[: SHOWN_STEPS - 1] if more else steps))
        raise UserError(f"--step {step}: no snapshot of this step. There are {have}{more}.")
    return paths[: steps.index(step) + 1]


def read(path: Location) -> Snapshot:
    """Read a snapshot's record. Raises UserError if it is damaged."""
    record, what = readable(path)
    if what:
        raise damaged(path, what)
    try:
        schema.check(record["config"], CONFIG, "its config")
    except UserError as error:
        raise damaged(path, str(error).rstrip(".")) from None
    return Snapshot(path, record)


def damaged(path: Location, what: str) -> UserError:
    """The error for a damaged snapshot."""
    return UserError(f"{path} is damaged: {what}. Delete it: `ema` then uses the others.")


def not_expressible(
    options: EmaFlags, snapshots: Sequence[Snapshot], profiles: Sequence[Profile]
) -> str:
    """The error for a width that the snapshots cannot make."""
    ranges = expressible(profiles, profiles[-1].time, LARGEST_ERROR)
    near = " or ".join(f"{a:g}" if a == b else f"{a:g} to {b:g}" for a, b in ranges)
    newest = snapshots[-1].record["step"]
    return (
        f"--sigma-rel {options.sigma_rel}: the {len(snapshots)} snapshots of {options.run} up to "
        f"step {newest} make {near}, to {LARGEST_ERROR:.0%} of the profile. Choose one of these; "
        "more [ema] snapshots and other [ema] power make others."
    )


def terms_of(snapshots: Sequence[Snapshot], fitted: Fit) -> Iterator[Term]:
    """Yield the snapshots with their weights; snapshots of weight 0 are left out."""
    weights = iter(fitted.weights)
    for snapshot in snapshots:
        pairs = [(f"ema.{power_name(p.sigma_rel)}.", next(weights)) for p in snapshot.profiles]
        if used := {prefix: weight for prefix, weight in pairs if weight}:
            yield Term(snapshot.path, used)


def has_frozen(config: Mapping[str, Any]) -> bool:
    """True if a checkpoint's config freezes parameters, which then have no averages."""
    groups = config["optimizer"].get("groups", ())
    return bool(config.get("lora", {}).get("rank")) or any(group.get("frozen") for group in groups)


def not_averaged(
    checkpoints: Checkpoints, terms: Sequence[Term], frozen: bool
) -> Iterator[tuple[Shapes, list[Term]]]:
    """Yield parameters that are in a checkpoint of the run, but not averaged: they are frozen.

    Raises UserError if the run has no checkpoint.
    """
    if (path := checkpoints.newest()) is None:
        if frozen:
            raise UserError(
                f"--run: {checkpoints.folder} has snapshots, but no checkpoint, which alone holds "
                "the frozen parameters. Let the run take one: it saves when it is stopped, too."
            )
        return
    averaged, prefix = shapes_of(terms[-1:]), "model."
    saved = {n: entry for n, entry in checkpoint.contents(path).items() if n.startswith(prefix)}
    model = {name.removeprefix(prefix): entry for name, entry in saved.items()}
    if left := {name: entry for name, entry in model.items() if name not in averaged}:
        yield left, [Term(path, {prefix: 1.0})]


def verify(paths: Sequence[Location]) -> None:
    """Check the SHA-256 of all files that will be read. Raises UserError for one that differs."""
    entries = {path: read(path).record["files"].values() for path in paths}
    size = sum(entry["bytes"] for files in entries.values() for entry in files)
    progress = ProgressLine(size, "B", what="verified", form=count)
    for path in entries:
        names = checkpoint.damaged_files(path, read(path).record, Ranks(), progress.add)
        if names:
            raise damaged(path, ", ".join(names))
    progress.end()


def size_of(shapes: Shapes) -> int:
    """Bytes of tensors."""
    return sum(shape.numel() * dtype.itemsize for shape, dtype in shapes.values())


def lines(
    options: EmaFlags, snapshots: Sequence[Snapshot], terms: Sequence[Term], fitted: Fit
) -> Iterator[str]:
    """Console lines: the averages, and the snapshots that they are made of."""
    powers = sorted({prefix for term in terms for prefix in term.weights})
    names = [prefix.removeprefix("ema.").removesuffix(".") for prefix in powers]
    yield (
        f"sigma_rel {options.sigma_rel} at step {snapshots[-1].record['step']}, of {len(terms)} "
        f"snapshots; error of the profile {fitted.error:.1e}"
    )
    yield f"{'step':>10}" + "".join(f"  {name:>14}" for name in names)
    for term in terms:
        shown = (f"{term.weights[p]:14.6e}" if p in term.weights else " " * 14 for p in powers)
        yield f"{step_of(term.path):10}" + "".join(f"  {text}" for text in shown)


def record_of(options: EmaFlags, newest: Snapshot, terms: Sequence[Term]) -> dict[str, Any]:
    """The checkpoint's record: like imported weights it belongs to no run, and has no average."""
    return {
        **imported.record_made_of(newest.record),
        "averaged": {
            "run": str(options.run),
            "step": newest.record["step"],
            "sigma_rel": options.sigma_rel,
            "weights": [[step_of(term.path), dict(term.weights)] for term in terms],
        },
    }
