"""The [data] sections: the keys of every dataset, and how it is opened.

Nothing here imports torch when it is imported, so that `--help` is quick.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

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
    Table,
    UserError,
    hints_of,
    show,
)

if TYPE_CHECKING:
    from titan_dit.data.base import Source
    from titan_dit.data.folders import LatentFolder
    from titan_dit.data.latent_facts import BucketShape
    from titan_dit.data.latents import LatentShards
    from titan_dit.data.mixed_latents import MixedLatents
    from titan_dit.data.sentence_pairs import PairSurvey, SentenceSpans
    from titan_dit.data.synthetic import SyntheticLatents
    from titan_dit.data.token_windows import TokenSurvey, TokenWindows


@dataclass(frozen=True, kw_only=True)
class DataConfig(Named):
    """The [data] section: keys of every dataset, and how to open it."""

    section = "data"

    num_workers: Annotated[int, Bound(least=0, most=256)] = 0
    """Prefetching worker processes per rank; 0 reads in the training process."""

    @property
    def has_validation_part(self) -> bool:
        """True if the dataset keeps a part for validation; [validation] then holds out no rows."""
        return False

    @abstractmethod
    def open(self) -> Source:
        """Open the dataset; raises UserError if files are missing or damaged."""
        raise NotImplementedError

    def survey(self) -> Any:
        """List or check all files. Rank 0 calls it; all ranks pass its result to `open_surveyed`.

        Override both if opening lists many files, or checks all of them.
        """
        return None

    def open_surveyed(self, survey: Any) -> Source:
        """Open the dataset, given the result of `survey` on rank 0."""
        return self.open()

    def validation_part(self) -> DataConfig:
        """Return the part kept apart for validation, if `has_validation_part`."""
        raise NotImplementedError

    def bucket_counts(self, text_multiple: int = 0) -> Mapping[BucketShape, int]:
        """(shape, tokens of the text) -> rows of each bucket of data that is there; else {}.

        For dry runs: it must be quick. `text_multiple`: see `Source`; without it, and without
        captions, buckets have 0 tokens.
        """
        return {}

    def sample_shape(self) -> tuple[int, ...] | None:
        """Shape of the largest samples of data that is there; None for other data.

        A [model] without sizes takes them from it. It must be quick.
        """
        return None

    def at(self, path: str) -> DataConfig:
        """Return this section for a dataset at another path, for [validation] path.

        Raises UserError if it has no path.
        """
        if "path" not in hints_of(type(self)):
            raise UserError(
                f"[data] name={show(self.name)} has no path. Remove path and set samples."
            )
        return replace(self, **{"path": path})  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class DatasetConfig(Table):
    """One of several datasets: its folder, how often its rows come, and its caption rule."""

    path: FilePath
    """Dataset folder; its layout is detected."""
    repeats: Few = 1
    """Times that each of its rows comes in an epoch."""
    weight: PositiveFloat | None = None
    """Its share of the samples, relative to the other weights; in place of repeats."""
    condition_dropout: Fraction | None = None
    """In place of [objective] condition_dropout; 1 trains on no captions or classes of it."""

    def check(self) -> None:
        """Raise UserError for repeats beside a weight."""
        if self.weight is not None and self.repeats != 1:
            raise UserError(
                f"[data] datasets: {self.path} has weight={show(self.weight)} and repeats="
                f"{self.repeats}. Keep one of them."
            )


@dataclass(frozen=True, kw_only=True)
class Latents(DataConfig):
    """Latents on disk: shards, a folder per class, or the features and labels of fast-DiT."""

    name = "latents"
    replaces: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "path": ("datasets",),
        "datasets": ("path", "buckets"),
    }

    path: FilePath = ""
    """Dataset folder; its layout is detected. Or set datasets."""
    datasets: tuple[DatasetConfig, ...] = ()
    """Several datasets: [[data.datasets]] tables with path, repeats or weight, condition_dropout
    (docs/data.md)."""
    buckets: tuple[str, ...] | None = None
    """Names of the buckets of path to train on, as `data report` prints them: "832x480", or
    "17 x 832x480" of clips. Unset: all."""
    scale: Finite | None = None
    """The model's input is (stored - shift) * scale. Unset: the manifest's, else 1."""
    shift: Finite | None = None
    """Unset: the manifest's, else 0."""
    verify: bool = False
    """Check all data at the start: the SHA-256 of every shard, or every file of a folder."""

    def __post_init__(self) -> None:
        """Raise UserError unless path or datasets are set, and weights for all datasets or none."""
        super().__post_init__()
        if bool(self.path) == bool(self.datasets):
            given = (
                "are both set. Keep one of them" if self.path else "are missing. Set one of them"
            )
            raise UserError(
                f"[data] path and datasets {given}: --data.path FOLDER, or [[data.datasets]] "
                "tables, each with a path."
            )
        for number, each in enumerate(self.datasets):
            if not each.path:
                raise UserError(
                    f'[data] datasets[{number}] path="" is empty. Set it to a dataset folder.'
                )
        if self.buckets is not None and (self.datasets or not self.buckets):
            wrong = "are of one path, but datasets is set" if self.datasets else "choose nothing"
            raise UserError(
                f"[data] buckets={show(self.buckets)} {wrong}. Name some buckets of path, or leave "
                "buckets out for all."
            )
        without = [each.path for each in self.datasets if each.weight is None]
        if 0 < len(without) < len(self.datasets):
            raise UserError(
                f"[data] datasets: {without[0]} has no weight, but others have. Give all of them "
                "a weight, or none."
            )

    @property
    def parts(self) -> tuple[Latents, ...]:
        """The section of each dataset alone."""
        return tuple(self.at(each.path) for each in self.datasets) or (self,)

    def at(self, path: str) -> Latents:
        """See `DataConfig.at`; keeps the chosen buckets that the dataset has."""
        found = replace(self, path=path, datasets=())
        if self.buckets is None:
            return found
        from titan_dit.data.manifest import bucket_names, read_manifest

        there = set(bucket_names(read_manifest(Path(path))))
        return replace(found, buckets=tuple(b for b in self.buckets if b in there) or self.buckets)

    def bucket_counts(self, text_multiple: int = 0) -> Mapping[BucketShape, int]:
        """See `DataConfig.bucket_counts`; reads the manifests, and the lengths of captions.

        For several datasets the counts are samples of an epoch, held-out rows included.
        """
        from titan_dit.data.latent_facts import clip_of
        from titan_dit.data.manifest import SHARD_FORMATS, read_json, read_manifest
        from titan_dit.data.mixed_order import rates

        folders = [Path(part.path) for part in self.parts]
        if any(read_json(folder).get("format") not in SHARD_FORMATS for folder in folders):
            return {}
        if text_multiple:
            return self._text_group_counts(text_multiple)
        found = [read_manifest(folder, self.buckets)["buckets"] for folder in folders]
        if not self.datasets:
            counts = {(bucket["shape"], 0): bucket["count"] for bucket in found[0]}
        else:
            totals = [sum(bucket["count"] for bucket in buckets) for buckets in found]
            has_clips = any(len(buckets[0]["shape"]) == 4 for buckets in found)
            counts = dict[tuple[tuple[int, ...], int], Any]()
            for buckets, rate in zip(found, rates(self.datasets, totals), strict=True):
                for bucket in buckets:
                    shape = clip_of(bucket["shape"]) if has_clips else bucket["shape"]
                    counts[shape, 0] = counts.get((shape, 0), 0) + bucket["count"] * rate
            counts = {shape: max(1, round(count)) for shape, count in counts.items()}
        return counts if len(counts) > 1 else {}

    def sample_shape(self) -> tuple[int, ...] | None:
        """See `DataConfig.sample_shape`; reads the manifests of shards."""
        from titan_dit.data.manifest import SHARD_FORMATS, read_json, read_manifest

        folders = [Path(part.path) for part in self.parts]
        if any(read_json(folder).get("format") not in SHARD_FORMATS for folder in folders):
            return None
        shapes = [
            bucket["shape"]
            for folder in folders
            for bucket in read_manifest(folder, self.buckets)["buckets"]
        ]
        largest: tuple[int, ...] = max(shapes, key=math.prod)
        return largest

    def _text_group_counts(self, text_multiple: int) -> Mapping[BucketShape, int]:
        from titan_dit.data.buckets import BucketOrder

        labels_unread = (None,) * len(self.parts) if self.datasets else None
        quick = replace(self, verify=False)
        source = quick.open_surveyed(labels_unread).in_text_groups(text_multiple)
        if not source.text_multiple:
            return self.bucket_counts()
        source.check_holds(("text",))
        names = source.bucket_names
        order = source.order(0, (), "feistel", [1] * len(names))
        assert isinstance(order, BucketOrder)
        samples = [max(1, round(bucket.samples)) for bucket in order.buckets]
        facts: Any = source.facts
        shapes = zip(facts.bucket_shapes, facts.bucket_text, strict=True)
        return dict(zip(shapes, samples, strict=True))

    def open(self) -> LatentShards | LatentFolder | MixedLatents:
        """Open the shards, or list the files."""
        return self.open_surveyed(self.survey())

    def survey(self) -> Any:
        """See `latents.survey`; a tuple of several datasets."""
        from titan_dit.data import latents

        if self.datasets:
            return tuple(map(latents.survey, self.parts))
        return latents.survey(self)

    def open_surveyed(self, survey: Any) -> LatentShards | LatentFolder | MixedLatents:
        """Open the listed files, or the shards; `verify` reads and checks all data."""
        from titan_dit.data import latents, mixed_latents

        if not self.datasets:
            return latents.open_surveyed(self, survey)
        return mixed_latents.mixed(
            [latents.open_surveyed(*pair) for pair in zip(self.parts, survey, strict=True)],
            self.datasets,
        )


@dataclass(frozen=True, kw_only=True)
class Digits(DataConfig):
    """The 1,797 handwritten digits of the UCI repository, 8x8 in [-1, 1]; part of titan_dit."""

    name = "digits"

    def open(self) -> LatentShards:
        """Open the single shard."""
        from titan_dit.data.latents import LatentShards

        return LatentShards(Path(__file__).parent / "digits", verify=True)


@dataclass(frozen=True, kw_only=True)
class Synthetic(DataConfig):
    """Standard normal latents with labels."""

    name = "synthetic"

    latent_size: Few
    channels: Few
    num_classes: Dim
    count: PositiveInt = 4096
    """Samples per epoch."""

    def open(self) -> SyntheticLatents:
        """Return the source."""
        from titan_dit.data.synthetic import SyntheticLatents

        return SyntheticLatents(self)


@dataclass(frozen=True, kw_only=True)
class IndexedData(DataConfig):
    """Keys of a dataset that is read from a .bin and a .idx."""

    part: ClassVar[int] = 0
    """Which share of `split`: 0 for training, 1 for validation."""

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
        """Raise UserError for weights and shares that fit no path."""
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

    @property
    def part_name(self) -> str:
        """The share's name in messages."""
        return ("training", "validation")[self.part]

    def open(self) -> Source:
        """Check the files, and open them."""
        return self.open_surveyed(self.survey())

    def at(self, path: str) -> IndexedData:
        """All documents of another dataset."""
        return replace(self, paths=(path,), weights=(), split=(1.0,))

    def values(self) -> dict[str, Any]:
        """The keys and their values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, kw_only=True)
class Tokens(IndexedData):
    """Token ids on disk: Megatron's .bin and .idx, as `data tokenize` writes them."""

    name = "tokens"

    def survey(self) -> TokenSurvey:
        """Check the files and their ids."""
        from titan_dit.data import token_windows

        return token_windows.survey(self)

    def open_surveyed(self, survey: TokenSurvey) -> TokenWindows:
        """Open the surveyed files."""
        from titan_dit.data.token_windows import TokenWindows

        return TokenWindows(survey, () if self.part else self.weights)

    def validation_part(self) -> Tokens:
        """The same documents' second share; weights do not apply."""
        return HeldOutTokens(**self.values())


@dataclass(frozen=True, kw_only=True)
class HeldOutTokens(Tokens):
    """The second share of `split`."""

    part = 1


PLAYS = Path(__file__).parent / "plays"


@dataclass(frozen=True, kw_only=True)
class Plays(DataConfig):
    """Eight plays of Shakespeare as tokens of a vocabulary of 2,048; part of titan_dit.

    Documents 0 to 7 are the beginnings of the plays, 8 to 15 their last 5%.
    """

    name = "plays"

    sequence_length: Dim
    """Tokens that the model predicts per sample."""

    @property
    def has_validation_part(self) -> bool:
        """True: the end of every play is for validation."""
        return True

    @property
    def tokens(self) -> Tokens:
        """The section of the same files as [data] name = "tokens"."""
        return Tokens(
            paths=(str(PLAYS / "plays_text_document"),),
            split=(8, 8),
            sequence_length=self.sequence_length,
            tokenizer=str(PLAYS / "tokenizer.json"),
            verify=True,
        )

    def open(self) -> Source:
        """Open the beginnings of the plays, for training."""
        return self.tokens.open()

    def validation_part(self) -> DataConfig:
        """The section of the ends of the plays."""
        return self.tokens.validation_part()


@dataclass(frozen=True, kw_only=True)
class SentencePairs(IndexedData):
    """Sentences on disk for BERT: `data tokenize --split-sentences`, with a tokenizer of BERT."""

    name = "sentence_pairs"

    sequence_length: Annotated[int, Bound(least=5, most=10**7)]
    """Tokens of a sample, with [CLS], twice [SEP] and padding."""
    short_seq_prob: Fraction = 0.1
    """Share of the samples with a random shorter length, as Megatron's short_seq_prob."""

    def __post_init__(self) -> None:
        """Raise UserError without a tokenizer: it has the ids of [CLS], [SEP], [MASK] and [PAD]."""
        super().__post_init__()
        if self.paths and not self.tokenizer:
            raise UserError(
                "[data] sentence_pairs need the ids of [CLS], [SEP], [MASK] and [PAD]. Set "
                "tokenizer (a tokenizer.json)."
            )

    def survey(self) -> PairSurvey:
        """Check the files and their ids, and find the samples."""
        from titan_dit.data import sentence_pairs

        return sentence_pairs.survey(self)

    def open_surveyed(self, survey: PairSurvey) -> SentenceSpans:
        """Open the surveyed files."""
        from titan_dit.data.sentence_pairs import SentenceSpans

        return SentenceSpans(survey, () if self.part else self.weights)

    def validation_part(self) -> SentencePairs:
        """The same files' second share; weights do not apply."""
        return HeldOutPairs(**self.values())


@dataclass(frozen=True, kw_only=True)
class HeldOutPairs(SentencePairs):
    """The second share of `split`."""

    part = 1
