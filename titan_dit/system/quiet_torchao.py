"""torchao, imported only if needed."""

from __future__ import annotations

import importlib
import logging
import warnings
from types import ModuleType


def load_torchao(part: str = "float8") -> ModuleType:
    """Import `torchao.PART` without torchao's warnings about missing CUDA libraries."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(f"torchao.{part}")
    finally:
        logging.disable(logging.NOTSET)
