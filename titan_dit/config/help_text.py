"""The text of `train --help` and `train --list`. Nothing here imports torch."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from titan_dit.config import catalog, config_file
from titan_dit.config.job import JobConfig
from titan_dit.config.section import OneOf, Section, Table, UserError, hints_of, show, written_name

DEFAULT_CONFIG = "digits.toml"
WIDEST = 100
"""Maximum columns, on any terminal."""

BASIC = {
    "data": ("name", "path"),
    "model": (
        *("name", "size", "latent_size", "in_channels", "num_classes"),
        *("text_tokens", "text_dim"),
    ),
    "objective": ("name",),
    "training": ("steps", "epochs", "global_batch_size", "microbatch_size"),
    "optimizer": ("name", "lr", "weight_decay"),
    "lr_scheduler": ("warmup_steps", "decay"),
    "sampling": ("every",),
    "validation": ("every", "samples"),
    "checkpoint": ("every", "resume"),
    "metrics": ("every", "wandb"),
    "job": ("name", "dir", "seed"),
    "precision": ("dtype",),
    "compile": ("enabled",),
    "parallel": ("dp_shard", "tp", "pp"),
}
"""Keys that most runs set, in the order in which a newcomer needs them: section -> keys."""

SERVE_OLD_RUNS = ("job.data_order", "job.initial_weights")
"""Keys that are not listed: a run keeps its own, a new one leaves them at "auto"."""

USAGE = """\
./run_train.sh --config FILE [--section.key VALUE ...]     or: titan_dit train ...

  --config FILE       a recipe by its name (--list names them) or a TOML file
  --dry-run [WORLD]   simulate one step on WORLD ranks: memory and traffic, without devices
  --list              the recipes, one line each
  --help              this text, with the values of the config that is given

Every key of the config is a flag, and flags win over the file. Values are written as in TOML: 3e-4,
true, [0.9, 0.95]. The name of [model], [objective], [data], [optimizer] selects its other keys.
"""


def recipes() -> str:
    """The recipes of train_configs/, each with the first sentence of its header."""
    files = sorted(config_file.CONFIG_DIR.glob("*.toml"))
    width = max(len(file.name) for file in files)
    lines = [f"  {file.name:{width}}  {first_sentence(file)}" for file in files]
    return "\n".join([*lines, "\nThe head of each file has its command and its sources.\n"])


def first_sentence(file: Path) -> str:
    """The first sentence of a recipe's header comment."""
    head = re.match(r"(?:#.*\n)*", file.read_text())
    text = " ".join((head[0] if head else "").replace("#", " ").split())
    return re.split(r"(?<=\.)\s", text, maxsplit=1)[0]


def help_of(arguments: Sequence[str], environment: str = "") -> str:
    """Usage, every key with its value in the given config, and the environment variables."""
    rest = [argument for argument in arguments if argument not in ("--help", "-h")]
    said = ""
    try:
        rest, _ = config_file.take_dry_run(rest)
        config = config_file.load(rest or ["--config", DEFAULT_CONFIG], catalog.variant)
    except UserError as error:
        said = f"{error}\n\n"
        config = config_file.load(["--config", DEFAULT_CONFIG], catalog.variant)
    of = "this config" if rest and not said else DEFAULT_CONFIG
    title = f"Values are those of {of}; a default that differs follows in parentheses."
    lines = [said + USAGE, f"BASIC KEYS. {title}", *listed(config, basic=True)]
    lines += ["", "ALL OTHER KEYS", *listed(config, basic=False)]
    return "\n".join([*lines, "", environment.rstrip(), ""])


def listed(config: JobConfig, basic: bool) -> Iterator[str]:
    """Help lines of the basic keys, or of all others; sections in the order of `BASIC`."""
    names = [f.name for f in dataclasses.fields(config)]
    for name in [*BASIC, *(name for name in names if name not in BASIC)]:
        section: Section = getattr(config, name)
        hints = hints_of(type(section))
        chosen = catalog.SECTIONS.get(name)
        first = [key for key in BASIC.get(name, ()) if key in hints]
        hidden = {key for key in hints if f"{name}.{key}" in SERVE_OLD_RUNS}
        keys = first if basic else [key for key in hints if key not in {*first, *hidden}]
        if keys or (basic and chosen):
            yield f"\n[{name}]  {(type(section).__doc__ or '').splitlines()[0]}"
        if basic and chosen:
            text = show(written_name(section))
            yield from entry(f"{name}.name", " | ".join(chosen), text, "")
        meanings = docstrings(type(section))
        for key in keys:
            kind, value = kind_of(hints[key]), value_of(section, key)
            yield from entry(f"{name}.{key}", kind, value, meanings.get(key, ""))


def entry(key: str, kind: str, value: str, meaning: str) -> Iterator[str]:
    """The lines of one key."""
    columns = min(shutil.get_terminal_size().columns, WIDEST)
    wrapped = functools.partial(textwrap.wrap, width=columns, break_long_words=False)
    yield from wrapped(f"--{key} {kind}  = {value}", initial_indent="  ", subsequent_indent=" " * 8)
    yield from wrapped(meaning, initial_indent=" " * 6, subsequent_indent=" " * 6)


def value_of(section: Section, key: str) -> str:
    """The key's value as TOML, then "(required)", or "(default: ...)" if it differs."""
    f = next(f for f in dataclasses.fields(section) if f.name == key)
    value = getattr(section, key)
    if config_file.is_required(f):
        return f"{written(value)} (required)"
    default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
    return written(value) + ("" if value == default else f" (default: {written(default)})")


def written(value: object) -> str:
    """A value in TOML syntax; None is a key that is not set."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {key: item for key, item in vars(value).items() if item is not None}
    if isinstance(value, tuple):
        return f"[{', '.join(map(written, value))}]"
    return "unset" if value is None else show(value)


def kind_of(hint: Any) -> str:
    """A key's type in short: "INT", "true | false", "[FLOAT, ...]" or its choices."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        named = [rule for rule in args[1:] if isinstance(rule, OneOf)]
        return " | ".join(named[0].names) if named else kind_of(args[0])
    if origin is Literal:
        return " | ".join(map(str, args))
    if origin is tuple:
        return f"[{kind_of(args[0])}, ...]"
    if origin is dict:
        return "{ section.key = value }"
    if args:
        return kind_of(next(arg for arg in args if arg is not NoneType))
    if issubclass(hint, Table):
        return "{ key = value }"
    return {int: "INT", float: "FLOAT", bool: "true | false"}.get(hint, "TEXT")


def docstrings(kind: type) -> dict[str, str]:
    """The docstrings below the fields of a class and its base classes."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if issubclass(base, Section) and base is not Section:
            found |= fields_of(sys.modules[base.__module__].__file__ or "").get(base.__name__, {})
    return found


@functools.cache
def fields_of(file: str) -> dict[str, dict[str, str]]:
    """Class -> field -> docstring, of a Python file."""
    classes = [n for n in ast.parse(Path(file).read_text()).body if isinstance(n, ast.ClassDef)]
    return {c.name: dict(documented(c.body)) for c in classes}


def documented(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    """The (name, docstring) of the annotated fields of a class body."""
    for field, after in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = getattr(getattr(after, "value", None), "value", None)
            if isinstance(after, ast.Expr) and isinstance(text, str):
                yield field.target.id, inspect.cleandoc(text)
