"""Next-token prediction: -log p(token | tokens before it)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from titan_dit.config.section import UserError, show
from titan_dit.config.training import GenerationConfig, SamplingConfig
from titan_dit.data.base import Batch, DataFacts, Field
from titan_dit.data.token_windows import TokenFacts
from titan_dit.data.tokenizing.tokenizer import codec_of
from titan_dit.models.base import ModelConfig
from titan_dit.objectives import dropout, text_drawing
from titan_dit.objectives.base import (
    DataShare,
    Forward,
    Objective,
    Prepared,
    Preview,
    lacks,
)
from titan_dit.objectives.sections import NextTokenConfig
from titan_dit.objectives.text_drawing import Windowed
from titan_dit.rng import SampleRNG


@runtime_checkable
class CausalModel(Windowed, Protocol):
    """A [model] section of a language model."""

    @property
    def name(self) -> str:
        """The name in the catalog."""


def causal(model: ModelConfig) -> CausalModel:
    """The section of a causal language model. Raises UserError for another model."""
    if not isinstance(model, CausalModel) or model.spec().mask != "causal":
        raise UserError(
            f"[model] name={show(model.name)} is no causal language model, as [objective] "
            'name="next_token" needs'
            f'{lacks(model, CausalModel)}. Set [model] name = "gpt".'
        )
    return model


def example(model: ModelConfig) -> tuple[DataFacts, Mapping[str, Field]]:
    """Facts and fields of windows with the model's own sizes."""
    found = causal(model)
    facts = TokenFacts(count=0, sequence_length=found.sequence_length, vocabulary=found.vocab_size)
    return facts, facts.fields


def build(section: NextTokenConfig, model: ModelConfig, facts: DataFacts) -> NextToken:
    """Build the objective; UserError if the data do not fit the model."""
    found = causal(model)
    if not isinstance(facts, TokenFacts):
        raise UserError(
            f"[objective] name={show(section.name)} trains on tokens, which [data] does not hold. "
            'Set [data] name = "tokens".'
        )
    if facts.sequence_length != found.sequence_length:
        raise UserError(
            f"[data] sequence_length={facts.sequence_length} and [model] "
            f"sequence_length={found.sequence_length} differ. Make them equal."
        )
    if facts.vocabulary > found.vocab_size:
        raise UserError(
            f"[data] has token ids up to {facts.vocabulary - 1}, but [model] "
            f"vocab_size={found.vocab_size}. Set [model] vocab_size = {facts.vocabulary}."
        )
    if section.mask_end_of_document and facts.end_of_document is None:
        raise UserError(
            "[objective] mask_end_of_document=true needs the id of the token that ends a "
            "document. Set [data] end_of_document."
        )
    masked = facts.end_of_document if section.mask_end_of_document else None
    return NextToken(found, facts, masked, dropout.drops(found.spec()))


@dataclass(frozen=True)
class NextToken(Objective):
    """Predicts every token of a window but the first."""

    takes = ("tokens",)

    model: CausalModel
    data: TokenFacts
    masked: int | None = None
    """Token id after which the next token is not predicted; None: all are."""
    drops: bool = False
    """The model has dropout."""

    def prepare(self, batch: Batch, rng: SampleRNG) -> Prepared:
        """Inputs are the first n tokens, targets the last n."""
        tokens = batch.fields["tokens"]
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        weight, total = batch.weight, batch.total_weight * targets.shape[1]
        if self.masked is not None:
            weight = weight[:, None] * (inputs != self.masked)
        return Prepared(
            inputs={"tokens": inputs},
            targets={},
            weight=weight,
            total_tokens=total if self.masked is None else None,
            static=self.model.static(tokens.device),
            context={"next_tokens": targets} | (dropout.context(rng) if self.drops else {}),
        )

    def evaluations(self, batch: Batch, rng: SampleRNG) -> dict[str, Prepared]:
        """The batch without dropout."""
        return {"": dropout.without(self.prepare(batch, rng))}

    def loss(
        self, predictions: Mapping[str, Tensor], targets: Mapping[str, Tensor]
    ) -> Float[Tensor, "b n"]:
        """The cross entropy in nats, which the head has computed."""
        return predictions["cross_entropy"]

    def summary(self, losses: Mapping[str, float], facts: DataFacts) -> dict[str, float]:
        """Perplexity, and the bits per byte of the text if the data knows the bytes of a token."""
        [nats] = losses.values()
        # An untrained fp32 model has a few hundred at most; above 709 exp overflows.
        found = {"perplexity": math.exp(min(nats, 700.0))}
        if isinstance(facts, TokenFacts) and facts.bytes_per_token:
            found["bits_per_byte"] = nats / math.log(2) / facts.bytes_per_token
        return found

    def check_preview(self, sampling: SamplingConfig, generation: GenerationConfig) -> None:
        """Raise UserError for a prompt that the data's tokenizer cannot encode."""
        codec = codec_of(self.data.tokenizer)
        text_drawing.prompt_ids(generation.prompt, codec, self.data, "[generation] prompt")

    def preview(
        self,
        forward: Forward,
        sampling: SamplingConfig,
        generation: GenerationConfig,
        seed: int,
        share: DataShare,
    ) -> Preview:
        """Continuations of the prompt of [generation]."""
        num = sampling.num or text_drawing.NUM
        return text_drawing.preview(forward, self.model, self.data, num, generation, seed, share)
