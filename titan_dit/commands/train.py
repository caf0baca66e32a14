"""`titan_dit train --config digits.toml [--section.key value ...]`: start this node's ranks.

  titan_dit train --config digits.toml --help            every key with its meaning
  titan_dit train --config dit_7b.toml --dry-run [WORLD] one step without devices

Environment variables:

  NGPU           ranks on this node (default: its GPUs; without one, 2 ranks on the CPU)
  NNODES         nodes, "4" or elastic "2:4"; with RDZV_ENDPOINT=host:port and the same RDZV_ID
  MAX_RESTARTS   restarts from the newest checkpoint after a rank has died (default 0; elastic 10)
  GRACE          seconds that ranks have to save and end after SIGTERM, SIGUSR1, Ctrl-C (600)
  STOPPED_CODE   exit code when they did, with steps left (0); Ctrl-C's is 130
  TORCHINDUCTOR_CACHE_DIR   where compiled code is kept (~/.cache/titan_dit/inductor)
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from titan_dit.config.section import UserError
from titan_dit.system import streams

RDZV_CONF = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=4"
"""A lost node is given up after 4 s without a heartbeat, and those that are there wait 3 s for
others. torchrun's own 15 s and 30 s are for thousands of nodes."""
TRAINER = "titan_dit.train"


def main(words: Sequence[str]) -> NoReturn:
    """Become the launcher of this node's ranks, or the one process that a dry run needs.

    The launcher takes this process's place, so that signals and exit codes need no handing on.
    """
    given = {word.partition("=")[0].replace("_", "-") for word in words}
    if given & {"--help", "-h"}:
        sys.stdout.write(f"{__doc__}\n")
        become(TRAINER, *words)
    if "--dry-run" in given:
        become(TRAINER, *words)
    cores = num_cores()
    ranks = num_ranks(os.environ, num_gpus(os.environ), cores)
    meeting = meeting_of(os.environ)
    os.environ.update(defaults(os.environ, ranks, cores))
    if "--nnodes" in meeting:
        nodes, endpoint = os.environ["NNODES"], os.environ["RDZV_ENDPOINT"]
        streams.tell(sys.stderr, f"titan_dit: meeting {nodes} nodes at {endpoint}\n")
    become(
        *("titan_dit.launcher.launch", *meeting, "--nproc-per-node", str(ranks)),
        *("--max-restarts", max_restarts(os.environ), "-m", TRAINER, *words),
    )


def become(module: str, *arguments: str) -> NoReturn:
    """Replace this process by `python -m module`."""
    sys.stdout.flush()
    streams.tell(sys.stderr, "")
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def num_gpus(environment: Mapping[str, str]) -> int:
    """GPUs that ranks would see. Asks the driver's own tool: importing torch takes seconds."""
    if shutil.which("nvidia-smi") is None:
        return 0
    asked = subprocess.run(
        ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False
    )
    there = sum(line.startswith("GPU ") for line in asked.stdout.splitlines())
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if not there or visible is None:
        return there
    return sum(bool(name.strip()) for name in visible.split(","))


def num_ranks(environment: Mapping[str, str], gpus: int, cores: int) -> int:
    """NGPU, else a rank per GPU, else two on the CPU if they have a core each."""
    given = environment.get("NGPU")
    if not given:
        return gpus or min(cores, 2)
    if not given.isdecimal() or not int(given):
        raise UserError(f"NGPU={given}: give the number of ranks on this node, such as NGPU=8.")
    return int(given)


def defaults(environment: Mapping[str, str], ranks: int, cores: int) -> dict[str, str]:
    """What the ranks' environment is to have, unless it is set already."""
    wanted = {
        "OMP_NUM_THREADS": str(max(cores // ranks, 1)),
        # When one node ends first, torch's C++ side tells the others' consoles in thirty lines of
        # frames.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    # What torch.compile has compiled serves the next launch too, if the machine keeps the folder.
    if folder := cache_folder(environment):
        wanted["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    return {name: value for name, value in wanted.items() if not environment.get(name)}


def cache_folder(environment: Mapping[str, str]) -> Path | None:
    """titan_dit's own among the user's caches, made if it was not there; None without a home."""
    caches, home = environment.get("XDG_CACHE_HOME"), environment.get("HOME")
    if not caches and not home:
        return None
    folder = (Path(caches) if caches else Path(home or "") / ".cache") / "titan_dit"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder if folder.is_dir() else None


def meeting_of(environment: Mapping[str, str]) -> list[str]:
    """Options of torchrun for where the nodes meet."""
    nodes = environment.get("NNODES")
    if not nodes or nodes == "1":
        return ["--standalone"]
    endpoint = environment.get("RDZV_ENDPOINT")
    if not endpoint:
        raise UserError(f"NNODES={nodes}: set RDZV_ENDPOINT=host:port of one node.")
    return [
        *("--nnodes", nodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint),
        *("--rdzv-id", environment.get("RDZV_ID") or "titan_dit"),
        *("--rdzv-conf", environment.get("RDZV_CONF") or RDZV_CONF),
    ]


def max_restarts(environment: Mapping[str, str]) -> str:
    """MAX_RESTARTS, else 10 for elastic nodes: losing one is a failure of the ranks that stay."""
    elastic = ":" in environment.get("NNODES", "")
    return environment.get("MAX_RESTARTS") or ("10" if elastic else "0")
