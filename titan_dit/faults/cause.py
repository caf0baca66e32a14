"""Which of the ranks' failures made the others fail, and what to say of it."""

from __future__ import annotations

import signal
from collections.abc import Mapping

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from titan_dit.failure import LEFT

GO_ON = "Run the same command again: it goes on from the newest checkpoint, if there is one."
KILLS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS)
OBEYED = (LEFT, -signal.SIGUSR1, -signal.SIGUSR2)
"""How a rank ends that was told to before it had anything to save."""

Failures = Mapping[int, ProcessFailure]
"""By rank."""


def first_cause(failures: Failures) -> tuple[int, ProcessFailure]:
    """The failure that made the others fail: the earliest one that left a message."""

    def moment(item: tuple[int, ProcessFailure]) -> tuple[bool, float]:
        message = item[1].message
        if isinstance(message, dict):
            return False, float(message["extraInfo"]["moment"])
        return True, float(item[1].timestamp)

    # A rank killed from outside leaves no message, and the others fail because of it. Other signals
    # can be consequences: the launcher's SIGTERM, NCCL's SIGABRT.
    killed = [(r, f) for r, f in failures.items() if -f.exitcode in KILLS]
    return killed[0] if killed else min(failures.items(), key=moment)


def is_users(failure: ProcessFailure) -> bool:
    """Whether a user has to put it right: trying again would not."""
    message = failure.message
    return isinstance(message, dict) and bool(message["extraInfo"]["user"])


def message_of(rank: int, failure: ProcessFailure, then: str = GO_ON) -> str:
    """What to print for it; `then` is what happens next."""
    message = failure.message
    if isinstance(message, dict):
        text: str = message["message"]
        return text if is_users(failure) else f"{text}\nrank {rank} failed (above). {then}"
    return f"rank {rank} ended with exit code {failure.exitcode}: {message}. {then}"
