"""Real training steps on gloo ranks of this machine, with every storage logged.

One launch per world size runs many cases: starting ranks costs more than most steps. The step is
`Trainer.train_step`; its parts are wrapped to tell the log what they allocate.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch.distributed import TCPStore

from titan_dit.config import catalog, config_file
from titan_dit.config.config_file import Tables
from titan_dit.dry_run.fake_step import await_sends
from titan_dit.dry_run.memory import MemoryLog, Peak, StorageKind
from titan_dit.ranks import process_group
from titan_dit.ranks.process_group import World
from titan_dit.system.worker import end_with_parent
from titan_dit.trainer import Trainer


@dataclass(frozen=True)
class Task:
    """Steps to run on every rank of a world."""

    name: str
    tables: Tables
    work: float
    """For the progress line, in any unit."""


@dataclass(frozen=True)
class Steps:
    """Results of a rank's steps."""

    losses: tuple[float, ...]
    """Loss of each step, over all ranks."""
    norms: tuple[float, ...]
    """Gradient norm of each step."""
    peak: Peak
    """Peak memory of this rank in the last step."""
    pipeline_rank: int


class Failure(Exception):
    """Ranks failed, died or hung; the launch was ended."""


def take_steps(world: World, tables: Tables, after_step: Callable[[], None]) -> Steps:
    """Train as `titan_dit train` does; collective."""
    log = MemoryLog()
    with log:
        with log.phase("set-up", StorageKind.TEMPORARY):
            trainer = Trainer(config_file.build(tables, catalog.variant), world)
            await_sends(trainer.mesh.p2p)
            # Copies of tied weights are parameters, too.
            parameters = [*trainer.parameters.values(), *trainer.built.copies.values()]
            log.mark(parameters, StorageKind.PARAMETERS)
        watch(trainer, log)
        losses, norms = [], []
        batches = trainer.batches()
        for number in range(trainer.config.training.steps):
            trainer.step = number + 1
            gc.collect()
            log.begin()
            with log.phase("inputs", StorageKind.INPUTS):
                batch = next(batches)
            with log.phase("optimizer", StorageKind.TEMPORARY):
                loss, norm, _ = trainer.train_step(batch)
            for state in trainer.optimizer.state.values():
                log.mark(state.values(), StorageKind.OPTIMIZER)
            peak = log.peak()
            with torch.no_grad():
                losses.append(trainer.mesh.sum_loss(loss).item())
                norms.append(norm.item())
            del batch, loss, norm
            after_step()
    rank = trainer.mesh.axis("pp").get_local_rank()
    return Steps(tuple(losses), tuple(norms), peak, rank)


def watch(trainer: Trainer, log: MemoryLog) -> None:
    """Log what the trainer's step prepares as inputs, and its executor's tensors as activations."""
    prepare, step = trainer.built.prepare, trainer.executor.step

    def prepared(*args: Any) -> Any:
        with log.phase("inputs", StorageKind.INPUTS):
            return prepare(*args)

    def stepped(*args: Any) -> Any:
        with log.phase("forward and backward", StorageKind.ACTIVATIONS):
            loss = step(*args)
            gradients = (parameter.grad for parameter in trainer.parameters.values())
            log.mark(gradients, StorageKind.GRADIENTS)
        return loss

    trainer.built = replace(trainer.built, prepare=prepared)
    trainer.executor.step = stepped  # type: ignore[method-assign]


def rank_main(variables: dict[str, str], tasks: Sequence[Task], told: Connection) -> None:
    """Run every task on one rank; rank 0 sends the steps and results, each rank its failure."""
    end_with_parent()
    os.environ |= variables
    torch.set_num_threads(1)
    gc.set_threshold(100_000, 50, 50)
    number, code = 0, 1
    try:
        with process_group.start("cpu") as world:
            for number, task in enumerate(tasks):

                def after_step(number: int = number, is_first: bool = world.is_first) -> None:
                    if is_first:
                        told.send(("step", number, None))

                found = world.gather(take_steps(world, task.tables, after_step))
                gc.collect()
                if world.is_first:
                    told.send(("done", number, found))
            world.gather(None)
        code = 0
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        lines = str(error).strip().splitlines() or [""]
        where = f"{os.path.basename(place.filename)}:{place.lineno}"  # noqa: PTH119
        with suppress(OSError):  # Whoever started this rank may have been killed.
            told.send(("failed", number, f"{type(error).__name__}: {lines[0]} ({where})"))
    # Destructors of gloo's groups would wait for ranks that have ended.
    os._exit(code)


@contextmanager
def ranks_of(tasks: Sequence[Task], num_ranks: int) -> Iterator[dict[Any, int]]:
    """Start the ranks; yields what to wait for -> rank. Ends them on leaving."""
    # The store binds a free port itself.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }
    context = multiprocessing.get_context("forkserver")
    # The server imports this module once for all ranks.
    context.set_forkserver_preload(["matrix_ranks"])
    ranks, listened = [], {}
    try:
        for rank in range(num_ranks):
            hears, tells = context.Pipe(duplex=False)
            given = shared | {"RANK": str(rank)}, tasks, tells
            process = context.Process(target=rank_main, args=given)
            process.start()
            tells.close()
            ranks.append(process)
            listened[hears] = rank
        yield listened
    finally:
        for process in ranks:
            process.kill()
            process.join()


def launch(
    tasks: Sequence[Task],
    num_ranks: int,
    timeout_s: float,
    after_step: Callable[[Task], None],
    done: Callable[[Task, list[Steps]], None],
) -> tuple[int, str]:
    """Run tasks in one world; return how many are done, and why no more: "" if all are."""
    count = 0
    with ranks_of(tasks, num_ranks) as listened:
        deadline = time.monotonic() + timeout_s
        while listened and count < len(tasks):
            ready = wait(list(listened), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                return count, f"no step has ended in {timeout_s:.0f} s"
            for hears in ready:
                rank = listened[hears]
                try:
                    kind, number, what = hears.recv()
                except EOFError:
                    return count, f"rank {rank} has died"
                deadline = time.monotonic() + timeout_s
                if kind == "step":
                    after_step(tasks[number])
                elif kind == "done":
                    done(tasks[number], what)
                    count = number + 1
                else:
                    return count, f"rank {rank}: {what}"
    return count, ""


def run(
    tasks: Sequence[Task],
    num_ranks: int,
    timeout_s: float,
    after_step: Callable[[Task], None],
) -> dict[str, list[Steps] | str]:
    """Run tasks on `num_ranks`; by name, the steps of every rank, or why they failed.

    After a failure the ranks are started anew for the tasks behind it.
    """
    results: dict[str, list[Steps] | str] = {}

    def done(task: Task, found: list[Steps]) -> None:
        results[task.name] = found

    left = list(tasks)
    while left:
        count, failure = launch(left, num_ranks, timeout_s, after_step, done)
        if failure:
            results[left[count].name] = failure
            count += 1
        left = left[count:]
    return results
