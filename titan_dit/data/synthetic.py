"""Random latents of any size, for benchmarks: no disk, no download."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from titan_dit.data.base import DataConfig, DataFacts, Sample, Source
from titan_dit.rng import SampleRNG
from titan_dit.section import Count


@dataclass(frozen=True, kw_only=True)
class Synthetic(DataConfig):
    """Standard normal latents with a label each."""

    name = "synthetic"

    latent_size: Count
    channels: Count
    num_classes: Count
    count: Count = 4096
    """Samples per epoch."""

    def open(self) -> SyntheticLatents:
        """Nothing to open."""
        return SyntheticLatents(self)


class SyntheticLatents(Source):
    """Sample i is a pure function of i."""

    def __init__(self, config: Synthetic) -> None:
        self.facts = DataFacts(
            shape=(config.channels, config.latent_size, config.latent_size),
            count=config.count,
            num_classes=config.num_classes,
            digest=f"synthetic/{config.channels}x{config.latent_size}/{config.count}",
        )

    def __getitem__(self, index: int) -> Sample:
        """Draw sample `index`."""
        rng = SampleRNG(0, torch.tensor([index]))
        latent = rng.normal("synthetic", self.facts.shape)[0]
        return Sample(latent, index % self.facts.num_classes)
