"""What the launchers of a run have to have in common, compared in the store of their rendezvous.

Their ranks would wait for each other, or train with different code, without a word.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import titan_dit
from titan_dit.config.section import UserError
from titan_dit.launcher import waiting

Facts = Mapping[str, str]


def facts_of(arguments: Sequence[str]) -> Facts:
    """What must be equal, by its name in a message; the first difference is reported."""
    return {
        "NNODES": waiting.option(arguments, "--nnodes") or "1",
        "torch": importlib.metadata.version("torch"),
        "titan_dit": titan_dit.__version__,
        "the files of titan_dit": digest_of(Path(titan_dit.__file__).parent),
    }


def digest_of(package: Path) -> str:
    """Digest of a package's Python files and their names."""
    found = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        content = file.read_bytes()
        found.update(f"{file.relative_to(package)} {len(content)}\n".encode() + content)
    return found.hexdigest()[:12]


def check(
    mine: Facts, say: Callable[[str], None], compare_set: Callable[..., bytes], run_id: str
) -> None:
    """Compare with the first launcher of this run; raises UserError if they differ.

    `compare_set`: that of the store. Another run id is reported only: two jobs may share a store.
    """
    found: bytes = compare_set(f"titan_dit.facts.{run_id}", "", json.dumps(mine))
    first: dict[str, Any] = json.loads(found)
    for name, value in mine.items():
        if first.get(name) != value:
            raise UserError(
                f"{name} differs between the hosts of this run: {value} here, and "
                f"{first.get(name)} where it was launched first. Launch it alike on all hosts."
            )
    other = compare_set("titan_dit.run_id", "", run_id).decode()
    if other != run_id:
        say(
            f"RDZV_ID={run_id}, but the first launcher at this RDZV_ENDPOINT has {other}: only "
            "launchers with the same RDZV_ID meet"
        )
