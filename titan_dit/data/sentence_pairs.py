"""Consecutive sentences for BERT's second task, out of Megatron's .bin and .idx.

Sequences of the files are sentences, documents group them: `data tokenize --split-sentences`. The
objective cuts the sentences of a sample in two, and swaps the halves or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from titan_dit.config.section import UserError
from titan_dit.data.blend import BlendedSource
from titan_dit.data.indexed_file import IndexedFile
from titan_dit.data.keys import SentencePairsKeys
from titan_dit.data.order import Numbers
from titan_dit.data.pair_facts import NUM_SPECIAL, PairFacts
from titan_dit.data.sentence_spans import Targets, sentence_numbers, spans_of
from titan_dit.data.token_files import IndexedData, check_ids
from titan_dit.data.token_part import TokenPart

SPECIAL = {"cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]", "pad": "[PAD]"}


@dataclass(frozen=True)
class Surveyed:
    """What rank 0 finds out for all ranks."""

    parts: tuple[TokenPart, ...]
    spans: tuple[Numbers, ...]
    facts: PairFacts


@dataclass(frozen=True, kw_only=True)
class SentencePairs(SentencePairsKeys, IndexedData):
    """Sentences on disk: Megatron's .bin and .idx with a sequence per sentence."""

    def survey(self) -> Surveyed:
        """Check the files and their ids, and find the samples."""
        files = self.files()
        assert files.tokenizer
        ids = files.tokenizer.ids
        if missing := [token for token in SPECIAL.values() if token not in ids]:
            raise UserError(
                f"[data] tokenizer={self.tokenizer} has no {', '.join(missing)}, which pairs of "
                "sentences need. Give a tokenizer of BERT."
            )
        for _ in files.histograms(self.verify):
            pass  # Each one refuses ids beyond the vocabulary.
        targets = Targets(self.sequence_length - NUM_SPECIAL, self.short_share)
        found = zip(files.indexed, files.parts, strict=True)
        spans = tuple(spans_of(file, part, targets) for file, part in found)
        self.check_spans(files.parts, spans)
        used = sum(int((own[:, 1] - own[:, 0]).sum()) for own in spans)
        facts = PairFacts(
            count=sum(map(len, spans)),
            digest=files.digest,
            sequence_length=self.sequence_length,
            vocabulary=files.vocabulary,
            short_share=self.short_share,
            end_of_document=files.end_of_document,
            tokenizer=files.tokenizer_path,
            num_tokens=files.num_tokens,
            num_left_out=files.num_tokens - used,
            **{name: ids[token] for name, token in SPECIAL.items()},
        )
        return Surveyed(files.parts, spans, facts)

    def check_spans(self, parts: Sequence[TokenPart], spans: Sequence[Numbers]) -> None:
        """Refuse a part without a sample: every weighted one must have one, else one of all."""
        empty = [part.prefix for part, own in zip(parts, spans, strict=True) if not len(own)]
        if empty and ((self.weights and not self.part) or len(empty) == len(parts)):
            raise UserError(
                f"[data] {empty[0]}: its part for {self.part_name} has no document of two "
                "sentences. Tokenize with --split-sentences, or choose another `split`."
            )

    def open_surveyed(self, survey: Surveyed) -> SentenceSpans:
        """Open the surveyed files."""
        return SentenceSpans(survey, () if self.part else self.weights)

    def validation_part(self) -> SentencePairs:
        """The same files' second share; weights do not apply."""
        return HeldOutPairs(**{f.name: getattr(self, f.name) for f in fields(self)})


@dataclass(frozen=True, kw_only=True)
class HeldOutPairs(SentencePairs):
    """The second share of `split`."""

    part = 1


class SentenceSpans(BlendedSource):
    """Random access to the samples of several files, numbered one file after another."""

    facts: PairFacts

    def __init__(self, survey: Surveyed, weights: Sequence[float] = ()) -> None:
        self.survey = survey
        self.facts, self.fields = survey.facts, survey.facts.fields
        self.files = [IndexedFile(part.prefix) for part in survey.parts]
        super().__init__([len(spans) for spans in survey.spans], weights)

    def __reduce__(self) -> tuple[type[SentenceSpans], tuple[Surveyed, tuple[float, ...]]]:
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
