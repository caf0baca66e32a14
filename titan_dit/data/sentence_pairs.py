"""Consecutive sentences for BERT's second task, out of Megatron's .bin and .idx.

Sequences of the files are sentences, documents group them: `data tokenize --split-sentences`. The
objective cuts the sentences of a sample in two, and swaps the halves or not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from titan_dit.config.section import UserError
from titan_dit.data import token_part
from titan_dit.data.base import DataConfig, Source
from titan_dit.data.blend import BlendOrder
from titan_dit.data.indexed_file import IndexedFile
from titan_dit.data.keys import SentencePairsKeys
from titan_dit.data.order import SampleOrder
from titan_dit.data.pair_facts import NUM_SPECIAL, PairFacts
from titan_dit.data.sentence_spans import Numbers, Targets, sentence_numbers, spans_of
from titan_dit.data.token_part import TokenPart
from titan_dit.data.token_windows import CHECKED_TOKENS
from titan_dit.data.tokenizer_file import read_tokenizer

SPECIAL = {"cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]", "pad": "[PAD]"}


@dataclass(frozen=True)
class Surveyed:
    """What rank 0 finds out for all ranks."""

    parts: tuple[TokenPart, ...]
    spans: tuple[Numbers, ...]
    facts: PairFacts


@dataclass(frozen=True, kw_only=True)
class SentencePairs(SentencePairsKeys, DataConfig):
    """Sentences on disk: Megatron's .bin and .idx with a sequence per sentence."""

    part: ClassVar[int] = 0
    """Which share of `split`."""

    def open(self) -> SentenceSpans:
        """Check the files, and open them."""
        return self.open_surveyed(self.survey())

    def survey(self) -> Surveyed:
        """Check the files and their ids, and find the samples."""
        tokenizer = read_tokenizer(Path(self.tokenizer))
        if missing := [token for token in SPECIAL.values() if token not in tokenizer.ids]:
            raise UserError(
                f"[data] tokenizer={self.tokenizer} has no {', '.join(missing)}, which pairs of "
                "sentences need. Give a tokenizer of BERT."
            )
        vocabulary = self.vocabulary or tokenizer.vocabulary
        found = [token_part.survey(Path(path), self.split, self.part) for path in self.paths]
        parts = [part for _, part in found]
        most = sum(map(len, parts)) if self.verify else max(CHECKED_TOKENS // len(parts), 1)
        for file, part in found:
            token_part.histogram(file, part, vocabulary, most)
        targets = Targets(self.sequence_length - NUM_SPECIAL, self.short_share)
        spans = tuple(spans_of(file, part, targets) for file, part in found)
        empty = [part.prefix for part, own in zip(parts, spans, strict=True) if not len(own)]
        if empty and (self.weights or len(empty) == len(parts)):
            what = ("training", "validation")[self.part]
            raise UserError(
                f"[data] {empty[0]}: its part for {what} has no document of two sentences. "
                "Tokenize with --split-sentences, or choose another `split`."
            )
        used = sum(int((own[:, 1] - own[:, 0]).sum()) for own in spans)
        end = tokenizer.end_of_document if self.end_of_document is None else self.end_of_document
        facts = PairFacts(
            count=sum(map(len, spans)),
            digest=hashlib.sha256(" ".join(part.digest for part in parts).encode()).hexdigest(),
            sequence_length=self.sequence_length,
            vocabulary=vocabulary,
            short_share=self.short_share,
            end_of_document=end,
            tokenizer=self.tokenizer,
            num_tokens=sum(map(len, parts)),
            num_left_out=sum(map(len, parts)) - used,
            **{name: tokenizer.ids[token] for name, token in SPECIAL.items()},
        )
        return Surveyed(tuple(parts), spans, facts)

    def open_surveyed(self, survey: Surveyed) -> SentenceSpans:
        """Open the surveyed files."""
        return SentenceSpans(survey, () if self.part else self.weights)

    def validation_part(self) -> SentencePairs:
        """The same files' second share; weights do not apply."""
        return HeldOutPairs(**{f.name: getattr(self, f.name) for f in fields(self)})

    def at(self, path: str) -> SentencePairs:
        """All documents of another dataset."""
        return replace(self, paths=(path,), weights=(), split=(1.0,))


@dataclass(frozen=True, kw_only=True)
class HeldOutPairs(SentencePairs):
    """The second share of `split`."""

    part = 1


class SentenceSpans(Source):
    """Random access to the samples of several files, numbered one file after another."""

    facts: PairFacts

    def __init__(self, survey: Surveyed, weights: Sequence[float] = ()) -> None:
        self.survey, self.weights = survey, tuple(weights)
        self.facts, self.fields = survey.facts, survey.facts.fields
        self.files = [IndexedFile(part.prefix) for part in survey.parts]
        self.counts = [len(spans) for spans in survey.spans]
        self.ends = np.cumsum(self.counts)

    def __reduce__(self) -> tuple[type[SentenceSpans], tuple[Surveyed, tuple[float, ...]]]:
        """Pickle what was surveyed; a spawned process opens the files itself."""
        return SentenceSpans, (self.survey, self.weights)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Read one sample. Raises UserError for an id outside the vocabulary."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        path = int(np.searchsorted(self.ends, index, side="right"))
        row = index - int(self.ends[path]) + self.counts[path]
        first, end = self.survey.spans[path][row].tolist()
        file, size = self.files[path], self.facts.sequence_length - NUM_SPECIAL
        ids = file.ids[first:end]
        token_part.check_ids(ids, self.facts.vocabulary, file, first)
        tokens, sentences = torch.zeros(size, dtype=torch.int64), torch.full((size,), -1)
        tokens[: end - first] = torch.from_numpy(ids.astype(np.int64))
        sentences[: end - first] = torch.from_numpy(sentence_numbers(file, first, end))
        return {"tokens": tokens, "sentences": sentences}

    def order(self, seed: int, held_out: tuple[int, ...], data_order: str) -> SampleOrder:
        """Return the order of training: a permutation an epoch, or a blend by weights."""
        if not self.weights:
            return super().order(seed, held_out, data_order)
        return BlendOrder.of(seed, self.counts, self.weights, held_out, data_order)
