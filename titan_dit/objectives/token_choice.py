"""Draw the next token from logits: temperature, top-k and top-p."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor


@runtime_checkable
class Choice(Protocol):
    """Settings for drawing a token: keys of [sampling] and flags of `sample`."""

    @property
    def temperature(self) -> float:
        """Divides the logits; 0 takes the most likely token."""

    @property
    def top_k(self) -> int | None:
        """Draw from the most likely `top_k` tokens only."""

    @property
    def top_p(self) -> float:
        """Draw from the fewest most likely tokens whose probabilities add up to this."""


def choose(
    logits: Float[Tensor, "b v"], uniform: Float[Tensor, " b"], choice: Choice
) -> Int64[Tensor, " b"]:
    """Draw a token per row; `uniform` in (0, 1).

    By the inverse of the cumulative distribution, in the order of the ids: logits that differ by a
    rounding, as those of two layouts do, move the edges by as much, and hardly ever the token.
    """
    if not choice.temperature:
        return logits.argmax(1)
    edges = probabilities(logits, choice).cumsum(1)
    # Scaled by the last edge, which is 1 up to rounding: no draw lies beyond it.
    return torch.searchsorted(edges, uniform.double()[:, None] * edges[:, -1:], right=True)[:, 0]


def probabilities(logits: Float[Tensor, "b v"], choice: Choice) -> Float[Tensor, "b v"]:
    """The distribution to draw from, in fp64; ties at the limit of top-k all stay."""
    scaled = logits.double() / choice.temperature
    if choice.top_k is not None and choice.top_k < scaled.shape[1]:
        least = scaled.topk(choice.top_k).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    found = scaled.softmax(1)
    if choice.top_p < 1:
        ordered, index = found.sort(dim=1, descending=True, stable=True)
        # The token that crosses top_p stays, so the first one always does.
        beyond = ordered.cumsum(1) - ordered >= choice.top_p
        found = found.masked_fill(beyond.scatter(1, index, beyond), 0)
    return found
