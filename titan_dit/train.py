"""The entry point of a rank: `python -m titan_dit.train --config FILE`, see commands/train.py."""

from __future__ import annotations

import os
import sys

from titan_dit.config import catalog, config_file
from titan_dit.config.job import JobConfig
from titan_dit.launcher import allocator, disk_errors, failure, torch_range
from titan_dit.system.launched_as import LaunchedAs


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
    allocator.expand_segments(os.environ, cuda_graphs=config.compile.cuda_graphs)
    # Lazy imports: a wrong config is reported before torch.distributed is loaded.
    from titan_dit.launcher import flight_recorder, orphan, process_group
    from titan_dit.opening import check_launch

    orphan.die_with_launcher()
    check_launch(config)
    from titan_dit.trainer import Trainer

    flight_recorder.switch_on()
    with process_group.start() as world:
        return Trainer(config, world).fit()


if __name__ == "__main__":
    failure.run_and_exit(main)
