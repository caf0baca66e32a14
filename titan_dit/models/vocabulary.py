"""The loss and the logits over a vocabulary, which tensor parallelism may shard."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn


def cross_entropy(
    logits: Float[Tensor, "t rows"], targets: Int[Tensor, " t"], size: int
) -> Float[Tensor, " t"]:
    """-log softmax(logits)[target] over the first `size` rows, in fp32 or fp64."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits[:, :size].to(dtype), targets, reduction="none")


def whole(logits: Float[Tensor, "b n rows"]) -> Float[Tensor, "b n rows"]:
    """The logits of all rows, from this rank's: without tp the identity."""
    return logits


class Vocabulary(nn.Module):
    """The last step of a head: the loss of its logits, or the logits; it has no parameters.

    `size`: number of token ids. `rows`: rows of the table; the rest of them is padding, which the
    softmax leaves out.
    """

    score: Callable[..., Tensor]
    """logits [t, rows], targets [t], size -> loss [t]. kernels/cross_entropy.py and
    parallel/tensor.py replace it."""
    whole: Callable[[Tensor], Tensor]
    """This rank's logits -> the logits of all rows; parallel/tensor.py replaces it."""

    def __init__(self, size: int, rows: int) -> None:
        super().__init__()
        self.size, self.rows = size, rows
        self.score, self.whole = cross_entropy, whole

    def forward(
        self, logits: Float[Tensor, "b n rows"], targets: Int[Tensor, "b n"] | None
    ) -> Float[Tensor, "b n *size"]:
        """The loss per token [b, n], or without targets the logits [b, n, size]."""
        if targets is None:
            return self.whole(logits)[..., : self.size]
        return self.score(logits.flatten(0, 1), targets.flatten(), self.size).view_as(targets)
