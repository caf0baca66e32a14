"""From the units a dataset is stored in to those the model sees."""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from titan_dit.data.base import Source
from titan_dit.data.latent_facts import LatentFacts
from titan_dit.rng import SampleRNG
from titan_dit.section import UserError


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
