"""Data and models of latents: whether they fit, sizes that follow from data, examples of data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch

from titan_dit.config.section import UserError, few, show
from titan_dit.config.training import RepaConfig
from titan_dit.data.base import DataFacts, Field
from titan_dit.data.latent_facts import (
    FeatureFacts,
    LatentFacts,
    ReferenceFacts,
    TextFacts,
    name_of,
)
from titan_dit.data.sections import DataConfig
from titan_dit.diffusion.base import (
    CaptionedModel,
    ConditionedModel,
    LabelledModel,
    LatentModel,
    PaddedModel,
    ReferencedModel,
    SizedModel,
    UnsizedModel,
    condition_channels,
    has_clips,
    has_reference_tokens,
    padding_of,
    resized_model,
)
from titan_dit.diffusion.conditions import Captions, ClassLabels, Condition
from titan_dit.models.base import ModelConfig
from titan_dit.objectives.base import missing_members

if TYPE_CHECKING:
    from titan_dit.pictures.features import PictureFeatures


def as_latent_model(model: ModelConfig, objective: str) -> LatentModel:
    """Return the model as a `LatentModel`; UserError names missing members."""
    if isinstance(model, LatentModel):
        return model
    raise UserError(
        f"[objective] name={show(objective)} trains models of latents, but [model] "
        f"name={show(model.name)} has no {missing_members(model, LatentModel)}. Choose another "
        "objective, or add them to the model (titan_dit/diffusion/base.py: LatentModel)."
    )


def check_data(facts: DataFacts, model: LatentModel, objective: str) -> LatentFacts:
    """Raise UserError if the samples of a dataset, or their conditions, do not fit the model.

    Twice the model's channels are accepted, as a mean and a std per channel, unless the dataset's
    metadata say that they are not.
    """
    if not isinstance(facts, LatentFacts):
        raise UserError(
            f"[objective] name={show(objective)} trains on latents: the facts of "
            "[data] must be LatentFacts (titan_dit/data/latent_facts.py), not "
            f"{type(facts).__name__}."
        )
    check_kind(facts, model)
    check_references(facts, model)
    shape = model.sample_shape
    if shape not in facts.latent_shapes:
        size = show(shape[-2:]) if isinstance(model, SizedModel) else shape[-1]
        frames = f", latent_frames={shape[1]}" if facts.has_clips else ""
        raise UserError(
            f"[model] in_channels={shape[0]}{frames} and latent_size={size} make samples of "
            f"{list(shape)}, but [data] holds {what_fits(facts, model)}"
        )
    condition_of(model, facts, objective)
    return facts


def check_kind(facts: LatentFacts, model: Any) -> None:
    """Raise UserError for clips that are given to a model of pictures, and the reverse."""
    if facts.has_clips == has_clips(model):
        return
    held = show(list(facts.shape))
    if facts.has_clips:
        raise UserError(
            f"[model] name={show(model.name)} takes pictures, but [data] holds clips of {held} "
            '(channels, frames, height, width). Choose a model of clips, such as name = "wan", or '
            "encode pictures: `data encode` without --frames."
        )
    raise UserError(
        f"[model] name={show(model.name)} takes clips, but [data] holds pictures of {held}. Give "
        "its source as_clips (docs/extending.md)."
    )


def what_fits(facts: LatentFacts, model: LatentModel) -> str:
    """Ending of a message about shapes: the shape of [data], and the keys of [model] to set."""
    (c, *size), *half = facts.latent_shapes
    held = f"{[c, *size]}"
    held = f"mean and std of {held}" if facts.posterior == "both" else held
    other = f", or in_channels = {half[0][0]} if half of its channels are a std" if half else ""
    largest = " in its largest bucket" if facts.bucket_shapes else ""
    if size[-2] != size[-1] and not isinstance(model, SizedModel):
        return f"{held}{largest}. Encode squares (--image-size), or take a model with at_size."
    fits = show(size[-2:]) if isinstance(model, SizedModel) else size[-1]
    frames = f", latent_frames = {size[0]}" if len(size) > 2 else ""
    leave = "" if not isinstance(model, UnsizedModel) else ", or leave the size out"
    return f"{held}{largest}. Set in_channels = {c}{frames}, latent_size = {fits}{leave}{other}."


def check_references(facts: LatentFacts, model: LatentModel) -> None:
    """Raise UserError for references that the model does not take, and the reverse."""
    takes, held = condition_channels(model), facts.condition_channels
    as_tokens, fixes = has_reference_tokens(model), list[str]()
    if isinstance(model, ConditionedModel):
        fixes.append(f"condition_channels = {held}")
    if isinstance(model, ReferencedModel) and not facts.has_clips:
        fixes.append("reference_tokens = true")
    if facts.reference is None:
        if takes or as_tokens:
            what = f"condition_channels={takes}" if takes else "reference_tokens=true"
            raise UserError(
                f"[model] {what}, but [data] holds no references. Encode NAME.reference.png beside "
                "NAME.png, or clips with `data encode --first-frame true`; or leave the key out "
                "(docs/conditions.md)."
            )
        return
    if not takes and not as_tokens:
        fix = f"Set {' or '.join(fixes)}" if fixes else 'Choose another model, such as "joint_dit"'
        raise UserError(
            f"[data] holds {facts.reference}, but [model] name={show(model.name)} is not given "
            f"any. {fix}, or encode the data without them."
        )
    if takes not in (0, held):
        raise UserError(
            f"[model] condition_channels={takes}, but [data] holds {facts.reference}, which are "
            f"{held} condition channels. Set condition_channels = {held}."
        )
    if as_tokens and facts.reference.channels != model.sample_shape[0]:
        raise UserError(
            f"[model] reference_tokens=true with in_channels={model.sample_shape[0]}, but [data] "
            f"holds {facts.reference}. Encode both by the same autoencoder."
        )


def condition_of(model: LatentModel, facts: LatentFacts, objective: str) -> Condition:
    """The condition that a model takes. Raises UserError if the data do not have it."""
    if isinstance(model, CaptionedModel):
        return captions_of(model, facts)
    if isinstance(model, LabelledModel):
        check_classes(model.num_classes, facts)
        return ClassLabels()
    raise UserError(
        f"[objective] name={show(objective)} trains models with class labels or captions, but "
        f"[model] name={show(model.name)} has neither {missing_members(model, LabelledModel)} nor "
        f"{missing_members(model, CaptionedModel)}. Add the members of one "
        "(titan_dit/diffusion/base.py)."
    )


def check_classes(num_classes: int, facts: LatentFacts) -> None:
    """Raise UserError unless the dataset has as many classes as the model."""
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


def captions_of(model: CaptionedModel, facts: LatentFacts) -> Captions:
    """The captions of a dataset. Raises UserError if they do not fit the model."""
    text = facts.text
    if text is None:
        raise UserError(
            f"[model] takes captions (text_dim={model.text_dim}), but the facts of [data] have no "
            "text. Encode it with `python -m titan_dit data encode --text-encoder DIR`, or give "
            "your own data TextFacts (titan_dit/data/latent_facts.py)."
        )
    if text.width != model.text_dim or text.tokens > model.text_tokens:
        raise UserError(
            f"[model] text_dim={model.text_dim} and text_tokens={model.text_tokens}, but the "
            f"captions of [data] have embeddings of {text.width} and up to {text.tokens} tokens. "
            f"Set text_dim = {text.width} and text_tokens = {text.tokens} or more."
        )
    check_padding(model, text)
    return Captions(model.text_tokens, text.null_embedding, text.is_online)


def check_padding(model: CaptionedModel, text: TextFacts) -> None:
    """Raise UserError if captions do not have the padding that a model takes."""
    wanted = padding_of(model)
    is_filled = wanted != "kept" or text.tokens == model.text_tokens
    if wanted not in (None, text.padding) or not is_filled:
        size = f" --text-tokens {model.text_tokens}" if wanted == "kept" else ""
        raise UserError(
            f"[model] text_tokens={model.text_tokens} of a network that takes captions with "
            f"padding {wanted}, but [data] has captions of up to {text.tokens} tokens with padding "
            f"{text.padding}. Encode them with `python -m titan_dit data encode --text-padding "
            f"{wanted}{size}`."
        )


def sized_models(model: ModelConfig, facts: DataFacts) -> Sequence[tuple[str, ModelConfig]]:
    """See `ObjectiveConfig.sized_models`."""
    if not isinstance(facts, LatentFacts) or not (shapes := facts.bucket_shapes):
        return ()
    check_kind(facts, model)
    if len(set(shapes)) > 1 and not isinstance(model, SizedModel):
        raise UserError(
            f"[model] name={show(model.name)} takes latents of one shape, but [data] holds "
            f"{len(shapes)}: {few([list(shape) for shape in shapes])}. Choose a model that has "
            'at_size, such as name = "joint_dit", or encode pictures of one size (--image-size).'
        )
    found = []
    for shape, tokens in zip(shapes, facts.bucket_text or repeat(0), strict=False):
        name = name_of(shape, tokens)
        try:
            found.append((name, resized_model(model, shape[1:], tokens)))
        except UserError as error:
            raise UserError(f"bucket {name}: {error}") from None
    return found


def settled_model(model: ModelConfig, data: DataConfig) -> ModelConfig:
    """See `ObjectiveConfig.settled_model`: the size of the largest samples, if none is set."""
    if not isinstance(model, UnsizedModel) or model.has_size:
        return model
    shape = data.sample_shape()
    if shape is None:
        raise UserError(
            f"[model] latent_size is not set, and cannot be taken from [data] name="
            f"{show(data.name)}: there are no shards. Set [height, width] of a latent, of a model "
            "of clips latent_frames, too."
        )
    found: ModelConfig = model.with_size(*shape[1:])
    return found


def token_grid(model: LatentModel) -> tuple[int, int]:
    """Rows and columns of a picture's tokens, for [repa]. Raises UserError for clips."""
    if has_clips(model):
        raise UserError(
            f"[repa] aligns networks of pictures, but [model] name={show(model.name)} takes clips. "
            "Leave [repa] out."
        )
    _, height, width = model.sample_shape
    tokens = model.num_real_tokens if isinstance(model, PaddedModel) else model.token_shape[0]
    patch = math.isqrt(height * width // tokens)
    return height // patch, width // patch


def open_features(name: str, data: LatentFacts, grid: tuple[int, int]) -> PictureFeatures:
    """The network of [repa], on the CPU. Raises UserError for data that holds no RGB pixels."""
    if len(data.shape) != 3 or data.shape[0] != 3 or data.value_range != (0.0, 255.0):
        raise UserError(
            f"[repa] network={show(name)} sees RGB pixels, but [data] holds {list(data.shape)} "
            "that are none. Leave it out and store features: `python -m titan_dit data encode "
            "--features MODULE:FUNCTION`."
        )
    # Imported late: most runs have none.
    from titan_dit.pictures.features import IN_STEPS, PictureFeatures

    height, width = data.shape[1:]
    return PictureFeatures.load(name, torch.device("cpu"), (height, width), grid, IN_STEPS)


def check_features(found: FeatureFacts | None, grid: tuple[int, int], repa: RepaConfig) -> None:
    """Raise UserError unless a dataset holds the features that [repa] takes."""
    rows, columns = grid
    if found is None:
        raise UserError(
            f"[repa] block={repa.block}, but [data] holds no features of its pictures. Store them: "
            "`python -m titan_dit data encode --features MODULE:FUNCTION`."
        )
    if found.grid != grid:
        own = " x ".join(map(str, found.grid))
        raise UserError(
            f"[repa] the features of [data] have a grid of {own}, but [model] has {rows} x "
            f"{columns} tokens. Encode them with --features-grid {rows}x{columns}."
        )
    if found.dim != repa.dim:
        raise UserError(
            f"[repa] dim={repa.dim}, but the features of [data], of {found.name}, have "
            f"{found.dim} elements. Set dim = {found.dim}."
        )


def example(model: ModelConfig, objective: str) -> tuple[LatentFacts, dict[str, Field]]:
    """Facts and fields of latents with the model's own shape."""
    latent = as_latent_model(model, objective)
    text = None
    if isinstance(latent, CaptionedModel):
        text = text_example(latent)
    facts = LatentFacts(
        count=0,
        shape=latent.sample_shape,
        num_classes=latent.num_classes if isinstance(latent, LabelledModel) else 1,
        text=text,
        **reference_example(latent),
    )
    return facts, facts.fields(torch.float32)


def reference_example(model: LatentModel) -> dict[str, Any]:
    """Keys of facts with references that fit a model, if it takes any."""
    given, channels = condition_channels(model), model.sample_shape[0]
    if not given and not has_reference_tokens(model):
        return {}
    if not has_clips(model) or not given:
        return {"reference": ReferenceFacts(kind="picture", channels=given or channels)}
    # Of a clip's first frame, by an autoencoder with as many channels as the network's samples.
    frames = max(0, given - channels)
    of_clips = ReferenceFacts(kind="first_frame", channels=given - frames, frame_channels=frames)
    return {"reference": of_clips}


def text_example(model: CaptionedModel) -> TextFacts:
    """Facts of captions that fit a model; the empty prompt is a zero."""
    return TextFacts(
        kind="",
        digest="",
        tokenizer="",
        layer=0,
        template="{}",
        width=model.text_dim,
        tokens=model.text_tokens,
        padding=padding_of(model) or "removed",
        null=TextFacts.null_text(torch.zeros(1, model.text_dim)),
    )
