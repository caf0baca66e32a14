"""Diffusion as an objective: stored latents to what a path corrupts, and pictures of samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from titan_dit.config.section import UserError
from titan_dit.config.training import SamplingConfig
from titan_dit.data.base import Batch, DataFacts, Field, Fields, Source
from titan_dit.data.latent_facts import LatentFacts
from titan_dit.diffusion import drawing
from titan_dit.diffusion.base import NO_LABEL, Clean, LatentModel, ProbabilityPath
from titan_dit.diffusion.fits import as_latent_model, as_path, check_data
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
    """What the sections of all kinds of diffusion have; each of them is a `ProbabilityPath`."""

    previews = True

    @property
    def path(self) -> ProbabilityPath:
        """The section itself."""
        return as_path(self, self.name)

    def model_spec(self, model: ModelConfig) -> ModelSpec:
        """The network with the output channels that the path wants."""
        latent = as_latent_model(model, self.name)
        return latent.spec(self.path.output_channels(latent.sample_shape[0]))

    def facts(self, values: Mapping[str, Any]) -> LatentFacts:
        """Those of labelled latents."""
        return LatentFacts.from_json(values)

    def example(self, model: ModelConfig) -> tuple[DataFacts, Mapping[str, Field]]:
        """Latents of the model's own shape."""
        latent = as_latent_model(model, self.name)
        shape, classes = latent.sample_shape, latent.num_classes
        facts = LatentFacts(count=0, shape=shape, num_classes=classes)
        return facts, facts.fields(torch.float32)

    def build(self, model: ModelConfig, facts: DataFacts) -> Diffusion:
        """Refuses data that are not the model's."""
        latent = as_latent_model(model, self.name)
        return Diffusion(self.path, latent, check_data(facts, latent, self.name))

    def check_sampling(self, model: ModelConfig, sampling: SamplingConfig) -> None:
        """Steps, channels and the sampler itself."""
        drawing.check(self.path, as_latent_model(model, self.name), sampling, "[sampling] {}")


@dataclass(frozen=True)
class Diffusion(Objective):
    """A path, the model that learns it, and the latents that it is learned from."""

    takes = ("latent", "label")

    path: ProbabilityPath
    model: LatentModel
    data: LatentFacts
    made: dict[torch.device, dict[str, Tensor]] = dataclasses.field(
        default_factory=dict, repr=False
    )
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
        noise = rng.normal("noise", tuple(clean.tokens.shape[1:]))
        return self.corrupted(batch, clean, self.path.timesteps_of(rng), noise, labels)

    def corrupted(
        self,
        batch: Batch,
        clean: Clean,
        timestep: Float[Tensor, " b"],
        noise: Float[Tensor, "b n d"],
        labels: Int64[Tensor, " b"],
    ) -> Prepared:
        """With given draws."""
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
        noise = rng.normal("noise", tuple(clean.tokens.shape[1:]))
        width = (self.path.last_timestep + 1) / VALIDATION_BINS
        for number in range(VALIDATION_BINS):
            middle = round((number + 0.5) * width)
            timestep = torch.full_like(batch.weight, middle)
            found[f"t{middle}"] = self.corrupted(batch, clean, timestep, noise, clean.labels)
        return found

    def hints(self, source: Source) -> Sequence[str]:
        """Latents of an unusual size."""
        line = scale_hint(source, self.data, self.model.sample_shape[0])
        return () if line is None else (line,)

    def imported(self, sampling: SamplingConfig) -> Mapping[str, object]:
        """The sampler, if it is used."""
        if not sampling.every:
            return {}
        return {"sampling": drawing.sampler_of(self.path, sampling.sampler)}

    def preview(
        self, forward: Forward, sampling: SamplingConfig, seed: int, share: DataShare
    ) -> Preview:
        """Samples of every class, one picture of all."""
        return drawing.preview(forward, self.path, self.model, self.data, sampling, seed, share)


def to_model_units(
    stored: Shaped[Tensor, "b k h w"], facts: LatentFacts, channels: int, rng: SampleRNG
) -> Float[Tensor, "b c h w"]:
    """(stored - shift) * scale in fp32; of a mean and a std, a latent is drawn first.

    The draw belongs to the sample number, as all noise does: a fresh one in every epoch, the same
    on every layout. Scaled after it is drawn, so that the std is scaled as the mean is.
    """
    latents = stored.float()
    if is_mean_and_std(facts, channels):
        mean, std = latents[:, :channels], latents[:, channels:]
        latents = mean + std * rng.normal("latent", tuple(mean.shape[1:]))
    if (facts.scale, facts.shift) != (1.0, 0.0):
        latents = (latents - facts.shift) * facts.scale
    return latents


def is_mean_and_std(facts: LatentFacts, channels: int) -> bool:
    """Whether a sample holds a mean and a std for each of the model's channels."""
    return facts.shape[0] == 2 * channels


def check_std(stored: Shaped[Tensor, "b k h w"], facts: LatentFacts, channels: int) -> None:
    """Refuse a std below 0. On the CPU, where looking at values waits for no device."""
    if is_mean_and_std(facts, channels) and stored[:, channels:].min() < 0:
        raise UserError(
            f"[data] holds {2 * channels} channels where [model] has channels={channels}: a mean "
            "and a std of each. But there is a std below 0: are these a mean and a log variance? "
            f"Store exp(0.5 * logvar), or set [model] channels = {2 * channels}."
        )


def scale_hint(source: Source, facts: LatentFacts, channels: int, num: int = 64) -> str | None:
    """A line for the user if what the model will see is far from a std of 1, else None.

    Noise has a std of 1: data of another size is hidden by it too late or too early.
    """
    num = min(num, len(source))
    stored = source.read([i * len(source) // num for i in range(num)])["latent"]
    check_std(stored, facts, channels)
    rng = SampleRNG(0, torch.arange(num))
    std = to_model_units(stored, facts, channels, rng).std().item()
    if 1 / 3 < std < 3 or num * stored[0].numel() < 1000:
        return None
    cause = "is it missing?" if std > 1 else "are the latents scaled twice?"
    return (
        f"hint    {num} samples have a std of {std:.2g} where the model sees them, with [data] "
        f"scale={facts.scale:g} (Stable Diffusion's is 0.18215): {cause}"
    )
