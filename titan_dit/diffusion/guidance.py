"""Classifier-free guidance (arXiv:2207.12598)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

Conditional = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x [b, n, d], timestep [b], labels [b]) -> prediction [b, n, d_out]."""


def scales(
    scale: float, guided: int, outputs: int, pixels: int, device: torch.device
) -> Float[Tensor, " d_out"]:
    """Guidance scale of every element of a token, (pixels, outputs) with the output fastest.

    Only the first `guided` outputs of a pixel are guided. The others, such as a learned variance,
    have scale 1: the prediction with the label.
    """
    per_pixel = torch.ones(outputs, device=device)
    per_pixel[:guided] = scale
    return per_pixel.repeat(pixels)


def guided(
    predict: Conditional, labels: Int64[Tensor, " b"], scale: Float[Tensor, " d_out"]
) -> Callable[[Tensor, Tensor], Tensor]:
    """Guidance u + scale * (c - u), c with and u without the label, both in one forward pass.

    With scale 1 only c is computed, at half the cost. Label -1 means no label.
    """
    if bool((scale == 1).all()):
        return lambda x, timestep: predict(x, timestep, labels)
    both_labels = torch.cat((labels, torch.full_like(labels, -1)))

    def prediction(x: Float[Tensor, "b n d"], timestep: Float[Tensor, " b"]) -> Tensor:
        both = predict(torch.cat((x, x)), torch.cat((timestep, timestep)), both_labels)
        conditional, unconditional = both.chunk(2)
        return torch.lerp(unconditional, conditional, scale)

    return prediction
