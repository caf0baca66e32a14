"""Files of results: they appear whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from titan_dit.observe import console
from titan_dit.ranks.disk_errors import writing
from titan_dit.system.files import replacing


@contextmanager
def new_file(flag: str, file: Path) -> Iterator[Path]:
    """Yield a path to write; it becomes `file` if the block succeeds. Raises UserError."""
    with writing(f"{flag} {file}", "Then repeat the command."), replacing(file) as aside:
        yield aside


def write(flag: str, file: Path, content: str) -> None:
    """Write a text, and print its name. Raises UserError, which names the flag."""
    with new_file(flag, file) as aside:
        aside.write_text(content, encoding="utf-8")
    console.say(f"wrote {file}")


def report(found: Mapping[str, Any], scores: Mapping[str, float], out: str | None) -> None:
    """Print the scores, and write all that was found to --out as JSON, if it is given."""
    width = max(map(len, scores))
    for name, value in scores.items():
        console.say(f"{name:{width}}  {value:.6g}")
    if out:
        write("--out", Path(out), json.dumps(found, indent=2) + "\n")
