"""`python -m titan_dit checkpoint list DIR`: list the checkpoints of a run."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from titan_dit.checkpoint import run_checkpoints
from titan_dit.checkpoint.run_checkpoints import NAME, step_of
from titan_dit.checkpoint.store import MANIFEST, Location, Store, location, store_of
from titan_dit.commands.flags import CheckpointListFlags
from titan_dit.observe import console
from titan_dit.recovery.resume import readable
from titan_dit.system.progress import duration


def main(options: CheckpointListFlags) -> None:
    """Print one line per checkpoint."""
    found = run_checkpoints.resolve(location(options.run))
    folder = found.checkpoints.folder
    store = store_of(folder)
    named = found.folders()
    if not named:
        raise found.none_found("checkpoint list")
    console.say(f"{'step':>10}  {'samples':>13}  {'epoch':>7}  {'MiB':>9}  {'age':>8}  files")
    for path in named:
        record, what = readable(path)
        sizes = record.get("files", {})
        gone = [name for name, entry in sizes.items() if not has(store, path / name, entry)]
        state = f"damaged: {', '.join([what, *gone] if what else gone)}" if what or gone else "all"
        if what and not store.renames and not store.has(path / MANIFEST):
            state = "unfinished"
        mib = sum(entry["bytes"] for entry in sizes.values()) / 2**20
        console.say(
            f"{step_text(path):>10}  {record.get('cursor', 0):13,}  {epoch(record):>7}  "
            f"{mib:9,.1f}  {age(record):>8}  {state}"
        )
    console.say(f"in {folder}; `checkpoint verify` checks the files' contents")


def step_text(path: Location) -> str:
    """The step in a checkpoint's name; imported weights have a name of their own."""
    return str(step_of(path)) if NAME.fullmatch(path.name) else "-"


def has(store: Store, file: Location, expected: dict[str, Any]) -> bool:
    """Return True if the file exists with the expected size."""
    return store.has(file) and store.size(file) == expected["bytes"]


def epoch(record: dict[str, Any]) -> str:
    """Samples drawn, in epochs; "-" if their length is unknown.

    Older checkpoints do not hold the samples of an epoch. Theirs has all rows of the dataset, with
    those held out.
    """
    ledger, data = record.get("ledger", {}), record.get("data", {})
    samples = ledger.get("samples_per_epoch") or data.get("count")
    return f"{record['cursor'] / samples:.2f}" if samples else "-"


def age(record: dict[str, Any]) -> str:
    """Format the checkpoint's age; "-" for formats without a timestamp."""
    if "written_at" not in record:
        return "-"
    passed = datetime.now(UTC) - datetime.fromisoformat(record["written_at"])
    return duration(max(0.0, passed.total_seconds()))
