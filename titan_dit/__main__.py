"""`titan_dit COMMAND`, or `python -m titan_dit COMMAND`."""

from __future__ import annotations

import importlib
import sys

from titan_dit.config.section import Section, UserError, hints_of
from titan_dit.launcher import failure

# Each is a file in titan_dit/commands with a dataclass `Options` and a function `main(options)`;
# a name of two words has an underscore there. `train` alone reads its words itself: its flags are
# the config's keys.
COMMANDS = {
    "train": "train a run on the ranks of this node",
    "sample": "draw samples from a trained run",
    "convert": "weights of the original DiT to a checkpoint, and back",
    "predict": "run a network on given inputs",
    "replay": "re-create a step of a run, sample by sample",
    "data pack": "turn a folder of latents or pictures into shards",
    "data show": "say and draw what a dataset holds",
    "bench attention": "time every attention kernel on one shape",
    "checkpoint list": "the checkpoints of a run",
    "checkpoint verify": "compare checkpoints with the digests of when they were written",
    "checkpoint show": "what a checkpoint says of itself",
}


def main() -> None:
    """Find the command, read its flags, run it."""
    words = sys.argv[1:] or ["--help"]
    length = 2 if " ".join(words[:2]) in COMMANDS else 1
    name = " ".join(words[:length])
    group = {command: what for command, what in COMMANDS.items() if command.split()[0] == name}
    asks_for_help = words[-1] in ("-h", "--help") and len(words) <= (2 if group else 1)
    if name not in COMMANDS and asks_for_help:
        listed = "\n".join(f"  {command:19}{what}" for command, what in (group or COMMANDS).items())
        sys.stdout.write(
            f"python -m titan_dit COMMAND\n\n{listed}\n\nEach explains itself with --help.\n"
        )
        return
    if name not in COMMANDS:
        there = f"There is: {', '.join(group or COMMANDS)}."
        raise UserError(f"{' '.join(words[:2] if group else words[:1])}: no such command. {there}")

    if name == "train":
        from titan_dit.commands import train

        train.main(words[1:])

    import tyro

    command = importlib.import_module(f"titan_dit.commands.{name.replace(' ', '_')}")
    command.main(
        tyro.cli(
            command.Options,
            prog=f"python -m titan_dit {name}",
            args=as_python(words[length:], command.Options),
            config=(tyro.conf.FlagConversionOff,),
        )
    )


def as_python(words: list[str], options: type[Section]) -> list[str]:
    """Booleans are written as in TOML; tyro knows Python's."""
    switches = {
        f"--{name}".replace("_", "-") for name, kind in hints_of(options).items() if kind is bool
    }
    spelled = []
    for before, word in zip(["", *words], words, strict=False):
        name, equals, value = word.partition("=")
        if before.replace("_", "-") in switches:
            word = word.capitalize()
        elif equals and name.replace("_", "-") in switches:
            word = f"{name}={value.capitalize()}"
        spelled.append(word)
    return spelled


def run() -> None:
    """The console script `titan_dit`."""
    failure.guarded(main)


if __name__ == "__main__":
    run()
