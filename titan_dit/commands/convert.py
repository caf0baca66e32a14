"""`python -m titan_dit convert`: convert weights of other projects to a checkpoint, or back."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from titan_dit.checkpoint.run_path import find_checkpoint
from titan_dit.checkpoint.store import URL, Location, location
from titan_dit.commands import (
    convert_adapter,
    convert_diffusers,
    convert_language_model,
    convert_original,
)
from titan_dit.commands.flags.convert import Options
from titan_dit.config.section import UserError
from titan_dit.interop import hf_directory, peft, weight_file
from titan_dit.models.dit import DiTConfig
from titan_dit.trained_model import open_weights

READING = ("heads", "scale", "prediction", "noise_schedule", "format")
WRITING = ("weights", "decay", "step", "vae", "as_is", "format")
OF_RUNS = ("weights", "decay", "step")
"""Flags of every export."""


class Kind(NamedTuple):
    """What --from can be."""

    name: str
    use: str
    """What `convert` does with it."""
    flags: tuple[str, ...] = ()


RUN = Kind("folder", "an export", WRITING)
FILE = Kind("file", "an import", READING)
PEFT = Kind("folder of peft", "its import", ("base", *OF_RUNS))
DIFFUSERS = Kind("folder of diffusers", "its import", ("scale",))
TRANSFORMERS = Kind("folder of transformers", "its import")
FLAGS = dict.fromkeys(flag for kind in (FILE, RUN, PEFT, DIFFUSERS) for flag in kind.flags)


def main(options: Options) -> None:
    """Import if --from is a file, or a folder of another library; export a run or a checkpoint."""
    source, target = location(options.source), Path(options.to)
    if isinstance(location(options.to), URL) or not target.name:
        raise UserError(f"--to {options.to}: give the path of a new file or folder on a disk.")
    kind = kind_of(source)
    writes = kind is RUN
    check_flags(options, kind.flags, f"{kind.use} (--from {source} is a {kind.name})")
    if target.exists() and (writes or not target.is_dir() or any(target.iterdir())):
        raise UserError(f"--to {target} exists. Choose another name, or delete it.")
    if not writes and target.suffix in weight_file.SUFFIXES:
        raise UserError(f"--to {target}: a checkpoint is a folder. Name one, such as dit_xl2.")
    if not writes and options.format == "peft":
        raise UserError(
            f"--format peft: --from {source} is a {kind.name}, not a run with adapters."
        )
    if isinstance(source, URL) or writes:
        export(source, target, options)
    elif kind is PEFT:
        convert_adapter.read_directory(source, target, options)
    elif kind is DIFFUSERS:
        convert_diffusers.read_directory(source, target, options.scale)
    elif kind is TRANSFORMERS:
        convert_language_model.read_directory(source, target)
    else:
        convert_original.read_file(source, target, options)


def kind_of(source: Location) -> Kind:
    """What --from is."""
    if isinstance(source, URL):
        return RUN
    if peft.is_directory(source):
        return PEFT
    if convert_diffusers.is_directory(source):
        return DIFFUSERS
    if hf_directory.is_directory(source):
        return TRANSFORMERS
    return RUN if source.is_dir() else FILE


def check_flags(options: Options, flags: tuple[str, ...], use: str) -> None:
    """Refuse the flags of another use."""
    for name in FLAGS:
        if getattr(options, name) not in (None, False, "") and name not in flags:
            raise UserError(f"--{name.replace('_', '-')} is not a flag of {use}.")


def export(source: Location, target: Path, options: Options) -> None:
    """Export a checkpoint: a DiT as a file or for diffusers, a language model as a folder."""
    path = find_checkpoint(source, options.step, "--from")
    run = open_weights(path, options.weights or "ema", options.decay, options.trust)
    config = run.model_config
    if options.format == "peft":
        check_flags(options, (*OF_RUNS, "as_is", "format"), "an export of adapters (--format peft)")
        convert_adapter.write_run(options.source, target, run, options.as_is)
    elif type(config) is not DiTConfig:  # A class derived from it may have other parameters.
        use = f"the export of a {config.name} model (--from {source})"
        check_flags(options, OF_RUNS, use)
        convert_language_model.write_directory(source, target, run)
    elif target.suffix in weight_file.SUFFIXES:
        check_flags(options, (*OF_RUNS, "format"), f"an export to a file (--to {target})")
        convert_original.write_file(target, run, config, options.format)
    elif target.suffix:
        raise UserError(
            f"--to {target}: name a .pt or .safetensors file, or for diffusers a folder without a "
            "suffix."
        )
    else:
        use = f"an export to diffusers (--to {target} has no suffix)"
        check_flags(options, (*OF_RUNS, "vae", "as_is"), use)
        convert_diffusers.write_run(target, run, config, options.vae, options.as_is)
