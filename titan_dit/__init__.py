"""titan_dit: pre-training of Diffusion Transformers with PyTorch's own distributed stack.

`titan_dit.load(RUN)` is a trained network, see docs/python-api.md.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titan_dit.trained_model import load

__all__ = ["__version__", "load"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`load`, imported when it is first asked for: `import titan_dit` needs no torch."""
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # By name: for import-linter every file that reads `__version__` would import the network's.
    return importlib.import_module("titan_dit.trained_model").load
