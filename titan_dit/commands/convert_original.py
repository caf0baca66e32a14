"""`convert` of files of the original DiT and of SiT: import as a checkpoint, and export."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from titan_dit.commands.flags.convert import Options
from titan_dit.config import catalog, config_file, dotted_names, schema, user_text
from titan_dit.config.section import UserError, conform, hints_of
from titan_dit.data.latent_facts import LatentFacts
from titan_dit.diffusion.objective import DiffusionConfig
from titan_dit.interop import (
    imported,
    original_dit,
    pickled,
    sit,
    tensor_writer,
    weight_file,
)
from titan_dit.interop.new_output import new_output
from titan_dit.interop.on_demand import OnDemand, dtypes, numel
from titan_dit.interop.original_dit import Original
from titan_dit.interop.write_progress import writing
from titan_dit.models.dit import DiTConfig
from titan_dit.observe import console
from titan_dit.trained_model import SavedWeights

OBJECTIVE = "titan_dit.objective"
"""Metadata key of a .safetensors file for the training objective."""
ORIGINAL = {"noise_schedule": "linear", "prediction": "eps"}
"""The keys of [objective] that the original DiT's weights were trained with."""
EXPECTED = "ddpm linear eps in 1000 steps"
"""`meaning` of the original's [objective]."""


def read_file(source: Path, target: Path, options: Options) -> None:
    """Import a file as a checkpoint."""
    try:
        weights = weight_file.read(source)
    except UserError as error:
        raise UserError(f"--from {error}") from None
    try:
        original = original_dit.infer(weights.ema, options.heads or known_heads(weights))
        objective = objective_of(weights, original, options)
        ema = original.to_ours(weights.ema)
        # Most files hold one state dict: check it once.
        model = ema if weights.model is weights.ema else original.to_ours(weights.model)
        facts = LatentFacts(
            shape=original.config.sample_shape,
            count=0,
            num_classes=original.config.num_classes,
            scale=options.scale or original_dit.SCALE,
        )
        record = imported.record_of_dit(original.config, objective, facts)
    except UserError as error:
        raise UserError(f"--from {source}: {error}") from None
    tensors: dict[str, Any] = {"model": model, "ema": {imported.EMA_DECAY: ema}}
    console.say(f"read    {source}: {describe(original, ema)}")
    console.say(f"        objective: {', '.join(f'{k} {v}' for k, v in objective.items())}")
    if wide := dtypes(weights.ema) - {"float32"}:
        console.say(f"        {', '.join(sorted(wide))} converted to float32")
    add_moments(tensors, weights, original)
    imported.save(target, tensors, record)
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
    """Return the number of heads in a file's metadata, written by `write_file`."""
    heads = weights.metadata.get("num_heads", "")
    return int(heads) if heads.isdecimal() and int(heads) > 0 else None


def objective_of(
    weights: weight_file.Weights, original: Original, options: Options
) -> dict[str, Any]:
    """Return the [objective] table: from the flags, else from the file, else the original's."""
    stored = stored_objective(weights, options.trust)
    if options.format == "dit" and (sit.wrote(weights.arguments) or (stored and sit.fits(stored))):
        raise UserError("--format dit, but it is a file of SiT: give --format sit, or none.")
    if options.format == "sit" or (not stored and sit.wrote(weights.arguments)):
        sit.check_arguments(weights.arguments)
        stored = stored or dict(sit.OBJECTIVE)
        sit.check_expressible(stored)
    if not stored and options.format is None and sit.is_named(options.source):
        console.say(
            "warning: by its name the file is SiT's, but it does not say so itself and is read as "
            "the original DiT's. If it is SiT's, repeat with --format sit"
        )
    table: dict[str, Any] = {"name": "ddpm", **ORIGINAL, **stored}
    is_ddpm = table["name"] == "ddpm"
    for name in ORIGINAL:
        if (value := getattr(options, name)) is None:
            continue
        if not is_ddpm:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} {value}: weights of {table['name']} have no {flag}.")
        table[name] = value
    table["learn_sigma"] = original.learn_sigma
    return table if is_ddpm else {k: v for k, v in table.items() if k not in ORIGINAL}


def stored_objective(weights: weight_file.Weights, trust: bool) -> dict[str, Any]:
    """The [objective] table in a file's metadata; empty if there is none."""
    try:
        stored: dict[str, Any] = user_text.parse_json(weights.metadata.get(OBJECTIVE, "{}"))
        if stored:
            schema.check(stored, schema.Each(schema.ANY), "[objective]")
            dotted_names.check_trusted({"objective": stored}, "it", trust, ("objective",))
            kind = catalog.variant("objective", conform(stored.get("name"), str, "name"))
            stored = config_file.renamed_keys("objective", stored, hints_of(kind))
    except (user_text.BadTextError, UserError) as error:
        raise UserError(f"its metadata {OBJECTIVE} is damaged: {error}") from None
    return stored


def write_file(target: Path, run: SavedWeights, config: DiTConfig, form: str | None) -> None:
    """Export a DiT as a file of the original or of SiT, whose names are the same."""
    objective = run.diffusion("convert").path
    assert isinstance(objective, DiffusionConfig)
    table = {"name": objective.name, **asdict(objective)}
    if form == "sit":
        sit.check_expressible(table)
    original = Original(config, objective.path.output_channels(config.channels))
    theirs, outline = original.to_original(run.tensors), original.outline()
    # A .pt file is made from a .safetensors file beside it, which is memory-mapped.
    passes = 1 if target.suffix == ".safetensors" else 2
    with writing(target, list(outline.values()) * passes), new_output(target) as place:
        file = place.with_name("tensors.safetensors")
        metadata = metadata_of(original, table)
        tensor_writer.write(place.parent, file.name, outline, theirs, metadata=metadata)
        if target.suffix == ".safetensors":
            file.rename(place)
        else:
            pickled.write(place, file, outline)
    console.say(f"read    {run.path}, step {run.step} ({run.weights})")
    is_sit = sit.fits(table) and form != "dit"
    name = "SiT" if is_sit else "the original DiT"
    console.say(f"wrote   {target}, a file of {name}: {describe(original, run.tensors)}")
    if not is_sit and (words := meaning(table)) != EXPECTED:
        console.say(f"note    trained for {words}: the original's sample.py expects {EXPECTED}")


def meaning(objective: Mapping[str, Any]) -> str:
    """What an [objective] trains a network for, in a few words."""
    words = [objective[key] for key in ("name", *ORIGINAL) if objective.get(key)]
    steps = objective.get("steps")
    return " ".join(words) + (f" in {steps} steps" if steps else "")


def metadata_of(original: Original, objective: Mapping[str, Any]) -> dict[str, str]:
    """The metadata of a .safetensors file."""
    config = original.config
    hidden, layers, heads, patch = config.shape
    return {
        "format": "pt",
        "input_size": str(config.latent_size),
        "patch_size": str(patch),
        "in_channels": str(config.channels),
        "hidden_size": str(hidden),
        "depth": str(layers),
        "num_heads": str(heads),
        "num_classes": str(config.num_classes),
        "learn_sigma": str(original.learn_sigma),
        OBJECTIVE: json.dumps(dict(objective)),
    }


def describe(original: Original, tensors: OnDemand) -> str:
    """Describe a network in one line."""
    config = original.config
    name = original_dit.name_of(config)
    size = name or "hidden {}, layers {}, heads {}, patch {}".format(*config.shape)
    sigma = "learned sigma" if original.learn_sigma else "no learned sigma"
    return (
        f"{size}, {numel(tensors):,} parameters, {config.channels}x{config.latent_size}x"
        f"{config.latent_size}, {config.num_classes} classes, {sigma}"
    )
