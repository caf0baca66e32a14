"""Train: `python -m titan_dit.train --config digits.toml`, mostly through commands/train.py."""

from __future__ import annotations

import os
import sys

from titan_dit import catalog, config_file, failure
from titan_dit.section import UserError


def main() -> int:
    """Read the config, join the other ranks, train. Returns the exit code."""
    arguments = sys.argv[1:]
    if "--help" in arguments or "-h" in arguments:
        if os.environ.get("RANK", "0") == "0":
            show_help(arguments)
        return 0
    arguments, rehearsed = config_file.take_dry_run(arguments)
    config = config_file.load(arguments, catalog.variant)
    if rehearsed is not None:
        if os.environ.get("RANK", "0") == "0":
            from titan_dit.dry_run.command import dry_run

            dry_run(config, rehearsed or None)
        return 0

    # Imported late: a mistake in the config is answered before torch.distributed is loaded.
    from titan_dit.dry_run import estimate
    from titan_dit.faults import flight_recorder, orphan
    from titan_dit.parallel import mesh, runtime
    from titan_dit.pipeline.checks import check_layout
    from titan_dit.state import resume

    orphan.die_with_launcher()
    # Checked before the ranks meet, so that a wrong launch fails at once and everywhere alike.
    # Whether the run has begun, the first rank decides; a shared disk may show others less.
    is_first = os.environ.get("RANK", "0") == "0"
    following = not is_first or resume.has_begun(config.job, config.checkpoint)
    try:
        sizes = mesh.solve(config.parallel, runtime.started_ranks(), following)
    except UserError as error:
        hint = "A step of this layout can be seen without any device: add --dry-run."
        raise UserError(f"{error} {hint}") from None
    check_layout(config, sizes, following)
    estimate.check_memory(config, sizes.shards, *estimate.rank_memory())
    from titan_dit.trainer import Trainer

    flight_recorder.switch_on()
    with runtime.start() as world:
        return Trainer(config, world).fit()


def show_help(arguments: list[str]) -> None:
    """Every key with its type, default and meaning, for the given config (digits.toml if none)."""
    import tyro

    rest = [argument for argument in arguments if argument not in ("--help", "-h")]
    try:
        config = config_file.load(rest or ["--config", "digits"], catalog.variant)
    except UserError as error:
        sys.stdout.write(f"{error}\n\n")
        config = config_file.load(["--config", "digits"], catalog.variant)
    names = "; ".join(
        f"--{section}.name {' | '.join(table)}" for section, table in catalog.SECTIONS.items()
    )
    kinds = (type(config.model), type(config.objective), type(config.data))
    tyro.cli(
        type(config)[kinds],  # type: ignore[index]
        prog="python -m titan_dit train --config FILE",
        description="Train a diffusion transformer. Flags win over the config file. The name of "
        f"[model], [objective] and [data] decides what their other keys are: {names}.",
        args=["--help"],
        default=config,
        config=(tyro.conf.FlagConversionOff,),
        use_underscores=True,
    )


if __name__ == "__main__":
    failure.guarded(main)
