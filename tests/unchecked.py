"""Disables the shape checks in this process.

Under tensor and context parallelism a rank's shapes differ from the annotations.
"""

from contextlib import contextmanager

import jaxtyping


@contextmanager
def unchecked():
    """Call titan_dit's functions without shape checks in the block."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)
