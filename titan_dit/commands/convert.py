"""`python -m titan_dit convert`: weights of the original DiT to a checkpoint, and back."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import Tensor

from titan_dit import __version__
from titan_dit.checkpoint import checkpoint
from titan_dit.checkpoint.store import URL, Place, place
from titan_dit.commands.restore import find, restore
from titan_dit.config import catalog, config_file
from titan_dit.config.section import Bound, Finite, PositiveInt, Section, UserError, conform
from titan_dit.data.latent_facts import LatentFacts
from titan_dit.diffusion.objective import DiffusionConfig
from titan_dit.interop import original_dit, weight_file
from titan_dit.interop.original_dit import Original
from titan_dit.interop.tensor_file import write_tensors
from titan_dit.models.dit import DiTConfig
from titan_dit.observe import console
from titan_dit.system.files import PARTIAL

EMA_DECAY = "0.9999"  # The original's.
SCALE = 0.18215
OBJECTIVE = "titan_dit.objective"
"""Key of a .safetensors file's metadata: what the weights were trained for."""


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Read weights of facebookresearch/DiT into a checkpoint, or write a checkpoint's as theirs."""

    section = "convert"

    source: Annotated[str, tyro.conf.arg(name="from")]
    """FILE.pt or FILE.safetensors of the original; or a run or a checkpoint to write as one."""
    to: str
    """DIR of the new checkpoint; or FILE.pt or FILE.safetensors in the original's names."""
    heads: PositiveInt | None = None
    """Reading: attention heads of the network, where it is none of S, B, L and XL."""
    scale: Annotated[Finite, Bound(above=0)] | None = None
    """Reading: the network's latents are the autoencoder's times this. Unset: 0.18215."""
    prediction: Literal["eps", "v", "x"] | None = None
    """Reading: what the network predicts. Unset: the noise, eps, as the original's does."""
    schedule: Literal["linear", "cosine"] | None = None
    """Reading: the noise schedule. Unset: linear, as the original's."""
    weights: Literal["ema", "model"] | None = None
    """Writing: averaged weights, or the last ones. Unset: averaged."""
    decay: float | None = None
    """Writing: which average, if the run keeps several; the first if not given."""
    step: int | None = None
    """Writing: which checkpoint of a run; the newest if not given."""


READING, WRITING = ("heads", "scale", "prediction", "schedule"), ("weights", "decay", "step")


def main(options: Options) -> None:
    """The kind of --from decides the direction."""
    source, target = place(options.source), Path(options.to)
    writes = isinstance(source, URL) or source.is_dir()
    for name in READING if writes else WRITING:
        if getattr(options, name) is not None:
            kind, use = ("folder", "writing") if writes else ("file", "reading")
            raise UserError(f"--{name} has no use in {use}, as --from {source} is a {kind}.")
    if target.exists() and (writes or not target.is_dir() or any(target.iterdir())):
        raise UserError(f"--to {target} exists. Choose another name, or delete it.")
    if writes:
        write_original(source, target, options)
    else:
        read_original(Path(options.source), target, options)


def read_original(source: Path, target: Path, options: Options) -> None:
    """A file of the original's to a checkpoint."""
    if target.suffix in weight_file.SUFFIXES:
        raise UserError(f"--to {target}: a checkpoint is a folder; name one, such as dit_xl2.")
    weights = weight_file.read(source)
    try:
        original = original_dit.infer(weights.ema, options.heads or known_heads(weights))
        ema = original.to_ours(weights.ema)
        # Most files hold one state dict: it is converted, and checked, once.
        model = ema if weights.model is weights.ema else original.to_ours(weights.model)
        objective = objective_of(weights, original, options)
    except UserError as error:
        raise UserError(f"--from {source}: {error}") from None
    tensors: dict[str, Any] = {"model": model, "ema": {EMA_DECAY: ema}}
    console.say(f"read    {source}: {describe(original, ema)}")
    console.say(f"        trained for {', '.join(f'{k} {v}' for k, v in objective.items())}")
    if wide := {str(t.dtype)[6:] for t in weights.ema.values()} - {"float32"}:
        console.say(f"        {', '.join(sorted(wide))} became float32")
    add_moments(tensors, weights, original)
    save(target, tensors, record_of(original, objective, options.scale or SCALE))
    console.say(f"wrote   {target}. Train on with --checkpoint.resume {target}")


def add_moments(tensors: dict[str, Any], weights: weight_file.Weights, original: Original) -> None:
    """AdamW's moments, where the file has them and they fit."""
    if weights.adam is None:
        return
    try:
        tensors["optimizer"] = original.adam_to_ours(weights.adam)
    except UserError as error:
        reason = " ".join(str(error).split())
        console.say(f"        its AdamW state is left out, training on starts a new one: {reason}")
        return
    steps = next(iter(tensors["optimizer"].values()))["step"].item()
    console.say(f"        and AdamW's moments after {steps:,.0f} steps")


def save(target: Path, tensors: dict[str, Any], record: dict[str, Any]) -> None:
    """Write the checkpoint; nothing is left of one that cannot be written."""
    aside = target.with_name(f"{target.resolve().name}{PARTIAL}")
    if aside.exists():
        raise UserError(f"--to {target}: {aside} is in the way. Move it, or choose another name.")
    try:
        checkpoint.write(target.with_name(target.resolve().name), tensors, record)
    except (OSError, RuntimeError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise UserError(f"--to {target} cannot be written: {str(error).splitlines()[0]}") from None


def known_heads(weights: weight_file.Weights) -> int | None:
    """The heads that a file's metadata tells, as `write_original` leaves them."""
    told = weights.metadata.get("num_heads", "")
    return int(told) if told.isdecimal() and int(told) > 0 else None


def objective_of(
    weights: weight_file.Weights, original: Original, options: Options
) -> dict[str, Any]:
    """What the network was trained for: as the file says, as the flags say, as the original."""
    try:
        told: dict[str, Any] = json.loads(weights.metadata.get(OBJECTIVE, "{}"))
        if told:
            catalog.variant("objective", conform(told.get("name"), str, "name"))
    except (json.JSONDecodeError, AttributeError, UserError) as error:
        raise UserError(f"its metadata {OBJECTIVE} is damaged: {error}") from None
    table: dict[str, Any] = {"name": "ddpm", "schedule": "linear", "prediction": "eps"} | told
    for name in ("schedule", "prediction"):
        if (value := getattr(options, name)) is not None:
            table[name] = value
    if table["name"] == "ddpm":
        table["learn_sigma"] = original.learn_sigma
        return table
    return {key: value for key, value in table.items() if key not in ("schedule", "prediction")}


def record_of(original: Original, objective: dict[str, Any], scale: float) -> dict[str, Any]:
    """The plain values of the checkpoint: those of a run that has not trained yet."""
    config = original.config
    shape = {key: getattr(config, key) for key in ("latent_size", "channels", "num_classes")}
    sizes = {key: getattr(config, key) for key in ("hidden", "layers", "heads", "patch")}
    tables: config_file.Tables = {
        "model": {"name": "dit", "mlp_ratio": config.mlp_ratio, **sizes, **shape},
        "objective": objective,
        # A checkpoint says what run it is of. Of the training of these weights nothing is known.
        "data": {"name": "synthetic", **shape},
        "training": {"steps": 1, "global_batch_size": 1},
        "ema": {"decays": [float(EMA_DECAY)], "warmup": False},
    }
    facts = LatentFacts(
        shape=config.sample_shape, count=0, num_classes=config.num_classes, scale=scale
    )
    return {
        "step": 0,
        "cursor": 0,
        "nan_steps": 0,
        "imported": True,
        "config": config_file.to_tables(config_file.build(tables, catalog.variant)),
        "config_format": config_file.FORMAT,
        "data": facts.as_json(),
        "versions": {"titan_dit": __version__, "torch": torch.__version__},
    }


def write_original(source: Place, target: Path, options: Options) -> None:
    """A checkpoint to a file in the original's names."""
    if target.suffix not in weight_file.SUFFIXES:
        raise UserError(f"--to {target}: name a file that ends in .pt or .safetensors.")
    path = find(source, options.step, "--from")
    run = restore(path, options.weights or "ema", options.decay, torch.device("cpu"))
    config = run.model_config
    if not isinstance(config, DiTConfig):
        raise UserError(f"--from {source}: {config.name} is no DiT; the original's files hold one.")
    objective = run.diffusion("convert").path
    assert isinstance(objective, DiffusionConfig)
    original = Original(config, objective.path.output_channels(config.channels))
    ours = {name: p.detach() for name, p in run.model.named_parameters()}
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
    write_tensors(target, original.to_original(ours), metadata)
    console.say(f"read    {run.path}, step {run.step} ({run.weights})")
    console.say(f"wrote   {target}: {describe(original, ours)}")
    trained_for = (objective.name, *(asdict(objective).get(k) for k in ("schedule", "prediction")))
    if trained_for != ("ddpm", "linear", "eps"):
        told = " ".join(str(part) for part in trained_for if part)
        console.say(f"note    trained for {told}: the original's sample.py expects ddpm linear eps")


def describe(original: Original, tensors: dict[str, Tensor]) -> str:
    """One line on a network."""
    config = original.config
    name = original_dit.name_of(config)
    size = name or "hidden {}, layers {}, heads {}, patch {}".format(*config.shape)
    count = sum(tensor.numel() for tensor in tensors.values())
    sigma = "learned sigma" if original.learn_sigma else "no learned sigma"
    return (
        f"{size}, {count:,} parameters, {config.channels}x{config.latent_size}x"
        f"{config.latent_size}, {config.num_classes} classes, {sigma}"
    )
