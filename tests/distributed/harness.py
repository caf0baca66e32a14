"""Run a function on several gloo ranks, forked from a server that has imported torch."""

import faulthandler
import os
import resource
import tempfile
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path

import forked
import torch
from torch.distributed import TCPStore


class RankFailed(Exception):
    """A rank raised, was killed or timed out; the others were terminated."""


def on_ranks(num_ranks, function, *arguments, variables=None, files=None, timeout=600):
    """Call function(world, *arguments) on every rank; return the results in rank order.

    `variables` are added to the environment of the ranks, which compute on a CPU or where RANKS_ON
    says; `files` is their limit of open files, soft and hard. Raises RankFailed.
    """
    # The ranks' store binds a free port itself: no other test can take it in between.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        shared = {
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        environment = os.environ | shared | (variables or {})
        # In a file: multiprocessing would send every tensor as a descriptor of shared memory.
        torch.save((function, arguments), Path(folder) / "call.pt")
        ranks = []
        try:
            for rank in range(num_ranks):
                variables = environment | {"RANK": str(rank)}
                ranks.append(forked.call(_rank_main, variables, folder, files))
            _wait(ranks, timeout)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        files = [Path(folder) / f"{rank}.pt" for rank in range(num_ranks)]
        return [torch.load(file, weights_only=False) for file in files]


def _wait(ranks, timeout):
    """Wait until all ranks have succeeded or one has failed."""
    deadline = time.monotonic() + timeout
    left = {process.sentinel: rank for rank, process in enumerate(ranks)}
    while left:
        ended = wait(left, timeout=max(0, deadline - time.monotonic()))
        if not ended:
            raise RankFailed(f"ranks {sorted(left.values())} have not ended within {timeout} s")
        for sentinel in ended:
            rank = left.pop(sentinel)
            ranks[rank].join()
            if code := ranks[rank].exitcode:
                raise RankFailed(f"rank {rank} ended with exit code {code}")


def _rank_main(environment, folder, files):
    if files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    os.environ.clear()
    os.environ.update(environment)
    faulthandler.enable(2)
    torch.set_num_threads(1)
    from titan_dit.ranks import process_group

    code = 1
    try:
        function, arguments = torch.load(Path(folder) / "call.pt", weights_only=False)
        with process_group.start(environment.get("RANKS_ON", "cpu")) as world:
            result = function(world, *arguments)
            torch.save(result, Path(folder) / f"{world.rank}.pt")
        code = 0
    except BaseException:
        traceback.print_exc()
    # As in `failure.run_and_exit`, for the same reason.
    os._exit(code)
