"""`convert` of diffusers' DiT: a transformer's folder, or that of a whole DiTPipeline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from titan_dit.config.section import UserError
from titan_dit.data.latent_facts import LatentFacts, shown
from titan_dit.interop import diffusers_dit, hf_directory, imported
from titan_dit.interop.diffusers_dit import DiffusersDiT
from titan_dit.interop.new_output import new_output
from titan_dit.interop.on_demand import numel
from titan_dit.interop.original_dit import SCALE
from titan_dit.interop.write_progress import writing
from titan_dit.models.dit import DiTConfig
from titan_dit.observe import console
from titan_dit.pictures import autoencoder
from titan_dit.trained_model import SavedWeights

FILES = (diffusers_dit.WEIGHTS, "diffusion_pytorch_model.bin")
NO_VAE = "none"
"""--vae of an export of the transformer alone."""


def is_directory(path: Path) -> bool:
    """True if a path is a DiTPipeline's folder, or that of its transformer."""
    if (path / diffusers_dit.INDEX).is_file():
        return True
    try:
        config = hf_directory.read_json(path / diffusers_dit.CONFIG)
    except UserError:
        return False
    return diffusers_dit.is_dit(config)


def read_directory(source: Path, target: Path, scale: float | None) -> None:
    """Import a folder as a checkpoint."""
    try:
        pipeline = source / diffusers_dit.INDEX
        whole = hf_directory.read_json(pipeline) if pipeline.is_file() else {}
        folder = source / diffusers_dit.TRANSFORMER if whole else source
        if whole and diffusers_dit.TRANSFORMER not in whole:
            kind = whole.get("_class_name")
            raise UserError(f"{pipeline.name} is of {kind}, not of {diffusers_dit.PIPELINE}.")
        names = class_names(whole.get("id2label") or {})
        found = diffusers_dit.config_of(
            hf_directory.read_json(folder / diffusers_dit.CONFIG), len(names) or None
        )
        ours = found.to_ours(hf_directory.read_weights(folder, FILES))
        objective = objective_of(bool(whole), source, found)
        facts = facts_of(source if whole else None, found.config, names, scale)
        record = imported.record_of_dit(found.config, objective, facts)
    except UserError as error:
        raise UserError(f"--from {source}: {error}") from None
    config = found.config
    console.say(f"read    {source}: {numel(ours):,} parameters, {config.num_classes} classes")
    console.say(f"        objective: {', '.join(f'{k} {v}' for k, v in objective.items())}")
    tensors = {"model": ours, "ema": {imported.EMA_DECAY: ours}}
    imported.save(target, tensors, record)
    console.say(f"wrote   {target}. Train from it with --checkpoint.resume {target}")


def class_names(labels: Any) -> tuple[str, ...]:
    """The names in label order; () if there is none."""
    if not isinstance(labels, dict) or labels.keys() != {str(i) for i in range(len(labels))}:
        raise UserError(
            f"{diffusers_dit.INDEX}: id2label must name the classes from 0 on, without a gap."
        )
    return tuple(str(labels[str(number)]) for number in range(len(labels)))


def objective_of(whole: bool, source: Path, found: DiffusersDiT) -> dict[str, Any]:
    """The [objective] table: a pipeline's by its scheduler; else DDPM, as released weights."""
    learn_sigma = found.output_channels == 2 * found.config.channels
    if not whole:
        return {"name": "ddpm", "learn_sigma": learn_sigma}
    scheduler = hf_directory.read_json(source / "scheduler" / diffusers_dit.SCHEDULER)
    return diffusers_dit.objective_of(scheduler, learn_sigma)


def facts_of(
    pipeline: Path | None, config: DiTConfig, names: tuple[str, ...], scale: float | None
) -> LatentFacts:
    """Facts of the latents that the weights were trained on, as far as they are known."""
    facts = LatentFacts(
        shape=config.sample_shape,
        count=0,
        num_classes=config.num_classes,
        class_names=names,
        scale=scale or SCALE,
    )
    if pipeline is None or not (pipeline / diffusers_dit.VAE).is_dir():
        return facts
    vae = autoencoder.load(str(pipeline), torch.device("cpu"), "vae")
    if isinstance(vae.scale, tuple) or vae.shift != 0.0:
        raise UserError(
            f"the latents of its vae have scale {shown(vae.scale)} and shift {shown(vae.shift)}, "
            "but DiTPipeline has one scale for all channels and no shift. Import "
            f"{diffusers_dit.TRANSFORMER}/ alone, with --scale."
        )
    return replace(
        facts,
        scale=scale or vae.scale,
        vae=vae.facts,
        vae_source=str(pipeline),
    )


def write_run(target: Path, run: SavedWeights, config: DiTConfig, given: str, as_is: bool) -> None:
    """Export a DiT as a folder; with --vae or the run's autoencoder as a whole pipeline."""
    diffusers_dit.check_expressible(config, as_is)
    diffusion = run.diffusion("convert")
    found = DiffusersDiT(config, diffusion.path.output_channels(config.channels))
    recorded = diffusion.data.vae_source
    vae = given or (recorded if Path(recorded or "-").expanduser().is_dir() else NO_VAE)
    outline = found.outline()
    theirs = found.to_theirs(run.tensors)
    parts = found.config_json(), outline, theirs, diffusers_dit.WEIGHTS
    if vae == NO_VAE:
        with writing(target, outline.values()), new_output(target) as place:
            hf_directory.write(place, *parts)
        console.say(
            f"wrote   {target}, a transformer for diffusers. With --vae: a whole DiTPipeline"
        )
    else:
        place_of_vae = Path(vae).expanduser()
        if not place_of_vae.is_dir():
            raise UserError(f"--vae {vae}: no such folder. Its files are copied.")
        check_autoencoder(place_of_vae, diffusion.data)
        scheduler = diffusers_dit.scheduler_json(diffusion.path)
        inside = (place_of_vae / autoencoder.CONFIG).is_file()
        folder = place_of_vae if inside else place_of_vae / autoencoder.INSIDE
        names = diffusion.data.class_names or map(str, range(config.num_classes))
        with writing(target, outline.values()), new_output(target) as place:
            hf_directory.write(place / diffusers_dit.TRANSFORMER, *parts)
            diffusers_dit.write_pipeline_parts(place, scheduler, folder, dict(enumerate(names)))
        console.say(f"wrote   {target}, a DiTPipeline with {scheduler['_class_name']}")
    console.say(f"        from {run.path}, step {run.step} ({run.weights})")


def check_autoencoder(vae: Path, facts: LatentFacts) -> None:
    """Refuse an autoencoder that did not make the latents, and units that DiTPipeline lacks."""
    loaded = autoencoder.load(str(vae), torch.device("cpu"))
    loaded.check_fits(facts, "--vae")
    if isinstance(facts.scale, tuple) or facts.shift != 0.0 or loaded.shift != 0.0:
        raise UserError(
            f"--vae {vae}: the latents have scale {shown(facts.scale)} and shift "
            f"{shown(facts.shift)}, but DiTPipeline has one scale for all channels and no shift. "
            f"Give --vae {NO_VAE} for the transformer alone."
        )
    if loaded.scale != facts.scale:
        raise UserError(
            f"--vae {vae}: its scaling_factor is {loaded.scale}, but the run's latents have scale "
            f"{shown(facts.scale)}, and DiTPipeline takes the autoencoder's."
        )
