"""Dropout whose mask is a function of the sample: equal on every layout, without a generator.

An element's number is a hash (SplitMix64, as in weight_draws.py) of the sample's key, the layer,
the place in the block, the token's position in the sample and the channel. Any rank can draw any
part of a mask, and recomputation draws the same one again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from titan_dit.models.base import SideInputs
from titan_dit.models.initializers import Initializer, constant
from titan_dit.models.layers import is_token_first
from titan_dit.models.weight_draws import mixed, signed
from titan_dit.rng import GOLDEN

PLACES = 16
"""Maximum dropout places of a layer."""


class SampleDropout(nn.Module):
    """Zero a share `rate` of the hidden channels, and divide the others by 1 - rate."""

    own_tokens: Callable[[Tensor], Tensor] = staticmethod(lambda positions: positions)
    """Positions of all tokens -> those of this rank's tokens; sequence parallelism replaces it."""
    initial: dict[str, Initializer]
    """The value of the buffer; see `Model.initializers`."""

    def __init__(self, rate: float, layer: int, place: int = 0) -> None:
        """Two modules drop independently if (layer, place) differ; `place` is below PLACES.

        Raises ValueError unless 0 <= rate < 1.
        """
        super().__init__()
        if not 0 <= rate < 1:
            raise ValueError(f"dropout={rate} is no probability below 1.")
        assert 0 <= place < PLACES, place
        self.rate, self.place, self.initial = rate, place, {"layer": constant(layer)}
        # A tensor: for a number torch.compile would make a graph per layer.
        self.register_buffer("layer", torch.tensor(layer), persistent=False)

    def forward(
        self,
        x: Float[Tensor, "b m d"],
        keys: Int64[Tensor, " b"],
        positions: Int64[Tensor, " n"],
    ) -> Float[Tensor, "b m d"]:
        """Drop channels of the m of n tokens that this rank has.

        `keys`: `SampleRNG.keys`; a sample with a negative key stays as it is (evaluation).
        `positions`: positions of the n tokens in the sample.
        """
        if not self.rate:
            return x
        is_off, exact = keys < 0, torch.promote_types(x.dtype, torch.float32)
        least = torch.where(is_off, signed(1 << 63), least_kept(self.rate))
        factor = torch.where(is_off, 1.0, 1 / (1 - self.rate)).to(exact)
        is_kept = self.words(x, keys, positions) >= least[:, None, None]
        scaled = (x * factor[:, None, None]).to(x.dtype)
        return torch.where(is_kept, scaled, 0)

    def words(self, x: Tensor, keys: Tensor, positions: Tensor) -> Int64[Tensor, "b m d"]:
        """A random word per element of `x`, in its memory order; the upper bits are the best."""
        places = self.layer * PLACES + self.place + 1  # type: ignore[operator]
        streams = mixed(keys + places * signed(GOLDEN))
        channels = torch.arange(1, x.shape[-1] + 1, device=x.device)
        elements = self.own_tokens(positions)[:, None] * x.shape[-1] + channels
        steps = elements * signed(GOLDEN)
        if is_token_first(x):
            return mixed(steps[:, None] + streams[:, None]).transpose(0, 1)
        return mixed(steps + streams[:, None, None])


def least_kept(rate: float) -> int:
    """The least random word, as int64, of an element that stays."""
    return signed(round(rate * 2**64) - 2**63)


def dropped(dropout: SampleDropout | None, x: Tensor, side: SideInputs) -> Tensor:
    """Apply dropout to `x` [b, n, ...] in training, when the samples have keys."""
    keys = side.get("dropout_keys")
    if dropout is None or keys is None:
        return x
    result: Tensor = dropout(x, keys, side["positions"])
    return result
