"""torchrun, with one error message instead of one per rank. run_train.sh calls it."""

from __future__ import annotations

import logging
import os
import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import parse_args, run

GO_ON = "Run the same command again: it goes on from the newest checkpoint, if there is one."
KILLS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS)


def main() -> None:
    """`python -m titan_dit.launch [torchrun's options] -m titan_dit.train --config ...`."""
    # torchrun logs every failure several times over; the cause is printed below.
    logging.disable(logging.ERROR)
    # Restarted ranks would meet on the store of those that died and read their stale keys.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    try:
        run(parse_args(sys.argv[1:]))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        rank, failure = first_cause(error)
        sys.stderr.write(message_of(rank, failure) + "\n")
        sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)
    except RendezvousError as error:
        sys.stderr.write(
            "error: the nodes did not meet (RDZV_ENDPOINT, NNODES), or another node ended first "
            f"and says why: {error}\n"
        )
        sys.exit(1)
    except SignalException as stopped:
        sys.stderr.write(f"Stopped by {stopped.sigval.name}. {GO_ON}\n")
        sys.exit(128 + stopped.sigval)


def first_cause(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """The failure that made the others fail: the earliest one that left a message."""

    def moment(item: tuple[int, ProcessFailure]) -> tuple[bool, float]:
        message = item[1].message
        if isinstance(message, dict):
            return False, float(message["extraInfo"]["moment"])
        return True, float(item[1].timestamp)

    # A rank killed from outside leaves no message, and the others fail because of it. Other signals
    # can be consequences: the launcher's SIGTERM, NCCL's SIGABRT.
    killed = [(r, f) for r, f in error.failures.items() if -f.exitcode in KILLS]
    return killed[0] if killed else min(error.failures.items(), key=moment)


def message_of(rank: int, failure: ProcessFailure) -> str:
    """What to print for it."""
    message = failure.message
    if isinstance(message, dict):
        text: str = message["message"]
        by = "" if message["extraInfo"]["user"] else f"\nrank {rank} failed (above). {GO_ON}"
        return text + by
    return f"rank {rank} ended with exit code {failure.exitcode}: {message}. {GO_ON}"


if __name__ == "__main__":
    main()
