"""`python -m titan_dit COMMAND`: everything but training."""

from __future__ import annotations

import importlib
import sys

from titan_dit import failure
from titan_dit.section import UserError

# Each is a file in titan_dit/commands with a dataclass `Options` and a function `main(options)`.
COMMANDS = {
    "sample": "draw samples from a trained run",
    "convert": "weights of the original DiT to a checkpoint, and back",
    "predict": "run a network on given inputs",
}


def main() -> None:
    """Find the command, read its flags, run it."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        listed = "\n".join(f"  {command:10}{what}" for command, what in COMMANDS.items())
        sys.stdout.write(
            f"python -m titan_dit COMMAND\n\n{listed}\n\nEach explains itself with --help. "
            "Training: ./run_train.sh --config FILE\n"
        )
        return
    if name not in COMMANDS:
        raise UserError(f"{name}: no such command. There is: {', '.join(COMMANDS)}.")

    import tyro

    command = importlib.import_module(f"titan_dit.commands.{name}")
    command.main(
        tyro.cli(
            command.Options,
            prog=f"python -m titan_dit {name}",
            args=sys.argv[2:],
            config=(tyro.conf.FlagConversionOff,),
        )
    )


if __name__ == "__main__":
    failure.guarded(main)
