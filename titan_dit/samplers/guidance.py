"""Classifier-free guidance (arXiv:2207.12598)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from titan_dit.samplers.ode import Velocity

Predict = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x [b, n, d], t [b], labels [b]) -> prediction [b, n, d]."""


def guided(predict: Predict, labels: Int64[Tensor, " b"], scale: float) -> Velocity:
    """Guide by u + scale * (c - u), u without and c with the label, both in one forward pass.

    A scale of 1 is the conditional prediction, at half the cost. Label -1 means no label.
    """
    if scale == 1:
        return lambda x, t: predict(x, t, labels)
    both_labels = torch.cat((labels, torch.full_like(labels, -1)))

    def velocity(x: Float[Tensor, "b n d"], t: Float[Tensor, " b"]) -> Float[Tensor, "b n d"]:
        both = predict(torch.cat((x, x)), torch.cat((t, t)), both_labels)
        conditional, unconditional = both.chunk(2)
        return torch.lerp(unconditional, conditional, scale)

    return velocity
