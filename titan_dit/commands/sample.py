"""`python -m titan_dit sample`: draw samples from a trained run, pictures or text.

    python -m titan_dit sample --run outputs/digits --out grid.png
    NGPU=4 python -m titan_dit sample --run outputs/digits --num 50000 --out samples.npz

Ranks of a launcher, such as torchrun, share the pictures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch

from titan_dit.checkpoint.run_checkpoints import find_checkpoint
from titan_dit.checkpoint.store import location
from titan_dit.commands import sample_pictures, sample_text, train
from titan_dit.commands.flags import CommonFlags, PictureFlags, SampleFlags, TextFlags
from titan_dit.config.section import UserError
from titan_dit.diffusion.objective import Diffusion
from titan_dit.objectives.next_token import NextToken
from titan_dit.ranks import process_group
from titan_dit.ranks.process_group import Ranks
from titan_dit.trained_model import TrainedModel, device_of, load_trained


class Family(NamedTuple):
    """Flags and command of one kind of objective."""

    objective: type[Any]
    flags: type[CommonFlags]
    """The common flags and its own."""
    command: ModuleType
    """A module with `check(flags)` and `main(run, objective, flags)`."""


FAMILIES = {
    "pictures": Family(Diffusion, PictureFlags, sample_pictures),
    "text": Family(NextToken, TextFlags, sample_text),
}


def main(options: SampleFlags) -> None:
    """Launch the ranks, be one of them, or draw alone."""
    if train.start_ranks(gpus=False):
        with process_group.start(device_of(options.device).type) as world:
            draw(options, world.device)
    else:
        draw(options, device_of(options.device))


def draw(options: SampleFlags, device: torch.device) -> None:
    """Draw samples as the run's family does, and write them. Collective.

    Raises UserError for text on several ranks.
    """
    # One rank looks: a run that trains may save another checkpoint meanwhile.
    first = Ranks().run_on_first
    path = first(lambda: find_checkpoint(location(options.run), options.step))
    run = load_trained(path, options.weights, options.decay, device, options.trust)
    name = family_of(run)
    check_flags(options, name)
    if name == "text" and Ranks().count > 1:
        raise UserError("sample draws text in one process: leave NGPU out.")
    FAMILIES[name].command.check(options)
    FAMILIES[name].command.main(run, run.objective, options)


def family_of(run: TrainedModel) -> str:
    """The name of the run's family. Raises UserError for a run that draws nothing."""
    for name, family in FAMILIES.items():
        if isinstance(run.objective, family.objective):
            return name
    raise UserError(
        f"sample draws {' or '.join(FAMILIES)}, but {run.path} was trained with "
        f"{type(run.objective).__name__}, whose model draws nothing: `titan_dit predict` writes "
        "what it predicts, `titan_dit evaluate` its loss."
    )


def check_flags(options: SampleFlags, name: str) -> None:
    """Raise UserError for the flags of another family."""
    known = {f.name for f in dataclasses.fields(FAMILIES[name].flags)}
    for f in given(options):
        if f not in known:
            raise UserError(
                f"--{f.replace('_', '-')} is not a flag for {name}, which {options.run} draws. "
                "Leave it out."
            )


def given(options: SampleFlags) -> Iterator[str]:
    """Flags with another value than their default."""
    return (f.name for f in dataclasses.fields(options) if getattr(options, f.name) != f.default)
