"""The words of a command line: flags, and their values."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from titan_dit.config import user_text
from titan_dit.config.section import Table, UserError

DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"
"""Unicode dashes by which word processors and web pages replace a hyphen."""


def split(arguments: Sequence[str], sections: Collection[str]) -> tuple[str, dict[str, list[str]]]:
    """Return the config's name, and each flag's values, which end at the next flag.

    `sections`: names of sections, to recognise a flag without its dashes.
    """
    flags: dict[str, list[str]] = {}
    configs: list[list[str]] = []
    values: list[str] | None = None
    for argument in arguments:
        if argument.startswith("--") and argument[2:3] not in tuple(DASHES):
            key, equals, value = argument[2:].partition("=")
            key, values = key.replace("-", "_"), [value] if equals else []
            if key == "config":
                configs.append(values)
            else:
                flags[key] = values
            continue
        check_word(argument, values, sections)
        assert values is not None
        values.append(argument)
    for key, given in flags.items():
        check_values(key, given)
    return only(configs, flags), flags


def take_keys(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the arguments into a command's own flags and config keys, --section.key VALUE."""
    own: list[str] = []
    keys: list[str] = []
    into = own
    for argument in arguments:
        if argument.startswith("--"):
            into = keys if "." in argument.partition("=")[0] else own
        into.append(argument)
    return own, keys


def only(configs: Sequence[list[str]], flags: Mapping[str, list[str]]) -> str:
    """The config's name. Raises UserError unless exactly one is given."""
    names = [" ".join(values) for values in configs]
    if len(configs) > 1:
        listed = " and ".join(f"--config {name}" for name in names)
        raise UserError(f"{listed}: give one config file, and other keys as flags.")
    for other in ("config_file", "job.config_file"):
        if not configs and other in flags:
            raise UserError(f"--{other}: write --config {' '.join(flags[other])}")
    if not configs or len(configs[0]) != 1 or not names[0]:
        raise UserError("Give one config file: --config digits.toml")
    return names[0]


def check_word(argument: str, values: list[str] | None, sections: Collection[str]) -> None:
    """Raise UserError for a word that can only be a flag without its dashes.

    `values`: the values so far of the preceding flag; None before the first flag.
    """
    bare = argument.lstrip(f"-{DASHES}")
    if argument != bare and bare[:1].isalpha() and not is_number(argument):
        name = "config" if bare == "c" else bare
        raise UserError(f"{argument}: flags begin with two plain dashes: --{name}")
    name, equals, _ = bare.partition("=")
    is_flag = name == "config" or name.partition(".")[0] in sections
    # The first word after a flag is its value, whatever it looks like.
    if is_flag and (equals or "." in name) and values != []:
        raise UserError(f"{argument}: flags begin with two dashes: --{bare}")
    if values is None:
        if argument == "train":
            raise UserError("train: leave the word out here, or write python -m titan_dit train.")
        raise UserError(f"{argument!r} comes before any flag. Write --config {argument}.")


def check_values(key: str, values: list[str]) -> None:
    """Raise UserError for a flag without a value, and spaces around its equals sign."""
    if "." not in key:
        return  # Refused when the keys are known.
    if key.startswith("no_") and values in ([], ["true"], ["True"]):
        raise UserError(f"--{key}: write booleans out: --{key[3:]} false")
    if not values:
        raise UserError(f"--{key} has no value. Write booleans out, too: --{key} true")
    if values[0] in ("=", "") and len(values) > 1:
        raise UserError(f"--{key} =: write it without spaces: --{key}={values[1]}")


def is_number(text: str) -> bool:
    """True for -inf and the like, which begin with a dash and a letter."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def value_of(texts: list[str], hint: Any) -> Any:
    """Parse a flag's value as TOML, or as Python writes it; the key's type `hint` decides."""
    kind, takes_none = unwrapped(hint)
    if takes_none and texts == ["None"]:
        return None
    if get_origin(kind) is tuple:
        return items(texts, get_args(kind)[0])
    if len(texts) > 1:
        return [literal(text) for text in texts]
    return scalar(texts[0], kind)


def unwrapped(hint: Any) -> tuple[Any, bool]:
    """A type without its bounds, and whether it takes None."""
    if get_origin(hint) is Annotated:
        return unwrapped(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        inner = next(arg for arg in get_args(hint) if arg is not NoneType)
        return unwrapped(inner)[0], NoneType in get_args(hint)
    return hint, False


def items(texts: Sequence[str], hint: Any) -> list[Any]:
    """The values of a list: `0.9 0.99`, `0.9,0.99`, `[0.9, 0.99]` or `(0.9, 0.99)`."""
    kind, _ = unwrapped(hint)
    joined = " ".join(texts)
    whole = literal(joined)
    if isinstance(whole, list):
        return whole
    is_table = isinstance(kind, type) and issubclass(kind, Table)
    has_brackets = joined[:1] in "([" and joined[-1:] in ")]"
    # Commas and spaces of a text may be its own.
    if not is_table and (has_brackets or kind is not str):
        texts = [text for text in re.split(r"[,\s]+", joined.strip("()[]")) if text]
    return [scalar(text, kind) for text in texts]


def scalar(text: str, kind: Any) -> Any:
    """Parse one value. Text that is no `kind` is returned unchanged; the section refuses it."""
    found = literal(text)
    if kind is bool and text in ("True", "False"):
        return text == "True"
    if kind is str:
        # `--job.name 7` is text.
        return found if isinstance(found, str) else text
    if kind is int and isinstance(found, float) and found.is_integer():
        return int(found)
    if kind in (int, float) and found == text:
        # `.5`, `1.` and `007` are numbers, but not in TOML.
        try:
            return kind(text)
        except ValueError:
            return text
    return found


def literal(text: str) -> Any:
    """Parse a TOML value such as `4`, `1e-3`, `true` or `[1, 2]`; anything else is text."""
    try:
        return user_text.parse_toml(f"value = {text}")["value"]
    except user_text.BadTextError:
        return text
