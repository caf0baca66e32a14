"""The range of torch versions: others are refused before torch is imported."""

from __future__ import annotations

import importlib.metadata
import re

from titan_dit.config.section import UserError

OLDEST, NEWEST = (2, 11), (2, 15)
"""As in pyproject.toml. docs/torch-versions.md: what is tested, and what newer ones may lack."""


def check_torch() -> None:
    """Raise UserError unless the installed torch is within the range."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return  # A build without metadata, or none: the import says more.
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and OLDEST <= (int(numbers[1]), int(numbers[2])) <= NEWEST:
        return
    oldest, newest = (".".join(map(str, numbers)) for numbers in (OLDEST, NEWEST))
    raise UserError(
        f"torch {version} is installed, but titan_dit runs with {oldest} to {newest}: it uses "
        f"private parts of torch. Install one of them: pip install torch=={newest}.0"
    )
