"""Two spans of text, in order or swapped, between special tokens: [CLS] A [SEP] B [SEP].

Megatron's second task of BERT, as in ALBERT (arXiv:1909.11942 sec. 3.1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from titan_dit.data.base import Fields
from titan_dit.data.pair_facts import PairFacts
from titan_dit.data.token_facts import TokenFacts
from titan_dit.rng import SampleRNG


@dataclass(frozen=True)
class Pairs:
    """A batch of framed and padded spans."""

    tokens: Int64[Tensor, "b n"]
    types: Int64[Tensor, "b n"]
    """1 for B and its [SEP], 0 for all other tokens and padding."""
    is_text: Bool[Tensor, "b n"]
    """False for special tokens and padding."""
    lengths: Int64[Tensor, " b"]
    """Tokens before the padding."""
    is_swapped: Bool[Tensor, " b"]


def end_of(facts: PairFacts | TokenFacts) -> int:
    """Id of the token that ends a document; -1, which is no token's id, without one."""
    return -1 if facts.end_of_document is None else facts.end_of_document


def pairs_of(fields: Fields, facts: PairFacts, rng: SampleRNG) -> Pairs:
    """Cut each sample at a random sentence into two spans; swap them with probability 1/2."""
    ids, sentences = fields["tokens"], fields["sentences"]
    is_given = sentences >= 0
    total = is_given.sum(1)
    cuts = sentences.amax(1).clamp(min=1)
    cut = 1 + (rng.uniform("cut") * cuts).long()
    first = (is_given & (sentences < cut[:, None])).sum(1)
    is_swapped = rng.uniform("swap") < 0.5
    size_a = first.where(~is_swapped, total - first)
    place = torch.arange(facts.sequence_length, device=ids.device).expand(len(ids), -1)
    in_a, sep, length = place <= size_a[:, None], size_a[:, None] + 1, total[:, None] + 3
    # Where in `ids` the tokens of A and of B begin.
    start_a, start_b = first.where(is_swapped, 0)[:, None], first.where(~is_swapped, 0)[:, None]
    index = torch.where(in_a, place - 1 + start_a, place - sep - 1 + start_b)
    tokens = ids.gather(1, index.clamp(0, ids.shape[1] - 1))
    is_sep = (place == sep) | (place == length - 1)
    is_padding = place >= length
    tokens = tokens.where(~is_sep, facts.sep).where(place > 0, facts.cls)
    return Pairs(
        tokens=tokens.where(~is_padding, facts.pad),
        types=((place > sep) & ~is_padding).long(),
        is_text=(place > 0) & ~is_sep & ~is_padding & (tokens != end_of(facts)),
        lengths=length[:, 0],
        is_swapped=is_swapped,
    )
