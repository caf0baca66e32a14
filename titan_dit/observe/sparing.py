"""A full disk costs what is written for people to read, not the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Sparing:
    """Lets writing fail, and says so once for each thing that is written."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.failed: set[str] = set()

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Write `what` in the block."""
        try:
            yield
        except OSError as error:
            if what not in self.failed:
                self.say(f"{what} could not be written: {error}; training goes on without")
            self.failed.add(what)
        else:
            self.failed.discard(what)
