"""Run a function on several gloo ranks; spawned, so that nothing of pytest leaks into them."""

import os
import socket
import tempfile
import traceback
from pathlib import Path

import torch
import torch.multiprocessing as mp


def on_ranks(num_ranks, function, *arguments):
    """Call function(world, *arguments) on every rank; return the results in the order of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        mp.start_processes(
            _rank_main,
            args=(num_ranks, port, folder, function, arguments),
            nprocs=num_ranks,
            start_method="spawn",
        )
        files = [Path(folder) / f"{rank}.pt" for rank in range(num_ranks)]
        return [torch.load(file, weights_only=False) for file in files]


def _rank_main(rank, num_ranks, port, folder, function, arguments):
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    from titan_dit.parallel import runtime

    try:
        with runtime.start("cpu") as world:
            torch.save(function(world, *arguments), Path(folder) / f"{rank}.pt")
    except Exception:
        traceback.print_exc()
        os._exit(1)
    # As `failure.guarded` does, and for its reason.
    os._exit(0)
