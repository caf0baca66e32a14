"""Which of the ranks' failures made the others fail, and what to say of it."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from titan_dit.launcher.failure import LEFT

GO_ON = "Run the same command again: it goes on from the newest checkpoint, if there is one."
KILLS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS)
OBEYED = (LEFT, -signal.SIGUSR1, -signal.SIGUSR2)
"""How a rank ends that was told to before it had anything to save."""

LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "ncclRemoteError")

Failures = Mapping[int, ProcessFailure]
"""By rank."""


def first_cause(failures: Failures) -> tuple[int, ProcessFailure]:
    """The failure that made the others fail: the earliest one that left a message of its own."""

    def moment(item: tuple[int, ProcessFailure]) -> tuple[int, float]:
        message = item[1].message
        if isinstance(message, dict):
            return 2 * has_lost_peer(message), float(message["extraInfo"]["moment"])
        is_told = item[1].exitcode in (*OBEYED, -signal.SIGTERM)
        return 3 if is_told else 1, float(item[1].timestamp)

    # A rank killed from outside leaves no message, and the others fail because of it. Other signals
    # can be consequences: the launcher's SIGTERM, NCCL's SIGABRT.
    killed = [(r, f) for r, f in failures.items() if -f.exitcode in KILLS]
    return killed[0] if killed else min(failures.items(), key=moment)


def is_users(failure: ProcessFailure) -> bool:
    """Whether a user has to put it right: trying again would not."""
    message = failure.message
    return isinstance(message, dict) and bool(message["extraInfo"]["user"])


def has_lost_peer(message: dict[str, Any]) -> bool:
    """Whether a rank only failed because another was gone, by what gloo and NCCL say then."""
    text: str = message["message"]
    return any(words in text for words in LOST_PEER)


def is_consequence(failure: ProcessFailure) -> bool:
    """Whether a rank only ended because it was told to, or because another one had gone."""
    if isinstance(failure.message, dict):
        return has_lost_peer(failure.message)
    return failure.exitcode in (*OBEYED, -signal.SIGTERM)


def message_of(rank: int, failure: ProcessFailure, then: str = GO_ON) -> str:
    """What to print for it; `then` is what happens next."""
    message = failure.message
    if isinstance(message, dict):
        text: str = message["message"]
        if has_lost_peer(message):
            text = f"another rank has gone: {text.splitlines()[-1]}"
        return text if is_users(failure) else f"{text}\nrank {rank} failed (above). {then}"
    return f"rank {rank} ended with exit code {failure.exitcode}: {message}. {then}"
