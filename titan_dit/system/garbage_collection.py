"""Python's cyclic garbage collector, run by all ranks after the same step.

Left to itself it runs whenever a rank has made enough objects, on every rank at another moment, and
each time all the others wait for that rank in their next collective. Memory that no cycle holds is
freed at once as ever: the collector is for cycles only.
"""

from __future__ import annotations

import gc


class Collector:
    """Takes over after the first step within its block, and gives back where the block ends.

    The first step is left to Python: it compiles, and makes the optimizer's state. What lives after
    it lives as long as the run, and is never looked at again (`gc.freeze`).
    """

    def __init__(self, every: int) -> None:
        """Steps between two collections; 0 leaves everything to Python."""
        self.every = every
        self.in_charge = False
        self.was_enabled = False

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *_: object) -> None:
        self.rest()

    def after(self, step: int) -> None:
        """Every so many steps, collect what has become garbage since the last time.

        Generation 1: what outlives one collection is left to the full ones.
        """
        if self.every and not self.in_charge:
            self.was_enabled, self.in_charge = gc.isenabled(), True
            gc.disable()
            gc.collect()
            gc.freeze()
        elif self.every and step % self.every == 0:
            gc.collect(1)

    def full(self) -> None:
        """Collect everything, where the ranks stop anyway."""
        if self.in_charge:
            gc.collect()

    def rest(self) -> None:
        """Leave everything to Python until after the next step.

        Also before processes are forked that are to have a collector: it is inherited as it is.
        """
        if self.in_charge:
            self.in_charge = False
            gc.unfreeze()
            if self.was_enabled:
                gc.enable()
