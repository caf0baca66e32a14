"""Flags of a run's config typed at a command that has flags of its own."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from titan_dit.config.section import UserError


def check(words: Sequence[str], names: Collection[str], command: str) -> None:
    """Raise UserError for `--sampling.steps 25` or `--config FILE`, with the command's own flag.

    `names`: the command's flags, with underscores.
    """
    for word in words:
        flag = word.partition("=")[0]
        if flag == "--config" and "config" not in names:
            own = next((name for name in ("run", "checkpoint") if name in names), None)
            advice = f" The config is the run's: give --{own} DIR." if own else ""
            raise UserError(f"--config: `{command}` reads no config file.{advice}")
        key = re.fullmatch(r"--\w+\.(\w+)", flag)
        if key and key[1] in names:
            own = key[1].replace("_", "-")
            raise UserError(f"{flag} is a key of `train`; the flag of `{command}` is --{own}.")
        if key:
            have = ", ".join(f"--{name.replace('_', '-')}" for name in names)
            raise UserError(f"{flag} is a key of `train`. `{command}` has {have}.")
