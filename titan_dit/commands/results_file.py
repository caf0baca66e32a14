"""Files of results: they appear whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from titan_dit.config.section import UserError
from titan_dit.observe import console
from titan_dit.system.files import reason_of, replacing


@contextmanager
def new_file(flag: str, file: Path) -> Iterator[Path]:
    """Yield a path to write; it becomes `file` if the block succeeds. Errors as of `writing`."""
    # A link stays one.
    with writing(flag, file), replacing(file.resolve(), f".{os.getpid()}") as aside:
        yield aside


@contextmanager
def writing(flag: str, file: Path) -> Iterator[None]:
    """Make the folder of a file that the block writes; an OSError is one line with the flag."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(
            f"{flag} {file} cannot be written: {reason_of(error)}. Free space, or name another "
            "file, and repeat the command."
        ) from None


def report(found: Mapping[str, Any], scores: Mapping[str, float], out: str | None) -> None:
    """Print the scores, and write all that was found to --out as JSON, if it is given."""
    width = max(map(len, scores))
    for name, value in scores.items():
        console.say(f"{name:{width}}  {value:.6g}")
    if out:
        with new_file("--out", Path(out)) as aside:
            aside.write_text(json.dumps(found, indent=2) + "\n")
        console.say(f"wrote {out}")
