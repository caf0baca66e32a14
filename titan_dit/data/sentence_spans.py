"""Which tokens of an indexed dataset of sentences make a sample, as Megatron builds them for BERT.

A sample takes neighbouring sentences of one document, those after the sample before it, until they
reach its target length. A last sentence alone is added to the sample before it. Targets are the
longest that fits; for a share of the samples a random shorter one, drawn by the number of the first
sentence: spans are a pure function of the files. Documents of one sentence have none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from titan_dit.data.indexed_file import IndexedFile
from titan_dit.data.order import Numbers
from titan_dit.data.token_part import TokenPart
from titan_dit.rng import words


@dataclass(frozen=True)
class Targets:
    """The target length of each sample, in tokens."""

    longest: int
    short_share: float
    """Share of the samples whose target is uniform in 2 to `longest`."""

    def of(self, sentences: Numbers) -> Numbers:
        """The targets of samples that begin with these sentences of a file."""
        drawn = words(0, "sentence_spans", torch.from_numpy(sentences), 2).numpy()
        is_short = drawn[:, 0] < self.short_share * 2**32
        short = 2 + drawn[:, 1] % (self.longest - 1)
        found: Numbers = np.where(is_short, short, self.longest)
        return found


def spans_of(file: IndexedFile, part: TokenPart, targets: Targets) -> Numbers:
    """First and last + 1 token of each sample of a part, [samples, 2], ascending."""
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
    """The tokens of the sentences `first` to `end` - 1, at most `wanted`.

    What is too long is cut at the end; but of a long first sentence the beginning, so that the
    second one keeps up to half of the sample.
    """
    head, second = starts[first + 1] - starts[first], starts[first + 2] - starts[first + 1]
    begin = starts[first] + np.maximum(head + np.minimum(second, wanted // 2) - wanted, 0)
    return np.stack((begin, np.minimum(starts[end], begin + wanted)), 1)


def sentence_numbers(file: IndexedFile, first: int, end: int) -> Numbers:
    """The sentence of each token from `first` to `end` - 1, numbered from 0."""
    size = file.dtype.itemsize
    low = np.searchsorted(file.pointers, first * size, side="right")
    high = np.searchsorted(file.pointers, end * size)
    # Of sentences without tokens only one begins at a token.
    inner = np.unique(file.pointers[low:high]) // size
    return np.searchsorted(inner, np.arange(first, end), side="right").astype(np.int64)
