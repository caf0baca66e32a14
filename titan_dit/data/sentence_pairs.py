"""Consecutive sentences for BERT's second task, from Megatron's .bin and .idx."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from titan_dit.config.section import UserError
from titan_dit.data.base import DataFacts, Field
from titan_dit.data.indexed_file import IndexedFile
from titan_dit.data.order import BlendedSource, Numbers
from titan_dit.data.sections import SentencePairs
from titan_dit.data.token_windows import TokenPart, check_ids, open_files
from titan_dit.rng import words

NUM_SPECIAL = 3
"""Special tokens of a sample: [CLS] A [SEP] B [SEP]."""


@dataclass(frozen=True, kw_only=True)
class PairFacts(DataFacts):
    """Metadata of samples of two or more consecutive sentences, to be cut into two spans."""

    differing: ClassVar[frozenset[str]] = DataFacts.differing | {"num_tokens", "num_left_out"}

    sequence_length: int
    """Tokens of a sample, with special tokens and padding."""
    vocabulary: int
    """Size of the vocabulary."""
    cls: int
    """Id of [CLS]."""
    sep: int
    """Id of [SEP]."""
    mask: int
    """Id of [MASK]."""
    pad: int = 0
    """Id of [PAD]."""
    end_of_document: int | None = None
    """Id of the token that ends a document; None if the files have none. It is never masked."""
    short_share: float = 0.0
    """Share of the samples that were built with a shorter target length."""
    tokenizer: str = ""
    """Path of the tokenizer.json; empty if unknown."""
    num_tokens: int = 0
    """Tokens of this part of the dataset."""
    num_left_out: int = 0
    """Tokens in no sample: cut off, or in documents of one sentence."""

    @property
    def about(self) -> str:
        """Tokens and remainder, for the console."""
        return f"pairs of {self.num_tokens:,} tokens, {self.num_left_out:,} left out"

    @property
    def fields(self) -> dict[str, Field]:
        """`tokens`: the ids. `sentences`: the number of each token's sentence, from 0.

        Both are padded at the end, `sentences` with -1. Special tokens are not included.
        """
        field = Field(torch.int64, (self.sequence_length - NUM_SPECIAL,))
        return {"tokens": field, "sentences": field}


@dataclass(frozen=True)
class Targets:
    """The target length of each sample, in tokens."""

    longest: int
    short_share: float
    """Share of the samples whose target length is uniform in 2 to `longest`."""

    def of(self, sentences: Numbers) -> Numbers:
        """Target lengths of samples, by the number of their first sentence in the file."""
        drawn = words(0, "sentence_spans", torch.from_numpy(sentences), 2).numpy()
        is_short = drawn[:, 0] < self.short_share * 2**32
        short = 2 + drawn[:, 1] % (self.longest - 1)
        found: Numbers = np.where(is_short, short, self.longest)
        return found


def spans_of(file: IndexedFile, part: TokenPart, targets: Targets) -> Numbers:
    """(first, last + 1) token of each sample of a part, [samples, 2], ascending."""
    size = file.dtype.itemsize
    edges = np.array([part.first, part.end], np.int64) * size
    low, high = np.searchsorted(file.pointers, edges).tolist()
    starts = np.append(file.pointers[low:high], edges[1]) // size
    documents = file.documents[(file.documents >= low) & (file.documents <= high)] - low
    at, stop = documents[:-1], documents[1:]
    found = [np.empty((0, 2), np.int64)]
    # One sample of every document at a time.
    while len(at):
        at, stop = at[stop - at >= 2], stop[stop - at >= 2]
        wanted = targets.of(at + low)
        next_at = np.maximum(np.searchsorted(starts, starts[at] + wanted), at + 2)
        next_at = np.where(stop - next_at < 2, stop, next_at)
        found.append(trimmed(starts, at, next_at, wanted))
        at = next_at
    spans = np.concatenate(found)
    ordered: Numbers = spans[np.argsort(spans[:, 0], kind="stable")]
    return ordered


def trimmed(starts: Numbers, first: Numbers, end: Numbers, wanted: Numbers) -> Numbers:
    """(first, last + 1) token of the sentences `first` to `end` - 1, at most `wanted` tokens.

    A sample that is too long is cut at its end. A long first sentence is cut at its beginning, so
    that the second one keeps up to half of the sample.
    """
    head, second = starts[first + 1] - starts[first], starts[first + 2] - starts[first + 1]
    begin = starts[first] + np.maximum(head + np.minimum(second, wanted // 2) - wanted, 0)
    return np.stack((begin, np.minimum(starts[end], begin + wanted)), 1)


def sentence_numbers(file: IndexedFile, first: int, end: int) -> Numbers:
    """Sentence number, from 0, of each token from `first` to `end` - 1."""
    size = file.dtype.itemsize
    low = np.searchsorted(file.pointers, first * size, side="right")
    high = np.searchsorted(file.pointers, end * size)
    # Of sentences without tokens only one begins at a token.
    inner = np.unique(file.pointers[low:high]) // size
    return np.searchsorted(inner, np.arange(first, end), side="right").astype(np.int64)


SPECIAL = {"cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]", "pad": "[PAD]"}


@dataclass(frozen=True)
class PairSurvey:
    """Result of rank 0's survey, for all ranks."""

    parts: tuple[TokenPart, ...]
    spans: tuple[Numbers, ...]
    facts: PairFacts


def survey(section: SentencePairs) -> PairSurvey:
    """Check the files and their ids, and find the samples.

    Raises UserError if the tokenizer lacks a token of BERT's.
    """
    files = open_files(section)
    assert files.tokenizer
    ids = files.tokenizer.ids
    if missing := [token for token in SPECIAL.values() if token not in ids]:
        raise UserError(
            f"[data] tokenizer={section.tokenizer} has no {', '.join(missing)}, which pairs of "
            "sentences need. Give a tokenizer of BERT."
        )
    for _ in files.histograms(section.verify):
        pass  # Each one refuses ids beyond the vocabulary.
    targets = Targets(section.sequence_length - NUM_SPECIAL, section.short_seq_prob)
    found = zip(files.indexed, files.parts, strict=True)
    spans = tuple(spans_of(file, part, targets) for file, part in found)
    check_spans(section, files.parts, spans)
    used = sum(int((own[:, 1] - own[:, 0]).sum()) for own in spans)
    facts = PairFacts(
        count=sum(map(len, spans)),
        digest=files.digest,
        sequence_length=section.sequence_length,
        vocabulary=files.vocabulary,
        short_share=section.short_seq_prob,
        end_of_document=files.end_of_document,
        tokenizer=files.tokenizer_path,
        num_tokens=files.num_tokens,
        num_left_out=files.num_tokens - used,
        **{name: ids[token] for name, token in SPECIAL.items()},
    )
    return PairSurvey(files.parts, spans, facts)


def check_spans(
    section: SentencePairs, parts: Sequence[TokenPart], spans: Sequence[Numbers]
) -> None:
    """Raise UserError if a file's part has no sample.

    With weights every file's training part needs one, else at least one file.
    """
    empty = [part.prefix for part, own in zip(parts, spans, strict=True) if not len(own)]
    if empty and ((section.weights and not section.part) or len(empty) == len(parts)):
        raise UserError(
            f"[data] {empty[0]}: its part for {section.part_name} has no document of two "
            "sentences. Tokenize with --split-sentences, or choose another `split`."
        )


class SentenceSpans(BlendedSource):
    """Random access to the samples of several files, numbered one file after another."""

    facts: PairFacts

    def __init__(self, survey: PairSurvey, weights: Sequence[float] = ()) -> None:
        self.survey = survey
        self.facts, self.fields = survey.facts, survey.facts.fields
        self.files = [IndexedFile(part.prefix) for part in survey.parts]
        super().__init__([len(spans) for spans in survey.spans], weights)

    def __reduce__(self) -> tuple[type[SentenceSpans], tuple[PairSurvey, tuple[float, ...]]]:
        """Pickle what was surveyed; a spawned process opens the files itself."""
        return SentenceSpans, (self.survey, self.weights)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Read one sample. Raises UserError for an id outside the vocabulary."""
        path, row = self.place_of(index)
        first, end = self.survey.spans[path][row].tolist()
        file, size = self.files[path], self.facts.sequence_length - NUM_SPECIAL
        ids = file.ids[first:end]
        check_ids(ids, self.facts.vocabulary, file, first)
        tokens, sentences = torch.zeros(size, dtype=torch.int64), torch.full((size,), -1)
        tokens[: end - first] = torch.from_numpy(ids.astype(np.int64))
        sentences[: end - first] = torch.from_numpy(sentence_numbers(file, first, end))
        return {"tokens": tokens, "sentences": sentences}
