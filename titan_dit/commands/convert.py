"""`python -m titan_dit convert`: convert weights of other projects to a checkpoint, or back."""

from __future__ import annotations

from pathlib import Path

from titan_dit.checkpoint.run_path import find_checkpoint
from titan_dit.checkpoint.store import URL, Location, location
from titan_dit.commands import convert_diffusers, convert_language_model, convert_original
from titan_dit.commands.flags.convert import Options
from titan_dit.config.section import UserError
from titan_dit.interop import hf_directory, weight_file
from titan_dit.models.dit import DiTConfig
from titan_dit.trained_model import open_weights

READING = ("heads", "scale", "prediction", "noise_schedule", "format")
WRITING = ("weights", "decay", "step", "vae", "as_is", "format")
OF_RUNS = ("weights", "decay", "step")
"""Flags of every export."""


def main(options: Options) -> None:
    """Import if --from is a file or a folder of transformers; export a run or a checkpoint."""
    source, target = location(options.source), Path(options.to)
    flags: tuple[str, ...] = ()
    from_diffusers = isinstance(source, Path) and convert_diffusers.is_directory(source)
    if from_diffusers:
        kind, use, flags = "folder of diffusers", "its import", ("scale",)
    elif isinstance(source, Path) and hf_directory.is_directory(source):
        kind, use = "folder of transformers", "its import"
    elif isinstance(source, URL) or source.is_dir():
        kind, use, flags = "folder", "an export", WRITING
    else:
        kind, use, flags = "file", "an import", READING
    check_flags(options, flags, f"{use} (--from {source} is a {kind})")
    writes = flags is WRITING
    if target.exists() and (writes or not target.is_dir() or any(target.iterdir())):
        raise UserError(f"--to {target} exists. Choose another name, or delete it.")
    if not writes and target.suffix in weight_file.SUFFIXES:
        raise UserError(f"--to {target}: a checkpoint is a folder. Name one, such as dit_xl2.")
    if writes:
        export(source, target, options)
    elif from_diffusers:
        convert_diffusers.read_directory(Path(options.source), target, options.scale)
    elif flags:
        convert_original.read_file(Path(options.source), target, options)
    else:
        convert_language_model.read_directory(Path(options.source), target)


def check_flags(options: Options, flags: tuple[str, ...], use: str) -> None:
    """Refuse the flags of another use."""
    for name in dict.fromkeys(READING + WRITING):
        if getattr(options, name) not in (None, False, "") and name not in flags:
            raise UserError(f"--{name.replace('_', '-')} is not a flag of {use}.")


def export(source: Location, target: Path, options: Options) -> None:
    """Export a checkpoint: a DiT as a file or for diffusers, a language model as a folder."""
    path = find_checkpoint(source, options.step, "--from")
    run = open_weights(path, options.weights or "ema", options.decay)
    config = run.model_config
    if not isinstance(config, DiTConfig):
        use = f"the export of a {config.name} model (--from {source})"
        check_flags(options, OF_RUNS, use)
        convert_language_model.write_directory(source, target, run)
    elif target.suffix in weight_file.SUFFIXES:
        check_flags(options, (*OF_RUNS, "format"), f"an export to a file (--to {target})")
        convert_original.write_file(target, run, config, options.format)
    elif target.suffix:
        raise UserError(
            f"--to {target}: name a .pt or .safetensors file, or a folder for diffusers."
        )
    else:
        use = f"an export to diffusers (--to {target} has no suffix)"
        check_flags(options, (*OF_RUNS, "vae", "as_is"), use)
        convert_diffusers.write_run(target, run, config, options.vae, options.as_is)
