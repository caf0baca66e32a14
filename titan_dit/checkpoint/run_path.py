"""Resolves a path that names a run directory, its checkpoints folder, or one checkpoint.

Every command and [checkpoint] resume take all three, as a path or a URL.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from titan_dit.checkpoint.run_checkpoints import NAME, Checkpoints, step_of
from titan_dit.checkpoint.store import MANIFEST, Location, location, store_of
from titan_dit.config import config_file
from titan_dit.config.section import UserError
from titan_dit.system import run_files

CONFIG, CHECKPOINTS = run_files.CONFIG, run_files.CHECKPOINTS
OF_LIBRARIES = ("config.json", "model_index.json")
"""Files by which a folder of transformers or diffusers is recognised."""
WANTED = "Give a run directory such as outputs/digits, its checkpoints folder, or one checkpoint."


@dataclass(frozen=True)
class RunPath:
    """A resolved path."""

    given: Location
    run: Location
    """The run directory; the checkpoints folder if that is elsewhere, by [checkpoint] dir."""
    checkpoints: Checkpoints
    """All checkpoints of the run, `checkpoint` included."""
    checkpoint: Location | None
    """Set if the path names one checkpoint, damaged or not."""

    def folders(self) -> list[Location]:
        """Every checkpoint that the path names, complete or damaged, oldest first."""
        return [self.checkpoint] if self.checkpoint else self.checkpoints.folders()

    def none_found(self, flag: str, what: str = "no checkpoint found") -> UserError:
        """The error for this path. `flag`: its option or key; `what`: what is wrong with it."""
        store = store_of(self.given)
        runs = [name for name in store.names(self.given) if store.has(self.given / name / CONFIG)]
        if any(store.has(self.given / name) for name in OF_LIBRARIES):
            hint = (
                f"Import weights first: python -m titan_dit convert --input {self.given} --out DIR."
            )
        elif runs and not store.has(self.given / CONFIG):
            more = ", ..." if len(runs) > 4 else ""
            hint = f"It holds runs ({', '.join(runs[:4])}{more}): give one of them."
        elif isinstance(self.given, Path) and not self.given.exists():
            hint = f"There is no such path. {WANTED}"
        else:
            hint = WANTED
        return UserError(f"{flag} {self.given}: {what}. {hint}")


def resolve(given: Location) -> RunPath:
    """Find out which of the three a path names. A file in one of them counts as its folder."""
    where = parent(given) if isinstance(given, Path) and given.is_file() else given
    names = store_of(where).names(where)
    if MANIFEST in names or (names and NAME.fullmatch(where.name)):
        folder = parent(where)
        return RunPath(given, run_of(folder), Checkpoints(folder), where)
    if any(NAME.fullmatch(name) for name in names):
        return RunPath(given, run_of(where), Checkpoints(where), None)
    checkpoints = Checkpoints(where / CHECKPOINTS)
    if CHECKPOINTS not in names and CONFIG in names and isinstance(where, Path):
        table = config_file.read_toml(where / CONFIG).get("checkpoint", {})
        if table.get("dir"):
            checkpoints = Checkpoints(location(str(table["dir"])))
    return RunPath(given, where, checkpoints, None)


def run_of(folder: Location) -> Location:
    """The run directory of a checkpoints folder; the folder itself if its parent is no run."""
    above = parent(folder)
    return above if store_of(above).has(above / CONFIG) else folder


def parent(where: Location) -> Location:
    """The containing folder, also for "." and ".."."""
    if isinstance(where, Path) and where.name in ("", ".."):
        where = where.resolve()
    return where.parent


def find_checkpoint(given: Location, step: int | None, flag: str = "--run") -> Location:
    """Return a run's checkpoint at `step` (None: the newest), or `given` if it is a checkpoint."""
    named = resolve(given)
    if path := named.checkpoint:
        if step is not None and NAME.fullmatch(path.name) and step_of(path) != step:
            raise UserError(f"--step {step}: {path} is one of step {step_of(path)}. Omit --step.")
        return path
    whole = {step_of(path): path for path in named.checkpoints.complete()}
    if not whole:
        raise named.none_found(flag)
    if step is None:
        return whole[max(whole)]
    if step not in whole:
        have = ", ".join(map(str, whole))
        raise UserError(f"--step {step}: {given} has no checkpoint of this step. It has {have}.")
    return whole[step]
