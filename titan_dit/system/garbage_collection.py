"""Runs Python's cyclic garbage collector after the same steps on all ranks.

Automatic collections run at different times on each rank and make it a straggler in the next
collective. Reference counting still frees objects outside cycles at once.
"""

from __future__ import annotations

import gc


class Collector:
    """Controls garbage collection from the end of the first step to the end of the block.

    The first step compiles and creates the optimizer state under Python's automatic collector.
    Objects alive after it last as long as the run and are excluded by `gc.freeze`.
    """

    def __init__(self, every: int) -> None:
        """Collect every `every` steps; 0 keeps Python's automatic collector."""
        self.every = every
        self.in_charge = False
        self.was_enabled = False

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def after(self, step: int) -> None:
        """Call after each step: collect generations 0 and 1 every `every` steps.

        Objects that survive one collection are left to `full`.
        """
        if self.every and not self.in_charge:
            self.was_enabled, self.in_charge = gc.isenabled(), True
            gc.disable()
            gc.collect()
            gc.freeze()
        elif self.every and step % self.every == 0:
            gc.collect(1)

    def full(self) -> None:
        """Collect all generations; call where the ranks synchronise anyway."""
        if self.in_charge:
            gc.collect()

    def restore(self) -> None:
        """Restore the automatic collector until after the next step.

        Call before forking: child processes inherit the collector's state.
        """
        if self.in_charge:
            self.in_charge = False
            gc.unfreeze()
            if self.was_enabled:
                gc.enable()
