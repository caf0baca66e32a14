"""A worse network that guides another one: autoguidance (arXiv:2406.02507)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from titan_dit.checkpoint.run_path import find_checkpoint
from titan_dit.checkpoint.store import location
from titan_dit.config.section import Named, UserError, show
from titan_dit.data.latent_facts import shown
from titan_dit.diffusion.guidance import Conditional
from titan_dit.diffusion.objective import Diffusion
from titan_dit.execution.base import first_of
from titan_dit.launcher.ranks import Ranks
from titan_dit.trained_model import TrainedModel, load_trained

MEANING = ("name", "prediction", "noise_schedule", "steps", "direction", "time_scale")
"""Keys of [objective] that say what a prediction means; the two networks must agree on them."""


def load_guide(guide: str, device: torch.device, trust: bool) -> TrainedModel:
    """The EMA weights of the newest checkpoint of --guide. Collective."""
    path = Ranks().run_on_first(lambda: find_checkpoint(location(guide), None, "--guide"))
    return load_trained(path, "ema", None, device, trust)


def weak_network(weak: TrainedModel, diffusion: Diffusion) -> Conditional:
    """The prediction of --guide's network for the tokens of `diffusion`, that of --run.

    Raises UserError on a misfit. Its outputs beyond the latent's channels, such as a learned
    variance, are not used.
    """
    theirs = weak.diffusion("--guide")
    check(f"{weak.path}", diffusion, theirs)
    channels, static = diffusion.model.sample_shape[0], theirs.model.static(weak.device)
    outputs = diffusion.path.output_channels(channels)

    def predict(x: Tensor, timestep: Tensor, labels: Tensor) -> Tensor:
        latents = diffusion.model.detokenize(x)
        given = {"tokens": theirs.model.tokenize(latents), "timestep": timestep, "labels": labels}
        found = theirs.model.detokenize(first_of(weak.network(given, static)).float())
        found = found[:, :channels]
        if outputs > channels:  # Scale 1 there: the other network's values count.
            found = torch.cat(
                (found, torch.zeros_like(found).repeat(1, outputs // channels - 1, 1, 1)), 1
            )
        return diffusion.model.tokenize(found)

    return predict


def check(guide: str, ours: Diffusion, theirs: Diffusion) -> None:
    """Refuse a network of other samples or of another prediction."""
    shapes = ours.model.sample_shape, theirs.model.sample_shape
    if shapes[0] != shapes[1] or ours.model.num_classes != theirs.model.num_classes:
        raise UserError(
            f"--guide {guide} draws samples of {list(shapes[1])} with {theirs.model.num_classes} "
            f"classes, but --run of {list(shapes[0])} with {ours.model.num_classes}."
        )
    # Of other latents what is stored is not known: some are stored scaled.
    if ours.data.vae and theirs.data.vae and latents_of(ours) != latents_of(theirs):
        raise UserError(
            f"--guide {guide} was trained on {latents_of(theirs)}, but --run on "
            f"{latents_of(ours)}: their predictions cannot be compared."
        )
    names = ours.data.class_names
    for number, (own, name) in enumerate(zip(names, theirs.data.class_names, strict=False)):
        # Other words may mean the same class; the same word at another number does not.
        if name != own and name in names:
            raise UserError(
                f"--guide {guide} has {show(name)} as class {number}, but --run as class "
                f"{names.index(name)}: its labels mean something else."
            )
    a, b = keys_of(ours.path), keys_of(theirs.path)
    for key in MEANING:
        if a.get(key) != b.get(key):
            raise UserError(
                f"--guide {guide} was trained with [objective] {key}={show(b.get(key))}, but "
                f"--run with {show(a.get(key))}: their predictions cannot be compared."
            )


def latents_of(diffusion: Diffusion) -> str:
    """What a network was trained on, in words."""
    data = diffusion.data
    return f"latents of {data.vae} with scale {shown(data.scale)} and shift {shown(data.shift)}"


def keys_of(path: object) -> Mapping[str, Any]:
    """The keys of an [objective] section."""
    assert isinstance(path, Named)
    return {"name": path.name, **asdict(path)}
