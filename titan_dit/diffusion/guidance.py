"""Guidance: by the prediction without the condition (arXiv:2207.12598), or by a weaker network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from titan_dit.diffusion.conditions import Given, joined

Conditional = Callable[[Tensor, Tensor, Given], Tensor]
"""(x [b, n, d], timestep [b], condition of b samples) -> prediction [b, n, d_out]."""


@dataclass(frozen=True)
class Guidance:
    """Settings of guidance: scale, channels, noise levels, rescaling and the worse prediction."""

    scale: float = 1.0
    """u + scale (c - u); 1 is no guidance."""
    channels: int | None = None
    """Guide the first channels only; None guides all."""
    interval: tuple[float, float] = (0.0, 1.0)
    """Guide at noise levels from the first to the second only (arXiv:2404.07724): t of a flow, the
    step over the last step of a discrete diffusion."""
    rescale: float = 0.0
    """Rescale the guided prediction to the std of the conditional prediction: 0 is off, 1 is
    all the way (phi of arXiv:2305.08891 sec. 3.4)."""
    weak: Conditional | None = None
    """A worse network, which guides in place of the prediction without the condition
    (arXiv:2406.02507)."""


def scales(
    scale: float, guided: int, outputs: int, pixels: int, device: torch.device
) -> Float[Tensor, " d_out"]:
    """Guidance scale of every element of a token, (pixels, outputs) with the output fastest.

    Only the first `guided` outputs of a pixel are guided. The others, such as a learned variance,
    have scale 1: the conditional prediction.
    """
    per_pixel = torch.ones(outputs, device=device)
    per_pixel[:guided] = scale
    return per_pixel.repeat(pixels)


def guided(
    predict: Conditional,
    given: Given,
    null: Given,
    scale: Float[Tensor, " d_out"],
    guidance: Guidance = Guidance(),
    noise_level: Callable[[float], float] = float,
) -> Callable[[Tensor, Tensor], Tensor]:
    """Guidance u + scale * (c - u): c with the condition, u with `null` or of the weaker network.

    c and u with `null` are one forward pass if their conditions have equal shapes. With scale 1,
    and outside the interval, only c is computed, at half the cost. All samples have the same
    timestep; `noise_level`: timestep -> 0 (data) to 1 (noise).
    """
    if bool((scale == 1).all()):
        return lambda x, timestep: predict(x, timestep, given)
    # Prompts and negative ones may be padded to other lengths.
    alike = all(value.shape == null[name].shape for name, value in given.items())
    both_given = joined(given, null) if alike else None
    first, last = guidance.interval
    everywhere = first <= 0 and last >= 1

    def pair(x: Tensor, timestep: Tensor) -> tuple[Tensor, Tensor]:
        if guidance.weak is not None:
            return predict(x, timestep, given), guidance.weak(x, timestep, given)
        if both_given is None:
            return predict(x, timestep, given), predict(x, timestep, null)
        both = predict(torch.cat((x, x)), torch.cat((timestep, timestep)), both_given)
        conditional, unconditional = both.chunk(2)
        return conditional, unconditional

    def prediction(x: Float[Tensor, "b n d"], timestep: Float[Tensor, " b"]) -> Tensor:
        # Rounded: 1 - 0.7 is not 0.3 in fp32.
        if not (everywhere or first <= round(noise_level(timestep[0].item()), 6) <= last):
            return predict(x, timestep, given)
        conditional, worse = pair(x, timestep)
        found = torch.lerp(worse, conditional, scale)
        return rescaled(found, conditional, scale != 1, guidance.rescale)

    return prediction


@dataclass(frozen=True)
class LowExpert:
    """The network that draws below a noise level, where two share the work, as in Wan 2.2."""

    predict: Conditional
    boundary: float
    """Noise level, as in `Guidance.interval`, from which the other network draws."""
    scale: float | None = None
    """Guidance scale of this network; None: that of the other one."""


def by_noise_level(
    high: Callable[[Tensor, Tensor], Tensor],
    low: Callable[[Tensor, Tensor], Tensor],
    boundary: float,
    noise_level: Callable[[float], float],
) -> Callable[[Tensor, Tensor], Tensor]:
    """The prediction of `high` at noise levels from `boundary` up, that of `low` below.

    All samples have the same timestep; `noise_level` as in `guided`.
    """

    def prediction(x: Float[Tensor, "b n d"], timestep: Float[Tensor, " b"]) -> Tensor:
        is_high = round(noise_level(timestep[0].item()), 6) >= boundary
        return (high if is_high else low)(x, timestep)

    return prediction


def rescaled(
    found: Float[Tensor, "b n d_out"],
    conditional: Float[Tensor, "b n d_out"],
    is_guided: Tensor,
    share: float,
) -> Float[Tensor, "b n d_out"]:
    """Bring the std of every sample's guided elements back by `share` (arXiv:2305.08891 eq. 15)."""
    if not share:
        return found
    wanted = conditional[..., is_guided].flatten(1).std(1)
    has = found[..., is_guided].flatten(1).std(1)
    # Both are 0 if the network still predicts 0, as at the start of training.
    factor = 1 + share * (torch.where(has > 0, wanted / has, 1.0) - 1)
    return torch.where(is_guided, found * factor[:, None, None], found)
