"""Latents of one channel with labels and masks, and features of 4 x 4 tokens, for [repa]."""

from dataclasses import dataclass, replace

import torch
from tiny_joint import MASK_MEAN, Captioned, Captions

from titan_dit.config.section import PositiveInt
from titan_dit.data.base import DataConfig, Field, Source
from titan_dit.data.latent_facts import FeatureFacts, LatentFacts

GRID, DIM = (4, 4), 6


@dataclass(frozen=True, kw_only=True)
class Featured(DataConfig):
    """64 random latents 1 x 8 x 8 of ten classes, with random masks and features."""

    def open(self):
        return FeaturedLatents()


class FeaturedLatents(Source):
    def __init__(self, features=None):
        self.facts = LatentFacts(
            count=64,
            digest="featured",
            shape=(1, 8, 8),
            num_classes=10,
            features=features,
            mask_mean=MASK_MEAN,
        )
        self.fields = self.facts.fields(torch.float32)

    def with_features(self):
        features = FeatureFacts(name="tests:random", digest="0", grid=GRID, dim=DIM)
        return FeaturedLatents(features)

    def __getitem__(self, index):
        rng = torch.Generator().manual_seed(index)
        found = {
            "latent": torch.randn(1, 8, 8, generator=rng),
            "label": torch.tensor(index % 10),
            "features": torch.randn(GRID[0] * GRID[1], DIM, generator=rng).half() + index % 3,
            "mask": torch.randint(256, (8, 8), generator=rng).byte(),
        }
        return {name: found[name] for name in self.fields}


def squares(pictures):
    """Features of RGB pictures 8 x 8: the colours of squares of two pixels, and their squares."""
    x = pictures.float().unflatten(3, (4, 2)).unflatten(2, (4, 2)).mean((3, 5)) / 255
    return torch.cat([x, x.square()], 1).permute(0, 2, 3, 1)


@dataclass(frozen=True, kw_only=True)
class Pictured(DataConfig):
    """64 random RGB pictures of ten classes, which may come with their `squares`."""

    def open(self):
        return Pictures()


class Pictures(Source):
    def __init__(self, features=None):
        self.facts = LatentFacts(
            count=64,
            digest="pictured",
            shape=(3, 8, 8),
            num_classes=10,
            scale=1 / 127.5,
            shift=127.5,
            value_range=(0.0, 255.0),
            features=features,
        )
        self.fields = self.facts.fields(torch.uint8)

    def with_features(self):
        return Pictures(FeatureFacts(name="tiny_repa:squares", digest="0", grid=GRID, dim=DIM))

    def __getitem__(self, index):
        rng = torch.Generator().manual_seed(index)
        picture = torch.randint(256, (1, 3, 8, 8), generator=rng, dtype=torch.uint8)
        found = {
            "latent": picture[0],
            "label": torch.tensor(index % 10),
            "features": squares(picture).half()[0].flatten(0, 1),
        }
        return {name: found[name] for name in self.fields}


def repa(**keys):
    """Keys of [repa] for a tiny DiT on this data."""
    return {"block": 2, "dim": DIM, "hidden_size": 16} | keys


def sections(**keys):
    """Sections of a tiny config: the data, and [repa] with these keys."""
    return {"data": {"name": "tiny_repa:Featured"}, "repa": repa(**keys)}


@dataclass(frozen=True, kw_only=True)
class FeaturedCaptions(Captioned):
    """The latents and captions of `tiny_joint`, with random features."""

    patch_size: PositiveInt = 2

    def open(self):
        shapes = [(self.channels, *self.latent_size)]
        text = self.text_tokens, self.text_dim
        found = CaptionsWithFeatures(shapes, text, self.text_padding, masks=self.masks)
        height, width = self.latent_size
        found.grid = height // self.patch_size, width // self.patch_size
        return found


class CaptionsWithFeatures(Captions):
    def with_features(self):
        features = FeatureFacts(name="tests:random", digest="0", grid=self.grid, dim=DIM)
        self.facts = replace(self.facts, features=features)
        tokens = self.facts.features.num_tokens
        self.fields = {**self.fields, "features": Field(torch.float16, (tokens, DIM))}
        return self

    def __getitem__(self, index):
        rng = torch.Generator().manual_seed(index)
        features = torch.randn(self.facts.features.num_tokens, DIM, generator=rng).half()
        return {**super().__getitem__(index), "features": features}
