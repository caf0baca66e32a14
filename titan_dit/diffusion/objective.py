"""Diffusion as an objective: stored latents to what a path corrupts, and pictures of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from titan_dit.config import SamplingConfig
from titan_dit.data.base import Batch, DataFacts, Fields, Source
from titan_dit.data.latent_facts import LatentFacts
from titan_dit.diffusion import drawing
from titan_dit.diffusion.base import NO_LABEL, Clean, LatentModel, Path
from titan_dit.diffusion.fits import as_latent_model, check_data
from titan_dit.diffusion.units import check_std, scale_hint, to_model_units
from titan_dit.models.base import ModelConfig, ModelSpec
from titan_dit.objectives.base import (
    DataShare,
    Forward,
    Objective,
    ObjectiveConfig,
    Prepared,
    Preview,
)
from titan_dit.rng import SampleRNG

VALIDATION_BINS = 8
"""Validation takes the loss at the middle of so many equal parts of the range of timesteps."""


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig(ObjectiveConfig):
    """What the sections of all kinds of diffusion have; each of them is a `Path`."""

    previews = True

    def network(self, model: ModelConfig) -> ModelSpec:
        """The network with the output channels that the path wants."""
        latent = as_latent_model(model, self.name)
        path: Any = self
        return latent.spec(path.output_channels(latent.sample_shape[0]))

    def facts(self, values: Mapping[str, Any]) -> LatentFacts:
        """Those of labelled latents."""
        return LatentFacts.from_json(values)

    def build(self, model: ModelConfig, facts: DataFacts) -> Diffusion:
        """Refuses data that are not the model's."""
        latent, path = as_latent_model(model, self.name), self
        return Diffusion(path, latent, check_data(facts, latent, self.name))  # type: ignore[arg-type]

    def check_sampling(self, model: ModelConfig, sampling: SamplingConfig) -> None:
        """Steps, channels and the sampler itself."""
        path: Any = self
        drawing.check(path, as_latent_model(model, self.name), sampling, "[sampling] {}")


@dataclass(frozen=True)
class Diffusion(Objective):
    """A path, the model that learns it, and the latents that it is learned from."""

    takes = ("latent", "label")

    path: Path
    model: LatentModel
    data: LatentFacts
    made: dict[torch.device, dict[str, Tensor]] = field(default_factory=dict, repr=False)
    """The model's static inputs, which are the same in every step."""

    @property
    def token_targets(self) -> tuple[str, ...]:  # type: ignore[override]
        """Those of the path."""
        return self.path.token_targets

    def clean(self, fields: Fields, rng: SampleRNG) -> Clean:
        """Stored latents in the model's units, cut into tokens."""
        channels = self.model.sample_shape[0]
        latents = to_model_units(fields["latent"], self.data, channels, rng)
        return Clean(self.model.tokenize(latents), fields["label"], channels)

    def prepare(self, batch: Batch, rng: SampleRNG) -> Prepared:
        """Draw timestep, noise and label dropout by sample number."""
        clean = self.clean(batch.fields, rng)
        dropped = rng.uniform("label_dropout") < self.path.label_dropout
        labels = clean.labels.masked_fill(dropped, NO_LABEL)
        return self.corrupted(batch, clean, self.path.timesteps_of(rng), labels, rng)

    def corrupted(
        self,
        batch: Batch,
        clean: Clean,
        timestep: Float[Tensor, " b"],
        labels: Int64[Tensor, " b"],
        rng: SampleRNG,
    ) -> Prepared:
        """With the noise of each sample at a timestep."""
        noise = rng.normal("noise", tuple(clean.tokens.shape[1:]))
        corrupted = self.path.corrupt(clean, timestep, noise, labels)
        return Prepared(
            inputs=corrupted.inputs,
            targets=corrupted.targets,
            weight=batch.weight,
            total_tokens=batch.total_weight * clean.tokens.shape[1],
            static=self.static(clean.tokens.device),
        )

    def static(self, device: torch.device) -> dict[str, Tensor]:
        """The model's static inputs."""
        if device not in self.made:
            self.made[device] = self.model.static(device)
        return self.made[device]

    def loss(
        self, predictions: Mapping[str, Tensor], targets: Mapping[str, Tensor]
    ) -> Float[Tensor, "b n"]:
        """See `Path.loss`."""
        return self.path.loss(predictions["prediction"], targets)

    def terms(
        self, predictions: Mapping[str, Tensor], targets: Mapping[str, Tensor]
    ) -> dict[str, Float[Tensor, "b n"]]:
        """See `Path.terms`."""
        return self.path.terms(predictions["prediction"], targets)

    def describe(self, fields: Fields, rng: SampleRNG) -> dict[str, Tensor]:
        """The timestep, in the network's unit, and the label where it was read."""
        labels = {"label": fields["label"]} if fields else {}
        return {**labels, "timestep": self.path.timesteps_of(rng)}

    def inspect(self, fields: Fields) -> None:
        """No std may be below 0."""
        check_std(fields["latent"], self.data, self.model.sample_shape[0])

    def evaluations(self, batch: Batch, rng: SampleRNG) -> dict[str, Prepared]:
        """Every sample, with its label, at the middle timestep of every bin."""
        clean, found = self.clean(batch.fields, rng), {}
        width = (self.path.last_timestep + 1) / VALIDATION_BINS
        for number in range(VALIDATION_BINS):
            middle = round((number + 0.5) * width)
            timestep = torch.full_like(batch.weight, middle)
            found[f"t{middle}"] = self.corrupted(batch, clean, timestep, clean.labels, rng)
        return found

    def hints(self, source: Source) -> Sequence[str]:
        """Latents of an unusual size."""
        line = scale_hint(source, self.data, self.model.sample_shape[0])
        return () if line is None else (line,)

    def preview(
        self, forward: Forward, sampling: SamplingConfig, seed: int, share: DataShare
    ) -> Preview:
        """Samples of every class, one picture of all."""
        return drawing.preview(forward, self.path, self.model, self.data, sampling, seed, share)
