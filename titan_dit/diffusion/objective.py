"""The diffusion objective: stored latents to noisy tokens, validation and previews."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int64, Shaped, UInt8
from torch import Tensor

from titan_dit.config.section import UserError, show
from titan_dit.config.training import FIDConfig, GenerationConfig, SamplingConfig
from titan_dit.data.base import Batch, DataFacts, Field, Fields, Source
from titan_dit.data.latent_facts import LatentFacts, shown
from titan_dit.diffusion import drawing
from titan_dit.diffusion.base import NO_LABEL, Clean, LatentModel, ProbabilityPath
from titan_dit.models.base import ModelConfig, ModelSpec
from titan_dit.objectives.base import (
    DataShare,
    Forward,
    Objective,
    ObjectiveConfig,
    Prepared,
    Preview,
)
from titan_dit.pictures import autoencoder
from titan_dit.rng import SampleRNG


def as_latent_model(model: ModelConfig, objective: str) -> LatentModel:
    """Return the model as a `LatentModel`; UserError names missing members."""
    if isinstance(model, LatentModel):
        return model
    raise UserError(
        f"[objective] name={show(objective)} trains models of latents with labels, but [model] "
        f"name={show(model.name)} has no {missing_members(model, LatentModel)}. Choose another "
        "objective, or add them to the model (titan_dit/diffusion/base.py: LatentModel)."
    )


def as_path(section: object, objective: str) -> ProbabilityPath:
    """Return the [objective] section as a path; UserError names missing members."""
    if isinstance(section, ProbabilityPath):
        return section
    raise UserError(
        f"[objective] name={show(objective)} derives from DiffusionConfig, but has no "
        f"{missing_members(section, ProbabilityPath)}. Add them "
        "(titan_dit/diffusion/base.py: ProbabilityPath)."
    )


def missing_members(thing: object, protocol: type) -> str:
    """The missing members of a protocol, comma-separated."""
    wanted = [name for name in vars(protocol) if not name.startswith("_")]
    wanted += [name for name in protocol.__annotations__ if name not in wanted]
    return ", ".join(name for name in wanted if not hasattr(thing, name))


def what_fits(facts: LatentFacts) -> str:
    """Ending of a message about shapes: the shape of [data], and the keys of [model] to set."""
    (c, h, w), *half = facts.latent_shapes
    held = f"mean and std of {[c, h, w]}" if facts.posterior == "both" else f"{[c, h, w]}"
    if h != w:
        return f"{held}. Latents must be square."
    other = f", or channels = {half[0][0]} if half of its channels are a std" if half else ""
    return f"{held}. Set channels = {c}, latent_size = {h}{other}."


def check_data(facts: DataFacts, model: LatentModel, objective: str) -> LatentFacts:
    """Raise UserError if samples or labels of a dataset do not fit the model.

    Twice the model's channels are accepted, as a mean and a std per channel, unless the dataset's
    metadata say that they are not.
    """
    if not isinstance(facts, LatentFacts):
        raise UserError(
            f"[objective] name={show(objective)} trains on latents with labels: the facts of "
            "[data] must be LatentFacts (titan_dit/data/latent_facts.py), not "
            f"{type(facts).__name__}."
        )
    shape, num_classes = model.sample_shape, model.num_classes
    if shape not in facts.latent_shapes:
        raise UserError(
            f"[model] in_channels={shape[0]} and latent_size={shape[1]} make samples of "
            f"{list(shape)}, but [data] holds {what_fits(facts)}"
        )
    if facts.num_classes != num_classes:
        relation = "less" if num_classes < facts.num_classes else "more"
        fix = f"Set num_classes = {facts.num_classes}."
        if num_classes > facts.num_classes:
            names = " --classes FILE" if facts.class_names else ""
            verb = "encode" if facts.vae else "pack"
            fix += (
                f" If the data is a subset of a larger dataset, {verb} it with "
                f"`python -m titan_dit data {verb} --num-classes {num_classes}{names}`."
            )
        raise UserError(
            f"[model] num_classes={num_classes} is {relation} than the {facts.num_classes} classes "
            f"of [data]. {fix}"
        )
    return facts


VALIDATION_BINS = 8
"""Equal bins of the timestep range; validation evaluates the loss at the middle of each."""


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig(ObjectiveConfig):
    """Base class of the diffusion sections; each subclass is a `ProbabilityPath`."""

    previews = True
    constants: ClassVar[tuple[Callable[..., Any], ...]] = ()

    @property
    def path(self) -> ProbabilityPath:
        """The section itself."""
        return as_path(self, self.name)

    def noise_level(self, timestep: float) -> float:
        """The timestep as a fraction of the last one, 0 (data) to 1 (noise)."""
        return timestep / self.path.last_timestep

    def validation_timesteps(self, bins: int) -> dict[str, float]:
        """The middles of equal bins, rounded to whole timesteps; key "t125" is timestep 125."""
        width = (self.path.last_timestep + 1) / bins
        middles = [round((number + 0.5) * width) for number in range(bins)]
        return {f"t{middle}": float(middle) for middle in middles}

    def model_spec(self, model: ModelConfig) -> ModelSpec:
        """The model's spec with the output channels of the path."""
        latent = as_latent_model(model, self.name)
        return latent.spec(self.path.output_channels(latent.sample_shape[0]))

    def facts(self, values: Mapping[str, Any]) -> LatentFacts:
        """Facts of labelled latents, from a checkpoint's record."""
        return LatentFacts.from_json(values)

    def example(self, model: ModelConfig) -> tuple[DataFacts, Mapping[str, Field]]:
        """Facts and fields of latents with the model's own shape."""
        latent = as_latent_model(model, self.name)
        shape, classes = latent.sample_shape, latent.num_classes
        facts = LatentFacts(count=0, shape=shape, num_classes=classes)
        return facts, facts.fields(torch.float32)

    def build(self, model: ModelConfig, facts: DataFacts) -> Diffusion:
        """Build the objective; UserError if the data do not fit the model."""
        latent = as_latent_model(model, self.name)
        return Diffusion(self.path, latent, check_data(facts, latent, self.name))

    def check_evaluation(
        self, model: ModelConfig, sampling: SamplingConfig, evaluation: FIDConfig
    ) -> None:
        """Check the sampler, as previews do."""
        if evaluation.every:
            self.check_sampling(model, sampling)

    def check_sampling(self, model: ModelConfig, sampling: SamplingConfig) -> None:
        """Check the sampler, its steps and the guided channels."""
        drawing.check(self.path, as_latent_model(model, self.name), sampling, "[sampling] {}")


@dataclass(frozen=True)
class Diffusion(Objective):
    """Trains a model of latents along a path."""

    takes = ("latent", "label")

    path: ProbabilityPath
    model: LatentModel
    data: LatentFacts
    made: dict[torch.device, dict[str, Tensor]] = dataclasses.field(
        default_factory=dict, repr=False
    )
    """Cache of the model's static inputs, which are equal in every step."""
    loaded: dict[str, autoencoder.Autoencoder] = dataclasses.field(default_factory=dict, repr=False)
    """Cache: [sampling] vae -> the autoencoder of previews."""

    @property
    def token_targets(self) -> tuple[str, ...]:  # type: ignore[override]
        """The token targets of the path."""
        return self.path.token_targets

    @property
    def constants(self) -> tuple[Callable[..., Any], ...]:  # type: ignore[override]
        """The constants of the path."""
        return self.path.constants

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
        """Prepare a batch with given timestep, noise and labels."""
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
        """See `ProbabilityPath.loss`."""
        return self.path.loss(predictions["prediction"], targets)

    def terms(
        self, predictions: Mapping[str, Tensor], targets: Mapping[str, Tensor]
    ) -> dict[str, Float[Tensor, "b n"]]:
        """See `ProbabilityPath.terms`."""
        return self.path.terms(predictions["prediction"], targets)

    def describe(self, fields: Fields, rng: SampleRNG) -> dict[str, Tensor]:
        """The timestep in the network's unit and, if fields were read, the label."""
        labels = {"label": fields["label"]} if fields else {}
        return {**labels, "timestep": self.path.timesteps_of(rng)}

    def inspect(self, fields: Fields) -> None:
        """Refuse a std below 0."""
        check_std(fields["latent"], self.data, self.model.sample_shape[0])

    def evaluations(self, batch: Batch, rng: SampleRNG) -> dict[str, Prepared]:
        """The batch, without label dropout, at the middle timestep of every bin."""
        clean, found = self.clean(batch.fields, rng), {}
        noise = rng.normal("noise", tuple(clean.tokens.shape[1:]))
        for name, middle in self.path.validation_timesteps(VALIDATION_BINS).items():
            timestep = torch.full_like(batch.weight, middle)
            found[name] = self.corrupted(batch, clean, timestep, noise, clean.labels)
        return found

    def hints(self, source: Source) -> Sequence[str]:
        """Warn about latents of an unusual scale."""
        line = scale_hint(source, self.data, self.model.sample_shape[0])
        return () if line is None else (line,)

    def imported(self, sampling: SamplingConfig) -> Mapping[str, object]:
        """The sampler, if [sampling] every turns previews on."""
        if not sampling.every:
            return {}
        return {"sampling": drawing.sampler_of(self.path, sampling.sampler)}

    def preview(
        self,
        forward: Forward,
        sampling: SamplingConfig,
        generation: GenerationConfig,
        seed: int,
        share: DataShare,
    ) -> Preview:
        """One picture with samples of up to ten classes; with [sampling] vae they are decoded."""
        given = self.path, self.model, self.data, sampling, seed, share
        if not sampling.vae:
            return drawing.preview(forward, *given)
        with self.decoder(sampling, share.device) as vae:
            return drawing.preview(forward, *given, vae)

    def picture_size(self, sampling: SamplingConfig) -> int:
        """Height of a latent, times the autoencoder's factor. Checks [sampling] vae."""
        self.check_autoencoder(sampling)
        height = self.model.sample_shape[1]
        if self.data.value_range is not None:
            return height
        if not sampling.vae:
            raise UserError(
                "[fid] needs pictures, but the run trains on latents: set [sampling] vae, "
                "the autoencoder that decodes them."
            )
        return height * self.autoencoder(sampling).facts.factor

    def knows_classes(self, like: Mapping[str, int]) -> bool:
        """True if all keys of `like` are classes of the data, by name or number."""
        names = self.data.class_names
        return drawing.labels_like(like, 1, self.model.num_classes, names) is not None

    def picture_labels(self, num: int, like: Mapping[str, int]) -> Int64[Tensor, " num"]:
        """Labels in the proportions of `like`; evenly over all classes if one is unknown."""
        classes = self.model.num_classes
        found = drawing.labels_like(like, num, classes, self.data.class_names)
        return drawing.spread_labels(num, list(range(classes))) if found is None else found

    def pictures(
        self,
        forward: Forward,
        sampling: SamplingConfig,
        seed: int,
        labels: Int64[Tensor, " n"],
        batches: Iterable[Int64[Tensor, " b"]],
    ) -> Iterator[tuple[UInt8[Tensor, "b h w 3"], Bool[Tensor, " b"]]]:
        """Draw pictures, decoded if they are latents, and whether each sample is finite."""
        # Imported late: the benchmarks train on machines without Pillow.
        from titan_dit.pictures import output

        value_range = self.data.value_range
        decodes = nullcontext() if value_range else self.decoder(sampling, labels.device)
        with decodes as vae:
            for numbers in batches:
                samples = drawing.samples(
                    forward,
                    self.path,
                    self.model,
                    self.data,
                    sampling,
                    seed,
                    labels=labels[numbers],
                    numbers=numbers,
                )
                finite = samples.isfinite().flatten(1).all(1)
                if vae is None:
                    yield output.to_pixels(samples, value_range), finite
                else:
                    yield vae.decode(samples).permute(0, 2, 3, 1), finite

    def check_preview(self, sampling: SamplingConfig, generation: GenerationConfig) -> None:
        """Check [sampling] vae."""
        self.check_autoencoder(sampling)

    def check_autoencoder(self, sampling: SamplingConfig) -> None:
        """Load [sampling] vae; UserError if it did not make the data's latents."""
        if sampling.vae:
            channels = self.model.sample_shape[0]
            self.autoencoder(sampling).check_fits(self.data, "[sampling] vae", channels)

    @contextmanager
    def decoder(
        self, sampling: SamplingConfig, device: torch.device
    ) -> Iterator[autoencoder.Autoencoder]:
        """The autoencoder of [sampling] vae, on `device` within the block and on the CPU after."""
        vae = self.autoencoder(sampling)
        vae.module.to(device)
        try:
            yield vae
        finally:
            vae.module.cpu()

    def autoencoder(self, sampling: SamplingConfig) -> autoencoder.Autoencoder:
        """The autoencoder of [sampling] vae, on the CPU; loaded once."""
        assert sampling.vae
        if sampling.vae not in self.loaded:
            on_cpu = torch.device("cpu")
            self.loaded[sampling.vae] = autoencoder.load(sampling.vae, on_cpu, "[sampling] vae")
        return self.loaded[sampling.vae]


def to_model_units(
    stored: Shaped[Tensor, "b k h w"], facts: LatentFacts, channels: int, rng: SampleRNG
) -> Float[Tensor, "b c h w"]:
    """(stored - shift) * scale in fp32; with a stored mean and std, the latent is drawn first.

    The draw depends on the sample number: new in every epoch, equal on every layout. Scaling
    follows the draw, so that it applies to the std too.
    """
    latents = stored.float()
    if is_mean_and_std(facts, channels):
        mean, std = latents[:, :channels], latents[:, channels:]
        latents = mean + std * rng.normal("latent", tuple(mean.shape[1:]))
    if (facts.scale, facts.shift) == (1.0, 0.0):
        return latents
    return facts.to_model_units(latents)


def is_mean_and_std(facts: LatentFacts, channels: int) -> bool:
    """True if a sample stores a mean and a std for each of the model's channels."""
    return facts.shape[0] == 2 * channels


def check_std(stored: Shaped[Tensor, "b k h w"], facts: LatentFacts, channels: int) -> None:
    """Raise UserError if a stored std is below 0. Takes CPU tensors: a GPU would synchronise."""
    if is_mean_and_std(facts, channels) and stored[:, channels:].min() < 0:
        raise UserError(
            f"[data] holds {2 * channels} channels and [model] in_channels={channels}: they are read "
            "as mean and std, but a std is below 0. If they are mean and log variance, store "
            f"exp(0.5 * logvar); otherwise set [model] in_channels = {2 * channels}."
        )


def scale_hint(source: Source, facts: LatentFacts, channels: int, num: int = 64) -> str | None:
    """A console warning if the std of the model's inputs is far from 1, else None.

    Noise has std 1: for data of another scale the noise levels are too low or too high.
    """
    num = min(num, len(source))
    stored = source.read([i * len(source) // num for i in range(num)])["latent"]
    check_std(stored, facts, channels)
    rng = SampleRNG(0, torch.arange(num))
    std = to_model_units(stored, facts, channels, rng).std().item()
    if 1 / 3 < std < 3 or num * stored[0].numel() < 1000:
        return None
    if std < 1 and not stored.is_floating_point():
        return None  # Pictures of low contrast: their scale is that of their integers.
    cause = "is it missing?" if std > 1 else "are the latents scaled twice?"
    return (
        f"hint    after [data] scale={shown(facts.scale)}, {num} latents have std {std:.2g} "
        f"instead of about 1 (Stable Diffusion: scale 0.18215): {cause}"
    )
