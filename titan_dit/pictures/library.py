"""Imports of the libraries of the extra `pictures`; only this file imports them."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from titan_dit.config.section import UserError
from titan_dit.ranks.torch_range import pip_install


def install_advice(package: str) -> str:
    """The advice for a missing package, as a sentence."""
    extra = pip_install("'titan_dit[pictures]'")
    return f"Install it: {extra}, or in a clone: {pip_install(package)}"


def diffusers(what: str) -> ModuleType:
    """Import diffusers; `what` needs it, such as "--vae". Raises UserError if it is missing."""
    return quietly("diffusers", ("AutoencoderKL",), what)


def transformers(what: str) -> ModuleType:
    """Import transformers; `what` needs it. Raises UserError if it is missing."""
    return quietly("transformers", ("T5EncoderModel", "PreTrainedTokenizerFast"), what)


def quietly(name: str, classes: tuple[str, ...], what: str) -> ModuleType:
    """Import a library with the modules of `classes`, and turn its messages off.

    Raises UserError, which begins with `what`, if it cannot be imported.
    """
    # It asks a server for news of itself at its import, which hangs where there is no network.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        with quiet():
            hide_if_broken("torchvision")
            library = importlib.import_module(name)
            reports = importlib.import_module(f"{name}.utils.logging")
            reports.disable_progress_bar()
            reports.set_verbosity_error()
            for kind in classes:  # It imports the modules of a class when that is first named.
                getattr(library, kind)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"{what} needs the library {name}, which cannot be imported "
            f"({' '.join(str(error).split())[:300]}). " + install_advice(name)
        ) from None
    # Of the hub: a line for each try without a network, a warning of how diffusers calls it.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="huggingface_hub")
    return library


def hide_if_broken(name: str) -> None:
    """Make a package that does not load look absent.

    torchvision from another index than torch's raises a RuntimeError; diffusers, which uses it for
    other models, would fail with it.
    """
    try:
        importlib.import_module(name)
    except ImportError:
        pass
    except (RuntimeError, OSError):
        for loaded in [key for key in sys.modules if key.partition(".")[0] == name]:
            del sys.modules[loaded]
        sys.modules[name] = None  # type: ignore[assignment]


@contextmanager
def quiet() -> Iterator[None]:
    """Hide warnings of the packages that diffusers imports."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def video(what: str) -> ModuleType:
    """Import PyAV, FFmpeg's libraries; `what` needs it. Raises UserError if it is missing."""
    try:
        av = importlib.import_module("av")
    except ImportError as error:
        raise UserError(
            f"{what} needs the library av, which cannot be imported ({error}). "
            + install_advice("av")
        ) from None
    # FFmpeg writes to stderr about damaged files, from any thread; errors are raised anyhow.
    av.logging.set_level(None)
    return av


def parquet(what: str) -> ModuleType:
    """Import pyarrow.parquet, which `what` needs. Raises UserError if it is missing."""
    try:
        return importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise UserError(
            f"{what} needs the library pyarrow, which cannot be imported ({error}). "
            + install_advice("pyarrow")
        ) from None
