"""`python -m titan_dit convert`: weights of the original DiT to a checkpoint, and back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import Tensor

from titan_dit import __version__, catalog, config_file
from titan_dit.commands.restore import find, restore
from titan_dit.data.base import DataFacts
from titan_dit.observe import console
from titan_dit.section import Bound, Count, Finite, Section, UserError
from titan_dit.state import checkpoint, original_weights, weight_file

EMA_DECAY = "0.9999"  # The original's.


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Read weights of facebookresearch/DiT into a checkpoint, or write a checkpoint's as theirs."""

    section = "convert"

    source: Annotated[str, tyro.conf.arg(name="from")]
    """FILE.pt or FILE.safetensors of the original; or a run or a checkpoint to write as one."""
    to: str
    """DIR of the new checkpoint; or FILE.pt or FILE.safetensors in the original's names."""
    heads: Count | None = None
    """Attention heads of the original's network, where it is none of S, B, L and XL."""
    scale: Annotated[Finite, Bound(above=0)] = 0.18215
    """The network's latents are the autoencoder's times this."""
    weights: Literal["ema", "model"] = "ema"
    """Which weights to write out: averaged, or the last ones."""
    decay: float | None = None
    """Which average, if the run keeps several; the first if not given."""
    step: int | None = None
    """Which checkpoint of a run to write out; the newest if not given."""


def main(options: Options) -> None:
    """The kind of --from decides the direction."""
    source, target = Path(options.source), Path(options.to)
    if source.is_dir():
        write_original(source, target, options)
    else:
        read_original(source, target, options)


def read_original(source: Path, target: Path, options: Options) -> None:
    """A file of the original's to a checkpoint."""
    if target.suffix in weight_file.SUFFIXES:
        raise UserError(f"--to {target}: a checkpoint is a folder; name one, such as dit_xl2.")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"--to {target} exists. Name a new folder, or delete it.")
    weights = weight_file.read(source)
    try:
        original = original_weights.infer(weights.ema, options.heads or known_heads(weights))
        ema = original.to_ours(weights.ema)
        # Most files hold one state dict: it is converted, and checked, once.
        model = ema if weights.model is weights.ema else original.to_ours(weights.model)
        adam = original.adam_to_ours(weights.adam) if weights.adam else None
    except UserError as error:
        raise UserError(f"--from {source}: {error}") from None
    tensors: dict[str, Any] = {"model": model, "ema": {EMA_DECAY: ema}}
    if adam:
        tensors["optimizer"] = adam
    checkpoint.write(target, tensors, record_of(original, options.scale))
    console.say(f"read    {source}: {describe(original, ema)}")
    if adam:
        steps = next(iter(adam.values()))["step"].item()
        console.say(f"        and AdamW's moments after {steps:,.0f} steps")
    console.say(f"wrote   {target}. Train on with --checkpoint.resume {target}")


def known_heads(weights: weight_file.Weights) -> int | None:
    """The heads that a file's metadata tells, as `write_original` leaves them."""
    told = weights.metadata.get("num_heads", "")
    return int(told) if told.isdecimal() and int(told) > 0 else None


def record_of(original: original_weights.Original, scale: float) -> dict[str, Any]:
    """The plain values of the checkpoint: those of a run that has not trained yet."""
    model = original.model
    shape = {key: getattr(model, key) for key in ("latent_size", "channels", "num_classes")}
    tables: config_file.Tables = {
        "model": {"name": "dit", "heads": model.shape[2], "mlp_ratio": model.mlp_ratio, **shape}
        | {key: getattr(model, key) for key in ("hidden", "layers", "patch")},
        "objective": {"name": "ddpm", "learn_sigma": original.learn_sigma},
        # A checkpoint says what run it is of. Of the training of these weights nothing is known.
        "data": {"name": "synthetic", **shape},
        "training": {"steps": 1, "global_batch_size": 1},
        "ema": {"decays": [float(EMA_DECAY)], "warmup": False},
    }
    facts = DataFacts(shape=model.sample_shape, count=0, num_classes=model.num_classes, scale=scale)
    return {
        "step": 0,
        "cursor": 0,
        "nan_steps": 0,
        "imported": True,
        "config": config_file.to_tables(config_file.build(tables, catalog.variant)),
        "data": facts.as_json(),
        "versions": {"titan_dit": __version__, "torch": torch.__version__},
    }


def write_original(source: Path, target: Path, options: Options) -> None:
    """A checkpoint to a file in the original's names."""
    if target.suffix not in weight_file.SUFFIXES:
        raise UserError(f"--to {target}: name a file that ends in .pt or .safetensors.")
    run = restore(
        find(source, options.step, "--from"), options.weights, options.decay, torch.device("cpu")
    )
    outputs = run.config.objective.output_channels(run.config.model.channels)
    original = original_weights.Original(run.config.model, outputs)
    ours = {name: p.detach() for name, p in run.model.named_parameters()}
    hidden, layers, heads, patch = original.model.shape
    metadata = {
        "format": "pt",
        "input_size": original.model.latent_size,
        "patch_size": patch,
        "in_channels": original.model.channels,
        "hidden_size": hidden,
        "depth": layers,
        "num_heads": heads,
        "num_classes": original.model.num_classes,
        "learn_sigma": original.learn_sigma,
    }
    weight_file.write(
        target, original.to_original(ours), {key: str(value) for key, value in metadata.items()}
    )
    console.say(f"read    {run.path}, step {run.step} ({run.weights})")
    console.say(f"wrote   {target}: {describe(original, ours)}")


def describe(original: original_weights.Original, tensors: dict[str, Tensor]) -> str:
    """One line on a network."""
    model = original.model
    size = model.size or "hidden {}, layers {}, heads {}, patch {}".format(*model.shape)
    count = sum(tensor.numel() for tensor in tensors.values())
    sigma = "learned sigma" if original.learn_sigma else "no learned sigma"
    return (
        f"{size}, {count:,} parameters, {model.channels}x{model.latent_size}x{model.latent_size}, "
        f"{model.num_classes} classes, {sigma}"
    )
