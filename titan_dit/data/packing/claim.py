"""Exclusive packing: `pack.json` in the output holds the plan's digest and a file lock."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from titan_dit.config.section import UserError
from titan_dit.data.manifest import CLAIM
from titan_dit.system.file_lock import open_locked
from titan_dit.system.files import sync_folder


@contextmanager
def claimed(output: Path, digest: str, command: str = "data pack") -> Iterator[None]:
    """Hold the lock of an output folder; refuses a folder started with another plan."""
    descriptor = lock(output, command)
    try:
        held = os.read(descriptor, 4096)
        if held and digest.encode() not in held:
            raise UserError(
                f"[{command}] output={output} holds unfinished shards of other files or options. "
                "Delete it or choose another --output."
            )
        if not held:
            # Written in place: a rename would replace the locked file.
            os.write(descriptor, (json.dumps({"plan": digest, "command": command}) + "\n").encode())
            os.fsync(descriptor)
            sync_folder(output)
        yield
    finally:
        os.close(descriptor)


def lock(output: Path, command: str = "data pack") -> int:
    """Open and lock `pack.json`; return its file descriptor."""
    try:
        return open_locked(output / CLAIM)
    except BlockingIOError:
        raise UserError(f"[{command}] another process is packing into {output}.") from None
