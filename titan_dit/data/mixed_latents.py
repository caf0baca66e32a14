"""Several datasets of latents as one: [[data.datasets]].

Rows are numbered bucket by bucket, and within a bucket dataset by dataset. So a bucket holds the
rows of its shape of all datasets, and each of these runs of rows is a group of its own: rows are
held out for validation from every bucket of every dataset. Beside clips a picture is one of a
single frame.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import repeat
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor
from torch.nn import functional

from titan_dit.config.section import UserError, show
from titan_dit.data.base import Field, SampleOrder, Source
from titan_dit.data.buckets import BucketOrder, split_held_out
from titan_dit.data.folders import LatentFolder
from titan_dit.data.latent_facts import (
    CONDITION_DROPOUT,
    IDS,
    OF_THE_RUN,
    BucketShape,
    LatentFacts,
    TextFacts,
    VAEFacts,
    beside_fields,
    name_of,
)
from titan_dit.data.latents import LatentShards
from titan_dit.data.manifest import digest_of
from titan_dit.data.mixed_order import MixedOrder, Part, rates
from titan_dit.data.sections import DatasetConfig
from titan_dit.data.text_groups import TextGroups, padded

ALIKE = ("posterior", "scale", "shift", "value_range", "vae", "reference")
"""Facts that all datasets share: the network's input has one meaning."""
TEXT_ALIKE = ("kind", "digest", "tokenizer", "layer", "template", "width", "dtype")
"""Facts of the text encoder that all datasets share."""
FULL = 255
"""Value of a mask where the loss counts in full."""
Latent = LatentShards | LatentFolder | TextGroups


def mixed(
    sources: Sequence[LatentShards | LatentFolder], datasets: Sequence[DatasetConfig]
) -> LatentShards | LatentFolder | MixedLatents:
    """The datasets as one; a single one that changes nothing as it is.

    Raises UserError for datasets that do not fit each other; the message names two folders.
    """
    if len(datasets) == 1 and datasets[0] == DatasetConfig(path=datasets[0].path):
        return sources[0]
    for number in range(1, len(sources)):
        for earlier in range(number):
            check_alike(sources, datasets, earlier, number)
    if any(source.facts.has_clips for source in sources):
        sources = [source.as_clips() for source in sources]
    return MixedLatents(sources, datasets)


def rates_of(sources: Sequence[Latent], datasets: Sequence[DatasetConfig]) -> Iterator[str]:
    """A warning for the console if clips differ in their frames per second."""
    rates = [
        (source.facts.fps, dataset.path)
        for source, dataset in zip(sources, datasets, strict=True)
        if source.facts.fps is not None
    ]
    if other := next((rate for rate in rates if rate[0] != rates[0][0]), None):
        (ours, here), (theirs, there) = rates[0], other
        yield (
            f"warning: [data] datasets: clips of {here} have {ours:g} frames per second, those of "
            f"{there} {theirs:g}, so motion has two speeds. Encode both with the same --fps."
        )


def check_alike(
    sources: Sequence[Latent], datasets: Sequence[DatasetConfig], first: int, other: int
) -> None:
    """Raise UserError for two datasets that do not fit each other."""
    ours, theirs = sources[first].facts, sources[other].facts
    where, there = f"[data] datasets: {datasets[first].path}", datasets[other].path
    if ours.digest == theirs.digest:
        raise UserError(
            f"{where} and {there} hold the same data. Name it once, with repeats or a weight."
        )
    if ours.shape[0] != theirs.shape[0]:
        raise UserError(
            f"{where} holds latents of {ours.shape[0]} channels, {there} of {theirs.shape[0]}. "
            "Encode both by the same autoencoder."
        )
    both_clips = ours.has_clips and theirs.has_clips
    for key in ALIKE:
        values = getattr(ours, key), getattr(theirs, key)
        if key == "vae" and not both_clips:  # One frame is the same with any frames_factor.
            values = pictures_of(ours.vae), pictures_of(theirs.vae)
        if values[0] != values[1]:
            shown = [str(value) if key in ("vae", "reference") else show(value) for value in values]
            raise UserError(
                f"{where} has {key}={shown[0]}, but {there} has {key}={shown[1]}. A network's "
                "latents have one meaning: encode both alike."
            )
    for key in TEXT_ALIKE if ours.text and theirs.text else ():
        values = getattr(ours.text, key), getattr(theirs.text, key)
        if values[0] != values[1]:
            raise UserError(
                f"{where} has captions by a text encoder with {key}={show(values[0])}, but {there} "
                f"with {key}={show(values[1])}. Encode both by the same one."
            )


def pictures_of(vae: VAEFacts | None) -> VAEFacts | None:
    """An autoencoder as it encodes single frames."""
    return vae and replace(vae, frames_factor=1)


@dataclass(frozen=True)
class Run:
    """Neighbouring rows of one dataset in one bucket."""

    bucket: int
    dataset: int
    first: int
    """Its first row."""
    count: int
    first_there: int
    """Its first row in the dataset."""


def runs_of(sources: Sequence[Latent], empty: int) -> tuple[list[BucketShape], list[Run]]:
    """(shape of each bucket, in the order in which the datasets have them; their rows).

    `empty`: tokens of the text of datasets without captions.
    """
    there = [
        (number, (source.bucket_fields(bucket)["latent"].shape, tokens), rows)
        for number, source in enumerate(sources)
        for bucket, (rows, tokens) in enumerate(
            zip(source.bucket_rows, source.facts.bucket_text or repeat(empty), strict=False)
        )
    ]
    shapes: dict[Any, None] = dict.fromkeys(shape for _, shape, _ in there)
    runs, first = list[Run](), 0
    for bucket, shape in enumerate(shapes):
        for dataset, its_shape, rows in there:
            if its_shape == shape:
                runs.append(Run(bucket, dataset, first, len(rows), rows.start))
                first += len(rows)
    return list(shapes), runs


def facts_of(
    sources: Sequence[Latent],
    datasets: Sequence[DatasetConfig],
    shapes: Sequence[BucketShape],
    runs: Sequence[Run],
) -> LatentFacts:
    """The facts of all datasets together. Raises UserError for different classes."""
    each = [source.facts for source in sources]
    texts = [facts.text for facts in each if facts.text]
    classes = {(facts.num_classes, facts.class_names) for facts in each}
    if len(classes) > 1 and not texts:
        names = [
            f"{dataset.path} {facts.about}" for facts, dataset in zip(each, datasets, strict=True)
        ]
        raise UserError(
            f"[data] datasets: {', '.join(names)}. Labels must mean the same in all: give them the "
            "same classes, by --num-classes and --classes of `data encode` or `data pack`."
        )
    counts = [0] * len(shapes)
    for run in runs:
        counts[run.bucket] += run.count
    several, text_tokens = len(shapes) > 1, tuple(tokens for _, tokens in shapes)
    rules = [(d.repeats, d.weight, d.condition_dropout) for d in datasets]
    has_text = [facts for facts in each if facts.text]
    of_clips = next((facts for facts in each if facts.vae and facts.vae.frames_factor > 1), each[0])
    return replace(
        each[0],
        vae=of_clips.vae,
        fps=next((facts.fps for facts in each if facts.fps), None),
        count=sum(counts),
        digest=digest_of([*(facts.digest for facts in each), json.dumps(rules)]),
        shape=max((shape for shape, _ in shapes), key=math.prod),
        # Other classes have other meanings: beside captions they are left out.
        num_classes=each[0].num_classes if len(classes) == 1 else 1,
        class_names=each[0].class_names if len(classes) == 1 else (),
        bucket_shapes=tuple(shape for shape, _ in shapes) if several or any(text_tokens) else (),
        bucket_counts=tuple(counts) if several or any(text_tokens) else (),
        bucket_text=text_tokens if any(text_tokens) else (),
        text=replace(texts[0], tokens=max(text.tokens for text in texts)) if texts else None,
        text_digest=digest_of([facts.text_digest for facts in each]) if texts else "",
        text_source=has_text[0].text_source if texts else "",
        repeats=tuple(dataset.repeats for dataset in datasets),
        weights=tuple(d.weight for d in datasets if d.weight is not None),
        condition_dropouts=tuple(dataset.condition_dropout for dataset in datasets),
        mask_mean=mean_of_masks(each, datasets, shapes, runs),
    )


def mean_of_masks(
    each: Sequence[LatentFacts],
    datasets: Sequence[DatasetConfig],
    shapes: Sequence[BucketShape],
    runs: Sequence[Run],
) -> float | None:
    """The mean of all masks over an epoch's latent pixels, 0 to 255; None if no dataset has masks.

    A dataset without masks counts in full.
    """
    if all(facts.mask_mean is None for facts in each):
        return None
    of_row = rates(datasets, [facts.count for facts in each])
    total = masked = 0.0
    for run in runs:
        num = float(of_row[run.dataset] * run.count) * math.prod(shapes[run.bucket][0][1:])
        mean = each[run.dataset].mask_mean
        total, masked = total + num, masked + num * (FULL if mean is None else mean)
    return masked / total


class MixedLatents(Source):
    """Random access to the rows of several datasets."""

    keeps_groups = True
    held_out_by_size = True

    def __init__(
        self,
        sources: Sequence[Latent],
        datasets: Sequence[DatasetConfig],
        text_multiple: int = 0,
    ) -> None:
        """`text_multiple`: see `Source`; above 0 the sets with captions are in text groups."""
        self.sources, self.datasets = tuple(sources), tuple(datasets)
        self.text_multiple = text_multiple
        texts = [source.facts.text for source in sources if source.facts.text]
        empty = 0
        if text_multiple and texts:
            length = len(texts[0].null_embedding)
            empty = int(padded(np.array([length]), length, text_multiple)[0])
        self.shapes, self.runs = runs_of(sources, empty)
        self.facts: LatentFacts = facts_of(sources, datasets, self.shapes, self.runs)
        dtypes = [source.fields["latent"].dtype for source in sources]
        # Exact: a wider dtype holds all values.
        self.fields = self.facts.fields(reduce(torch.promote_types, dtypes))
        classes = {(source.facts.num_classes, source.facts.class_names) for source in sources}
        self._has_labels = len(classes) == 1
        self._ends = np.array([run.first + run.count for run in self.runs])
        self._firsts = np.array([run.first for run in self.runs])
        self._firsts_there = np.array([run.first_there for run in self.runs])
        self._datasets = np.array([run.dataset for run in self.runs])

    @property
    def copies(self) -> int:  # type: ignore[override]
        """See `Source.copies`. Raises UserError if the datasets differ in it."""
        pairs = zip(self.sources, self.datasets, strict=True)
        known = {source.copies: dataset.path for source, dataset in pairs}
        if len(known) > 1:
            (most, path), (few, other) = max(known.items()), min(known.items())
            raise UserError(
                f"[validation] samples: {path} has {most} rows of each picture (`data encode "
                f"--flip true` adds its mirror image), which are held out together, but {other} "
                f"has {few}. Set [validation] path, or encode both alike."
            )
        return self.sources[0].copies

    @property
    def bucket_rows(self) -> Sequence[range]:
        """See `Source.bucket_rows`."""
        runs = [[run for run in self.runs if run.bucket == b] for b in range(len(self.shapes))]
        return [range(own[0].first, own[-1].first + own[-1].count) for own in runs]

    @property
    def bucket_names(self) -> Sequence[str]:
        """See `Source.bucket_names`."""
        return [name_of(*shape) for shape in self.shapes]

    def bucket_fields(self, bucket: int) -> Mapping[str, Field]:
        """See `Source.bucket_fields`."""
        shape, tokens = self.shapes[bucket]
        found = beside_fields(self.fields, shape)
        if tokens and (text := self.fields.get("text")):  # Else token ids.
            found["text"] = Field(text.dtype, (tokens, *text.shape[1:]))
        return found

    def check_holds(self, names: Collection[str]) -> None:
        """See `Source.check_holds`: captions may be missing if all of them are dropped."""
        if not self.facts.text or not {"text", "text_ids"} & set(names):
            return
        for source, dataset in zip(self.sources, self.datasets, strict=True):
            if not source.facts.text and dataset.condition_dropout != 1:
                raise UserError(
                    f"[data] datasets: {dataset.path} holds no embeddings of captions, but others "
                    "do. Encode them by `data encode --text-encoder`, or train it on the empty "
                    "prompt: condition_dropout = 1."
                )

    def as_ids(self) -> MixedLatents:
        """See `Source.as_ids`; a dataset without captions is unchanged."""
        if self.facts.text is None:
            return super().as_ids()
        given: Any = [source.as_ids() if source.facts.text else source for source in self.sources]
        return MixedLatents(given, self.datasets, self.text_multiple)

    def with_features(self) -> MixedLatents:
        """Raise UserError: features are not read from several datasets."""
        raise UserError(
            f"[repa] block is set, but [data] holds {len(self.sources)} datasets, and features are "
            "of one. Encode their pictures into one set, or leave [repa] out."
        )

    def as_clips(self) -> MixedLatents:
        """See `Source.as_clips`."""
        clips: Any = [source.as_clips() for source in self.sources]
        return MixedLatents(clips, self.datasets, self.text_multiple)

    def in_text_groups(self, multiple: int) -> Source:
        """See `Source.in_text_groups`."""
        if self.facts.text is None:
            return self
        grouped: Any = [source.in_text_groups(multiple) for source in self.sources]
        return MixedLatents(grouped, self.datasets, multiple)

    def groups(self) -> Int64[Tensor, " n"]:
        """The run of every row."""
        return torch.cat(list(self.group_parts()))

    def group_parts(self) -> Iterator[Int64[Tensor, " n"]]:
        """See `Source.group_parts`."""
        for number, run in enumerate(self.runs):
            yield from torch.split(torch.full((run.count,), number), 1 << 20)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Read one sample."""
        return {name: value[0] for name, value in self.read([index]).items()}

    def read(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """See `Source.read`. Raises ValueError for rows of several buckets."""
        tokens = self.tokens_of(rows)
        return self.joined(rows, tokens, lambda source, there, _: source.read(there))

    def read_numbered(self, rows: Sequence[int], numbers: Sequence[int]) -> dict[str, Tensor]:
        """See `Source.read_numbered`. Raises ValueError for rows of several buckets."""
        return self.joined(
            rows,
            self.tokens_of(rows),
            lambda source, there, places: source.read_numbered(
                there, [numbers[place] for place in places]
            ),
        )

    def read_fields(self, names: Sequence[str], rows: Sequence[int]) -> dict[str, Tensor]:
        """See `Source.read_fields`; rows of several buckets have captions, too."""

        def read(source: Latent, there: list[int], _: object) -> dict[str, Tensor]:
            stored = [name for name in names if name in source.fields]
            return source.read_fields(stored, there) if stored else {}

        found = self.joined(rows, self.most_tokens, read)
        return {name: found[name] for name in names}

    def captions(self, rows: Sequence[int]) -> list[str]:
        """See `Source.captions`; "" for rows of a dataset that is trained without captions."""
        found = [""] * len(rows)
        for dataset, there, places in self.split(rows):
            source = self.sources[dataset]
            texts = source.captions(there) if source.facts.text else [""] * len(there)
            if not texts:
                return []
            for place, text in zip(places, texts, strict=True):
                found[place] = text
        return found

    def row_name(self, row: int) -> str:
        """See `Source.row_name`: the row of its dataset, and the dataset."""
        [(dataset, [there], _)] = self.split([row])
        return f"{self.sources[dataset].row_name(there)} of {self.datasets[dataset].path}"

    def order(
        self,
        seed: int,
        held_out: tuple[int, ...],
        data_order: str,
        batch_sizes: Sequence[int] = (),
    ) -> SampleOrder:
        """The order of training; of several buckets, steps of one bucket each.

        Raises UserError if all of a dataset's rows in a bucket are held out.
        """
        outs = split_held_out(held_out, self._firsts.tolist(), [run.count for run in self.runs])
        trained = [0] * len(self.sources)
        for run, out in zip(self.runs, outs, strict=True):
            trained[run.dataset] += run.count - len(out)
            if run.count == len(out):
                raise UserError(
                    f"[validation] samples={len(held_out)} holds out all {run.count} rows of "
                    f"{self.datasets[run.dataset].path} in a bucket, so none remain for training. "
                    "Set fewer."
                )
        of_row, parts = rates(self.datasets, trained), [list[Part]() for _ in self.shapes]
        firsts = [rows.start for rows in self.bucket_rows]
        for run, out in zip(self.runs, outs, strict=True):
            rate = of_row[run.dataset] * (run.count - len(out))
            parts[run.bucket].append(Part(run.first - firsts[run.bucket], run.count, rate, out))
        if not self.facts.bucket_shapes:
            return MixedOrder(seed, tuple(parts[0]))
        return BucketOrder.mixed(seed, self.bucket_names, list(map(tuple, parts)), batch_sizes)

    def lines(self, order: SampleOrder) -> Iterator[str]:
        """See `Source.lines`: a line for each dataset."""
        if isinstance(order, BucketOrder):
            parts = [part for bucket in order.buckets for part in bucket.parts]
        else:
            assert isinstance(order, MixedOrder)
            parts = list(order.parts)
        for number, (source, dataset) in enumerate(zip(self.sources, self.datasets, strict=True)):
            pairs = zip(self.runs, parts, strict=True)
            own = [part for run, part in pairs if run.dataset == number]
            samples = sum(part.rate for part in own)
            rows = f"{len(source):,} rows"
            if held_out := sum(len(part.held_out) for part in own):
                rows += f", of which {len(source) - held_out:,} are trained on"
            often = f"{dataset.repeats} times an epoch"
            if dataset.weight is not None:
                often = f"weight {dataset.weight:g}"
            dropout, rule = dataset.condition_dropout, ""
            if dropout is not None:
                rule = f", condition_dropout {dropout:g}"
            yield (
                f"dataset {dataset.path}: {rows}, {often}: "
                f"{float(samples / order.num_rows):.1%} of the samples{rule}"
            )
        yield from rates_of(self.sources, self.datasets)

    def split(self, rows: Sequence[int]) -> Iterator[tuple[int, list[int], list[int]]]:
        """Yield (dataset, rows in it, places among `rows`) of each dataset that has some."""
        at = self.checked_rows(rows)
        runs = np.searchsorted(self._ends, at, side="right")
        there = at - self._firsts[runs] + self._firsts_there[runs]
        datasets = self._datasets[runs]
        for dataset in np.unique(datasets).tolist():
            places = np.flatnonzero(datasets == dataset)
            yield dataset, there[places].tolist(), places.tolist()

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest caption of all."""
        return self.facts.text.tokens if self.facts.text else 0

    def tokens_of(self, rows: Sequence[int]) -> int:
        """Tokens of the text of rows of one bucket.

        Raises ValueError for rows of several: they have no common shape.
        """
        runs = np.searchsorted(self._ends, np.asarray(rows, dtype=np.int64), side="right")
        buckets = {self.runs[run].bucket for run in set(runs.tolist()) if run < len(self.runs)}
        if len(buckets) > 1:
            raise ValueError(f"rows of {len(buckets)} buckets have no common shape")
        return self.shapes[buckets.pop() if buckets else 0][1] or self.most_tokens

    def joined(
        self,
        rows: Sequence[int],
        tokens: int,
        read: Callable[[Latent, list[int], list[int]], dict[str, Tensor]],
    ) -> dict[str, Tensor]:
        """The fields of rows of any datasets; `read`: (dataset, its rows, their places) -> fields.

        Their text is padded to `tokens`.
        """
        found: dict[str, Tensor] = {}
        for dataset, there, places in self.split(rows):
            own = read(self.sources[dataset], there, places)
            own = self.completed(dataset, own, len(there), tokens)
            if len(there) == len(rows):
                return own
            for name, value in own.items():
                if name not in found:
                    found[name] = value.new_empty(len(rows), *value.shape[1:])
                found[name][torch.tensor(places)] = value
        return found

    def completed(
        self, dataset: int, own: dict[str, Tensor], num: int, tokens: int
    ) -> dict[str, Tensor]:
        """The fields of `num` rows of one dataset, in the form of all datasets' fields."""
        for name in ("latent", "reference"):
            if name in own:
                own[name] = own[name].to(self.fields[name].dtype)
        if "mask" in self.fields and "mask" not in own and "latent" in own:
            own["mask"] = torch.full_like(own["latent"][:, 0], FULL, dtype=torch.uint8)
        if "label" in own and not self._has_labels:
            own["label"] = torch.zeros_like(own["label"])
        if self.facts.text:
            self._complete_text(self.facts.text, dataset, own, num, tokens)
        if CONDITION_DROPOUT in self.fields:
            dropout = self.datasets[dataset].condition_dropout
            own[CONDITION_DROPOUT] = torch.full((num,), OF_THE_RUN if dropout is None else dropout)
        return own

    def _complete_text(
        self, text: TextFacts, dataset: int, own: dict[str, Tensor], num: int, tokens: int
    ) -> None:
        """Pad the captions of one dataset to `tokens`; without any they are the empty caption."""
        if not self.sources[dataset].facts.text and text.is_online:
            # Some token: its embedding is dropped for the empty caption's.
            own["text_ids"] = torch.zeros(num, 1, dtype=IDS.dtype)
            own["text_length"] = torch.ones(num, dtype=torch.int64)
        elif not self.sources[dataset].facts.text:
            null = text.null_embedding.to(self.fields["text"].dtype)
            own["text"] = null.expand(num, -1, -1)
            own["text_length"] = torch.full((num,), len(null))
        if "text" in own:
            missing = tokens - own["text"].shape[1]
            own["text"] = functional.pad(own["text"], (0, 0, 0, missing))
        if "text_ids" in own:
            missing = tokens - own["text_ids"].shape[1]
            own["text_ids"] = functional.pad(own["text_ids"], (0, missing))
