"""titan_dit without the checks of shapes, in this process.

Under tensor and context parallelism a rank's shapes are not those that the annotations name; a
process of its own would spend three seconds on importing torch.
"""

from contextlib import contextmanager

import jaxtyping


@contextmanager
def unchecked():
    """Functions of titan_dit are called as they stand."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)
