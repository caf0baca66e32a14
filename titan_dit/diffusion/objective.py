"""The diffusion objective: stored latents become noisy tokens, targets and a loss per token."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int64, Shaped, UInt8
from torch import Tensor

from titan_dit.config.section import UserError, show
from titan_dit.config.training import (
    NO_REPA,
    GenerationConfig,
    RepaConfig,
    SamplingConfig,
    TextConfig,
)
from titan_dit.data.base import Batch, DataFacts, Field, Fields, Source
from titan_dit.data.latent_facts import CONDITION_DROPOUT, FEATURES, BucketShape, LatentFacts, shown
from titan_dit.diffusion.base import (
    Corrupted,
    LabelledModel,
    LatentModel,
    PaddedModel,
    Predict,
    SizedModel,
    condition_channels,
    has_clips,
    has_reference_tokens,
    resized_model,
    text_multiple,
)
from titan_dit.diffusion.conditions import (
    Captions,
    ClassLabels,
    Condition,
    Conditions,
    Given,
    PreviewData,
    with_first_frame,
    without,
)
from titan_dit.diffusion.fits import (
    as_latent_model,
    check_data,
    check_features,
    condition_of,
    open_features,
    token_grid,
)
from titan_dit.diffusion.frozen import FrozenNetworks
from titan_dit.diffusion.sections import DiffusionConfig
from titan_dit.models.base import ModelConfig, ModelSpec
from titan_dit.objectives.base import (
    DataShare,
    Forward,
    Objective,
    OnFirst,
    Placement,
    Prepared,
    Preview,
)
from titan_dit.objectives.repa import normalized
from titan_dit.rng import SampleRNG

if TYPE_CHECKING:
    from titan_dit.pictures.autoencoder import Autoencoder

Kind = TypeVar("Kind", bound="Diffusion")


MOST_HINTED = 1 << 26
"""Maximum elements that `scale_hint` reads: 32 latents of 81 frames of 480 x 832 pixels."""
VALIDATION_BINS = 8
"""Equal bins of the timestep range; validation evaluates the loss at the middle of each."""


@dataclass(frozen=True)
class Diffusion(Objective, ABC):
    """Trains a model of latents; a subclass is one kind of diffusion, on tokens.

    A subclass gives `token_targets`, `last_timestep`, `timesteps_of`, `corrupt`, `loss` and
    `process`.
    """

    takes = ("latent", "label")

    config: DiffusionConfig
    model: LatentModel
    data: LatentFacts
    condition: Condition = dataclasses.field(default_factory=ClassLabels)
    """What the network is given besides noisy tokens and timestep."""
    repa: RepaConfig = NO_REPA
    """With a block, the features of pictures go to the network, see `objectives.repa`."""
    frozen: FrozenNetworks = dataclasses.field(
        default_factory=FrozenNetworks, repr=False, compare=False
    )
    """Networks that complete batches."""
    preview_data: PreviewData = dataclasses.field(
        default_factory=PreviewData, repr=False, compare=False
    )
    """What previews and scores show."""
    autoencoders: dict[str, Autoencoder] = dataclasses.field(
        default_factory=dict, repr=False, compare=False
    )
    """Cache: [sampling] vae -> the autoencoder of previews."""
    # Caches of this objective alone: `dataclasses.replace` makes new ones.
    static_inputs: dict[torch.device, dict[str, Tensor]] = dataclasses.field(
        init=False, default_factory=dict, repr=False, compare=False
    )
    """Cache of the model's static inputs, which are equal in every step."""
    by_size: dict[BucketShape, Any] = dataclasses.field(
        init=False, default_factory=dict, repr=False, compare=False
    )
    """Cache of `sized`: ([h, w] or [f, h, w], tokens of the text or 0) -> the objective."""
    by_text: dict[int, Any] = dataclasses.field(
        init=False, default_factory=dict, repr=False, compare=False
    )
    """Cache of `with_text`. Not `by_size`, which the compiler reads: previews fill this one."""

    @classmethod
    def of(cls: type[Kind], config: Any, model: ModelConfig, facts: DataFacts) -> Kind:
        """The objective of a section; UserError if the data do not fit the model."""
        if missing := sorted(cls.__abstractmethods__):
            raise UserError(
                f"[objective] name={show(config.name)}: {cls.__name__} derives from Diffusion, but "
                f"has no {', '.join(missing)}. Add them (titan_dit/diffusion/objective.py)."
            )
        latent = as_latent_model(model, config.name)
        found = check_data(facts, latent, config.name)
        return cls(config, latent, found, condition_of(latent, found, config.name))

    def __post_init__(self) -> None:
        """Set `takes`: the latent; fields of condition, references, masks, features; its own."""
        own = [name for name in type(self).takes if name not in Diffusion.takes]
        held = {"reference": self.data.reference, "mask": self.data.mask_mean}
        more = [name for name, facts in held.items() if facts is not None]
        more += [FEATURES] if self.repa.block and not self.frozen.features else []
        object.__setattr__(self, "takes", ("latent", *self.condition.stored, *more, *own))

    @property
    @abstractmethod
    def last_timestep(self) -> float:
        """The largest timestep, in the network's unit; the smallest one is 0."""

    @abstractmethod
    def timesteps_of(self, rng: SampleRNG) -> Float[Tensor, " b"]:
        """Draw a timestep for every sample, in the network's unit."""

    @abstractmethod
    def corrupt(
        self,
        clean: Float[Tensor, "b n d"],
        timestep: Float[Tensor, " b"],
        noise: Float[Tensor, "b n d"],
    ) -> Corrupted:
        """Inputs and targets for a given noise and timestep (in the network's unit)."""

    @abstractmethod
    def loss(
        self, predictions: Mapping[str, Tensor], targets: Mapping[str, Tensor]
    ) -> Float[Tensor, "b n"]:
        """Loss per token in fp32 of `predictions["prediction"]` [b, n, d_out]."""

    @abstractmethod
    def process(self, predict: Predict) -> Any:
        """The function that samplers call: (x, t) -> velocity for flows, a `Denoiser` for DDPM."""

    def prepare(self, batch: Batch, rng: SampleRNG) -> Prepared:
        """Draw timestep, noise and condition dropout by sample number."""
        own = self.sized(batch.fields)
        self.static(batch.weight.device)  # Of all sizes: a compiled `prepare` reads the cache.
        clean = own.clean_tokens(batch.fields, rng)
        # The name of the draws as it always was: runs go on with the same ones.
        dropped = rng.uniform("label_dropout") < self.condition_dropout(batch.fields)
        null = own.condition.null(len(clean), clean.device)
        given = without(own.condition.given(batch.fields), null, dropped)
        given |= own.references(batch.fields, rng)
        noise = rng.normal("noise", tuple(clean.shape[1:]))
        return own.prepared_at(batch, clean, own.timesteps_of(rng), noise, given)

    def evaluations(self, batch: Batch, rng: SampleRNG) -> dict[str, Prepared]:
        """The batch, without condition dropout, at the middle timestep of every bin."""
        own, found = self.sized(batch.fields), dict[str, Prepared]()
        clean = own.clean_tokens(batch.fields, rng)
        noise = rng.normal("noise", tuple(clean.shape[1:]))
        given = own.condition.given(batch.fields) | own.references(batch.fields)
        for name, middle in self.validation_timesteps(VALIDATION_BINS).items():
            timestep = torch.full_like(batch.weight, middle)
            found[name] = own.prepared_at(batch, clean, timestep, noise, given)
        return found

    def prepared_at(
        self,
        batch: Batch,
        clean: Float[Tensor, "b n d"],
        timestep: Float[Tensor, " b"],
        noise: Float[Tensor, "b n d"],
        given: Given,
    ) -> Prepared:
        """Prepare a batch with this timestep, noise and condition."""
        corrupted, tokens = self.corrupt(clean, timestep, noise), self.num_real_tokens
        weight = self.token_weights(batch)
        if tokens < clean.shape[1]:
            is_real = torch.arange(clean.shape[1], device=clean.device) < tokens
            weight = weight.view(len(clean), -1) * is_real
        return Prepared(
            inputs={**corrupted.inputs, **given},
            targets=corrupted.targets,
            weight=weight,
            total_tokens=batch.total_weight * tokens,
            static=self.static(clean.device),
            context=self.features_of(batch.fields),
        )

    def clean_tokens(self, fields: Fields, rng: SampleRNG) -> Float[Tensor, "b n d"]:
        """Stored latents in the model's units, cut into tokens."""
        return self.model.tokenize(drawn_latents(fields["latent"], self.data, self.channels, rng))

    def references(self, fields: Fields, rng: SampleRNG | None = None) -> dict[str, Tensor]:
        """The network's inputs by the field `reference`; {} without such inputs.

        `rng`: of training, in which some references are dropped for zeros, by sample number.
        """
        facts = self.data.reference
        if facts is None:
            return {}
        latents = self.data.to_model_units(fields["reference"].float())
        given = latents
        if facts.frame_channels:
            given = with_first_frame(latents, facts.frame_channels)
        found = {}
        if condition_channels(self.model):
            found["condition"] = self.model.tokenize(given)
        if has_reference_tokens(self.model):
            found["reference"] = self.model.tokenize(latents)
        if rng is None or not self.config.reference_dropout:
            return found
        dropped = rng.uniform("reference_dropout") < self.config.reference_dropout
        return {name: value * ~dropped[:, None, None] for name, value in found.items()}

    def token_weights(self, batch: Batch) -> Float[Tensor, "b *n"]:
        """Loss weight of every sample, or of every token if the data have masks.

        A token's weight is the mean of the mask over its latent pixels, divided by the mean of all
        masks. So it is 1 on average over the data, and the loss is divided by the number of tokens
        as without masks: that is known beforehand, and equal on every layout.
        """
        mean = self.data.mask_mean
        if mean is None:
            return batch.weight
        tokens = self.model.tokenize(batch.fields["mask"][:, None].float())
        return batch.weight[:, None] * tokens.mean(-1) / mean

    def condition_dropout(self, fields: Fields) -> float | Float[Tensor, " b"]:
        """The probability that a sample loses its condition: its dataset's, else the run's."""
        rate, own = self.config.condition_dropout, fields.get(CONDITION_DROPOUT)
        return rate if own is None else own.where(own >= 0, rate)

    def features_of(self, fields: Fields) -> dict[str, Tensor]:
        """The features for [repa], by the name of their side input; {} without any."""
        if not self.repa.block or FEATURES not in fields:
            return {}
        return {FEATURES: normalized(fields[FEATURES], self.repa.spatial_norm)}

    def static(self, device: torch.device) -> dict[str, Tensor]:
        """The model's static inputs."""
        if device not in self.static_inputs:
            self.static_inputs[device] = self.model.static(device)
            for other in self.by_size.values():
                other.static(device)
        return self.static_inputs[device]

    def sized(self: Kind, fields: Fields) -> Kind:
        """This objective for samples of the size of `fields`, which are of one bucket.

        Raises UserError for a size of no bucket.
        """
        data = self.data
        if not data.bucket_shapes:
            return self
        if not self.by_size:
            # All at once: the compiler reads the cache.
            pairs = zip(data.bucket_shapes, data.bucket_text or repeat(0), strict=False)
            sizes = {(shape[1:], tokens) for shape, tokens in pairs}
            self.by_size.update({size: self.resized(*size) for size in sorted(sizes)})
        size = tuple(fields["latent"].shape[2:])
        tokens = fields["text"].shape[1] if data.bucket_text else 0
        found: Kind | None = self.by_size.get((size, tokens))
        if found is None:
            text = f" and {tokens} text tokens" if tokens else ""
            raise UserError(
                f"[data] a batch has latents of {' x '.join(map(str, size))}{text}, which is no "
                "bucket's size. Let every step take the samples of one bucket."
            )
        return found

    def resized(self: Kind, size: Sequence[int], text_tokens: int = 0) -> Kind:
        """The objective for other latents and, unless it is 0, captions of another length."""
        condition = self.condition
        if text_tokens and isinstance(condition, Captions):
            condition = dataclasses.replace(condition, tokens=text_tokens)
        return dataclasses.replace(
            self,
            model=resized_model(self.model, size, text_tokens),
            condition=condition,
        )

    def at_size(self: Kind, *size: int) -> Kind:
        """The objective for latents of another size, [h, w] or [f, h, w].

        Raises UserError if the network cannot.
        """
        if not isinstance(self.model, SizedModel):
            raise UserError(
                f"[model] name={show(self.model.name)} has no at_size: it draws samples of "
                f"{list(self.model.sample_shape)} only. Leave the size out, or take a model that "
                "has it."
            )
        return self.resized(size)

    def with_text(self: Kind, given: Given) -> Kind:
        """The objective for conditions with the text of `given`, see `by_text_length`."""
        if "text" not in given or (tokens := given["text"].shape[1]) == self.model_text_tokens:
            return self
        if tokens not in self.by_text:
            self.by_text[tokens] = self.resized(self.model.sample_shape[1:], tokens)
        found: Kind = self.by_text[tokens]
        return found

    def drawn_specs(self) -> Sequence[ModelSpec]:
        """See `Objective.drawn_specs`: a spec per caption length, at the model's own latent size.

        Lengths are multiples of `text_multiple`; () if all captions have one length.
        """
        multiple = text_multiple(self.model)
        if not multiple:
            return ()
        size, outputs = self.model.sample_shape[1:], self.config.output_channels(self.channels)
        tokens = range(multiple, self.model_text_tokens + 1, multiple)
        return [resized_model(self.model, size, each).spec(outputs) for each in tokens]

    @property
    def channels(self) -> int:
        """Channels of a latent: a token holds its patch as (p, p, channels)."""
        return self.model.sample_shape[0]

    @property
    def num_real_tokens(self) -> int:
        """Tokens of a latent, without padding."""
        if isinstance(self.model, PaddedModel):
            return self.model.num_real_tokens
        return self.model.token_shape[0]

    @property
    def num_classes(self) -> int:
        """Classes of a network with labels. Raises UserError for one with captions."""
        if isinstance(self.model, LabelledModel):
            return self.model.num_classes
        raise UserError(
            f"[model] name={show(self.model.name)} takes captions, not classes. Give it prompts."
        )

    @property
    def draws_clips(self) -> bool:
        """True if samples are clips of several frames; those of one are drawn as pictures."""
        return has_clips(self.model) and self.model.sample_shape[1] > 1

    @property
    def captions(self) -> Captions | None:
        """The condition of a network that takes captions, else None."""
        return self.condition if isinstance(self.condition, Captions) else None

    @property
    def model_text_tokens(self) -> int:
        """Tokens of the text that the model takes; 0 without captions."""
        return self.captions.tokens if self.captions else 0

    @property
    def most_sampling_steps(self) -> int | None:
        """Maximum number of sampling steps; None for no limit."""
        return None

    @property
    def shift(self) -> float | None:
        """The shift of a flow's times (arXiv:2403.03206 eq. 23); None without a flow."""
        return None

    def shift_in(self, steps: int) -> float | None:
        """The shift in sampling with so many steps; that of training unless a subclass differs."""
        return self.shift

    @property
    def times_depend_on_size(self) -> bool:
        """True if the timestep of a sample depends on the size of its latent."""
        return False

    def noise_level(self, timestep: float) -> float:
        """0 (data) to 1 (noise) at a timestep in the network's unit."""
        return timestep / self.last_timestep

    def validation_timesteps(self, bins: int) -> dict[str, float]:
        """The middles of equal bins, rounded to whole timesteps; key "t125" is timestep 125."""
        width = (self.last_timestep + 1) / bins
        middles = [round((number + 0.5) * width) for number in range(bins)]
        return {f"t{middle}": float(middle) for middle in middles}

    def inspect(self, fields: Fields) -> None:
        """Raise UserError for a std below 0, and references or masks not of their latents' size."""
        check_std(fields["latent"], self.data, self.channels)
        size = fields["latent"].shape[2:]
        for name, leading in (("reference", 2), ("mask", 1)):
            if name in self.takes and fields[name].shape[leading:] != size:
                raise UserError(
                    f"[data] {name} is of {list(fields[name].shape[leading:])}, but its latent of "
                    f"{list(size)}. Store both in one size."
                )

    def describe(self, fields: Fields, rng: SampleRNG) -> dict[str, Tensor]:
        """The timestep in the network's unit and, if fields were read, the label."""
        labels = {"label": fields["label"]} if "label" in self.takes and fields else {}
        if not fields and self.data.bucket_shapes and self.times_depend_on_size:
            return {}
        own = self.sized(fields) if fields else self
        return {**labels, "timestep": own.timesteps_of(rng)}

    def hints(self, source: Source) -> Sequence[str]:
        """Warn about latents of an unusual scale, and about prompts that were cut."""
        line = scale_hint(source, self.data, self.channels)
        return (*(() if line is None else (line,)), *self.preview_data.prompts.notes)

    def imported(self, sampling: SamplingConfig) -> Mapping[str, object]:
        """The network of [repa]; the sampler, if [sampling] every turns previews on."""
        network = self.frozen.features
        found: dict[str, object] = {"repa": network.name} if network else {}
        if not sampling.every:
            return found
        from titan_dit.diffusion import drawing

        return {**found, "sampling": drawing.sampler_of(self.config, sampling.sampler)}

    def aligned(self: Kind, repa: RepaConfig) -> Kind:
        """See `Objective.aligned`."""
        grid, found = token_grid(self.model), self.data.features
        if repa.network is not None and found is None:
            self.frozen.features = network = open_features(repa.network, self.data, grid)
            found = network.facts
        check_features(found, grid, repa)
        return dataclasses.replace(self, repa=repa)

    def open_text(self, text: TextConfig) -> None:
        """Load the text encoder of [text]. Raises UserError if the data do not fit."""
        if self.captions is None or not self.captions.is_online:
            return super().open_text(text)
        self.frozen.open_text(text, self.data)

    def place_frozen(self, placement: Placement, flops_per_sample: int) -> Sequence[str]:
        """See `Objective.place_frozen`."""
        return self.frozen.place(placement, flops_per_sample)

    def collect(self, batch: Batch) -> Batch:
        """See `Objective.collect`: embed captions, compute or leave out features."""
        if self.frozen.text is None and not self.repa.block:
            return batch
        return self.frozen.collect(batch, self.repa)

    def collected(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        """See `Objective.collected`."""
        return self.frozen.collected(fields, self.data)

    def readings(self) -> Mapping[str, float]:
        """See `Objective.readings`."""
        return self.frozen.readings()

    def check_preview(self, sampling: SamplingConfig, generation: GenerationConfig) -> None:
        """See `Objective.check_preview` and `previews.check`."""
        from titan_dit.diffusion import previews

        previews.check(self, sampling)

    def open_drawing(
        self, sampling: SamplingConfig, source: Source, on_first: OnFirst, folder: Path
    ) -> None:
        """See `Objective.open_drawing` and `previews.prompts_of`."""
        self.preview_data.source = source
        if self.captions and sampling.every:
            from titan_dit.diffusion import previews, row_conditions

            data, tokens = self.data, self.captions.tokens
            rows = row_conditions.rows_to_show(self, source)
            self.preview_data.prompts = on_first(
                lambda: previews.prompts_of(sampling, data, tokens, source, folder, rows)
            )
            previews.contents(self, sampling)

    def remember(self, folder: Path) -> None:
        """Write the prompts' embeddings, for `open_drawing`."""
        if self.preview_data.prompts.key:
            from titan_dit.diffusion import previews

            previews.write_prompts(folder, self.preview_data.prompts)

    def preview(
        self,
        forward: Forward,
        sampling: SamplingConfig,
        generation: GenerationConfig,
        seed: int,
        share: DataShare,
    ) -> Preview:
        """One picture with samples of up to ten classes, or of each prompt.

        With [sampling] vae they are decoded.
        """
        from titan_dit.diffusion import previews

        return previews.preview(forward, self, sampling, seed, share)

    def picture_size(self, sampling: SamplingConfig) -> int:
        """See `validation.evaluation.DrawsPictures`."""
        from titan_dit.diffusion import scored

        return scored.picture_size(self, sampling)

    def knows_classes(self, like: Mapping[str, int]) -> bool:
        """See `validation.evaluation.DrawsPictures`."""
        from titan_dit.diffusion import scored

        return scored.knows_classes(self, like)

    def picture_conditions(self, num: int, like: Mapping[str, int]) -> Conditions:
        """See `validation.evaluation.DrawsPictures`."""
        from titan_dit.diffusion import scored

        return scored.conditions_like(self, num, like)

    def pictures(
        self,
        forward: Forward,
        sampling: SamplingConfig,
        seed: int,
        conditions: Conditions,
        batches: Iterable[Int64[Tensor, " b"]],
        share: DataShare,
    ) -> Iterator[tuple[UInt8[Tensor, "b h w 3"], Bool[Tensor, " b"]]]:
        """See `validation.evaluation.DrawsPictures`."""
        from titan_dit.diffusion import scored

        return scored.pictures(forward, self, sampling, seed, conditions, batches, share)


def drawn_latents(
    stored: Shaped[Tensor, "b k *size"], facts: LatentFacts, channels: int, rng: SampleRNG
) -> Float[Tensor, "b c *size"]:
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


def check_std(stored: Shaped[Tensor, "b k *size"], facts: LatentFacts, channels: int) -> None:
    """Raise UserError if a stored std is below 0. Takes CPU tensors: a GPU would synchronise."""
    if is_mean_and_std(facts, channels) and stored[:, channels:].min() < 0:
        raise UserError(
            f"[data] holds {2 * channels} channels and [model] in_channels={channels}: they are "
            "read as mean and std, but a std is below 0. If they are mean and log variance, store "
            f"exp(0.5 * logvar); otherwise set [model] in_channels = {2 * channels}."
        )


def scale_hint(source: Source, facts: LatentFacts, channels: int, num: int = 64) -> str | None:
    """A console warning if the std of the model's inputs is far from 1, else None.

    Noise has std 1: for data of another scale the noise levels are too low or too high.
    """
    rows = max(source.bucket_rows, key=len)
    num = min(num, len(rows), max(1, MOST_HINTED // math.prod(facts.shape)))
    stored = source.read([rows[i * len(rows) // num] for i in range(num)])["latent"]
    check_std(stored, facts, channels)
    rng = SampleRNG(0, torch.arange(num))
    std = drawn_latents(stored, facts, channels, rng).std().item()
    if 1 / 3 < std < 3 or num * stored[0].numel() < 1000:
        return None
    if std < 1 and not stored.is_floating_point():
        return None  # Pictures of low contrast: their scale is that of their integers.
    cause = "is it missing?" if std > 1 else "are the latents scaled twice?"
    return (
        f"hint    after [data] scale={shown(facts.scale)}, {num} latents have std {std:.2g} "
        f"instead of about 1 (Stable Diffusion: scale 0.18215): {cause}"
    )
