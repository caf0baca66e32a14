"""Prompts: the embeddings that a network of captions is given in place of a dataset's own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from titan_dit.config import user_text
from titan_dit.config.section import UserError
from titan_dit.data.latent_facts import LatentFacts, TextFacts
from titan_dit.pictures import text_encoder
from titan_dit.pictures.encode import same_bits
from titan_dit.pictures.text_encoder import TextEncoder

BATCH, AT_ONCE = 32, 10_000
"""Prompts that are encoded, and that are tokenized, at once."""


@dataclass(frozen=True)
class PromptEncoder:
    """Embeds prompts as the captions of a dataset were embedded."""

    facts: TextFacts
    """How the captions were embedded."""
    tokens: int
    """Tokens to which embeddings are padded."""
    encoder: TextEncoder | None
    """None if only the empty prompt is embedded."""

    def num_cut(self, prompts: Sequence[str]) -> int:
        """Prompts that have more tokens than the network takes."""
        if self.encoder is None:
            return 0
        parts = [prompts[first : first + AT_ONCE] for first in range(0, len(prompts), AT_ONCE)]
        return sum(len(self.encoder.tokenize(part)[1]) for part in parts)

    def fields(self, prompts: Sequence[str], *, same: bool = True) -> dict[str, Tensor]:
        """`text` [b, tokens, d] in the dtype of stored captions, and `text_length` [b]; on the CPU.

        A blank prompt has the stored embedding of the empty one. `same`: the same bits on every
        rank, by one thread. Raises UserError for an embedding that is not finite.
        """
        dtype = self.facts.torch_dtype
        embedded = {prompt: self.facts.null_embedding.to(dtype) for prompt in prompts}
        distinct = [prompt for prompt in embedded if prompt.strip()]
        for first in range(0, len(distinct), BATCH):
            assert self.encoder is not None
            some = distinct[first : first + BATCH]
            with same_bits() if same else nullcontext():
                found = self.encoder.encode(some)
            for prompt, embedding in zip(some, found, strict=True):
                embedded[prompt] = self.stored(embedding, prompt)
        rows = [embedded[prompt] for prompt in prompts]
        return {
            "text": torch.stack([functional.pad(r, (0, 0, 0, self.tokens - len(r))) for r in rows]),
            "text_length": torch.tensor([len(row) for row in rows]),
        }

    def stored(self, embedding: Tensor, prompt: str) -> Tensor:
        """An embedding in the dtype of stored captions. Raises UserError if it is out of range."""
        kept = embedding.to(self.facts.torch_dtype).cpu()
        if not kept.isfinite().all():
            raise UserError(
                f"the prompt {prompt[:60]!r} has an embedding with values outside of "
                f"{self.facts.dtype}, in which the captions were stored. Change its words."
            )
        return kept


def open_encoder(
    prompts: Sequence[str],
    data: LatentFacts,
    source: str | None,
    tokens: int,
    device: torch.device,
    where: str,
) -> PromptEncoder:
    """An encoder of prompts; without a network if none is given and all prompts are blank.

    `source`: a folder or name; None takes the recorded one that embedded the captions of `data`.
    `tokens`: the network's number of tokens. `where` names the flag or key of `source` in errors.
    Raises UserError for another encoder than that of the captions, and if there is none.
    """
    text = data.text
    assert text is not None
    for prompt in prompts:
        if not user_text.is_utf8(prompt):
            raise UserError(f"the prompt {prompt[:60]!a} is not UTF-8. Write it as such.")
    if not text.kind:
        raise UserError(
            "the weights were imported without a text encoder, so no prompts can be embedded. "
            "Import them with that of their pipeline (convert --text-encoder PIPELINE), or train "
            "from them ([checkpoint] init) on captions and draw from that run."
        )
    # The empty prompt's embedding is stored with the data.
    if not source and not any(prompt.strip() for prompt in prompts):
        return PromptEncoder(text, tokens, None)
    if not source and not data.text_source:
        raise UserError(
            f"{where} is not set, and the folder of the text encoder that made the embeddings of "
            f"the captions, {text}, is not recorded. Give its folder: {where} DIR."
        )
    try:
        encoder = text_encoder.load(source or data.text_source, device, where=where)
    except UserError as error:
        if source:
            raise
        raise UserError(
            f"{error} It made the embeddings of the captions. If it is somewhere else now: "
            f"{where} DIR."
        ) from None
    return PromptEncoder(text, tokens, used_as(encoder, text, tokens, where))


def used_as(encoder: TextEncoder, facts: TextFacts, tokens: int, where: str) -> TextEncoder:
    """A text encoder as it embedded the captions of a dataset.

    `tokens`: the most that the network takes. Raises UserError for another one.
    """
    alike = replace(encoder, layers=facts.layers, template=facts.template, padding=facts.padding)
    alike.check_fits(facts, where)
    if not facts.layers or max(facts.layers) > encoder.num_layers:
        raise UserError(
            f"{where} {encoder.source} has hidden states 0 to {encoder.num_layers}, but the "
            f"embeddings of captions are of {list(facts.layers)}. Make the dataset again."
        )
    most = text_encoder.most_tokens(encoder.kind, encoder.module.config) or tokens
    longest = facts.tokens if facts.padding == "kept" else min(tokens, most)
    return replace(alike, max_tokens=longest).without_unused()
