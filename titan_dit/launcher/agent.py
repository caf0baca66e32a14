"""torchrun's agent, taught to stop in good order. The only file that touches its inside."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError
from torch.distributed.launcher import api
from torch.distributed.run import parse_args, run

from titan_dit.launcher.cause import first_cause, is_consequence, is_users, message_of
from titan_dit.launcher.failure import LAUNCH, STARTED

__all__ = ["Agent", "ChildFailedError", "RendezvousError", "Stopped", "launch"]


LOST_NODE_S = 10.0
"""Ranks that wait for one that has gone do not hear that they should end."""
SEEN_S = 2.0
"""A node that ends the job stays this long: the others may meet there, and see that it is over."""


class Stopped(Exception):
    """The job was to stop while this launcher had no ranks."""


def launch(arguments: list[str], make_agent: Callable[..., Agent]) -> None:
    """Run torchrun with these arguments, and with the agent that `make_agent` makes.

    Raises ChildFailedError, RendezvousError or Stopped.
    """
    options = parse_args(arguments)  # type: ignore[no-untyped-call]
    # Its own handlers would end the ranks; all but one signal are ours.
    options.signals_to_handle = "SIGQUIT"
    api.LocalElasticAgent = make_agent  # type: ignore[attr-defined, assignment]
    run(options)  # type: ignore[no-untyped-call]


class Agent(LocalElasticAgent):
    """The ranks of one node.

    What a user has to put right is not tried again. When a node comes, the ranks save before they
    start anew with it. A rank's failure is told at once, though another attempt follows.
    """

    def __init__(
        self, *args: Any, say: Callable[[str], None], grace_s: float, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.say, self.grace_s = say, grace_s
        self.starting = threading.Lock()
        self.is_stopping = False
        self.is_done = False
        self.starts = 0
        self.note: dict[str, Any] = {}
        """What the ranks left when they ended well: that they were stopped, and why."""

    def ask_to_stop(self) -> bool:
        """Let the ranks save and end; False if there are none. From any thread."""
        with self.starting:
            self.is_stopping = True
            return self.tell(signal.SIGUSR1)

    def tell(self, number: signal.Signals) -> bool:
        """Send the living ranks of this node a signal; False if there are none."""
        told = False
        for process in self.processes():
            if process.poll() is None:
                process.send_signal(number)
                told = True
        return told

    def kill(self) -> None:
        """End the ranks, and what they have started, at once."""
        for process in self.processes():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # Each leads a session of its own.

    def processes(self) -> list[Any]:
        """The ranks' processes; none before they are started."""
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return [handler.proc for handler in handlers.values()]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the ranks; they have met already."""
        with self.starting:
            if self.is_stopping:
                raise Stopped
            # The ranks inherit both.
            if self.has_met_before(worker_group):
                os.environ[STARTED] = "1"
            os.environ[LAUNCH] = self.name_of_job(worker_group)
            started: dict[int, Any] = super()._start_workers(worker_group)
        nodes, ranks = worker_group.group_world_size, worker_group.workers[0].world_size
        if self.starts or nodes != 1:
            begun = "begun again" if self.starts else "begun"
            on = f"{nodes} nodes" if nodes != 1 else "one node"
            self.say(f"{begun}: {ranks} ranks on {on}")
        self.starts += 1
        return started

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """Start anew after a failure; what else it takes to begin again is `_monitor_workers`'."""
        if worker_group.state != WorkerState.HEALTHY:
            super()._restart_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """How the ranks are; decides what of it is a failure, and whether it is tried again."""
        result: RunResult = super()._monitor_workers(worker_group)
        is_regrouping = False
        if result.state == WorkerState.HEALTHY and not self.is_stopping:
            if self.has_lost_node(worker_group):
                # gloo's collectives fail at once then; NCCL's may wait for a node that has gone.
                why = "a node has gone or begins again: the ranks end, and meet anew"
                is_regrouping, wait_s = True, LOST_NODE_S
            elif worker_group.spec.rdzv_handler.num_nodes_waiting():
                why = "another node waits: the ranks save, and begin again with it"
                is_regrouping, wait_s = True, self.grace_s
            if is_regrouping:
                result = self.regroup(worker_group, why, wait_s)
        return self.judged(worker_group, result, is_regrouping)

    def regroup(self, worker_group: WorkerGroup, why: str, wait_s: float) -> RunResult:
        """Let the ranks save and end, to begin again with other nodes: how they were at last.

        One that fails meanwhile ends the others, as at any time.
        """
        self.tell(signal.SIGUSR2)
        self.say(why)
        deadline = time.monotonic() + wait_s
        while True:
            result: RunResult = super()._monitor_workers(worker_group)
            if result.state != WorkerState.HEALTHY or time.monotonic() >= deadline:
                return result
            time.sleep(0.05)

    def judged(self, group: WorkerGroup, result: RunResult, is_regrouping: bool) -> RunResult:
        """What torchrun is told of it."""
        if result.state == WorkerState.SUCCEEDED:
            self.note = self.read_note()
            # Where all were asked to stop as well, the ranks have agreed on that.
            is_regrouping = self.note.get("stopped") == "REGROUP"
            self.is_done = not is_regrouping
        elif result.state == WorkerState.FAILED:
            _, cause = first_cause(result.failures)
            is_failure = self.is_stopping or not (is_regrouping and is_consequence(cause))
            if is_failure:
                self.after_failure(result.failures, is_regrouping)
            is_regrouping = not is_failure
        elif self.is_stopping:
            is_regrouping = False  # Ranks that live will stop.
        if not is_regrouping:
            return result
        self.begin_again(group)
        return RunResult(state=WorkerState.HEALTHY)

    def begin_again(self, worker_group: WorkerGroup) -> None:
        """Meet the nodes that are there now, and start the ranks."""
        handler = worker_group.spec.rdzv_handler
        if self.is_stopping:
            # Asked after the ranks had agreed to begin again: they have saved. So have the others'.
            handler.shutdown()
            if (worker_group.group_world_size or 1) > 1:
                time.sleep(SEEN_S)
            raise Stopped
        try:
            super()._restart_workers(worker_group)
        except RendezvousClosedError:
            self.say("another node has ended the job; its launcher says why")
            raise Stopped from None

    def has_lost_node(self, worker_group: WorkerGroup) -> bool:
        """Whether a node that the ranks count on sends no heartbeats any more."""
        holder = getattr(worker_group.spec.rdzv_handler, "_state_holder", None)
        nodes = worker_group.group_world_size
        if holder is None or nodes is None:
            return False
        return 0 < len(holder.state.participants) < nodes

    def has_met_before(self, worker_group: WorkerGroup) -> bool:
        """Whether the job had ranks before these; a node that comes late learns it at the meeting.

        A round of the meeting ends when all have left it to begin again.
        """
        holder = getattr(worker_group.spec.rdzv_handler, "_state_holder", None)
        return self.starts > 0 or (holder is not None and holder.state.round > 0)

    def name_of_job(self, worker_group: WorkerGroup) -> str:
        """One name for all nodes of a run that meet here: the first one to ask chooses it.

        Empty where the nodes meet in another way than ours.
        """
        handler = worker_group.spec.rdzv_handler
        store = getattr(handler, "_store", None)
        if store is None:
            return ""
        # Runs of several ids may meet in one store.
        key = f"titan_dit.job.{handler.get_run_id()}"
        name: bytes = store.compare_set(key, "", uuid.uuid4().hex)
        return name.decode()

    def after_failure(self, failures: dict[int, ProcessFailure], is_regrouping: bool) -> None:
        """Say why, and whether there is another attempt: torchrun does as the number says."""
        rank, cause = first_cause(failures)
        left = self._remaining_restarts
        if self.is_stopping or is_users(cause):
            self._remaining_restarts = 0
        elif not is_regrouping and self._worker_group.spec.rdzv_handler.num_nodes_waiting():
            # Another node's ranks ended first, for a reason it tells, and it waits for this one.
            self._remaining_restarts = left + 1
        elif left:
            attempt = f"restart {self._worker_group.spec.max_restarts - left + 1}"
            self.say(message_of(rank, cause, then=f"{attempt}, {left - 1} more to come."))

    def read_note(self) -> dict[str, Any]:
        """What a rank has left, if any did."""
        assert self._pcontext is not None
        for file in self._pcontext.error_files.values():
            if file and Path(file).is_file():
                note: dict[str, Any] = json.loads(Path(file).read_text())
                return note
        return {}
