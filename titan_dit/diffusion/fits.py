"""Checks that a model, a dataset and a diffusion objective fit each other."""

from __future__ import annotations

from titan_dit.config.section import UserError, show
from titan_dit.data.base import DataFacts
from titan_dit.data.latent_facts import LatentFacts
from titan_dit.diffusion.base import LatentModel, ProbabilityPath
from titan_dit.models.base import ModelConfig


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
            f"[model] channels={shape[0]} and latent_size={shape[1]} make samples of "
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
