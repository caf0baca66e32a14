"""Dropout of the inputs of LoRA's A, by sample number: equal on every layout, without a generator.

A random word per token goes with a batch, beside one per sample for layers without tokens. It is
cut as the tokens are: by microbatches, by cp. An element's number is a hash (SplitMix64, as in
weight_draws.py) of its token's word, the layer and the channel. So any rank can draw any part of a
mask, and recomputation draws the same one again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from titan_dit.config.parameter_groups import matches
from titan_dit.models.base import ModelSpec, SideInputs, Stream, TensorSpec
from titan_dit.models.sample_dropout import least_kept
from titan_dit.models.weight_draws import mixed, signed
from titan_dit.rng import GOLDEN, SampleRNG

NAME = "lora_dropout"
"""Name of the samples' words in the context, int64 [b]; NAME.STREAM: of the tokens, [b, n]."""
NUMBER = "lora_number"
"""Name of the buffer with a layer's number."""


def specs(spec: ModelSpec) -> dict[str, TensorSpec]:
    """The words of a network's samples and tokens, as entries of `ModelSpec.context`."""
    found = {NAME: TensorSpec((), dtype=torch.int64)}
    for name, tensor in spec.stream.items():
        if len(tensor.shape) == 2:
            words = TensorSpec(tensor.shape[:1], tensor.token_dim, dtype=torch.int64)
            found[f"{NAME}.{name}"] = words
    return found


def with_words(spec: ModelSpec) -> ModelSpec:
    """A network's spec with the words in its context."""
    return replace(spec, context={**spec.context, **specs(spec)})


def drawn(rng: SampleRNG, spec: ModelSpec) -> dict[str, Tensor]:
    """The words of a batch, by name."""
    found: dict[str, Tensor] = {}
    for name, words in specs(spec).items():
        keys = rng.keys(name)
        if words.shape:
            places = torch.arange(1, words.shape[0] + 1, device=keys.device)
            keys = mixed(keys[:, None] + places * signed(GOLDEN))
        found[name] = keys
    return found


class Words:
    """The words of the microbatch that the network runs; none in evaluations."""

    def __init__(self) -> None:
        self.now: Mapping[str, Tensor] = {}

    def hold(self, side: SideInputs) -> None:
        """Take the words from the inputs of a microbatch."""
        self.now = {name: words for name, words in side.items() if name.startswith(NAME)}


class HoldsWords:
    """Mixed into the class of a block: its layers drop by the words of the block's inputs.

    Recomputation in backward runs a block alone, after the forward passes of other microbatches.
    """

    lora_words: Words

    def forward(self, stream: Stream, side: SideInputs) -> Stream:
        """The block's forward."""
        # A graph has the words among its inputs, and keeps them: see `parallel/lora.py`.
        if not torch.compiler.is_compiling():
            self.lora_words.hold(side)
        result: Stream = super().forward(stream, side)  # type: ignore[misc]
        return result


def streams_read(part: nn.Module, layer: str, first: str) -> tuple[str, ...]:
    """Names of the stream tensors whose tokens a layer of embed, a block or head reads, in order.

    The class attribute `reads` of the part has them by patterns of layers; the others read `first`.
    """
    table: Mapping[str, tuple[str, ...]] = getattr(part, "reads", {})
    return next((names for pattern, names in table.items() if matches(layer, [pattern])), (first,))


def layer_number(name: str) -> int:
    """A number of 48 bits for a layer, a hash of its name: fp64 holds it, too."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "little")


def words_of(parts: Sequence[Int64[Tensor, "b _"]], shards: int) -> Int64[Tensor, "b n"]:
    """The words of the tokens of several tensors in one, as `layers.JoinedRotary` orders them.

    `shards`: sequence-parallel ranks, each of which joins its shards of the tensors.
    """
    ranks = zip(*(part.chunk(shards, 1) for part in parts), strict=True)
    return torch.cat([shard for rank in ranks for shard in rank], 1)


def dropped(
    x: Float[Tensor, "*n i"],
    words: Int64[Tensor, "*n"],
    number: Int64[Tensor, ""],
    rate: float,
    first: int = 0,
) -> Float[Tensor, "*n i"]:
    """Zero a share `rate` of the elements, and divide the others by 1 - rate.

    `number`: `layer_number`. `first`: the first of the channels that `x` has.
    """
    rows = mixed(words + number * signed(GOLDEN))
    channels = torch.arange(first + 1, first + x.shape[-1] + 1, device=x.device)
    is_kept = mixed(rows[..., None] + channels * signed(GOLDEN)) >= least_kept(rate)
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.where(is_kept, (exact / (1 - rate)).to(x.dtype), 0)
