"""Latents of one channel with labels, and features of 4 x 4 tokens, for [repa]."""

from dataclasses import dataclass

import torch

from titan_dit.data.base import DataConfig, Source
from titan_dit.data.latent_facts import FeatureFacts, LatentFacts

GRID, DIM = (4, 4), 6


@dataclass(frozen=True, kw_only=True)
class Featured(DataConfig):
    """64 random latents 1 x 8 x 8 of ten classes, with random features."""

    def open(self):
        return FeaturedLatents()


class FeaturedLatents(Source):
    def __init__(self, features=None):
        self.facts = LatentFacts(
            count=64, digest="featured", shape=(1, 8, 8), num_classes=10, features=features
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
        }
        return {name: found[name] for name in self.fields}


def repa(**keys):
    """Keys of [repa] for a tiny DiT on this data."""
    return {"block": 2, "dim": DIM, "hidden_size": 16} | keys


def sections(**keys):
    """Sections of a tiny config: the data, and [repa] with these keys."""
    return {"data": {"name": "tiny_repa:Featured"}, "repa": repa(**keys)}
