"""Random latents of any size, for benchmarks."""

from __future__ import annotations

from copy import copy

import torch
from jaxtyping import Int64
from torch import Tensor

from titan_dit.data.base import Source
from titan_dit.data.latent_facts import LatentFacts
from titan_dit.data.sections import Synthetic
from titan_dit.rng import SampleRNG


class SyntheticLatents(Source):
    """Random latents; sample i is a pure function of i."""

    def __init__(self, config: Synthetic) -> None:
        self.facts: LatentFacts = LatentFacts(
            shape=(config.channels, config.latent_size, config.latent_size),
            count=config.count,
            num_classes=config.num_classes,
            digest=f"synthetic/{config.channels}x{config.latent_size}/{config.count}",
        )
        self.fields = self.facts.fields(torch.float32)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Generate sample `index`."""
        rng = SampleRNG(0, torch.tensor([index]))
        latent = rng.normal("synthetic", self.facts.shape)[0]
        return {"latent": latent, "label": torch.tensor(index % self.facts.num_classes)}

    def as_clips(self) -> SyntheticLatents:
        """See `Source.as_clips`."""
        found = copy(self)
        found.facts = self.facts.as_clips()
        found.fields = found.facts.fields(torch.float32)
        return found

    def groups(self) -> Int64[Tensor, " n"]:
        """Return the labels."""
        return torch.arange(len(self)) % self.facts.num_classes
