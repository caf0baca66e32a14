"""The entry point of a rank: `python -m titan_dit.train --config FILE`, see commands/train.py."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

from titan_dit.config import catalog, config_file
from titan_dit.config.job import JobConfig
from titan_dit.ranks import disk_errors, failure, torch_range
from titan_dit.system.launched_as import LaunchedAs

SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Both names are read by every supported torch; the second one is the older."""
REGISTRATION = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
"""Buffers registered with NCCL: torch switches it off if segments can grow."""
EXPANDABLE = "expandable_segments:True"


def expand_segments(environment: MutableMapping[str, str], *, cuda_graphs: bool) -> None:
    """Set expandable segments in `environment`; call before CUDA is used.

    Ordinary segments are as large as their first request. Where sizes change (other samples, a
    partial batch, drawing), the gaps between them cannot be joined: memory is reserved that no
    request fits (docs.pytorch.org/docs/stable/notes/cuda.html, "Optimizing memory usage"). torch
    2.11 to 2.15 read these variables when CUDA first allocates, not on import.

    Not if the user has set the allocator or NCCL's registration, and not with CUDA graphs: torch
    has excluded and readmitted graphs' private pools, and a capture beside collectives has hung
    with expandable segments (pytorch/torchtitan#3306).
    """
    registers = environment.get(REGISTRATION, "").lower() in ("1", "y", "yes", "t", "true")
    if cuda_graphs or registers or any(environment.get(name) for name in SETTINGS):
        return
    environment[SETTINGS[0]] = EXPANDABLE


def main() -> int:
    """Read the config, start the process group, train; return the exit code."""
    arguments = sys.argv[1:]
    if "--help" in arguments or "-h" in arguments:
        if LaunchedAs.here().is_first:
            from titan_dit.config import help_text

            sys.stdout.write(help_text.help_of(arguments))
        return 0
    torch_range.check_torch()
    arguments, dry_run_world = config_file.take_dry_run(arguments)
    config = config_file.load(arguments, catalog.variant)
    if dry_run_world is not None:
        if LaunchedAs.here().is_first:
            from titan_dit.dry_run.command import dry_run

            dry_run(config, dry_run_world or None)
        return 0

    with disk_errors.naming(config.paths, failure.Disruption):
        return train(config)


def train(config: JobConfig) -> int:
    """Start the process group, train; return the exit code."""
    expand_segments(os.environ, cuda_graphs=config.compile.cuda_graphs)
    # Lazy imports: a wrong config is reported before torch.distributed is loaded.
    from titan_dit.opening import check_launch
    from titan_dit.ranks import process_group, signals, watchdog

    signals.die_with_launcher()
    check_launch(config)
    from titan_dit import trainer

    watchdog.record_collectives()
    with process_group.start() as world:
        return trainer.fit(config, world)


if __name__ == "__main__":
    failure.run_and_exit(main)
