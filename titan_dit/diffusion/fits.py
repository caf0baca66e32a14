"""Whether a model, a dataset and a kind of diffusion fit each other."""

from __future__ import annotations

from titan_dit.config.section import UserError, show
from titan_dit.data.base import DataFacts
from titan_dit.data.latent_facts import LatentFacts
from titan_dit.diffusion.base import LatentModel, ProbabilityPath
from titan_dit.models.base import ModelConfig


def as_latent_model(model: ModelConfig, objective: str) -> LatentModel:
    """The model, if it is one of latents; UserError that names what it lacks."""
    if isinstance(model, LatentModel):
        return model
    raise UserError(
        f"[objective] name={show(objective)} trains models of latents with labels, but [model] "
        f"name={show(model.name)} has no {lacking(model, LatentModel)}. Choose another "
        "objective, or add them to the model (titan_dit/diffusion/base.py: LatentModel)."
    )


def as_path(section: object, objective: str) -> ProbabilityPath:
    """The [objective] section, if it is a path; UserError that names what it lacks."""
    if isinstance(section, ProbabilityPath):
        return section
    raise UserError(
        f"[objective] name={show(objective)} is a diffusion without "
        f"{lacking(section, ProbabilityPath)} "
        "(titan_dit/diffusion/base.py: ProbabilityPath). Add them."
    )


def lacking(thing: object, protocol: type) -> str:
    """The members of a protocol that something does not have."""
    wanted = [name for name in vars(protocol) if not name.startswith("_")]
    wanted += [name for name in protocol.__annotations__ if name not in wanted]
    return ", ".join(name for name in wanted if not hasattr(thing, name))


def check_data(facts: DataFacts, model: LatentModel, objective: str) -> LatentFacts:
    """Refuse a dataset whose samples or labels are not those of the model.

    Twice the model's channels are a mean and a std of each.
    """
    if not isinstance(facts, LatentFacts):
        raise UserError(
            f"[objective] name={show(objective)} trains on latents with labels: the facts of "
            "[data] must be LatentFacts (titan_dit/data/latent_facts.py), not "
            f"{type(facts).__name__}."
        )
    shape, num_classes = model.sample_shape, model.num_classes
    if facts.shape not in (shape, (2 * shape[0], *shape[1:])):
        c, h, w = facts.shape
        fix = f"Set channels = {c}, latent_size = {h}." if h == w else "Latents must be square."
        raise UserError(
            f"[model] channels={shape[0]} and latent_size={shape[1]} make samples of "
            f"{list(shape)}, but [data] holds {list(facts.shape)}. {fix}"
        )
    if facts.num_classes != num_classes:
        relation = "less" if num_classes < facts.num_classes else "more"
        fix = f"Set num_classes = {facts.num_classes}."
        if num_classes > facts.num_classes:
            names = " --classes FILE" if facts.class_names else ""
            fix += (
                " If the data is a part of a larger set, pack it with "
                f"`python -m titan_dit data pack --num-classes {num_classes}{names}`."
            )
        raise UserError(
            f"[model] num_classes={num_classes} is {relation} than the {facts.num_classes} classes "
            f"of [data]. {fix}"
        )
    return facts
