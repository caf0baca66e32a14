"""Base classes of config sections: frozen dataclasses that check types and bounds.

Nothing here imports torch, so that a wrong key is reported quickly.
"""

from __future__ import annotations

import dataclasses
import json
import operator
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from titan_dit.config.did_you_mean import for_value, nearest


class UserError(ValueError):
    """An error that the user can fix. Printed once, by one rank, without a traceback."""


class MisspelledError(UserError):
    """A value of another type, with how to write it."""

    def __init__(self, fault: str, advice: str = "") -> None:
        super().__init__(fault + advice)
        self.fault = fault


@dataclass(frozen=True)
class Bound:
    """Limits of a number, carried in the type: `Annotated[int, Bound(least=1)]`."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None

    def broken_by(self, value: Any) -> str | None:
        """The bound that a number breaks, as text, or None. NaN breaks every bound."""
        if not isinstance(value, int | float):
            return None
        rules = (
            (self.least, "at least", operator.ge),
            (self.most, "at most", operator.le),
            (self.above, "above", operator.gt),
            (self.below, "below", operator.lt),
        )
        for limit, words, holds in rules:
            if limit is not None and not holds(value, limit):
                return f"must be {words} {limit if isinstance(limit, int) else f'{limit:g}'}"
        return None


@dataclass(frozen=True)
class OneOf:
    """Names of a catalog table, carried in the type; "package.module:name" is always allowed."""

    names: tuple[str, ...]
    class_prefix: str = ""
    """A name may also be spelled as a class, with or without this prefix, which lowers to it:
    "Interleaved1F1B" and "ScheduleInterleaved1F1B" are "interleaved_1f1b"."""

    def named(self, value: str) -> str:
        """The name of a spelling; other values as they are."""
        spelled = value.lower().replace("_", "")
        by_spelling = {name.replace("_", ""): name for name in self.names}
        return by_spelling.get(spelled.removeprefix(self.class_prefix), value)

    def broken_by(self, value: Any) -> str | None:
        """Message about a wrong value; None if it is right."""
        if value in self.names or ":" in value:
            return None
        return f"is not one of {', '.join(map(show, self.names))}"


@dataclass(frozen=True)
class Sides:
    """A list of `count` numbers, carried in the type; one number stands for equal ones."""

    count: int

    def spread(self, value: object) -> object:
        """One number as a list of equal ones; other values as they are."""
        if type(value) in (int, float):
            value = [value]
        is_one = isinstance(value, list | tuple) and len(value) == 1
        return [*value] * self.count if is_one else value  # type: ignore[misc]

    def broken_by(self, value: Any) -> str | None:
        """Message about a list of another length; None if it is right."""
        return None if len(value) == self.count else f"must be {self.count} numbers, or one"


@dataclass(frozen=True)
class FromHome:
    """A path, carried in the type: a leading `~` is the home directory.

    A shell does not replace it in `--data.path=~/latents`, and TOML has none.
    """

    def expanded(self, path: str) -> str:
        """The path without `~`, if the home directory is known."""
        # Path.expanduser would make s3:/ of s3:// and "." of an empty text.
        return os.path.expanduser(path)  # noqa: PTH111

    def broken_by(self, path: str) -> str | None:
        """Error text for a path with a NUL character; else None."""
        return "holds a NUL character. Remove it" if "\0" in path else None


@dataclass(frozen=True)
class Written(FromHome):
    """A path that is written. `commands/own_input.py` refuses it if the command also reads it."""


@dataclass(frozen=True)
class OfRun(FromHome):
    """A path of a run or a checkpoint. Outputs may lie in it but not replace the run's files."""


FilePath = Annotated[str, FromHome()]
"""A path that is read."""
OutputPath = Annotated[str, Written()]
RunPath = Annotated[str, OfRun()]
MOST, LARGEST = 10**12, 1e30
"""Largest integer and largest float of a section; floats stay finite in fp32."""
PositiveInt = Annotated[int, Bound(least=1, most=MOST)]
NonNegativeInt = Annotated[int, Bound(least=0, most=MOST)]
PositiveFloat = Annotated[float, Bound(above=0, most=LARGEST)]
NonNegativeFloat = Annotated[float, Bound(least=0, most=LARGEST)]
Finite = Annotated[float, Bound(least=-LARGEST, most=LARGEST)]
Dim = Annotated[int, Bound(least=1, most=10**7)]
"""Size of a tensor's dim, such as a vocabulary."""
Few = Annotated[int, Bound(least=1, most=10**4)]
"""Number of things made one by one: samples of a preview, ranks of a mesh axis, heads."""
Channels = Annotated[int, Bound(least=0, most=10**4)]
"""A number of channels that may be missing."""
HeightWidth = Annotated[tuple[Few, ...], Sides(2)]
"""[height, width] of a picture or latent; one number is a square."""
Layers = Annotated[int, Bound(least=1, most=2000)]
"""Number of layers. Each layer's modules are built, even to count bytes only: 5 ms each."""
MOST_SAMPLES = 2**20
FrameRate = Annotated[float, Bound(least=0.1, most=1000)]
BatchSize = Annotated[int, Bound(least=1, most=MOST_SAMPLES)]
Tokens = Annotated[int, Bound(least=1, most=2**36)]
"""Tokens of many samples."""
Workers = Annotated[int, Bound(least=1, most=256)]
"""Processes or threads."""
GuidanceScale = Annotated[float, Bound(least=0, most=3e38)]
"""cfg_scale, finite in fp32. Samples that overflow because of it are reported by number."""
Fraction = Annotated[float, Bound(least=0, most=1)]
Decay = Annotated[float, Bound(least=0, below=1)]
SigmaRel = Annotated[float, Bound(least=0.001, most=0.28)]
"""Relative width of a power-function average (arXiv:2312.02696).
12 ** -0.5 = 0.2887 would be the plain mean of all steps."""


def conform_made(value: object, hint: Any, where: str) -> Any:
    """`conform`, of a file that a program wrote: without advice on how to write a value.

    Raises UserError.
    """
    try:
        return conform(value, hint, where)
    except MisspelledError as error:
        raise UserError(error.fault) from None


def conform(value: object, hint: Any, where: str) -> Any:
    """Check `value` against the type `hint`; a float takes a TOML int, a tuple a TOML array.

    Raises UserError for a value of another type or outside its rules.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        for rule in args[1:]:
            value = rule.spread(value) if isinstance(rule, Sides) else value
        return follow_rules(conform(value, args[0], where), args[1:], where)
    if origin in (Union, UnionType):
        inner = next(arg for arg in args if arg is not NoneType)
        # Up to format 4 a text that was not set was "".
        is_unset = value is None or (value == "" and str in (inner, *get_args(inner)))
        return None if is_unset else conform(value, inner, where)
    if origin is Literal:
        if value not in args:
            choices = ", ".join(show(arg) for arg in args)
            raise UserError(
                f"{where}={show(value)} is not one of {choices}.{for_value(value, args)}"
            )
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise UserError(f"{where}={show(value)} must be a list, such as [{show(value)}].")
        if list(value) == ["None"]:
            raise UserError(f"{where}=None is not a list. The empty one is [].")
        return tuple(conform(item, args[0], f"{where}[{i}]") for i, item in enumerate(value))
    if isinstance(hint, type) and issubclass(hint, Table):
        return value if isinstance(value, hint) else table_of(value, hint, where)
    return conform_scalar(value, origin or hint, where)


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table within a section. Its keys are checked when the section is built."""

    def check(self) -> None:
        """Raise UserError if keys contradict each other."""


def follow_rules(value: Any, rules: Iterable[object], where: str) -> Any:
    """Check a value against the rules in its type's metadata, and expand a path.

    Raises UserError for a value that breaks one.
    """
    for rule in rules:
        # Other libraries put their own metadata there.
        if isinstance(rule, OneOf) and rule.class_prefix:
            value = rule.named(value)
        if isinstance(rule, Bound | OneOf | Sides | FromHome) and (broken := rule.broken_by(value)):
            near = for_value(value, rule.names) if isinstance(rule, OneOf) else ""
            raise UserError(f"{where}={show(value)} {broken}.{near}")
        if isinstance(rule, FromHome):
            value = rule.expanded(value)
    return value


def table_of(value: object, kind: type[Table], where: str) -> Table:
    """Build a table within a section from the config's.

    Raises UserError for an unknown or missing key.
    """
    if not isinstance(value, dict):
        raise UserError(f"{where}={show(value)} must be a table, {{ key = value }}.")
    hints = hints_of(kind)
    for key in value:
        if key not in hints:
            raise UserError(f"{where} {key}: unknown key.{nearest(key, hints)}")
    for f in dataclasses.fields(kind):
        if f.default is dataclasses.MISSING and f.name not in value:
            raise UserError(f"{where} {f.name} is missing and has no default.")
    built = kind(**{key: conform(v, hints[key], f"{where} {key}") for key, v in value.items()})
    built.check()
    return built


SWITCHES = {"true": "true", "yes": "true", "on": "true", "false": "false", "no": "false"}
SWITCHES |= {"off": "false"}
UNITS = {"k": 10**3, "m": 10**6}
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text in quotes"}
WORDS |= {dict: "a table, { key = value }"}


def conform_scalar(value: object, kind: type, where: str) -> Any:
    """`conform` for a plain int, float, bool or str.

    Raises UserError for a value of another type.
    """
    if kind is float and type(value) is int and abs(value) < 2**1023:
        return float(value)
    # type(), not isinstance: bool is a subclass of int, but `steps = true` is a mistake.
    if type(value) is not kind:
        raise MisspelledError(f"{where}={show(value)} must be {WORDS[kind]}.", plainly(value, kind))
    if isinstance(value, str) and (wrong := not_utf8(value)):
        raise UserError(f"{where}: {wrong}")
    return value


def not_utf8(text: str) -> str:
    """Message about text from the operating system that is not UTF-8; "" if it is."""
    if text.isascii() or not re.search("[\ud800-\udfff]", text):
        return ""
    return f"{text!a} is not UTF-8. Rename the file or the folder: configs and datasets are UTF-8."


def plainly(value: object, kind: type) -> str:
    """Ending of a message: how to write a number or a boolean, if `value` looks like one."""
    if kind is int and isinstance(value, float) and value.is_integer():
        return f" Write {int(value)}."
    if not isinstance(value, str):
        return ""
    text = SWITCHES.get(value.lower()) if kind is bool else as_number(value, kind)
    if text is None:
        return ""
    return f" Write {text}{', without quotes' if text == value else ''}."


def as_number(text: str, kind: type) -> str | None:
    """The number that `1e-3`, `10k`, `10,000` or `0,001` stands for, in TOML."""
    # U+2212 is a minus sign. A comma parts the thousands of a count, or is a decimal point.
    plain = text.lower().replace("\u2212", "-")
    plain = re.sub(r"[ ,](?=\d{3}\b)", "", plain) if kind is int else plain.replace(",", ".")
    unit = UNITS.get(plain[-1:])
    try:
        number = float(plain[:-1]) * unit if unit else float(plain)
    except ValueError:
        return None
    if kind is int:
        return str(int(number)) if number.is_integer() else None
    return text if plain == text else show(number)


def few(
    names: Sequence[object], num: int = 4, total: int | None = None, between: str = ", "
) -> str:
    """The first `num` names as text, and the number of the others, of `total` (default: all)."""
    shown, total = between.join(str(name) for name in names[:num]), total or len(names)
    return shown if total <= num else f"{shown} and {total - num:,} more"


def show(value: object) -> str:
    """A value in TOML syntax, for messages and the resolved config."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # JSON's escapes are valid in TOML, which also needs DEL escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {show(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(show(item) for item in value) + "]"
    return str(value)


def paths_of(section: Section | Table) -> Iterator[tuple[str, str, FromHome]]:
    """Yield (field, path, rule of the path) for each path that a section or its tables name."""
    for name, hint in hints_of(type(section)).items():
        value, rule = getattr(section, name), path_rule(hint)
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, Table):
                yield from ((f"{name} {key}", path, rule) for key, path, rule in paths_of(item))
            elif rule and item:
                yield name, item, rule


def path_rule(hint: Any) -> FromHome | None:
    """The rule of a path, or of a list of paths; None for another type."""
    rules = [rule for rule in getattr(hint, "__metadata__", ()) if isinstance(rule, FromHome)]
    return rules[0] if rules else next(filter(None, map(path_rule, get_args(hint))), None)


HINTS: dict[type, Mapping[str, Any]] = {}
"""What `hints_of` has found, by section."""


def hints_of(section: type) -> Mapping[str, Any]:
    """The resolved type of every field of a section, with its bounds."""
    if section not in HINTS:
        hints = get_type_hints(section, include_extras=True)
        found = {f.name: hints[f.name] for f in dataclasses.fields(section)}
        HINTS[section] = MappingProxyType(found)
    return HINTS[section]


@dataclass(frozen=True, kw_only=True)
class Section:
    """A table of the config. Building it checks every field's type and bounds."""

    section: ClassVar[str]
    replaces: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Key -> keys of the file that are dropped when this key is given as a flag."""

    def __post_init__(self) -> None:
        """Check and convert every field; subclasses add rules across fields."""
        for name, hint in hints_of(type(self)).items():
            value = conform(getattr(self, name), hint, self.place_of(name, hint))
            object.__setattr__(self, name, value)

    def place_of(self, key: str, hint: Any) -> str:
        """How errors name a key."""
        return f"[{self.section}] {key}"


@dataclass(frozen=True, kw_only=True)
class Named(Section):
    """A section with several classes: `name` is in the catalog, or "package.module:Class"."""

    @property
    def name(self) -> str:
        """The name in the catalog, or "package.module:Class"."""
        return written_name(self)


def written_name(section: Section) -> str:
    """The `name` that selects this section's class."""
    kind = type(section)
    # A user's class derived from one of ours inherits its short name.
    short: object = getattr(kind, "name", None)
    if kind.__module__.startswith("titan_dit.") and isinstance(short, str):
        return short
    return f"{kind.__module__}:{kind.__qualname__}"
