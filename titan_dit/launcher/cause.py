"""The root cause among the ranks' failures, and its message."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from titan_dit.ranks.failure import LEFT

RESUME_HINT = "Run the same command again: it resumes from the newest checkpoint, if any."
KILLS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS)
ASKED_TO_END = (LEFT, -signal.SIGUSR1, -signal.SIGUSR2)
"""Exit codes of a rank that was asked to end before it had anything to save."""

LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",  # gloo connects at first use: the other rank may have ended before.
    "ncclRemoteError",
)

Failures = Mapping[int, ProcessFailure]
"""Global rank -> its failure."""


def root_cause(failures: Failures) -> tuple[int, ProcessFailure]:
    """The failure that most likely caused the others; the earliest of equally likely ones."""

    def moment(item: tuple[int, ProcessFailure]) -> tuple[int, float]:
        message = item[1].message
        if isinstance(message, dict):
            return 2 * has_lost_peer(message), float(message["extraInfo"]["moment"])
        is_asked = item[1].exitcode in (*ASKED_TO_END, -signal.SIGTERM)
        return 3 if is_asked else 1, float(item[1].timestamp)

    # A rank killed from outside leaves no message but makes the others fail. Other signals can be
    # consequences: the launcher's SIGTERM, NCCL's SIGABRT.
    killed = [(r, f) for r, f in failures.items() if -f.exitcode in KILLS]
    return killed[0] if killed else min(failures.items(), key=moment)


def without_killed(failures: Failures, closed: Collection[int]) -> dict[int, ProcessFailure]:
    """Leave out the ranks that torchrun killed because another one had failed.

    `closed`: local ranks that were running when torchrun ended them. A SIGKILL of any other rank
    came from outside: from the kernel, for memory, or from a person.
    """
    return {
        rank: failure
        for rank, failure in failures.items()
        if failure.local_rank not in closed or failure.exitcode != -signal.SIGKILL
    }


def is_user_error(failure: ProcessFailure) -> bool:
    """Return True for a user error, which a restart would not fix."""
    message = failure.message
    return isinstance(message, dict) and bool(message["extraInfo"]["user"])


def came_early(failure: ProcessFailure) -> bool:
    """Return True for an error that a rank raised before training, while it built or loaded."""
    message = failure.message
    return isinstance(message, dict) and not message["extraInfo"].get("trained", True)


def has_lost_peer(message: dict[str, Any]) -> bool:
    """Return True if gloo's or NCCL's message says that another rank was lost."""
    text: str = message["message"]
    return any(words in text for words in LOST_PEER)


def is_consequence(failure: ProcessFailure) -> bool:
    """Return True if a rank ended on request or because another rank was lost."""
    if isinstance(failure.message, dict):
        return has_lost_peer(failure.message)
    return failure.exitcode in (*ASKED_TO_END, -signal.SIGTERM)


def may_be_consequence(failure: ProcessFailure) -> bool:
    """`is_consequence`, or an abort without a message: NCCL's watchdog may have missed a peer."""
    is_abort = failure.exitcode == -signal.SIGABRT and not isinstance(failure.message, dict)
    return is_abort or is_consequence(failure)


def message_of(rank: int, failure: ProcessFailure, then: str = RESUME_HINT) -> str:
    """The console message of a failure; `then`: what happens next, left out for user errors."""
    message = failure.message
    if isinstance(message, dict):
        text: str = message["message"]
        if has_lost_peer(message):
            text = f"another rank was lost: {text.splitlines()[-1]}"
        return text if is_user_error(failure) else f"{text}\nrank {rank} failed (above). {then}"
    return f"rank {rank} ended with exit code {failure.exitcode}: {message}. {then}"
