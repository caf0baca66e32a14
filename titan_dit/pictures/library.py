"""The libraries of the extra `pictures`: nothing else imports them."""

from __future__ import annotations

import importlib
import os
import warnings
from types import ModuleType

from titan_dit.config.section import UserError

INSTALL = "Install it: pip install 'titan_dit[pictures]', or in a clone: pip install {}."


def diffusers(what: str) -> ModuleType:
    """Import diffusers; `what` needs it, such as "--vae". Raises UserError if it is missing."""
    # It asks a server for news of itself at its import, which hangs where there is no network.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Of packages that diffusers imports.
            library = importlib.import_module("diffusers")
            importlib.import_module("diffusers.utils.logging").disable_progress_bar()
    except ImportError as error:
        raise UserError(
            f"{what} needs the library diffusers, which cannot be imported ({error}). "
            + INSTALL.format("diffusers")
        ) from None
    return library


def parquet(what: str) -> ModuleType:
    """Import pyarrow.parquet, which `what` needs. Raises UserError if it is missing."""
    try:
        return importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise UserError(
            f"{what} needs the library pyarrow, which cannot be imported ({error}). "
            + INSTALL.format("pyarrow")
        ) from None
