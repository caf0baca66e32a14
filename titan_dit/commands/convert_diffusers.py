"""`convert` of diffusers' DiT: a transformer's folder, or that of a whole DiTPipeline."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from titan_dit.config import config_file
from titan_dit.config.section import UserError
from titan_dit.data.latent_facts import LatentFacts, shown
from titan_dit.interop import diffusers_dit, hf_directory, imported
from titan_dit.interop.diffusers_dit import DiffusersDiT
from titan_dit.models.dit import DiTConfig
from titan_dit.observe import console
from titan_dit.pictures import autoencoder
from titan_dit.system.files import PARTIAL, sync_folder
from titan_dit.trained_model import TrainedModel

FILES = (diffusers_dit.WEIGHTS, "diffusion_pytorch_model.bin")
SD_SCALE = 0.18215
"""Of Stable Diffusion's autoencoder, which released DiTs take."""


def is_directory(path: Path) -> bool:
    """True if a path is a DiTPipeline's folder, or that of its transformer."""
    if (path / diffusers_dit.INDEX).is_file():
        return True
    try:
        config = hf_directory.read_json(path / diffusers_dit.CONFIG)
    except UserError:
        return False
    return config.get("_class_name") == diffusers_dit.KIND


def read_directory(source: Path, target: Path, scale: float | None) -> None:
    """Import a folder as a checkpoint."""
    try:
        pipeline = source / diffusers_dit.INDEX
        whole = hf_directory.read_json(pipeline) if pipeline.is_file() else {}
        folder = source / diffusers_dit.TRANSFORMER if whole else source
        names = class_names(whole.get("id2label") or {})
        found = diffusers_dit.config_of(
            hf_directory.read_json(folder / diffusers_dit.CONFIG), len(names) or None
        )
        ours = found.to_ours(hf_directory.read_weights(folder, FILES))
        objective = objective_of(source, found) if whole else {"name": "ddpm", "learn_sigma": True}
        facts = facts_of(source if whole else None, found.config, names, scale)
    except UserError as error:
        raise UserError(f"--from {source}: {error}") from None
    config = found.config
    sizes = ("hidden", "layers", "heads", "patch", "latent_size", "channels", "num_classes")
    model: dict[str, Any] = {key: getattr(config, key) for key in sizes}
    model |= {"name": "dit", "timestep_frequencies": "diffusers"}
    shape = {key: getattr(config, key) for key in ("latent_size", "channels", "num_classes")}
    tables: config_file.Tables = {
        "model": model,
        "objective": objective,
        "data": {"name": "synthetic", **shape},
    }
    count = sum(tensor.numel() for tensor in ours.values())
    console.say(f"read    {source}: {count:,} parameters, {config.num_classes} classes")
    console.say(f"        objective: {', '.join(f'{k} {v}' for k, v in objective.items())}")
    tensors = {"model": ours, "ema": {imported.EMA_DECAY: ours}}
    imported.save(target, tensors, imported.record_of(tables, facts))
    console.say(f"wrote   {target}. Train from it with --checkpoint.resume {target}")


def class_names(labels: dict[str, str]) -> tuple[str, ...]:
    """The names in label order; () if there is none."""
    return tuple(str(labels[key]) for key in sorted(labels, key=int))


def objective_of(source: Path, found: DiffusersDiT) -> dict[str, Any]:
    """The [objective] table of a pipeline."""
    scheduler = hf_directory.read_json(source / "scheduler" / diffusers_dit.SCHEDULER)
    learn_sigma = found.output_channels == 2 * found.config.channels
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
        scale=scale or SD_SCALE,
    )
    if pipeline is None or not (pipeline / diffusers_dit.VAE).is_dir():
        return facts
    vae = autoencoder.load(str(pipeline), torch.device("cpu"), "vae")
    return LatentFacts(
        shape=facts.shape,
        count=0,
        num_classes=facts.num_classes,
        class_names=names,
        scale=scale or vae.scale,
        shift=vae.shift,
        vae=vae.facts,
        vae_source=str(pipeline),
    )


def write_directory(target: Path, run: TrainedModel, config: DiTConfig, as_is: bool) -> None:
    """Export a DiT as a folder; with the autoencoder `vae` of the run or --vae, a pipeline."""
    diffusers_dit.check_expressible(config, as_is)
    path = run.diffusion("convert").path
    found = DiffusersDiT(config, path.output_channels(config.channels))
    theirs = found.to_theirs({name: p.detach() for name, p in run.network.named_parameters()})
    write(target, found, theirs, None, {}, {})
    console.say(f"wrote   {target}, a transformer for diffusers. With --vae: a whole DiTPipeline")


def write_pipeline(
    target: Path, run: TrainedModel, config: DiTConfig, vae: Path, as_is: bool
) -> None:
    """Export a DiT with its autoencoder, scheduler and class names as a DiTPipeline."""
    diffusers_dit.check_expressible(config, as_is)
    diffusion = run.diffusion("convert")
    facts, names = diffusion.data, diffusion.data.class_names
    loaded = autoencoder.load(str(vae), torch.device("cpu"))
    loaded.check_fits(facts, "--vae")
    if isinstance(facts.scale, tuple) or facts.shift != 0.0 or loaded.shift != 0.0:
        raise UserError(
            f"--vae {vae}: the latents have scale {shown(facts.scale)} and shift "
            f"{shown(facts.shift)}, but DiTPipeline has one scale for all channels and no shift."
        )
    if loaded.scale != facts.scale:
        raise UserError(
            f"--vae {vae}: its scaling_factor is {loaded.scale}, but the run's latents have scale "
            f"{shown(facts.scale)}, and DiTPipeline takes the autoencoder's."
        )
    found = DiffusersDiT(config, diffusion.path.output_channels(config.channels))
    theirs = found.to_theirs({name: p.detach() for name, p in run.network.named_parameters()})
    scheduler = diffusers_dit.scheduler_json(diffusion.path)
    folder = vae if (vae / autoencoder.CONFIG).is_file() else vae / autoencoder.INSIDE
    labels = dict(enumerate(names or map(str, range(config.num_classes))))
    write(target, found, theirs, folder, scheduler, labels)
    console.say(f"wrote   {target}, a DiTPipeline with {scheduler['_class_name']}")


def write(
    target: Path,
    found: DiffusersDiT,
    theirs: dict[str, torch.Tensor],
    vae: Path | None,
    scheduler: dict[str, Any],
    labels: dict[int, str],
) -> None:
    """Write a folder; it appears whole or not at all."""
    aside = target.with_name(f"{target.resolve().name}.{os.getpid()}{PARTIAL}")
    folder = aside if vae is None else aside / diffusers_dit.TRANSFORMER
    try:
        folder.mkdir(parents=True)
        config = json.dumps(found.config_json(), indent=2, sort_keys=True) + "\n"
        (folder / diffusers_dit.CONFIG).write_text(config)
        hf_directory.write_weights(folder, theirs, diffusers_dit.WEIGHTS)
        if vae is not None:
            diffusers_dit.write_pipeline_parts(aside, scheduler, vae, labels)
        aside.rename(target)
        sync_folder(target.resolve().parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise UserError(f"--to {target} cannot be written: {reason}.") from None
