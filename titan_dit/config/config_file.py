"""TOML and flags to a JobConfig, and back."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from titan_dit.config import did_you_mean, dotted_names, flags, toml_text
from titan_dit.config.catalog import DEFAULT_NAMES, SECTIONS
from titan_dit.config.job import FREE_ON_RESUME, JobConfig
from titan_dit.config.section import (
    FromHome,
    Section,
    UserError,
    conform,
    hints_of,
    show,
    written_name,
)

Tables = dict[str, dict[str, Any]]
Variant = Callable[[str, str], type[Section]]
"""(section, name) -> its dataclass, see `catalog.variant`."""

PACKAGE = Path(__file__).resolve().parent.parent
# Recipes are in the package if installed, beside it in a clone.
INSTALLED = PACKAGE / "train_configs"
CONFIG_DIR = INSTALLED if INSTALLED.is_dir() else PACKAGE.parent / "train_configs"
CHOSEN_BY_NAME = ("model", "objective", "data", "optimizer")
FORMAT = 5
"""Format number of config.toml and of a checkpoint's config; the first format had none."""
BEFORE_FORMAT_4 = {"data_order": "sort", "initial_weights": "generator"}
"""Key of [job] that older formats lack -> the value with which their runs ran."""
RENAMED = {
    "evaluation": "fid",
    "lr_schedule": "lr_scheduler",
    "remat": "activation_checkpoint",
    "data.short_share": "data.short_seq_prob",
    "data.vocabulary": "data.vocab_size",
    "data.workers": "data.num_workers",
    "model.channels": "model.in_channels",
    "model.ffn": "model.intermediate_size",
    "model.heads": "model.num_heads",
    "model.hidden": "model.hidden_size",
    "model.layers": "model.num_layers",
    "model.patch": "model.patch_size",
    "model.positions": "model.position_embedding_type",
    "model.query_groups": "model.num_key_value_heads",
    "model.rotary_base": "model.rope_theta",
    "model.tied": "model.tie_word_embeddings",
    "model.vocabulary": "model.vocab_size",
    "objective.label_dropout": "objective.condition_dropout",
    "objective.schedule": "objective.noise_schedule",
    "sampling.length": "generation.max_new_tokens",
    "sampling.prompt": "generation.prompt",
    "sampling.temperature": "generation.temperature",
    "sampling.top_k": "generation.top_k",
    "sampling.top_p": "generation.top_p",
}
"""Sections and keys of older formats: "section" or "section.key" -> what it is called now.

Configs, records and flags may have either; `--help` shows the new ones alone. A key keeps its old
name in a class of the user's that declares it."""
ZERO_WAS_UNSET = frozenset(
    {
        "model.intermediate_size",
        "model.num_key_value_heads",
        "parallel.blocks_per_fsdp_unit",
        "parallel.prefetch",
        "precision.loss_scale",
        "training.epochs",
        "training.steps",
        "validation.samples",
    }
)
"""Keys whose 0 meant "not set" up to format 4. A text that was not set was "" (`conform`)."""
PROTOCOLS = ("ModelConfig", "ObjectiveConfig", "DataConfig", "OptimizerConfig")


def load(arguments: Sequence[str], variant: Variant) -> JobConfig:
    """Read `--config FILE` and its overrides `--section.key value`."""
    sections = (*plain_sections(), *CHOSEN_BY_NAME, *(old for old in RENAMED if "." not in old))
    config_name, given = flags.split(arguments, sections)
    config_path = find_config(config_name)
    tables = overridden(read_toml(config_path), given, variant)
    tables.setdefault("job", {}).setdefault("name", config_path.stem)
    config = build(tables, variant)
    config.job.check_name()
    return config


def overridden(tables: Tables, given: dict[str, list[str]], variant: Variant) -> Tables:
    """Set the keys of flags in the tables. `given`: "section.key" -> words of the flag.

    Raises UserError for words of another form.
    """
    tables = in_new_sections(tables)
    for section in CHOSEN_BY_NAME:
        # First: the name decides the section's other keys.
        if chosen := given.pop(f"{section}.name", None):
            tables[section] = renamed(section, tables.get(section, {}), " ".join(chosen), variant)
    by_section: dict[str, dict[str, list[str]]] = {}
    for key, texts in given.items():
        section, dot, name = new_path(key).partition(".")
        if not dot or not section:
            form = "flags have the form --section.key value, as in the TOML."
            hint = did_you_mean.for_flag(name or section, known_keys(tables, variant))
            raise UserError(f"--{key}: {form}{hint}")
        put_once(by_section.setdefault(section, {}), section, name, texts)
    for section, words in by_section.items():
        put_keys(tables, section, words, variant, flags.value_of)
    return tables


def put_keys(
    tables: Tables,
    section: str,
    given: Mapping[str, Any],
    variant: Variant,
    value_of: Callable[[Any, Any], Any] = lambda value, hint: value,
) -> None:
    """Set keys of a section in `tables`, and drop the keys that they replace.

    `value_of`: (what is given, type of the key) -> its value. Raises UserError for unknown keys.
    """
    kind = section_type(section, {section: dict(given)} | tables, variant)
    hints = hints_of(kind)
    table = tables[section] = renamed_keys(section, tables.get(section, {}), hints)
    found = renamed_keys(section, given, hints)
    for name, value in found.items():
        if name not in hints:
            raise unknown_key(section, name, tables, variant)
        for rival in kind.replaces.get(name, ()):
            if rival not in found:
                table.pop(rival, None)
        table[name] = value_of(value, hints[name])


def renamed(section: str, table: dict[str, Any], name: str, variant: Variant) -> dict[str, Any]:
    """Set a section's `name` to a flag's value; drop the keys that the named class lacks."""
    if table.get("name") == name:
        return table
    known = hints_of(variant(section, name))
    table = renamed_keys(section, table, known)
    return {key: value for key, value in table.items() if key in known} | {"name": name}


def take_dry_run(arguments: Sequence[str]) -> tuple[list[str], int | None]:
    """Remove `--dry-run [WORLD]` and return WORLD: 0 if omitted, None without the flag.

    Raises UserError for another WORLD.
    """
    rest: list[str] = []
    values: list[str] | None = None
    into = rest
    for argument in arguments:
        if argument.startswith("--"):
            key, equals, value = argument[2:].partition("=")
            if key.replace("_", "-") == "dry-run":
                values = [value] if equals else []
                into = values
                continue
            into = rest
        into.append(argument)
    if values is None:
        return rest, None
    if len(values) > 1 or not all(value.isdecimal() and int(value) for value in values):
        raise UserError(
            f"--dry-run {' '.join(values)}: give the number of ranks, --dry-run 16, or nothing for "
            "the ranks that the sizes of [parallel] need."
        )
    return rest, int(values[0]) if values else 0


def find_config(name: str) -> Path:
    """Find a config by path, or by name in train_configs/, with or without .toml.

    Raises UserError if there is none.
    """
    name = FromHome().expanded(name)
    names = (name, f"{name}.toml")
    folders = (Path(), Path("train_configs"), CONFIG_DIR)
    for candidate in (folder / file for folder in folders for file in names):
        if candidate.is_file():
            return candidate
    known = sorted(path.name for path in CONFIG_DIR.glob("*.toml"))
    if Path(name).is_dir():
        files = sorted(map(str, Path(name).glob("*.toml"))) or known
        raise UserError(f"--config {name} is a folder. Name a file: {', '.join(files)}.")
    near = did_you_mean.like(f"{Path(name).stem}.toml", known, did_you_mean.ELSEWHERE)
    raise UserError(
        f"--config {name}: no such file, here or in train_configs/ ({', '.join(known)})."
        f"{f' Did you mean {near}?' if near else ''}"
    )


def read_toml(path: Path, unnumbered: int = FORMAT) -> Tables:
    """Parse a file; UserError with file and line on a syntax error.

    `unnumbered` is the format of a file that names none.
    """
    tables = toml_text.parse(path)
    number = check_format(tables.pop("format", unnumbered), path)
    stages = tables.pop("stages", None)
    if isinstance(stages, dict):
        raise UserError(f"{path}: write [[stages]], with double brackets, once for each stage.")
    for name, table in tables.items():
        if isinstance(table, list) and table and isinstance(table[0], dict):
            raise UserError(f"{path}: write [{name}], with single brackets.")
        if not isinstance(table, dict):
            raise UserError(
                f"{path}: {name}={show(table)} is outside any [section]. Move it there."
            )
    if stages is not None:
        put_once(tables.setdefault("training", {}), "training", "stages", stages)
    return of_format(number, tables)


def of_run(path: Path) -> Tables:
    """The tables of a run's config.toml; the first ones had no format number."""
    return read_toml(path, unnumbered=1)


def keys_of(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Set keys as "section.key" -> value, by today's names; builds and imports nothing."""
    found = {}
    for section, table in in_new_sections(tables).items():
        for key, value in table.items():
            path = RENAMED.get(f"{section}.{key}", f"{section}.{key}")
            if value not in (None, "") and (value or path not in ZERO_WAS_UNSET):
                found[path] = value
    return found


def of_format(number: int, tables: Tables) -> Tables:
    """Tables of an older format in today's sections, with the keys of [job] that it lacks."""
    tables = in_new_sections(tables)
    if number >= 4:
        return tables
    return tables | {"job": BEFORE_FORMAT_4 | tables.get("job", {})}


def new_path(path: str) -> str:
    """Today's "section.key" of one whose section has been renamed, or that has changed section."""
    section, dot, key = path.partition(".")
    moved = RENAMED.get(path, path)
    if moved.partition(".")[0] != section:
        return moved
    return f"{RENAMED.get(section, section)}{dot}{key}"


def in_new_sections(tables: Mapping[str, Mapping[str, Any]]) -> Tables:
    """Tables with the sections that `RENAMED` gives them. UserError if a key has two values."""
    found: Tables = {RENAMED.get(section, section): {} for section in tables}
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise UserError(f"{name}={show(table)} is outside any [section].")
        for key, value in table.items():
            section, _, new = new_path(f"{name}.{key}").partition(".")
            put_once(found.setdefault(section, {}), section, new, value)
    return found


def put_once(table: dict[str, Any], section: str, key: str, value: Any) -> None:
    """Set a key that may have been given under an old name, too.

    Raises UserError if both names have a value.
    """
    if key in table and table[key] != value:
        path = f"{section}.{key}"
        old = " or ".join(was for was, now in RENAMED.items() if now in (path, section))
        raise UserError(
            f"[{section}] {key} has two values, {show(table[key])} and {show(value)}: it is also "
            f"given under its old name ({old}). Remove that."
        )
    table[key] = value


def check_format(number: object, where: object) -> int:
    """Raise UserError for the format of a later version: its keys may differ in meaning."""
    if not isinstance(number, int) or number > FORMAT:
        raise UserError(
            f"{where}: format={show(number)}, but this titan_dit reads formats up to {FORMAT}. "
            "Update titan_dit to the version that wrote it."
        )
    return number


def of_record(record: Mapping[str, Any]) -> Tables:
    """The config tables of a checkpoint's record."""
    number = check_format(record.get("config_format", 1), "[checkpoint] its config")
    return of_format(number, record["config"])


def renamed_keys(
    section: str, table: Mapping[str, Any], hints: Mapping[str, Any]
) -> dict[str, Any]:
    """A section's table with keys of older formats renamed; `hints`: the current keys."""
    found = dict(table)
    for old, path in RENAMED.items():
        (where, _, key), (_, _, new) = old.partition("."), path.partition(".")
        if where == section and key in found and key not in hints and new in hints:
            put_once(found, section, new, found.pop(key))
    for key, value in found.items():
        if type(value) in (int, float) and not value and f"{section}.{key}" in ZERO_WAS_UNSET:
            found[key] = None if NoneType in get_args(hints.get(key)) else value
    return found


def section_type(section: str, tables: Tables, variant: Variant) -> type[Section]:
    """A section's dataclass; for a section in CHOSEN_BY_NAME the key `name` selects it.

    Raises UserError for an unknown section or a missing name.
    """
    if section in CHOSEN_BY_NAME:
        name = tables.get(section, {}).get("name", DEFAULT_NAMES.get(section))
        if name is None:
            names = ", ".join(map(show, SECTIONS[section]))
            raise UserError(
                f'[{section}] name is missing. Add name = "..." to the section: {names}.'
            )
        return variant(section, conform(name, str, f"[{section}] name"))
    sections = plain_sections()
    if section not in sections:
        known = known_keys(tables, variant)
        hint = did_you_mean.for_section(section, tables.get(section, {}), known)
        raise UserError(f"[{section}]: unknown section.{hint}")
    return sections[section]


@functools.cache
def plain_sections() -> dict[str, type[Section]]:
    """The sections with a single class."""
    # Resolving the others' annotations would import torch.
    hints = get_type_hints(JobConfig, localns=dict.fromkeys(PROTOCOLS, Section))
    return {name: kind for name, kind in hints.items() if name not in CHOSEN_BY_NAME}


def known_keys(tables: Mapping[str, Mapping[str, Any]], variant: Variant) -> did_you_mean.Known:
    """The keys of all sections. Imports every class of the catalog: for errors only.

    A user's class is included only if its module is already imported: the tables may come from
    somebody else's run, whose modules must not be executed.
    """
    keys: dict[str, Collection[str]] = {
        section: tuple(hints_of(kind)) for section, kind in plain_sections().items()
    }
    others: dict[str, dict[str, Collection[str]]] = {}
    for section, rows in SECTIONS.items():
        chosen = tables.get(section, {}).get("name", DEFAULT_NAMES.get(section))
        found: dict[str, Collection[str]] = {}
        is_known = isinstance(chosen, str) and dotted_names.is_imported(chosen)
        for name in {*rows, chosen} if is_known else rows:
            with contextlib.suppress(UserError):
                found[name] = tuple(hints_of(variant(section, name)))
        keys[section] = found.pop(str(chosen), ())
        others[section] = found
    return did_you_mean.Known(keys, others)


def unknown_key(
    section: str, key: str, tables: Mapping[str, Mapping[str, Any]], variant: Variant
) -> UserError:
    """The error about a key that a section lacks."""
    hint = did_you_mean.for_key(section, key, known_keys(tables, variant))
    return UserError(f"[{section}] {key}: unknown key.{hint}")


def build(tables: Mapping[str, Mapping[str, Any]], variant: Variant) -> JobConfig:
    """Build the config; UserError on unknown keys and wrong values."""
    plain = in_new_sections(tables)
    for name in (*CHOSEN_BY_NAME, "training"):
        plain.setdefault(name, {})
    return JobConfig(**build_sections(plain, variant))


def build_sections(
    tables: Mapping[str, Mapping[str, Any]], variant: Variant, only: Collection[str] = ()
) -> dict[str, Any]:
    """Build the sections of `tables`; with `only`, import and check no others.

    Raises UserError for an unknown or missing key.
    """
    plain = in_new_sections(tables)
    built: dict[str, Any] = {}
    for name, written in plain.items():
        if only and name not in only:
            continue
        kind = section_type(name, plain, variant)
        hints = hints_of(kind)
        table = renamed_keys(name, written, hints)
        for key in table:
            if key not in hints and not (key == "name" and name in CHOSEN_BY_NAME):
                raise unknown_key(name, key, plain, variant)
        for f in dataclasses.fields(kind):
            if f.name not in table and is_required(f):
                raise UserError(
                    f"[{name}] {f.name} is missing and has no default. Add it to the section, or "
                    f"--{name}.{f.name} VALUE."
                )
        given = {key: value for key, value in table.items() if key in hints}
        built[name] = kind(
            **{key: conform(value, hints[key], f"[{name}] {key}") for key, value in given.items()}
        )
    return built


def is_required(f: dataclasses.Field[Any]) -> bool:
    """True if a field has no default."""
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def to_tables(config: JobConfig) -> Tables:
    """The config as plain tables, with defaults; keys that are None are left out."""
    tables: Tables = {}
    for f in dataclasses.fields(config):
        section = getattr(config, f.name)
        table = {"name": written_name(section)} if f.name in CHOSEN_BY_NAME else {}
        tables[f.name] = table | without_none(dataclasses.asdict(section))
    return tables


def without_none(value: Any) -> Any:
    """Nested tables as plain ones, without keys that are None; tuples as lists."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list | tuple) else value


def to_toml(tables: Tables) -> str:
    """Config tables as TOML, which `load` reads back to an equal config."""
    lines = [f"format = {FORMAT}", ""]
    stages = tables.get("training", {}).get("stages", [])
    for name, table in tables.items():
        keys = [key for key in table if (name, key) != ("training", "stages")]
        lines += [f"[{name}]", *(f"{key} = {show(table[key])}" for key in keys), ""]
    for stage in stages:
        lines += ["[[stages]]", f"steps = {stage['steps']}"]
        for name, table in stage.items():
            if name != "steps":
                lines += [f"{name}.{key} = {show(value)}" for key, value in table.items()]
        lines.append("")
    return "\n".join(lines)


def changes(old: Tables, new: Tables) -> Iterator[str]:
    """Config changes on resume that affect the training math, as `[section] key: old -> new`."""
    for section in sorted(old.keys() | new.keys()):
        before, after = old.get(section, {}), new.get(section, {})
        is_same = before.get("name") == after.get("name")
        # Two classes have different keys: their names say enough.
        keys = before.keys() | after.keys() if is_same else before.keys() & after.keys()
        for key in sorted(keys):
            if section in FREE_ON_RESUME or f"{section}.{key}" in FREE_ON_RESUME:
                continue
            if before.get(key) != after.get(key):
                yield f"[{section}] {key}: {show(before.get(key))} -> {show(after.get(key))}"
