"""Import classes and functions named in a config: built-in or "package.module:name"."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Collection, Iterator, Mapping
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

from titan_dit.config.did_you_mean import nearest
from titan_dit.config.section import UserError, show

OF_RUN = {
    **{section: "name" for section in ("model", "objective", "data", "optimizer")},
    "lr_scheduler": "decay",
    "pipeline": "schedule",
    "parallel": "tensor_plan",
    "repa": "network",
}
"""Section -> the key that may name a module. Commands that read a run's config import these.

Only `train` imports others, such as hooks, and only from the config that it is given."""


def check_trusted(
    tables: Mapping[str, Mapping[str, Any]],
    source: str,
    trust: bool,
    only: Collection[str] = tuple(OF_RUN),
) -> None:
    """Raise UserError if a run's config names modules to import, unless the user trusts it.

    The author of a run chose these names, and may have put a module of such a name beside it.
    `source`: where the config is, for errors. `only`: the sections that are read.
    """
    written = tables.get("training", {}).get("stages", ())
    stages = written if isinstance(written, list | tuple) else ()
    every = (tables, *(stage for stage in stages if isinstance(stage, Mapping)))
    for section, of_stage in product(only, every):
        table = of_stage.get(section, {})
        name = table.get(OF_RUN[section]) if isinstance(table, Mapping) else None
        if isinstance(name, str) and ":" in name and not trust:
            raise UserError(
                f"{source}: its config has [{section}] {OF_RUN[section]}={show(name)}. Importing "
                f"{name.partition(':')[0]}, from {Path.cwd()} or what is installed, runs its code. "
                "Look at it, then add --trust (in Python trust=True)."
            )


def is_imported(name: str) -> bool:
    """True for a name of the catalog, and for one whose module is imported already."""
    return ":" not in name or name.partition(":")[0] in sys.modules


def look_up(table: Mapping[str, str], where: str, name: str) -> Any:
    """Import a row of `table` or "package.module:thing"; `where`: the config key, for errors.

    Raises UserError for an unknown name.
    """
    if ":" in name:
        return imported(name, where)
    if name not in table:
        fix = nearest(name, table) if table else ""
        raise UserError(
            f'{where}={show(name)} is unknown.{fix} Your own are written "package.module:Name".'
        )
    module, _, attribute = table[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def imported(name: str, where: str) -> Any:
    """Import "package.module:thing"; UserError with the reason on failure."""
    module_name, _, attribute = name.partition(":")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(
                f"{where}={show(name)}: {module_name} imports {error.name}, which is not "
                "installed. Install it."
            ) from error
        raise UserError(
            f"{where}={show(name)}: there is no module {error.name}, neither installed nor in "
            f"{Path.cwd()}. Run the command from the folder that holds it, or install it."
        ) from None
    except UserError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        raise UserError(
            f"{where}={show(name)}: importing {module_name} raised {type(error).__name__}: {text}. "
            f"Correct {module_name}."
        ) from error
    thing = getattr(module, attribute, None)
    if thing is None:
        public = [key for key in vars(module) if not key.startswith("_")]
        raise UserError(
            f"{where}={show(name)}: {module.__file__} has no {attribute or 'name after the colon'}."
            f"{nearest(attribute, public) if public else ''}"
        )
    return thing


def import_module(name: str) -> ModuleType:
    """Import a module; the current folder is always last on the path."""
    put_current_folder_last()
    return importlib.import_module(name)


def put_current_folder_last() -> None:
    """Move the current folder to the end of sys.path, where it shadows no installed package.

    `python -m` puts it first.
    """
    here = str(Path.cwd())
    if sys.path[-1:] != [here] or "" in sys.path:
        sys.path[:] = [entry for entry in sys.path if entry not in ("", here)] + [here]
        importlib.invalidate_caches()


def require(thing: Any, members: Mapping[str, str], where: str, name: str) -> None:
    """Raise UserError for a user's class without all `members` (name -> description)."""
    lacking = [f"{member} ({what})" for member, what in members.items() if not has(thing, member)]
    if lacking:
        called = getattr(thing, "__name__", name.partition(":")[2])
        raise UserError(
            f"{where}={show(name)}: {called} in {file_of(thing)} has no {', '.join(lacking)}."
        )


def has(thing: Any, member: str) -> bool:
    """True if a class has a member that is not abstract."""
    found = inspect.getattr_static(thing, member, None)
    return found is not None and not getattr(found, "__isabstractmethod__", False)


def file_of(thing: Any) -> str:
    """The file that a class or function was imported from."""
    try:
        return inspect.getfile(thing)
    except TypeError:
        return "an unknown file"


def origins(sections: Mapping[str, object]) -> Iterator[str]:
    """Yield a line with module and file for every entry that is from a user's module.

    An entry is an instance, a class, a function or an imported "package.module:name".
    """
    for section, thing in sections.items():
        if isinstance(thing, str):
            yield f"[{section}] {thing} is from {sys.modules[thing.partition(':')[0]].__file__}"
            continue
        kind = thing if isinstance(thing, type) or inspect.isfunction(thing) else type(thing)
        if not kind.__module__.startswith("titan_dit."):
            yield f"[{section}] {kind.__module__}:{kind.__qualname__} is from {file_of(kind)}"
