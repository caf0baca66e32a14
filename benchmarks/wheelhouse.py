"""Imports for a benchmark on a machine with torch only.

The pure-Python dependencies of titan_dit's core can be wheels in benchmarks/wheels. A wheel is a
zip file, and Python imports from zip files, so nothing has to be installed.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks" / "wheels"
NEEDED = ("torch", "numpy", "jaxtyping", "wadler_lindig")
"""Dependencies of titan_dit's core, direct and indirect."""


def use(folder: Path) -> None:
    """Prepend the wheels of the folder and this checkout to sys.path."""
    for path in (ROOT, *sorted(folder.glob("*.whl"))):
        sys.path.insert(0, str(path))


def complaint(needed: Sequence[str] = NEEDED) -> str | None:
    """A message about missing packages and how to get them, or None."""
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    said = f"{', '.join(missing)} cannot be imported."
    if "torch" in missing:
        said += " Install torch (2.11 to 2.15) for your device, see pytorch.org."
    if "numpy" in missing:
        said += " Install numpy."
    if wheels := [name.replace("_", "-") for name in missing if name not in ("torch", "numpy")]:
        said += (
            f" Install {' '.join(wheels)}; or run scripts/gpu_wheels.sh in a checkout with a "
            "network and copy benchmarks/wheels here."
        )
    return said
