"""`titan_dit COMMAND`, or `python -m titan_dit COMMAND`."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable

from titan_dit.config.did_you_mean import ELSEWHERE, like
from titan_dit.config.dotted_names import put_current_folder_last
from titan_dit.config.section import Section, UserError, hints_of
from titan_dit.ranks import disk_errors, failure, torch_range

# Command "a b-c" is titan_dit/commands/a_b_c.py with `main(options)`. Its flags are the dataclass
# `ABCFlags` of titan_dit/commands/flags.py, which does not import torch.
# Only `train` parses its own arguments, as its flags are the config's keys.
COMMANDS = {
    "train": "train a run on the ranks of this node",
    "sample": "draw samples from a trained run",
    "evaluate": "score a trained run: its validation loss, or the pictures it draws",
    "plan": "plan time, memory and the best layout of a run without a GPU",
    "runs": "compare runs: a table, and their loss curves as a picture",
    "ema": "make an average of any width from a run's snapshots",
    "convert": "import or export weights: DiT, SiT, diffusers, transformers, peft",
    "predict": "run the network on given inputs",
    "replay": "repeat a training step and list its samples",
    "data encode": "encode pictures by an autoencoder into shards",
    "data pack": "pack a folder of latents or images into shards",
    "data show": "print a dataset's metadata and samples",
    "data report": "list every picture of an encoded set, and what became of it",
    "data example": "write example pictures as a folder",
    "data tokenize": "turn text files into Megatron's .bin and .idx",
    "data train-tokenizer": "train a tokenizer on text files",
    "pipeline plan": "plan a run's pipeline order from its measured costs",
    "pipeline draw": "draw a pipeline schedule, planned and at run time",
    "bench attention": "benchmark every attention kernel on one shape",
    "checkpoint list": "list the checkpoints of a run",
    "checkpoint verify": "check the SHA-256 of every checkpoint file",
    "checkpoint show": "print a checkpoint's metadata, tensors and config",
}
KEYED = ("evaluate", "plan")
"""Commands that take keys of the config, too: `main(options, keys)`."""


def main() -> None:
    """Parse the command and its flags, and run it."""
    words = sys.argv[1:] or ["--help"]
    length = 2 if " ".join(words[:2]) in COMMANDS else 1
    name = " ".join(words[:length])
    group = {command: what for command, what in COMMANDS.items() if command.split()[0] == name}
    asks_for_help = words[-1] in ("-h", "--help") and len(words) <= (2 if group else 1)
    if name not in COMMANDS and asks_for_help:
        listed = "\n".join(f"  {command:21}{what}" for command, what in (group or COMMANDS).items())
        sys.stdout.write(
            f"python -m titan_dit COMMAND\n\n{listed}\n\nSee COMMAND --help for its flags.\n"
        )
        return
    if name not in COMMANDS:
        there = f"There is: {', '.join(group or COMMANDS)}."
        if group and len(words) == 1:
            raise UserError(f"{name}: give one of its commands: {', '.join(group)}.")
        if words[0].startswith("-"):
            there = f"Name one first: python -m titan_dit train {words[0]} ..."
        elif not group and (near := like(name, COMMANDS, ELSEWHERE)):
            there = f"Did you mean {near}?"
        raise UserError(f"{' '.join(words[:2] if group else words[:1])}: no such command. {there}")

    torch_range.check_torch()
    if name == "train":
        from titan_dit.commands import train

        train.main(words[1:])

    import tyro

    from titan_dit.commands import flag_advice, own_input
    from titan_dit.commands.flags import of_command
    from titan_dit.config import flags

    own, keys = flags.take_keys(words[length:]) if name in KEYED else (words[length:], [])
    module = name.replace(" ", "_").replace("-", "_")
    kind = of_command(name)
    own = flag_advice.renamed(own, hints_of(kind))
    flag_advice.check(own, hints_of(kind), name)
    options = tyro.cli(
        uncaught(kind),
        prog=f"python -m titan_dit {name}",
        args=as_python(own, kind),
        config=(tyro.conf.FlagConversionOff,),
    )
    paths = functools.partial(own_input.named, options, keys)
    with failure.ended_by_sigterm(), disk_errors.naming(paths):
        own_input.check(options, keys)
        command = importlib.import_module(f"titan_dit.commands.{module}")
        command.main(options, *([keys] if name in KEYED else []))


def uncaught(options: type[Section]) -> Callable[..., Section]:
    """Wrap `options` in a function: tyro would catch the UserError of a class and draw a box."""
    # tyro takes no default factories from a function.
    made = {
        f.name: f.default_factory()
        for f in dataclasses.fields(options)
        if f.default_factory is not dataclasses.MISSING
    }
    # It looks for the names in inherited annotations in the module of the subclass.
    vars(options)["__init__"].__annotations__ = {**hints_of(options), "return": None}
    return functools.partial(options, **made)


def as_python(words: list[str], options: type[Section]) -> list[str]:
    """Rewrite TOML booleans (true) as the Python ones that tyro expects; a bare flag is True."""
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
        if before.replace("_", "-") in switches and word.startswith("--"):
            spelled.append("True")
        spelled.append(word)
    return [*spelled, "True"] if words and words[-1].replace("_", "-") in switches else spelled


def run() -> None:
    """Entry point of the console script `titan_dit`."""
    put_current_folder_last()
    failure.run_and_exit(main)


if __name__ == "__main__":
    run()
