"""Latents of any shape, and a transparent model of them."""

from dataclasses import dataclass

import torch

from titan_dit.data.base import Batch
from titan_dit.data.latent_facts import LatentFacts
from titan_dit.rng import SampleRNG


@dataclass(frozen=True)
class Points:
    """A model of latents [channels, tokens, pixels] that are cut into tokens row by row."""

    tokens: int
    pixels: int
    channels: int
    name = "points"
    num_classes = 7

    @property
    def sample_shape(self):
        return self.channels, self.tokens, self.pixels

    @property
    def token_shape(self):
        return self.tokens, self.pixels * self.channels

    def spec(self, output_channels=None):
        raise NotImplementedError

    def tokenize(self, latents):
        return latents.permute(0, 2, 3, 1).flatten(2)

    def detokenize(self, tokens):
        return tokens.unflatten(2, (self.pixels, self.channels)).permute(0, 3, 1, 2)

    def static(self, device):
        return {}


def tokens_of(numbers, tokens=6, pixels=1, channels=4):
    """Clean samples as a function of their sample number."""
    return SampleRNG(99, numbers).normal("data", (tokens, pixels * channels)) * 0.5 + 0.2


def batch_of(numbers, tokens=6, pixels=1, channels=4, total_weight=None):
    """`tokens_of` as a batch of the loader."""
    clean = tokens_of(numbers, tokens, pixels, channels)
    return Batch(
        fields={
            "latent": Points(tokens, pixels, channels).detokenize(clean),
            "label": numbers % 7,
        },
        sample_numbers=numbers,
        weight=torch.ones(len(numbers)),
        total_weight=float(total_weight or len(numbers)),
    )


def built(section, tokens=6, pixels=1, channels=4):
    """The objective of a section over the points."""
    model = Points(tokens, pixels, channels)
    facts = LatentFacts(shape=model.sample_shape, count=1 << 20, num_classes=7)
    return section.build(model, facts)


def prepare(section, numbers, seed=0, tokens=6, pixels=1, channels=4, total_weight=None):
    """The points prepared with the random numbers of their sample numbers."""
    shape = {"tokens": tokens, "pixels": pixels, "channels": channels}
    batch = batch_of(numbers, **shape, total_weight=total_weight)
    return built(section, **shape).prepare(batch, SampleRNG(seed, numbers))
