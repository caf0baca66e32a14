"""Run a benchmark where little more than torch is installed.

The pure-Python packages that titan_dit's core needs may lie beside the benchmark as wheels: a wheel
is a zip file, and Python imports from zip files, so nothing has to be installed.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks" / "wheels"
NEEDED = ("torch", "jaxtyping", "wadler_lindig")
"""What models, objectives, parallel and state import, and what that imports in its turn."""


def use(folder: Path) -> None:
    """Put this checkout first on sys.path, and before it every wheel of the folder."""
    for path in (ROOT, *sorted(folder.glob("*.whl"))):
        sys.path.insert(0, str(path))


def complaint(needed: Sequence[str] = NEEDED) -> str | None:
    """What is missing and how to get it, or None."""
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    said = f"{', '.join(missing)} cannot be imported."
    if "torch" in missing:
        said += " Install torch (2.11 to 2.13) for your device, see pytorch.org."
    if wheels := [name.replace("_", "-") for name in missing if name != "torch"]:
        said += (
            " Install, or where there is a network, in the checkout:\n  pip download --no-deps "
            f"-d benchmarks/wheels {' '.join(wheels)}\nand copy benchmarks/wheels along."
        )
    return said
