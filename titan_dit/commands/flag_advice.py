"""Words that belong to another command: a key of a config, the flag of a path elsewhere."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tyro

from titan_dit.config.section import UserError

PATHS = ("run", "checkpoint", "from", "input", "path", "dir")
"""Flags of commands for a run or a dataset."""


class Aliases:
    """Earlier names of a flag, carried in the type: understood, but not shown by --help."""

    def __init__(self, *names: str) -> None:
        self.names = names


def renamed(words: Sequence[str], hints: Mapping[str, Any]) -> list[str]:
    """A command's words with today's name of each flag in place of an earlier one.

    `hints`: the types of the command's options. Raises UserError if both names are given.
    """
    today = {
        name: flag_of(field, hint)
        for field, hint in hints.items()
        for part in parts_of(hint)
        if isinstance(part, Aliases)
        for name in part.names
    }
    flags = [(word.partition("=")[0].replace("_", "-"), word) for word in words]
    given = {flag for flag, _ in flags}
    if twice := [name for name in given if today.get(name) in given]:
        raise UserError(f"{twice[0]} is the earlier name of {today[twice[0]]}. Give one of them.")
    return [today[flag] + word[len(flag) :] if flag in today else word for flag, word in flags]


def check(words: Sequence[str], hints: Mapping[str, Any], command: str) -> None:
    """Raise UserError with advice for `--sampling.steps 25`, `--config FILE` or `sample RUN`.

    `hints`: the types of the command's options.
    """
    names, takes_words = flags_of(hints), any(map(is_positional, hints.values()))
    own = next((name for name in PATHS if name in names), None)
    if words and own and not takes_words and not words[0].startswith("-"):
        raise UserError(f"{words[0]}: a path needs its flag here: {command} --{own} {words[0]}.")
    for word, after in zip(words, [*words[1:], ""], strict=False):
        flag, _, value = word.partition("=")
        if flag == "--config" and "config" not in names:
            advice = f" The config is the run's: give --{own} DIR." if own else ""
            raise UserError(f"--config: `{command}` reads no config file.{advice}")
        if takes_words and flag.removeprefix("--") in PATHS and flag.startswith("--"):
            path = value or after
            raise UserError(f"{flag}: the path has no flag here: {command} {path}".rstrip() + ".")
        check_key(flag, names, command)


def check_key(flag: str, names: Collection[str], command: str) -> None:
    """Raise UserError if a flag is a key of a run's config."""
    if not (key := re.fullmatch(r"--\w+\.(\w+)", flag)):
        return
    own = key[1].replace("_", "-")
    if own in names:
        raise UserError(f"{flag} is a key of `train`; the flag of `{command}` is --{own}.")
    have = ", ".join(f"--{name}" for name in names)
    raise UserError(f"{flag} is a key of `train`. `{command}` has {have}.")


def flags_of(hints: Mapping[str, Any]) -> list[str]:
    """The command's flags, without dashes at their front."""
    return [flag_of(name, hint)[2:] for name, hint in hints.items() if not is_positional(hint)]


def flag_of(field: str, hint: Any) -> str:
    """The flag of a field, with its dashes; "" of a positional one."""
    if is_positional(hint):
        return ""
    return f"--{field.replace('_', '-')}"


def is_positional(hint: Any) -> bool:
    """Return True for an option that has no flag."""
    return tyro.conf.Positional in parts_of(hint)


def parts_of(hint: Any) -> tuple[Any, ...]:
    """Metadata of an Annotated type; () for any other type."""
    return getattr(hint, "__metadata__", ())
