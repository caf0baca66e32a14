"""The range of torch versions: others are refused before torch is imported.

docs/torch-versions.md: what is tested, and all private parts of torch that are used.
"""

from __future__ import annotations

import importlib.metadata
import re

from titan_dit.config.section import UserError

OLDEST, NEWEST = (2, 11), (2, 15)
"""Supported versions of torch; equal to pyproject.toml's."""


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


def pip_install(packages: str) -> str:
    """The command that installs packages and keeps this torch, which pip would replace by another.

    A dependency such as torchvision may want the newest torch: another build, perhaps for CUDA.
    """
    try:
        return f"pip install {packages} torch=={importlib.metadata.version('torch')}"
    except importlib.metadata.PackageNotFoundError:
        return f"pip install {packages}"


def require(file: str, owner: object, *names: str) -> None:
    """Raise UserError if `owner`, a part of torch, lacks a private name that `file` uses later."""
    for name in names:
        if not hasattr(owner, name):
            where = getattr(owner, "__name__", type(owner).__name__)
            raise UserError(
                f"torch {importlib.metadata.version('torch')} has no {where}.{name}, which "
                f"titan_dit/{file} uses. Install a version that docs/torch-versions.md names."
            )
