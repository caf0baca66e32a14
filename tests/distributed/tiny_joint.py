"""A tiny text-to-image DiT on random pictures with random captions of random lengths."""

from dataclasses import dataclass

import torch

from titan_dit.config import catalog, config_file
from titan_dit.config.section import HeightWidth, PositiveInt
from titan_dit.data.base import DataConfig, DataFacts, Field, Source
from titan_dit.objectives.base import Objective, ObjectiveConfig, Prepared, at_least_fp32

TABLES = {
    "model": {
        "name": "joint_dit",
        "hidden_size": 32,
        "num_layers": 3,
        "num_heads": 4,
        "patch_size": 2,
        "latent_size": [4, 8],  # Wider than high, so that rows are not columns.
        "in_channels": 2,
        "text_tokens": 8,
        "text_dim": 12,
        "intermediate_size": 48,
    },
    "objective": {"name": "tiny_joint:Flow"},
    "data": {"name": "tiny_joint:Captioned", "channels": 2, "text_dim": 12},
    "training": {"steps": 4, "global_batch_size": 8},
    "precision": {"dtype": "fp32"},
    "optimizer": {"lr": 1e-3, "weight_decay": 0.01},
    "ema": {"decays": [0.9]},
    "checkpoint": {"every": 0},
    "metrics": {"every": 1, "tensorboard": False},
}


@dataclass(frozen=True, kw_only=True)
class Captioned(DataConfig):
    """64 latents, each with the embeddings of some words, and zeros for padding."""

    channels: PositiveInt
    latent_size: HeightWidth
    text_tokens: PositiveInt
    text_dim: PositiveInt

    def open(self):
        return Captions((self.channels, *self.latent_size), (self.text_tokens, self.text_dim))


def fields_of(latent, text):
    return {
        "latent": Field(torch.float32, latent),
        "text": Field(torch.float16, text),
        "text_length": Field(torch.int64, ()),
    }


class Captions(Source):
    facts = DataFacts(count=64, digest="captions")

    def __init__(self, latent, text):
        self.fields, self.latent, self.text = fields_of(latent, text), latent, text

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        words = torch.randn(self.text, generator=generator, dtype=torch.float32)
        length = index % (self.text[0] + 1)
        words[length:] = 0
        return {
            "latent": torch.randn(self.latent, generator=generator),
            "text": words.half(),
            "text_length": torch.tensor(length),
        }


@dataclass(frozen=True, kw_only=True)
class Flow(ObjectiveConfig):
    """Rectified flow with captions."""

    def build(self, model, facts):
        return CaptionedFlow(model)

    def example(self, model):
        return Captions.facts, fields_of(model.sample_shape, (model.text_tokens, model.text_dim))


class CaptionedFlow(Objective):
    takes = ("latent", "text", "text_length")
    token_targets = ("velocity",)

    def __init__(self, model):
        self.model = model

    def prepare(self, batch, rng):
        clean = self.model.tokenize(batch.fields["latent"])
        noise, t = rng.normal("noise", tuple(clean.shape[1:])), rng.uniform("t")
        return Prepared(
            inputs={
                "tokens": torch.lerp(clean, noise, t[:, None, None]),
                "timestep": 1000 * t,
                "text": batch.fields["text"],
                "text_length": batch.fields["text_length"],
            },
            targets={"velocity": noise - clean},
            weight=batch.weight,
            total_tokens=batch.total_weight * clean.shape[1],
            static=self.model.static(clean.device),
        )

    def loss(self, predictions, targets):
        error = at_least_fp32(predictions["prediction"]) - targets["velocity"]
        return error.square().mean(-1)


def joint_config(**sections):
    """TABLES with keys of some sections replaced."""
    tables = {name: dict(table) for name, table in TABLES.items()}
    for name, table in sections.items():
        tables.setdefault(name, {}).update(table)
    sizes = {key: tables["model"][key] for key in ("latent_size", "text_tokens")}
    tables["data"] = sizes | tables["data"]
    return config_file.build(tables, catalog.variant)
