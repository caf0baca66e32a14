"""`python -m titan_dit convert`: convert weights of other projects to a checkpoint, or back."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titan_dit.checkpoint.run_path import find_checkpoint
from titan_dit.checkpoint.store import URL, Location, location
from titan_dit.commands import convert_diffusers, convert_language_model
from titan_dit.commands.flags.convert import Options
from titan_dit.config import catalog, config_file
from titan_dit.config.section import (
    UserError,
    conform,
    hints_of,
)
from titan_dit.data.latent_facts import LatentFacts
from titan_dit.diffusion.objective import DiffusionConfig
from titan_dit.interop import hf_directory, imported, original_dit, weight_file, write_progress
from titan_dit.interop.original_dit import Original
from titan_dit.interop.tensor_file import write_tensors
from titan_dit.models.dit import DiTConfig
from titan_dit.observe import console
from titan_dit.trained_model import TrainedModel, load_trained

SCALE = 0.18215
OBJECTIVE = "titan_dit.objective"
"""Metadata key of a .safetensors file for the training objective."""


ORIGINAL = {"noise_schedule": "linear", "prediction": "eps"}
"""The keys of [objective] that the original DiT's weights were trained with."""
READING = ("heads", "scale", "prediction", "noise_schedule")
WRITING = ("weights", "decay", "step", "vae", "as_is")


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
        read_original(Path(options.source), target, options)
    else:
        convert_language_model.read_directory(Path(options.source), target)


def check_flags(options: Options, flags: tuple[str, ...], use: str) -> None:
    """Refuse the flags of another use."""
    for name in READING + WRITING:
        if getattr(options, name) not in (None, False, "") and name not in flags:
            raise UserError(f"--{name.replace('_', '-')} is not a flag of {use}.")


def read_original(source: Path, target: Path, options: Options) -> None:
    """Import a file of the original as a checkpoint."""
    weights = weight_file.read(source)
    try:
        original = original_dit.infer(weights.ema, options.heads or known_heads(weights))
        ema = original.to_ours(weights.ema)
        # Most files hold one state dict: convert and check it once.
        model = ema if weights.model is weights.ema else original.to_ours(weights.model)
        objective = objective_of(weights, original, options)
    except UserError as error:
        raise UserError(f"--from {source}: {error}") from None
    tensors: dict[str, Any] = {"model": model, "ema": {imported.EMA_DECAY: ema}}
    console.say(f"read    {source}: {describe(original, ema)}")
    console.say(f"        objective: {', '.join(f'{k} {v}' for k, v in objective.items())}")
    if wide := {str(t.dtype)[6:] for t in weights.ema.values()} - {"float32"}:
        console.say(f"        {', '.join(sorted(wide))} converted to float32")
    add_moments(tensors, weights, original)
    imported.save(target, tensors, record_of(original, objective, options.scale or SCALE))
    console.say(f"wrote   {target}. Train from it with --checkpoint.resume {target}")


def add_moments(tensors: dict[str, Any], weights: weight_file.Weights, original: Original) -> None:
    """Add AdamW's moments if the file has matching ones."""
    if weights.adam is None:
        return
    try:
        tensors["optimizer"] = original.adam_to_ours(weights.adam)
    except UserError as error:
        reason = " ".join(str(error).split())
        console.say(f"        AdamW state dropped, training starts with a new one: {reason}")
        return
    steps = next(iter(tensors["optimizer"].values()))["step"].item()
    console.say(f"        with AdamW's moments after {steps:,.0f} steps")


def known_heads(weights: weight_file.Weights) -> int | None:
    """Return the number of heads in a file's metadata, written by `write_original`."""
    heads = weights.metadata.get("num_heads", "")
    return int(heads) if heads.isdecimal() and int(heads) > 0 else None


def objective_of(
    weights: weight_file.Weights, original: Original, options: Options
) -> dict[str, Any]:
    """Return the [objective] table: from the flags, else the file's metadata, else the original."""
    try:
        stored: dict[str, Any] = json.loads(weights.metadata.get(OBJECTIVE, "{}"))
        if stored:
            kind = catalog.variant("objective", conform(stored.get("name"), str, "name"))
            stored = config_file.renamed_keys("objective", stored, hints_of(kind))
    except (json.JSONDecodeError, AttributeError, UserError) as error:
        raise UserError(f"its metadata {OBJECTIVE} is damaged: {error}") from None
    table: dict[str, Any] = {"name": "ddpm", **ORIGINAL, **stored}
    for name in ORIGINAL:
        if (value := getattr(options, name)) is not None:
            table[name] = value
    if table["name"] == "ddpm":
        table["learn_sigma"] = original.learn_sigma
        return table
    return {key: value for key, value in table.items() if key not in ORIGINAL}


def record_of(original: Original, objective: dict[str, Any], scale: float) -> dict[str, Any]:
    """Return the checkpoint's record, like that of a run at step 0."""
    config = original.config
    shape = {key: getattr(config, key) for key in ("latent_size", "channels", "num_classes")}
    sizes = {key: getattr(config, key) for key in ("hidden", "layers", "heads", "patch")}
    tables: config_file.Tables = {
        "model": {"name": "dit", "mlp_ratio": config.mlp_ratio, **sizes, **shape},
        "objective": objective,
        # A checkpoint needs this section; the training of imported weights is unknown.
        "data": {"name": "synthetic", **shape},
    }
    facts = LatentFacts(
        shape=config.sample_shape, count=0, num_classes=config.num_classes, scale=scale
    )
    return imported.record_of(tables, facts)


def export(source: Location, target: Path, options: Options) -> None:
    """Export a checkpoint: a DiT as a file of the original, a language model as a folder."""
    path = find_checkpoint(source, options.step, "--from")
    run = load_trained(path, options.weights or "ema", options.decay, torch.device("cpu"))
    if isinstance(run.model_config, DiTConfig) and not target.suffix:
        export_to_diffusers(target, run, run.model_config, options)
    elif isinstance(run.model_config, DiTConfig):
        write_original(target, run, run.model_config)
    else:
        convert_language_model.write_directory(source, target, run)


def export_to_diffusers(
    target: Path, run: TrainedModel, config: DiTConfig, options: Options
) -> None:
    """Export a DiT as a folder of diffusers, a whole pipeline if the autoencoder is known."""
    recorded = run.diffusion("convert").data.vae_source
    vae = options.vae or (recorded if Path(recorded or "-").expanduser().is_dir() else "")
    if vae:
        place = Path(vae).expanduser()
        if not place.is_dir():
            raise UserError(f"--vae {vae}: no such folder. Its files are copied.")
        convert_diffusers.write_pipeline(target, run, config, place, options.as_is)
    else:
        convert_diffusers.write_directory(target, run, config, options.as_is)
    console.say(f"        from {run.path}, step {run.step} ({run.weights})")


def write_original(target: Path, run: TrainedModel, config: DiTConfig) -> None:
    """Export a DiT as a file of the original."""
    if target.suffix not in weight_file.SUFFIXES:
        raise UserError(
            f"--to {target}: name a .pt or .safetensors file, or a folder for diffusers."
        )
    objective = run.diffusion("convert").path
    assert isinstance(objective, DiffusionConfig)
    original = Original(config, objective.path.output_channels(config.channels))
    ours = {name: p.detach() for name, p in run.network.named_parameters()}
    hidden, layers, heads, patch = config.shape
    metadata = {
        "format": "pt",
        "input_size": str(config.latent_size),
        "patch_size": str(patch),
        "in_channels": str(config.channels),
        "hidden_size": str(hidden),
        "depth": str(layers),
        "num_heads": str(heads),
        "num_classes": str(config.num_classes),
        "learn_sigma": str(original.learn_sigma),
        OBJECTIVE: json.dumps({"name": objective.name, **asdict(objective)}),
    }
    theirs = original.to_original(ours)
    with write_progress.writing(target, theirs.values()):
        write_tensors(target, theirs, metadata)
    console.say(f"read    {run.path}, step {run.step} ({run.weights})")
    console.say(f"wrote   {target}: {describe(original, ours)}")
    trained_for = (objective.name, *map(asdict(objective).get, ORIGINAL))
    if trained_for != ("ddpm", "linear", "eps"):
        words = " ".join(str(part) for part in trained_for if part)
        console.say(
            f"note    trained for {words}: the original's sample.py expects ddpm linear eps"
        )


def describe(original: Original, tensors: dict[str, Tensor]) -> str:
    """Describe a network in one line."""
    config = original.config
    name = original_dit.name_of(config)
    size = name or "hidden {}, layers {}, heads {}, patch {}".format(*config.shape)
    count = sum(tensor.numel() for tensor in tensors.values())
    sigma = "learned sigma" if original.learn_sigma else "no learned sigma"
    return (
        f"{size}, {count:,} parameters, {config.channels}x{config.latent_size}x"
        f"{config.latent_size}, {config.num_classes} classes, {sigma}"
    )
