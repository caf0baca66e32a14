"""`titan_dit train --config digits.toml [--section.key value ...]`: launch this node's ranks.

  titan_dit train --config digits.toml --help            list all config keys
  titan_dit train --list                                 list the recipes
  titan_dit train --config dit_7b.toml --dry-run [WORLD] simulate one step without devices

Environment variables:

  NGPU           ranks on this node (default: one per GPU; 2 on a CPU)
  OMP_NUM_THREADS  threads of each rank (default: cores / ranks)
  NNODES         nodes, "4" or elastic "2:4"; needs RDZV_ENDPOINT=host:port and a common RDZV_ID
  RDZV_CONF      torchrun's --rdzv-conf (default: a node is lost after 12 s of silence; 60 s if
                 NNODES > 4)
  MAX_RESTARTS   restarts from the newest checkpoint after a rank fails (default 0; elastic 10);
                 counted anew from each checkpoint
  GRACE          seconds for ranks to save and exit after SIGTERM, SIGUSR1, Ctrl-C (default 600)
  FORK           0: start a Python per rank instead of forking ranks (docs/launching.md)
  STOPPED_CODE   exit code of a run stopped early by a signal (default 0); Ctrl-C's is 130
  TORCHINDUCTOR_CACHE_DIR   torch.compile cache (default ~/.cache/titan_dit/inductor)
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
from titan_dit.ranks import hosts, signals
from titan_dit.system import stdio
from titan_dit.system.launched_as import LaunchedAs

FEW_NODES = 4
QUICK = "last_call_timeout=3,keep_alive_interval=2,keep_alive_max_attempt=6"
"""Up to FEW_NODES nodes: one is lost after 2 x 6 s of silence, and the rendezvous waits 3 s for
more nodes."""
CALM = "last_call_timeout=30,keep_alive_interval=15,keep_alive_max_attempt=4"
"""More nodes: 60 s and 30 s. Stalls are more frequent, each false alarm restarts more ranks, and
all heartbeats go to one host."""
NUMBERS = {
    "MAX_RESTARTS": "a number of restarts such as MAX_RESTARTS=10",
    "GRACE": "seconds such as GRACE=600",
    "STOPPED_CODE": "an exit code such as STOPPED_CODE=75",
}
TRAINER = "titan_dit.train"


def main(words: Sequence[str]) -> NoReturn:
    """Exec the launcher of this node's ranks, or the single process of a dry run.

    exec instead of a subprocess: signals and exit codes need no forwarding.
    """
    given = {word.partition("=")[0].replace("_", "-") for word in words}
    if given & {"--help", "-h"}:
        from titan_dit.config import help_text

        _, title, variables = (__doc__ or "").partition("Environment variables:")
        print_and_exit(help_text.help_of(words, title + variables))
    if "--list" in given:
        from titan_dit.config import help_text

        print_and_exit(help_text.recipes())
    if "--dry-run" in given:
        become(TRAINER, *words)
    launch(num_ranks(os.environ, num_gpus(os.environ), num_cores()), TRAINER, *words)


def start_ranks(*, gpus: bool, cores: int = 1) -> bool:
    """Be a rank of a launcher, or launch this node's ranks of this command (exec).

    Without NGPU one rank per GPU if the command uses `gpus`, else min(cores, 2). Returns True in a
    rank, False in the only process of a command that needs no launcher.
    """
    if LaunchedAs.here().is_rank:
        signals.die_with_launcher()
        return True
    ranks = num_ranks(os.environ, num_gpus(os.environ) if gpus else 0, cores)
    if ranks > 1 or os.environ.get("NNODES", "1") != "1":
        launch(ranks, "titan_dit", *sys.argv[1:])
    return False


def launch(ranks: int, module: str, *words: str) -> NoReturn:
    """Exec the launcher of this node's `ranks`, each of which runs `python -m module words`."""
    check_numbers(os.environ)
    rendezvous = rendezvous_options(os.environ)
    os.environ.update(defaults(os.environ, ranks, num_cores()))
    if "--nnodes" in rendezvous:
        nodes, endpoint = os.environ["NNODES"], os.environ["RDZV_ENDPOINT"]
        stdio.write(sys.stderr, f"titan_dit: rendezvous of {nodes} nodes at {endpoint}\n")
    # Without "--" the launcher's parser would take --num or --run for its own longer options.
    become(
        *("titan_dit.launcher.launch", *rendezvous, "--nproc-per-node", str(ranks)),
        *("--max-restarts", max_restarts(os.environ), "-m", "--", module, *words),
    )


def check_numbers(environment: Mapping[str, str]) -> None:
    """Raise UserError for numbers that the launcher cannot read; empty is not set."""
    for name, example in NUMBERS.items():
        given = environment.get(name) or "0"
        # Seconds may have a fraction.
        digits = given.replace(".", "", 1) if name == "GRACE" else given
        if not digits.isdecimal():
            raise UserError(f"{name}={given}: set {example}, or leave it out.")


def print_and_exit(text: str) -> NoReturn:
    """Write to stdout, and end this process."""
    stdio.write(sys.stdout, text)
    sys.exit(0)


def become(module: str, *arguments: str) -> NoReturn:
    """Replace this process by `python -m module` (exec)."""
    sys.stdout.flush()
    stdio.write(sys.stderr, "")
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


def num_cores() -> int:
    """Return the number of cores available to this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def num_gpus(environment: Mapping[str, str]) -> int:
    """Return the number of visible GPUs, from nvidia-smi: importing torch takes seconds."""
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
    """Return NGPU, else one rank per GPU, else min(cores, 2) on the CPU.

    Raises UserError unless NGPU is a whole number above 0.
    """
    given = environment.get("NGPU")
    if not given:
        return gpus or min(cores, 2)
    if not given.isdecimal() or not int(given):
        raise UserError(f"NGPU={given}: set the number of ranks on this node, such as NGPU=8.")
    return int(given)


def defaults(environment: Mapping[str, str], ranks: int, cores: int) -> dict[str, str]:
    """Return environment variables for the ranks, except the ones that the user has set."""
    wanted = {
        "OMP_NUM_THREADS": str(max(cores // ranks, 1)),
        # Else torch's C++ code prints thirty lines of stack frames when another node exits first.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    # A persistent cache lets the next launch reuse compiled code.
    if folder := cache_folder(environment):
        wanted["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    return {name: value for name, value in wanted.items() if not environment.get(name)}


def cache_folder(environment: Mapping[str, str]) -> Path | None:
    """Return titan_dit's cache folder, created if missing; None without a home directory."""
    caches, home = environment.get("XDG_CACHE_HOME"), environment.get("HOME")
    if not caches and not home:
        return None
    folder = (Path(caches) if caches else Path(home or "") / ".cache") / "titan_dit"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder if folder.is_dir() else None


def rendezvous_options(environment: Mapping[str, str]) -> list[str]:
    """Return torchrun's rendezvous options.

    Raises UserError for several nodes without RDZV_ENDPOINT.
    """
    nodes = environment.get("NNODES")
    if not nodes or nodes == "1":
        return ["--standalone"]
    endpoint = environment.get("RDZV_ENDPOINT")
    if not endpoint:
        raise UserError(f"NNODES={nodes}: set RDZV_ENDPOINT=host:port of one node.")
    hosts.split(endpoint)
    return [
        *("--nnodes", nodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint),
        *("--rdzv-id", environment.get("RDZV_ID") or "titan_dit"),
        *("--rdzv-conf", environment.get("RDZV_CONF") or rendezvous_timing(nodes)),
    ]


def rendezvous_timing(nodes: str) -> str:
    """Return torchrun's --rdzv-conf for NNODES such as "4" or "2:4"; the largest number counts.

    Raises UserError for another form.
    """
    most = nodes.rpartition(":")[2]
    if not most.isdecimal():
        raise UserError(f"NNODES={nodes}: set a number of nodes, or two such as 2:4.")
    return QUICK if int(most) <= FEW_NODES else CALM


def max_restarts(environment: Mapping[str, str]) -> str:
    """Return MAX_RESTARTS; default 10 if elastic, where a lost node costs a restart, else 0."""
    elastic = ":" in environment.get("NNODES", "")
    return environment.get("MAX_RESTARTS") or ("10" if elastic else "0")
