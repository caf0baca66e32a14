"""torchrun with one error message instead of one per rank, and graceful stops.

SIGTERM, SIGUSR1, SIGHUP and the first Ctrl-C ask the ranks to save and end. A second Ctrl-C kills
them. commands/train.py calls this.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from titan_dit.config.section import UserError
from titan_dit.launcher import rendezvous
from titan_dit.launcher.forked_ranks import ForkServer, fork_ranks
from titan_dit.ranks import hosts, open_files
from titan_dit.ranks.failure import INTERNAL_ERROR, INTERRUPTED, describe
from titan_dit.ranks.signals import PARENT, Listener
from titan_dit.system import stdio

if TYPE_CHECKING:
    from titan_dit.launcher.agent import Agent, ChildFailedError

STOPS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)


class Launcher:
    """This node's ranks, from the first signal handler to the exit code."""

    def __init__(self, grace_s: float, stopped_code: int) -> None:
        self.grace_s, self.stopped_code = grace_s, stopped_code
        self.agent: Agent | None = None
        self.asked: signal.Signals | None = None

    def make_agent(self, *args: Any, **kwargs: Any) -> Agent:
        """Agent factory for torchrun."""
        from titan_dit.launcher.agent import Agent

        self.agent = Agent(*args, say=say, grace_s=self.grace_s, **kwargs)
        return self.agent

    def hear(self, number: signal.Signals) -> None:
        """Handle a signal in the listener's thread, even if the main thread is blocked."""
        if self.asked is not None:
            if number == signal.SIGINT:
                self.end_at_once(INTERRUPTED)
            return
        if self.agent and self.agent.has_failed:
            # Its ranks are gone, and its failure is being reported: no stop, no code 0.
            if number == signal.SIGINT:
                self.asked = number  # A second one ends it at once.
            return
        self.asked = number
        if self.agent is None or not self.agent.ask_to_stop():
            if not (self.agent and self.agent.is_done):
                say(f"stopped by {number.name} while there were no ranks")
                if self.agent and self.has_ranks:
                    self.agent.end_job()  # Other nodes would wait for this one, or go on.
            self.end_at_once(self.code())
        again = "; Ctrl-C again ends them at once" if number == signal.SIGINT else ""
        say(f"{number.name}: the ranks finish the step, save and end{again}")
        timer = threading.Timer(self.grace_s, self.out_of_grace)
        timer.daemon = True
        timer.start()

    def out_of_grace(self) -> None:
        """Kill the ranks after the grace period."""
        assert self.asked is not None
        say(f"the ranks did not end within GRACE={self.grace_s:g} s; killing them")
        self.end_at_once(128 + self.asked)

    def end_at_once(self, code: int) -> None:
        """Kill the ranks and exit immediately."""
        if self.agent:
            self.agent.kill()
        os._exit(code)

    def code(self) -> int:
        """Exit code of a launch without failures: finished, or stopped with steps left."""
        if self.agent and self.agent.is_done and not self.agent.note.get("stopped"):
            return 0
        return INTERRUPTED if self.asked == signal.SIGINT else self.stopped_code

    @property
    def has_ranks(self) -> bool:
        """True once ranks of this node have started; between a failure and a restart, too."""
        return self.agent is not None and self.agent.starts > 0

    def give_notice(self, endpoint: str) -> None:
        """Say what the rendezvous waits for, unless it is over."""
        if not self.has_ranks:
            say(rendezvous.notice(endpoint))

    def run(self, arguments: list[str]) -> int:
        """Launch the ranks, wait for them, return the exit code."""
        # Its imports run beside ours.
        server = ForkServer() if os.environ.get("FORK", "1") != "0" else None
        with silent_frames():
            from titan_dit.launcher import agent
        if server:
            fork_ranks(server)

        endpoint = rendezvous.endpoint_of(arguments)
        try:
            if endpoint:
                need = open_files.needed_by_launcher(rendezvous.most_nodes(arguments))
                open_files.raise_limit(need, "the launcher of RDZV_ENDPOINT")
                timer = threading.Timer(rendezvous.NOTICE_S, self.give_notice, [endpoint])
                timer.daemon = True
                timer.start()
            options = hosts.torchrun_options(arguments, endpoint)
            agent.launch(options, self.make_agent, say)
        except UserError as error:
            code, message = describe(error)
            stdio.write(sys.stderr, f"{message}\n")
            return code
        except agent.ChildFailedError as error:
            return self.failed(error)
        except agent.Stopped:
            return self.code()
        except agent.EndedElsewhere:
            say("the job did not finish here: steps may be left. The same command resumes it")
            return INTERNAL_ERROR
        except agent.RendezvousError as error:
            stdio.write(
                sys.stderr,
                "error: the rendezvous failed (RDZV_ENDPOINT, NNODES). Either not enough nodes "
                "joined, or another node ended first and reports why. If the node of RDZV_ENDPOINT "
                f"was lost, restart it, then this one: {error}\n",
            )
            return 1
        except socket.gaierror as error:
            stdio.write(sys.stderr, f"error: {hosts.unknown_names(endpoint)}: {error}\n")
            return 1
        return self.code()

    def failed(self, error: ChildFailedError) -> int:
        """Print the root cause of failed ranks; return the exit code."""
        from titan_dit.launcher.cause import ASKED_TO_END, is_consequence, message_of, root_cause

        rank, failure = root_cause(error.failures)
        asked_to_end = any(f.exitcode in ASKED_TO_END for f in error.failures.values())
        if self.asked and asked_to_end and is_consequence(failure):
            say("stopped before the first step finished: nothing new to save")
            return self.code()
        stdio.write(sys.stderr, message_of(rank, failure) + "\n")
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode


@contextmanager
def silent_frames() -> Iterator[None]:
    """Import torch without its C++ log in this process: errors come as exceptions, too."""
    name = "TORCH_CPP_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ[name] = "FATAL"
    yield
    # The ranks keep theirs.
    os.environ.pop(name)
    if before is not None:
        os.environ[name] = before


def say(line: str) -> None:
    """Print a line to this node's console."""
    stdio.write(sys.stderr, f"titan_dit: {line}\n")


def main() -> int:
    """`python -m titan_dit.launcher.launch [torchrun options] -m titan_dit.train --config ...`."""
    stdio.prepare()
    # torchrun logs every failure several times; the root cause is printed below.
    logging.disable(logging.ERROR)
    # Otherwise restarted ranks reuse the store of the dead ones and read stale keys.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ[PARENT] = str(os.getpid())
    grace_s = float(os.environ.get("GRACE") or "600")
    launcher = Launcher(grace_s, stopped_code=int(os.environ.get("STOPPED_CODE") or "0"))
    # Listen before torch is imported, which takes seconds.
    with Listener(STOPS, launcher.hear):
        return launcher.run(sys.argv[1:])


if __name__ == "__main__":
    code = main()
    # The job has ended: a signal while torch is torn down must not change the exit code, by which
    # a scheduler would requeue a finished job.
    for stop in STOPS:
        signal.signal(stop, signal.SIG_IGN)
    sys.exit(code)
