"""The keys of the datasets, without torch, so that `--help` is quick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from titan_dit.config.section import (
    Bound,
    Dim,
    Few,
    FilePath,
    Finite,
    Fraction,
    Named,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UserError,
    show,
)


@dataclass(frozen=True, kw_only=True)
class DataKeys(Named):
    """Keys shared by all datasets."""

    section = "data"

    num_workers: Annotated[int, Bound(least=0, most=256)] = 0
    """Prefetching worker processes per rank; 0 reads in the training process."""

    @property
    def has_validation_part(self) -> bool:
        """True if the dataset keeps a part for validation; [validation] then holds out no rows."""
        return False


@dataclass(frozen=True, kw_only=True)
class LatentsKeys(DataKeys):
    """Latents on disk: shards, a folder per class, or the features and labels of fast-DiT."""

    name = "latents"

    path: FilePath
    """Dataset folder; its layout is detected."""
    scale: Finite | None = None
    """The model's input is (stored - shift) * scale. Unset: the manifest's, else 1."""
    shift: Finite | None = None
    """Unset: the manifest's, else 0."""
    verify: bool = False
    """Check all data at the start: the SHA-256 of every shard, or every file of a folder."""


@dataclass(frozen=True, kw_only=True)
class DigitsKeys(DataKeys):
    """The 1,797 handwritten digits of the UCI repository, 8x8 in [-1, 1]; part of titan_dit."""

    name = "digits"


@dataclass(frozen=True, kw_only=True)
class SyntheticKeys(DataKeys):
    """Standard normal latents with labels."""

    name = "synthetic"

    latent_size: Few
    channels: Few
    num_classes: Dim
    count: PositiveInt = 4096
    """Samples per epoch."""


@dataclass(frozen=True, kw_only=True)
class PlaysKeys(DataKeys):
    """Eight plays of Shakespeare as tokens of a vocabulary of 2,048; part of titan_dit."""

    name = "plays"

    sequence_length: Dim
    """Tokens that the model predicts per sample."""

    @property
    def has_validation_part(self) -> bool:
        """The end of every play."""
        return True


@dataclass(frozen=True, kw_only=True)
class TokensKeys(DataKeys):
    """Token ids on disk: Megatron's .bin and .idx, as `data tokenize` writes them."""

    name = "tokens"

    paths: tuple[FilePath, ...]
    """Datasets, each the path of a .bin and a .idx without these suffixes. Imported weights have
    none."""
    weights: tuple[PositiveFloat, ...] = ()
    """Share of each path in the samples. Empty: every window of every path once an epoch."""
    split: tuple[NonNegativeFloat, ...] = (949.0, 50.0, 1.0)
    """Shares of each path's documents, in their order: for training, for [validation], unused."""
    sequence_length: Dim
    """Tokens that the model predicts per sample; a window has one more."""
    tokenizer: FilePath = ""
    """A tokenizer.json: gives vocabulary and end_of_document, and text its bits per byte."""
    vocab_size: Dim | None = None
    """Ids are below it; a larger one is refused. Unset: the tokenizer's."""
    end_of_document: NonNegativeInt | None = None
    """Id of the token at the end of a document. Unset: the tokenizer's."""
    verify: bool = False
    """Check every id at the start, not only the first 134 million."""

    def __post_init__(self) -> None:
        """Refuse weights and shares that fit no path."""
        super().__post_init__()
        if len(self.weights) not in (0, len(self.paths)):
            raise UserError(
                f"[data] weights={show(self.weights)} fit no paths={show(self.paths)}: "
                f"{len(self.weights)} weights for {len(self.paths)} paths. Give one for each, or "
                "none."
            )
        if not (1 <= len(self.split) <= 3 and self.split[0]):
            raise UserError(
                f"[data] split={show(self.split)} must be up to three shares (training, "
                "validation, unused), the first above 0, such as [949, 50, 1]."
            )
        if not self.tokenizer and self.vocab_size is None:
            raise UserError(
                "[data] tokens need the size of their vocabulary. Set tokenizer (a "
                "tokenizer.json) or vocab_size."
            )

    @property
    def has_validation_part(self) -> bool:
        """True if `split` has a second share."""
        return len(self.split) > 1 and self.split[1] > 0


@dataclass(frozen=True, kw_only=True)
class SentencePairsKeys(TokensKeys):
    """Sentences on disk for BERT: `data tokenize --split-sentences`, with a tokenizer of BERT."""

    name = "sentence_pairs"

    sequence_length: Annotated[int, Bound(least=5, most=10**7)]
    """Tokens of a sample, with [CLS], twice [SEP] and padding."""
    short_seq_prob: Fraction = 0.1
    """Share of the samples with a random shorter length, as Megatron's short_seq_prob."""

    def __post_init__(self) -> None:
        """Require a tokenizer: it has the ids of [CLS], [SEP], [MASK] and [PAD]."""
        super().__post_init__()
        if self.paths and not self.tokenizer:
            raise UserError(
                "[data] sentence_pairs need the ids of [CLS], [SEP], [MASK] and [PAD]. Set "
                "tokenizer (a tokenizer.json)."
            )
