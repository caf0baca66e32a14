"""Train: `python -m titan_dit.train --config digits.toml`, mostly through commands/train.py."""

from __future__ import annotations

import dataclasses
import os
import sys

from titan_dit.config import catalog, config_file
from titan_dit.config.job import JobConfig
from titan_dit.config.section import UserError
from titan_dit.launcher import failure


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
    from titan_dit import plan
    from titan_dit.checks import device, layout, validate
    from titan_dit.dry_run import estimate
    from titan_dit.launcher import flight_recorder, orphan, process_group
    from titan_dit.recovery import resume

    orphan.die_with_launcher()
    # Checked before the ranks meet, so that a wrong launch fails at once and everywhere alike.
    # Whether the run has begun, the first rank decides; a shared disk may show others less.
    is_first = os.environ.get("RANK", "0") == "0"
    resuming = not is_first or resume.has_started(config.job, config.checkpoint)
    planned = plan.resolve(config, process_group.started_ranks(), resuming)
    try:
        layout.check_world(planned)
    except UserError as error:
        hint = "A step of this layout can be seen without any device: add --dry-run."
        raise UserError(f"{error} {hint}") from None
    validate(config, planned)
    device.check_memory(planned, config.ema, *estimate.rank_memory())
    from titan_dit.trainer import Trainer

    flight_recorder.switch_on()
    with process_group.start() as world:
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
    schedules = " | ".join(catalog.SCHEDULES)
    tyro.cli(
        shown_as(config),
        prog="python -m titan_dit train --config FILE",
        description="Train a diffusion transformer. Flags win over the config file. The name of "
        f"[model], [objective] and [data] decides what their other keys are: {names}. "
        f"Pipeline schedules: --pipeline.schedule {schedules}.",
        args=["--help"],
        default=shown_as(config)(**vars(config)),
        config=(tyro.conf.FlagConversionOff,),
        use_underscores=True,
    )


def shown_as(config: JobConfig) -> type[JobConfig]:
    """The config's class with the classes of [model], [objective] and [data] in their places."""
    kinds = {f.name: type(getattr(config, f.name)) for f in dataclasses.fields(config)}
    named = [(f.name, kinds[f.name], f) for f in dataclasses.fields(config)]
    made: type[JobConfig] = dataclasses.make_dataclass(
        "JobConfig", named, frozen=True, kw_only=True
    )
    return made


if __name__ == "__main__":
    failure.run_and_exit(main)
