"""Progress while weights are written."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path

from torch import Tensor

from titan_dit.system.files import PARTIAL
from titan_dit.system.progress import ProgressLine, count, following


def writing(target: Path, tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Show how much of `target`, a file or a folder of these tensors, has been written."""
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    progress = ProgressLine(total, "B", what=f"writing {target.name}", form=count)
    return following(partial(bytes_aside, target.resolve()), progress)


def bytes_aside(target: Path) -> int:
    """Bytes of the temporary file or folder that becomes `target`."""
    size = 0
    for aside in target.parent.glob(f"{glob.escape(target.name)}*{PARTIAL}"):
        # os.walk passes over folders that are renamed in between; Path.rglob raises.
        inside = (Path(folder, name) for folder, _, names in os.walk(aside) for name in names)
        for path in (aside, *inside):
            with suppress(OSError):
                size += path.stat().st_size if path.is_file() else 0
    return size
