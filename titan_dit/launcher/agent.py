"""torchrun's agent with graceful stops.

All uses of its private interfaces are in this file, those of its heartbeats in store.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed import DistStoreError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError
from torch.distributed.launcher import api
from torch.distributed.run import parse_args, run

from titan_dit.launcher import rendezvous
from titan_dit.launcher.cause import (
    Failures,
    came_early,
    is_consequence,
    is_user_error,
    may_be_consequence,
    message_of,
    root_cause,
    without_killed,
)
from titan_dit.launcher.store import LastingStore, LocalWatch, connect_again, watch_locally
from titan_dit.ranks.failure import HERE, LAUNCH, LEAVING, SAVED, STARTED
from titan_dit.ranks.torch_range import require

__all__ = ["Agent", "ChildFailedError", "RendezvousError", "Stopped", "launch"]


KILLS_AFTER_S = 30
"""torchrun's patience with ranks that it has asked to end; then it kills them."""
LOST_NODE_S = 2.0
"""Time for the ranks to agree on their end after a node was lost. Those that are blocked in a
collective with it cannot, and are killed."""
LEAVING_S = 30.0
"""Time for ranks that have agreed on their end and save: the node was not really lost."""
RETURN_S = 3.0
"""Time for the store to be reached again when a rank lost another one: the network may be back."""
LINGER_S = 3.0
"""A node that ends the job stays this long: the others may rendezvous there and must see it."""
FIRST_PAUSE_S, PAUSE_S = 2.0, 60.0
"""Shortest and longest pause before a restart: see `Agent.pause_s`."""
CLOSING_S = 5.0
"""Limit for closing the rendezvous when a stop is requested between ranks."""
STOPPED, DONE = b"stopped", b"done"
"""Ends of a job without an error, as the store has them for the launchers of other nodes."""


class Stopped(Exception):
    """A stop was requested while this launcher had no ranks."""


class EndedElsewhere(Exception):
    """Another node has ended the job, and nobody asked for it."""


def launch(
    arguments: list[str], make_agent: Callable[..., Agent], say: Callable[[str], None]
) -> None:
    """Run torchrun with these arguments and `make_agent` as its agent class.

    Raises ChildFailedError, RendezvousError, EndedElsewhere, Stopped or UserError.
    """
    options = parse_args(arguments)  # type: ignore[no-untyped-call]
    # torchrun's handlers would kill the ranks: leave it only SIGQUIT.
    options.signals_to_handle = "SIGQUIT"
    api.LocalElasticAgent = make_agent  # type: ignore[attr-defined, assignment]
    watch_locally()
    mine = rendezvous.facts_of(arguments)
    connect_again(say, partial(rendezvous.check, mine, say))
    run(options)  # type: ignore[no-untyped-call]


class Agent(LocalElasticAgent):
    """The ranks of one node.

    User errors are not retried. When a node joins, the ranks save before they restart with it. A
    rank's failure is reported at once, even if a restart follows.
    """

    def __init__(
        self, *args: Any, say: Callable[[str], None], grace_s: float, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        require("launcher/agent.py", self, "_pcontext", "_worker_group", "_remaining_restarts")
        self.say, self.grace_s = say, grace_s
        self.starting = threading.Lock()
        self.is_stopping = False
        self.is_done = False
        self.starts = 0
        self.pause_s = 0.0
        """Time to wait before the next restart: longer and longer while restarted ranks fail early,
        because a disk that is away needs time to come back."""
        self.closed: set[int] = set()
        """Local ranks that torchrun may have killed, since they did not end."""
        self.credited = -1
        """Step of the newest checkpoint that has given the restarts back."""
        self.has_failed = False
        """True if the job ends with a failure: no restart is left."""
        self.note: dict[str, Any] = {}
        """Note of ranks that ended without error: whether and why they were stopped."""

    def ask_to_stop(self) -> bool:
        """Ask the ranks to save and end; False if there are none. Thread-safe."""
        with self.starting:
            self.is_stopping = True
            return self.send(signal.SIGUSR1)

    def send(self, number: signal.Signals) -> bool:
        """Send a signal to this node's running ranks; False if there are none."""
        sent = False
        for process in self.processes():
            if process.poll() is None:
                process.send_signal(number)
                sent = True
        return sent

    def kill(self) -> None:
        """Kill the ranks and their child processes."""
        for process in self.processes():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):  # It has just ended.
                    os.killpg(process.pid, signal.SIGKILL)  # Each rank leads its own session.

    def processes(self) -> list[Any]:
        """The ranks' processes; empty before the start."""
        return list(self.processes_by_rank().values())

    def processes_by_rank(self) -> dict[int, Any]:
        """Local rank -> its process; empty before the start."""
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return {rank: handler.proc for rank, handler in handlers.items()}

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Rendezvous and set this node's ranks; again if a node was lost in between."""
        while True:
            try:
                super()._rendezvous(worker_group)
                return
            except DistStoreError:  # The lost node's part did not come.
                self.say("a node was lost before its ranks started: the others rendezvous again")

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the ranks, after the rendezvous."""
        # Not under the lock: the store may be out of reach, and a stop request must not wait.
        name = self.launch_name(worker_group)
        with self.starting:
            if self.is_stopping:
                raise Stopped
            # The ranks inherit both variables.
            if self.is_restart(worker_group):
                os.environ[STARTED] = HERE if self.starts else "elsewhere"
            os.environ[LAUNCH] = name
            started: dict[int, Any] = super()._start_workers(worker_group)
            self.announce_ends()
        nodes, ranks = worker_group.group_world_size, worker_group.workers[0].world_size
        group_rank = worker_group.group_rank
        if self.starts or nodes != 1:
            started_how = "restarted" if self.starts else "started"
            on = f"{nodes} nodes" if nodes != 1 else "one node"
            # Its console is silent from here on.
            first = worker_group.master_addr
            elsewhere = f"; rank 0 prints on another node ({first})" if group_rank else ""
            self.say(f"{started_how}: {ranks} ranks on {on}{elsewhere}")
        self.starts += 1
        return started

    def announce_ends(self) -> None:
        """Have the ranks know whose SIGTERM it is: torchrun's, and no request to end the job.

        torchrun ends the others when a rank has failed. Their collective may come through
        nevertheless, if what was lost was the network. Then all ranks of all nodes would agree to
        stop, and the job would end with exit code 0.

        torchrun kills those that do not end, and records them as failures. `closed` notes who they
        are: they are no cause.
        """
        assert self._pcontext is not None
        close = self._pcontext.close
        self.closed = set()

        def announced(
            death_sig: signal.Signals | None = None, timeout: int = KILLS_AFTER_S
        ) -> None:
            running = self.processes_by_rank().items()
            left = {rank for rank, process in running if process.poll() is None}
            if death_sig in (None, signal.SIGTERM):
                self.send(signal.SIGUSR2)
            began = time.monotonic()
            close(death_sig, timeout)
            # It kills when its patience is over. A rank that was still dying is not meant.
            if death_sig == signal.SIGKILL or time.monotonic() - began >= timeout:
                self.closed |= left

        self._pcontext.close = announced  # type: ignore[method-assign]

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """Restart after a failure; `_monitor_workers` handles restarts of healthy ranks."""
        if worker_group.state != WorkerState.HEALTHY:
            self.pause()
            self.restart(worker_group)

    def pause(self) -> None:
        """Wait before a restart, unless the job is ended meanwhile, here or on another node."""
        handler = self._worker_group.spec.rdzv_handler
        holder = getattr(handler, "_state_holder", None)
        deadline = time.monotonic() + self.pause_s
        while time.monotonic() < deadline and not self.is_stopping:
            with contextlib.suppress(RendezvousError):
                handler.num_nodes_waiting()  # Reads the state from the store.
            if holder is not None and holder.state.closed:
                return
            time.sleep(min(0.5, self.pause_s))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Poll the ranks; start a restart if a node has left or joined."""
        result: RunResult = super()._monitor_workers(worker_group)
        is_regrouping = False
        if result.state == WorkerState.HEALTHY and not self.is_stopping:
            if self.has_lost_node(worker_group):
                # gloo's collectives fail at once; NCCL's may block on the lost node.
                why = "a node was lost or restarts: the ranks end and rendezvous again"
                is_regrouping, is_lost = True, True
            elif worker_group.spec.rdzv_handler.num_nodes_waiting():
                why = "another node is waiting: the ranks save and restart with it"
                is_regrouping, is_lost = True, False
            if is_regrouping:
                result = self.regroup(worker_group, why, is_lost=is_lost)
        return self.handle(worker_group, result, is_regrouping)

    def regroup(self, worker_group: WorkerGroup, why: str, *, is_lost: bool) -> RunResult:
        """Ask the ranks to save and end before a new rendezvous; return their last state.

        A rank that fails meanwhile ends the others as usual.
        """
        self.send(signal.SIGUSR2)
        self.say(why)
        asked = time.monotonic()
        lost = asked if is_lost else None
        while True:
            result: RunResult = super()._monitor_workers(worker_group)
            now = time.monotonic()
            if lost is None and self.has_lost_node(worker_group):
                lost = now
            since, limit = asked, self.grace_s
            if lost is not None:
                since, limit = lost, LEAVING_S if self.shown(LEAVING) else LOST_NODE_S
            if result.state != WorkerState.HEALTHY or now - since >= limit:
                return result
            time.sleep(0.05)

    def shown(self, sign: str) -> list[str]:
        """Texts that ranks of this node show: having agreed to end (LEAVING), or saved (SAVED)."""
        files = self._pcontext.error_files.values() if self._pcontext else ()
        found = [Path(file + sign) for file in files if file]
        return [file.read_text() for file in found if file.exists()]

    def credit(self) -> None:
        """Give all restarts back for a checkpoint of a later step: a long run may fail often."""
        steps = [int(text) for text in self.shown(SAVED) if text.isdecimal()]
        if max(steps, default=-1) > self.credited:
            self.credited = max(steps)
            self._remaining_restarts = self._worker_group.spec.max_restarts

    def handle(self, group: WorkerGroup, result: RunResult, is_regrouping: bool) -> RunResult:
        """Return the result for torchrun: success, failure, or HEALTHY after a restart."""
        if result.state != WorkerState.HEALTHY or is_regrouping:
            self.credit()
        if result.state == WorkerState.SUCCEEDED:
            rejoins = self.succeeded(group)
        elif result.state == WorkerState.FAILED:
            result.failures = without_killed(result.failures, self.closed)
            rejoins = self.failed(group, result.failures, is_regrouping)
        else:
            rejoins = is_regrouping and not self.is_stopping  # The running ranks will stop.
        if not rejoins:
            return result
        self.rejoin(group)
        return RunResult(state=WorkerState.HEALTHY)

    def succeeded(self, group: WorkerGroup) -> bool:
        """Note how the job ended; True if the ranks have agreed to rendezvous again instead."""
        self.note = self.read_note()
        # Their note and not this node's wish: a stop request of another node wins over a regroup.
        if self.note.get("stopped") == "REGROUP":
            return True
        self.is_done = True
        self.note_end(group, STOPPED if self.note.get("stopped") else DONE)
        return False

    def failed(self, group: WorkerGroup, failures: Failures, is_regrouping: bool) -> bool:
        """Report and count a failure; True if it only follows from a regroup, and is neither."""
        _, cause = root_cause(failures)
        # This node may have been lost to the others while the network was cut.
        is_regrouping |= is_consequence(cause) and self.is_left_out(group)
        if is_regrouping and is_consequence(cause) and not self.is_stopping:
            return True
        self.count_and_report(failures, is_regrouping)
        return False

    def rejoin(self, worker_group: WorkerGroup) -> None:
        """Rendezvous with the present nodes and restart the ranks."""
        handler = worker_group.spec.rdzv_handler
        if self.is_stopping:
            # The stop came after the ranks of all nodes agreed to restart: all have saved.
            self.note_end(worker_group, STOPPED)
            handler.shutdown()
            if (worker_group.group_world_size or 1) > 1:
                time.sleep(LINGER_S)
            raise Stopped
        # Those that still run are blocked: SIGTERM would only cost seconds.
        self.kill()
        self.restart(worker_group)

    def restart(self, worker_group: WorkerGroup) -> None:
        """Rendezvous, start the ranks again; raises Stopped or EndedElsewhere if it is closed."""
        try:
            super()._restart_workers(worker_group)
        except RendezvousClosedError:
            if self.is_stopping:  # By `end_job`, after which its thread ends the process.
                time.sleep(CLOSING_S + 2 * LINGER_S)
                raise Stopped from None
            self.say("another node has ended the job; its launcher says why")
            if self.end_of(worker_group) in (STOPPED, DONE):
                raise Stopped from None
            raise EndedElsewhere from None

    def end_job(self) -> None:
        """End the job on all nodes while this one has no ranks, in a few seconds. Thread-safe."""
        closing = threading.Thread(target=self.close_rendezvous, daemon=True)
        closing.start()
        closing.join(CLOSING_S)  # The store may be out of reach.
        if (self._worker_group.group_world_size or 1) > 1:
            time.sleep(LINGER_S)

    def close_rendezvous(self) -> None:
        """Tell all nodes that the job is stopped, and close the rendezvous."""
        self.note_end(self._worker_group, STOPPED)
        holder = getattr(self._worker_group.spec.rdzv_handler, "_state_holder", None)
        with contextlib.suppress(RendezvousError):
            if isinstance(holder, LocalWatch):
                holder.close()

    def note_end(self, worker_group: WorkerGroup, how: bytes) -> None:
        """Tell the launchers of other nodes that the job ends without an error."""
        store = getattr(worker_group.spec.rdzv_handler, "_store", None)
        if isinstance(store, LastingStore):
            store.is_needed = False  # The launcher that has it may end first.
        if store is not None:
            with contextlib.suppress(RuntimeError, RendezvousError):
                store.set(self.key_of_end(worker_group), how)

    def end_of(self, worker_group: WorkerGroup) -> bytes:
        """How another node ended the job (STOPPED, DONE); empty after an error, or if unknown."""
        store = getattr(worker_group.spec.rdzv_handler, "_store", None)
        key = self.key_of_end(worker_group)
        with contextlib.suppress(RuntimeError, RendezvousError):
            if store is not None and store.check([key]):
                how: bytes = store.get(key)
                return how
        return b""

    @staticmethod
    def key_of_end(worker_group: WorkerGroup) -> str:
        """Key of the end of the job in the store; several run ids may share one store."""
        return f"titan_dit.end.{worker_group.spec.rdzv_handler.get_run_id()}"

    def has_lost_node(self, worker_group: WorkerGroup) -> bool:
        """Return True if a node of the ranks' rendezvous is no longer in it, or this one is not."""
        handler = worker_group.spec.rdzv_handler
        holder = getattr(handler, "_state_holder", None)
        nodes = worker_group.group_world_size
        if holder is None or nodes is None:
            return False
        present = holder.state.participants
        # Others that went on without this node may have taken another one in its place.
        return len(present) < nodes or getattr(handler, "_this_node", None) not in present

    def is_left_out(self, worker_group: WorkerGroup) -> bool:
        """`has_lost_node`, after a cut of the network, with the state that the store has now."""
        handler = worker_group.spec.rdzv_handler
        store = getattr(handler, "_store", None)
        deadline = time.monotonic() + RETURN_S
        while isinstance(store, LastingStore) and store.lost is not None:
            if time.monotonic() > deadline:
                return False
            with contextlib.suppress(RendezvousError):
                handler.num_nodes_waiting()
            time.sleep(0.05)
        return self.has_lost_node(worker_group)

    def is_restart(self, worker_group: WorkerGroup) -> bool:
        """Return True if the job had ranks before, on any node.

        The rendezvous counts its rounds, so a node that joins late knows it, too.
        """
        holder = getattr(worker_group.spec.rdzv_handler, "_state_holder", None)
        return self.starts > 0 or (holder is not None and holder.state.round > 0)

    def launch_name(self, worker_group: WorkerGroup) -> str:
        """A unique launch name, shared by all nodes of the rendezvous; the first node chooses it.

        Empty if the rendezvous backend has no store.
        """
        handler = worker_group.spec.rdzv_handler
        store = getattr(handler, "_store", None)
        if store is None:
            return ""
        # Several run ids may share one store.
        key = f"titan_dit.job.{handler.get_run_id()}"
        name: bytes = store.compare_set(key, "", uuid.uuid4().hex)
        return name.decode()

    def count_and_report(self, failures: Failures, is_regrouping: bool) -> None:
        """Set torchrun's remaining restarts; report the root cause if another attempt follows."""
        rank, cause = root_cause(failures)
        left, before, self.pause_s = self._remaining_restarts, self.pause_s, 0.0
        if self.is_stopping or is_user_error(cause):
            self._remaining_restarts = 0
        elif not is_regrouping and may_be_consequence(cause) and self.is_awaited():
            # Another node's ranks failed first; it reports the cause and waits for this node.
            self._remaining_restarts = left + 1
            if not is_consequence(cause):
                then = "Not counted: another node waits for this one."
                self.say(message_of(rank, cause, then=then))
        elif left:
            fails_early = self.starts > 1 and came_early(cause)
            if fails_early:
                self.pause_s = min(max(FIRST_PAUSE_S, 2 * before), PAUSE_S)
            when = f" in {self.pause_s:g} s" if fails_early else ""
            attempt = f"restart {self._worker_group.spec.max_restarts - left + 1}{when}"
            self.say(message_of(rank, cause, then=f"{attempt}, {left - 1} left."))
        self.has_failed = self._remaining_restarts == 0

    def is_awaited(self) -> bool:
        """Return True if another node waits in the rendezvous."""
        return bool(self._worker_group.spec.rdzv_handler.num_nodes_waiting())

    def read_note(self) -> dict[str, Any]:
        """Read a rank's note, if any rank left one."""
        assert self._pcontext is not None
        for file in self._pcontext.error_files.values():
            if file and Path(file).is_file():
                with contextlib.suppress(ValueError):  # Cut off: its rank was killed.
                    note: dict[str, Any] = json.loads(Path(file).read_text())
                    return note
        return {}
