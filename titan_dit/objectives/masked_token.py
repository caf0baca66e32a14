"""Masked tokens, and the order of sentences, as BERT is trained (arXiv:1810.04805 sec. 3.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from titan_dit.config.section import UserError, show
from titan_dit.data.base import Batch, DataFacts, Field, Fields
from titan_dit.data.sentence_pairs import PairFacts
from titan_dit.data.token_windows import TokenFacts
from titan_dit.models.base import ModelConfig, ModelSpec
from titan_dit.objectives import dropout
from titan_dit.objectives.base import Objective, Prepared, lacks
from titan_dit.objectives.sections import MaskedTokenConfig
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


TERMS = {"masked": "scale", "order": "order_scale"}
"""Term of the loss -> the target with its weight per token."""


@runtime_checkable
class MaskedModel(Protocol):
    """A [model] section of a bidirectional language model."""

    @property
    def name(self) -> str:
        """The name in the catalog."""

    @property
    def sequence_length(self) -> int:
        """Tokens of a sample."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids; ids are below it."""

    def masked_spec(self, num_scored: int, *, sentence_order: bool) -> ModelSpec:
        """Describe the network; `num_scored`: maximum masked tokens of a sample."""

    def static(self, device: torch.device) -> dict[str, Tensor]:
        """Inputs that are equal for all samples."""


def bidirectional(model: ModelConfig) -> MaskedModel:
    """The section of a model of masked tokens. Raises UserError for another model."""
    if not isinstance(model, MaskedModel):
        raise UserError(
            f"[model] name={show(model.name)} predicts no masked tokens, as [objective] "
            'name="masked_token" needs'
            f'{lacks(model, MaskedModel)}. Set [model] name = "bert".'
        )
    return model


def num_masked(share: float, length: int) -> int:
    """Masked tokens of a sample of `length` tokens."""
    return max(1, round(share * length))


def model_spec(section: MaskedTokenConfig, model: ModelConfig) -> ModelSpec:
    """The model's spec, with the heads of the tasks."""
    found = bidirectional(model)
    num = num_masked(section.mask_share, found.sequence_length)
    return found.masked_spec(num, sentence_order=section.sentence_order)


def example(
    section: MaskedTokenConfig, model: ModelConfig
) -> tuple[DataFacts, Mapping[str, Field]]:
    """Facts and fields of samples with the model's own sizes."""
    found = bidirectional(model)
    n, size = found.sequence_length, found.vocab_size
    facts: PairFacts | TokenFacts
    if section.sentence_order:
        facts = PairFacts(count=0, sequence_length=n, vocabulary=size, cls=1, sep=2, mask=3)
    else:
        facts = TokenFacts(count=0, sequence_length=n, vocabulary=max(size - 1, 1))
    return facts, facts.fields


def build(section: MaskedTokenConfig, model: ModelConfig, facts: DataFacts) -> MaskedToken:
    """Build the objective; UserError if the data do not fit the model."""
    found = bidirectional(model)
    if not isinstance(facts, PairFacts if section.sentence_order else TokenFacts):
        kind = "sentence_pairs" if section.sentence_order else "tokens"
        raise UserError(
            f"[objective] sentence_order={show(section.sentence_order)} trains on other samples "
            f'than [data] holds. Set [data] name = "{kind}".'
        )
    assert isinstance(facts, PairFacts | TokenFacts)
    if facts.sequence_length != found.sequence_length:
        raise UserError(
            f"[data] sequence_length={facts.sequence_length} and [model] "
            f"sequence_length={found.sequence_length} differ. Make them equal."
        )
    own = facts.mask if isinstance(facts, PairFacts) else facts.vocabulary
    mask = own if section.mask_id is None else section.mask_id
    if max(facts.vocabulary, mask + 1) > found.vocab_size:
        raise UserError(
            f"[data] has token ids up to {facts.vocabulary - 1}, and [MASK] is {mask}, but "
            f"[model] vocab_size={found.vocab_size}. Set [model] vocab_size = "
            f"{max(facts.vocabulary, mask + 1)}."
        )
    drops = dropout.drops(model_spec(section, model))
    return MaskedToken(found, facts, mask, section.mask_share, drops)


@dataclass(frozen=True)
class MaskedToken(Objective):
    """Predicts a fixed number of each sample's tokens, drawn by sample number."""

    token_targets = ("scale", "order_scale")

    model: MaskedModel
    data: PairFacts | TokenFacts
    mask: int
    """Id of [MASK]."""
    share: float
    drops: bool = False
    """The model has dropout."""

    @property
    def takes(self) -> tuple[str, ...]:  # type: ignore[override]
        """Fields of a sample that it reads."""
        return tuple(self.data.fields)

    def prepare(self, batch: Batch, rng: SampleRNG) -> Prepared:
        """Frame pairs of spans with special tokens, and mask tokens."""
        sample = self.sample_of(batch, rng)
        n = sample.tokens.shape[1]
        is_masked = self.drawn(sample, rng)
        # The weights of a sample's masked tokens add up to n, as equal weights of all would.
        scale = n * is_masked / is_masked.sum(1, keepdim=True).clamp(min=1)
        context = {"labels": sample.tokens.where(is_masked, -1)}
        targets = {"scale": scale}
        if isinstance(self.data, PairFacts):
            at_start = torch.arange(n, device=scale.device) == 0
            order = sample.is_swapped[:, None].long().where(at_start, -1)
            context |= {"order": order, "lengths": sample.lengths}
            targets["order_scale"] = torch.where(order < 0, 0.0, float(n))
        return Prepared(
            inputs={"tokens": self.replaced(sample.tokens, is_masked, rng), "types": sample.types},
            targets=targets,
            weight=batch.weight,
            total_tokens=batch.total_weight * n,
            static=self.model.static(scale.device),
            context=context | (dropout.context(rng) if self.drops else {}),
        )

    def evaluations(self, batch: Batch, rng: SampleRNG) -> dict[str, Prepared]:
        """The batch without dropout."""
        return {"": dropout.without(self.prepare(batch, rng))}

    def sample_of(self, batch: Batch, rng: SampleRNG) -> Pairs:
        """The tokens before masking: framed pairs, or the last n tokens of a window of n + 1.

        Windows overlap by one token, so without the first one no token comes twice.
        """
        if isinstance(self.data, PairFacts):
            return pairs_of(batch.fields, self.data, rng)
        tokens = batch.fields["tokens"][:, 1:]
        lengths = torch.full_like(tokens[:, 0], tokens.shape[1])
        is_text = tokens != end_of(self.data)
        return Pairs(tokens, torch.zeros_like(tokens), is_text, lengths, lengths < 0)

    def drawn(self, sample: Pairs, rng: SampleRNG) -> Bool[Tensor, "b n"]:
        """True for the tokens to predict: round(share x length) per sample, no special ones."""
        n = sample.tokens.shape[1]
        # Unique keys, so that every device and every sort choose the same tokens.
        keys = (rng.uniform("masked", (n,)) * 2**23).long() * n + torch.arange(
            n, device=sample.tokens.device
        )
        keys = keys.where(sample.is_text, torch.iinfo(torch.int64).max)
        count = (self.share * sample.lengths.double()).round().long().clamp(min=1)
        count = torch.minimum(count, sample.is_text.sum(1))
        most = num_masked(self.share, n)
        least = keys.topk(most, largest=False, sorted=True).values
        last = least.gather(1, (count - 1).clamp(min=0)[:, None])
        return (keys <= last) & (count > 0)[:, None]

    def replaced(
        self, tokens: Int64[Tensor, "b n"], is_masked: Bool[Tensor, "b n"], rng: SampleRNG
    ) -> Int64[Tensor, "b n"]:
        """Replace 80% of the masked tokens by [MASK] and 10% by a random token; 10% stay."""
        shape = tokens.shape[1:]
        kind = rng.uniform("kind", shape)
        other = (rng.uniform("other", shape) * self.data.vocabulary).long()
        new = torch.where(kind < 0.8, self.mask, other.where(kind < 0.9, tokens))
        return new.where(is_masked, tokens)

    def loss(
        self, predictions: Mapping[str, Tensor], targets: Mapping[str, Tensor]
    ) -> Float[Tensor, "b n"]:
        """Sum of the terms in nats; its mean over a sample's tokens is the sample's loss."""
        return predictions["losses"] * sum(targets.values())

    def terms(
        self, predictions: Mapping[str, Tensor], targets: Mapping[str, Tensor]
    ) -> dict[str, Float[Tensor, "b n"]]:
        """The weighted losses of the masked tokens and of the sentence order."""
        losses = predictions["losses"]
        return {k: losses * targets[scale] for k, scale in TERMS.items() if scale in targets}

    def validated_terms(
        self, losses: Float[Tensor, "b n"], targets: Mapping[str, Tensor]
    ) -> dict[str, Float[Tensor, "b n"]]:
        """Both terms with the second task: token 0 has the order's loss, and is never masked."""
        if "order_scale" not in targets:
            return {}
        return {k: losses.where(targets[scale] > 0, 0) for k, scale in TERMS.items()}
