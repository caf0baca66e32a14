"""Planning in a process of its own: with a thousand ranks it is a minute of Python.

In the rank's own process that minute would hold the GIL, which training needs to launch kernels.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

READY = "ready"
START_S = 120.0
"""Maximum seconds of its start: imports from a slow disk. After that the rank plans itself."""
ROOT = Path(__file__).resolve().parents[2]


class PlanningProcess:
    """A `GlobalPlan` in another process. Raises OSError if it cannot be started."""

    def __init__(self) -> None:
        # A file: a full pipe that nobody reads would block the process.
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C must not end it: the ranks save a last checkpoint.
        )
        if not self.is_ready():
            raise OSError(f"the planning process does not start: {self.end()}")

    def choose(self, plans: Sequence[bytes]) -> list[bytes]:
        """As `GlobalPlan.choose`."""
        choices: list[bytes] = self.ask("choose", plans)
        return choices

    def describe(self, results: Sequence[bytes]) -> dict[str, bytes]:
        """As `GlobalPlan.describe`; ends the process."""
        described: dict[str, bytes] = self.ask("describe", results)
        self.close()
        return described

    def ask(self, name: str, parts: Sequence[bytes]) -> Any:
        """Call a method of the process's `GlobalPlan`."""
        assert self.process.stdin
        try:
            pickle.dump((name, list(parts)), self.process.stdin)
            self.process.stdin.flush()
            failure, answer = self.answer()
        except (EOFError, BrokenPipeError):
            raise RuntimeError(f"the process that plans a checkpoint ended: {self.end()}") from None
        if failure:
            raise RuntimeError(f"the checkpoint cannot be planned: {failure}")
        return answer

    def is_ready(self) -> bool:
        """Wait for the process's first message, up to START_S."""
        assert self.process.stdout
        if not select.select([self.process.stdout], [], [], START_S)[0]:
            return False
        try:
            return bool(self.answer() == READY)
        except Exception:  # Other output on stdout is no pickle; loading it can raise anything.
            return False

    def answer(self) -> Any:
        """The next object that the process sends."""
        assert self.process.stdout
        try:
            return pickle.load(self.process.stdout)
        except (EOFError, pickle.UnpicklingError):
            raise EOFError from None

    def end(self) -> str:
        """End the process; return its exit code and the last line of its stderr."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=1)  # Its own exit code.
        self.close()
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return f"exit code {self.process.returncode}. {lines[-1] if lines else ''}".strip()

    def close(self) -> None:
        """End the process.

        A data worker may have inherited the pipes: closing them here does not close them there.
        """
        assert self.process.stdin
        assert self.process.stdout
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(BrokenPipeError):
                pipe.close()
        self.process.kill()
        self.process.wait()


def main() -> None:
    """Answer calls from stdin on stdout until stdin ends: the rank closed it, or died."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    os.nice(5)  # The ranks come first.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # A library's prints must not mix with the answers.
    from titan_dit.checkpoint.save_plan import GlobalPlan

    gc.disable()  # Millions of small objects, none in a cycle.
    plan = GlobalPlan()
    reply: Any = READY
    while True:
        pickle.dump(reply, answers)
        answers.flush()
        try:
            name, parts = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            reply = None, getattr(plan, name)(parts)
        except Exception as error:
            reply = f"{type(error).__name__}: {error}", None


if __name__ == "__main__":
    main()
