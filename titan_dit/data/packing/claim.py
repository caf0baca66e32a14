"""One packer at a time: `pack.json` in the output says what is being made there, and is locked."""

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
def claimed(output: Path, digest: str) -> Iterator[None]:
    """Hold `pack.json`, made for this plan and no other, while the folder is written."""
    descriptor = lock(output)
    try:
        held = os.read(descriptor, 4096)
        if held and digest.encode() not in held:
            raise UserError(
                f"[data pack] output={output} holds what is left of packing other files, or in "
                "another way. Delete it or choose another --output."
            )
        if not held:
            # In place: another file of this name would not be the one that is locked.
            os.write(descriptor, (json.dumps({"plan": digest}) + "\n").encode())
            os.fsync(descriptor)
            sync_folder(output)
        yield
    finally:
        os.close(descriptor)


def lock(output: Path) -> int:
    """`pack.json`, opened and locked."""
    try:
        return open_locked(output / CLAIM)
    except BlockingIOError:
        raise UserError(f"[data pack] another process is packing into {output}.") from None
