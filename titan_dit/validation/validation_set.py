"""[validation]: the validation set and the loss over it."""

from __future__ import annotations

import hashlib
import itertools
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from titan_dit.config.job import JobSection
from titan_dit.config.section import UserError, show
from titan_dit.config.training import TextConfig, ValidationConfig
from titan_dit.data import loader
from titan_dit.data.base import Field, Source
from titan_dit.data.held_out import held_out_rows
from titan_dit.data.latent_facts import CONDITION_DROPOUT, FEATURES, LatentFacts
from titan_dit.data.sections import DataConfig
from titan_dit.execution import Executor
from titan_dit.objectives.base import DataShare, Objective, Prepared
from titan_dit.observe.console import LOSS
from titan_dit.optim.ema import EMA
from titan_dit.ranks.process_group import Ranks, World
from titan_dit.rng import SampleRNG
from titan_dit.system.files import write_whole
from titan_dit.system.progress import ProgressLine

BATCH = 256


def check_overlap(
    path: str, validation: Source, rows: Sequence[int], training: Source, world: World
) -> None:
    """Raise UserError on every rank if validation rows are in the training set.

    The training data is read once, split over the ranks.
    """
    names = shared_fields(validation, training)
    theirs = list(digests(validation, rows, names))
    wanted = set(theirs)
    mine = range(world.rank, len(training), world.size)
    what = f"[validation] {path} compared with [data]"
    progress = ProgressLine(len(mine), "rows", what=what)
    found: set[bytes] = set()
    for digest in digests(training, mine, names):
        if digest in wanted:
            found.add(digest)
        progress.add(1)
    progress.end()
    shared = set().union(*world.gather(found))
    if shared:
        raise UserError(
            f"[validation] path={path}: {sum(d in shared for d in theirs)} of its {len(rows)} "
            "samples are also in [data], so the validation loss would include training samples. "
            "Remove them from one dataset, or drop path and set samples to hold out rows of "
            "[data]."
        )


def shared_fields(source: Source, other: Source) -> list[str]:
    """The fields that equal samples have equal in both; text may be padded to other lengths."""
    names = sorted(source.fields.keys() & other.fields.keys())
    return [name for name in names if fits(source.fields[name], other.fields[name])]


def fits(field: Field, other: Field) -> bool:
    """True if two fields have the same dtype and shape, where neither size differs by sample."""
    sizes = zip(field.shape, other.shape, strict=False)
    alike = all(size == its or None in (size, its) for size, its in sizes)
    return alike and (field.dtype, len(field.shape)) == (other.dtype, len(other.shape))


def digests(source: Source, rows: Sequence[int], names: Sequence[str]) -> Iterator[bytes]:
    """Yield a digest of every row, over the bytes of these fields."""
    for part in parts_of(source, rows):
        # View as bytes: numpy has no bfloat16.
        whole = [part[name].contiguous().view(len(part[name]), -1) for name in names]
        arrays = [tensor.view(torch.uint8).numpy() for tensor in whole]
        for row in range(len(arrays[0])):
            sha = hashlib.blake2b(digest_size=16)
            for array in arrays:
                sha.update(array[row].tobytes())
            yield sha.digest()


def parts_of(source: Source, rows: Sequence[int]) -> Iterator[dict[str, Tensor]]:
    """Yield the samples of all rows in their order, up to BATCH of one bucket at once."""
    bucket = bucket_of(source)
    for _, group in itertools.groupby(rows, key=bucket):
        while part := list(itertools.islice(group, BATCH)):
            yield source.read(part)


def bucket_of(source: Source) -> Callable[[int], int]:
    """The function from a row to its bucket."""
    firsts = [rows.start for rows in source.bucket_rows]
    return lambda row: bisect_right(firsts, row) - 1


COMPARED = "validation.json"
PREFIX = "validation_"
"""Prefix of a validation's keys in a row of metrics."""


@dataclass(frozen=True)
class ValidationSet:
    """Rows of a source to validate on."""

    source: Source
    rows: Sequence[int]
    compared: Mapping[str, Any] = field(default_factory=dict)
    """Digests and sample count of the overlap check that the rows passed; empty without a check."""

    def remember(self, folder: Path) -> None:
        """Write the passed overlap check to the run directory, so that a restart skips it."""
        if self.compared:
            write_whole(folder / COMPARED, text_of(self.compared))


def text_of(compared: Mapping[str, Any]) -> str:
    """Contents of `validation.json`."""
    return json.dumps(compared) + "\n"


def open_set(
    config: ValidationConfig,
    data: DataConfig,
    source: Source,
    held_out: Sequence[int],
    job: JobSection,
    text: TextConfig,
) -> ValidationSet | None:
    """Open [validation] path, else take the `held_out` rows; None if disabled. Collective.

    Raises UserError if it does not fit the training data.
    """
    if not config.every:
        return None
    if not config.path and not data.has_validation_part:
        return ValidationSet(source, held_out)
    where = f"[validation] path={show(config.path)}" if config.path else "[data] validation part"
    on_first = Ranks().run_on_first
    try:
        there = data.at(config.path) if config.path else data.validation_part()
        other = there.open_surveyed(on_first(there.survey))
        if isinstance(source.facts, LatentFacts) and source.facts.has_clips:
            other = other.as_clips()
        if text.mode == "online":
            other = other.as_ids()
        if source.text_multiple:
            other = other.in_text_groups(source.text_multiple)
    except (OSError, UserError) as error:
        raise UserError(f"{where}: {error}") from None
    check_alike(where, other, source)
    if config.samples and config.samples > len(other):
        raise UserError(
            f"{where} holds {len(other)} samples, but samples={config.samples}. "
            f"Set samples = {len(other)}, or leave it out for all."
        )
    samples = config.samples or len(other)
    if samples == len(other):
        return ValidationSet(other, range(len(other)))
    rows = on_first(lambda: held_out_rows(other, job.seed, samples, job.data_order))
    return ValidationSet(other, rows)


def check_alike(where: str, other: Source, source: Source) -> None:
    """Raise UserError unless fields, units and classes equal the training data's.

    Data in buckets may have only some of the buckets, and shorter captions.
    """
    ours, its = fields_by_bucket(source), fields_by_bucket(other)
    several = len(ours) > 1
    if several and (new := sorted(its.keys() - ours.keys())):
        raise UserError(
            f"{where} holds the buckets {', '.join(new)}, but [data] only {', '.join(ours)}. "
            "Encode both with the same --buckets."
        )
    for name, fields in its.items():
        wanted = ours.get(name, source.fields)
        if not fits_all(fields, wanted):
            raise UserError(
                f"{where} holds {spelled(fields)}, but [data] holds {spelled(wanted)}. Give a "
                "dataset of the same kind."
            )
    of_buckets = {"shape", "bucket_shapes", "bucket_text"} if several else set[str]()
    theirs, known = (without_length(each.facts.as_json()) for each in (other, source))
    for key in sorted(theirs.keys() - source.facts.differing - of_buckets):
        if theirs[key] != known.get(key):
            raise UserError(
                f"{where} has {key}={show(theirs[key])}, but [data] has {key}="
                f"{show(known.get(key))}. Give a dataset of the same kind."
            )


def fits_all(fields: Mapping[str, Field], wanted: Mapping[str, Field]) -> bool:
    """True if samples have the fields wanted; text may be shorter.

    The dropout of a dataset and the features of [repa] are for training alone.
    """
    of_training = CONDITION_DROPOUT, FEATURES
    wanted = {name: field for name, field in wanted.items() if name not in of_training}
    text, other = fields.get("text"), wanted.get("text")
    if text and other and (text.shape[0] or 0) <= (other.shape[0] or 0):
        fields = {**fields, "text": Field(text.dtype, (other.shape[0], *text.shape[1:]))}
    return dict(fields) == wanted


def without_length(facts: dict[str, Any]) -> dict[str, Any]:
    """Facts of a dataset without what depends on its captions' lengths and its empty prompt."""
    if not isinstance(text := facts.get("text"), dict):
        return facts
    kept = {key: value for key, value in text.items() if key not in ("tokens", "null")}
    return facts | {"text": kept}


def fields_by_bucket(source: Source) -> dict[str, Mapping[str, Field]]:
    """Name of each bucket -> the fields of its samples."""
    return {name: source.bucket_fields(i) for i, name in enumerate(source.bucket_names)}


def spelled(fields: Mapping[str, Field]) -> str:
    """Format the fields of a sample: "latent float32 [4, 32, 32], label int64 []"."""
    return ", ".join(f"{name} {field}" for name, field in fields.items())


def open_checked(
    config: ValidationConfig,
    data: DataConfig,
    source: Source,
    held_out: Sequence[int],
    job: JobSection,
    world: World,
    text: TextConfig,
) -> ValidationSet | None:
    """`open_set` plus the overlap check against the training set. Collective.

    The run directory stores a passed check.
    """
    found = open_set(config, data, source, held_out, job, text)
    if found is None or not config.path:
        return found
    digests = {"data": source.facts.digest, "validation": found.source.facts.digest}
    compared = digests | {"samples": len(found.rows)}
    file = job.folder / COMPARED
    # Compared as text: a truncated file differs, and the rows are checked again.
    is_known = file.is_file() and file.read_text() == text_of(compared)
    # Rank 0's view decides: a shared disk may show a file to some ranks only.
    if not world.gather(is_known)[0]:
        check_overlap(config.path, found.source, found.rows, source, world)
    return replace(found, compared=compared)


@dataclass(frozen=True, kw_only=True)
class Validator:
    """The losses of a network on the samples of a validation set; collective.

    Each data rank evaluates its share of a bucket. Sample i has sample number i, so its random
    draws are the same every time and in every layout.
    """

    validation_set: ValidationSet
    objective: Objective
    executor: Executor
    share: DataShare
    seed: int
    batch_sizes: Mapping[str, int]
    """Name of each bucket -> the most samples of a batch; "" for data of one shape."""
    alive: Callable[[], None] = lambda: None
    """Called after each batch."""

    def losses(self) -> dict[str, float]:
        """Mean loss over all rows, the objective's summary, losses of evaluations and terms.

        For data in buckets also the loss of each.
        """
        source, sizes = self.validation_set.source, self.batch_sizes
        parts: Sums = {}
        terms: Sums = {}
        named: dict[str, float] = {}
        groups = by_bucket(self.validation_set)
        for bucket, places in groups.items():
            name = source.bucket_names[bucket]
            found = self.sums(places, sizes[name if name in sizes else ""])
            if len(groups) > 1:
                named[f"{LOSS}_{key_of(name)}"] = mean_of(means_of(found[0]))
            parts, terms = added(parts, found[0]), added(terms, found[1])
        means = means_of(parts)
        shown = means | means_of(terms)
        named = {f"{LOSS}_{name}": v for name, v in shown.items() if name} | named
        summary = self.objective.summary(means, source.facts)
        others = {f"{PREFIX}{name}": value for name, value in summary.items()}
        return {LOSS: mean_of(means), **others, **named}

    def losses_with_averages(self, ema: EMA) -> dict[str, float]:
        """`losses` of the weights; for each EMA, too, with names that end in _ema_DECAY."""
        found = self.losses()
        for average in ema.averages:
            with ema.swapped_in(average):
                own = self.losses()
            found |= {f"{name}_ema_{average}": loss for name, loss in own.items()}
        return found

    def sums(self, places: Sequence[int], batch_size: int) -> tuple[Sums, Sums]:
        """(sums of the evaluations, sums of their terms) over the rows at places of the set."""
        chosen, objective, share = self.validation_set, self.objective, self.share
        count = -(-len(places) // share.num_ranks)
        if len(chosen.source.bucket_rows) > 1:
            batch_size = min(batch_size, count)  # A bucket may have few rows.
        parts: dict[str, list[Tensor]] = {}
        terms: dict[str, list[Tensor]] = {}
        for first in range(0, count, batch_size):
            # Fixed batch size: equal counts on every rank, no recompilation. Padding past the end
            # of the share or the places is cut off below.
            begin = share.rank * count + first
            numbers = [places[min(begin + i, len(places) - 1)] for i in range(batch_size)]
            pairs = [(i, chosen.rows[i]) for i in numbers]
            inspect, device = objective.inspect, share.device
            batch = loader.load_samples(chosen.source, pairs, inspect, device, len(pairs))
            rng = SampleRNG(self.seed, batch.sample_numbers)
            for name, prepared in objective.evaluations(objective.collect(batch), rng).items():
                per_token = self.executor.evaluate(prepared)
                parts.setdefault(name, []).append(sums_of(per_token, prepared))
                for term, its in objective.validated_terms(per_token, prepared.targets).items():
                    terms.setdefault(term, []).append(sums_of(its, prepared))
            self.alive()

        def whole(found: Mapping[str, Sequence[Tensor]]) -> Sums:
            joined = {name: torch.cat(tuple(each))[:count] for name, each in found.items()}
            return {name: share.gather(each)[: len(places)].sum(0) for name, each in joined.items()}

        return whole(parts), whole(terms)


def key_of(bucket: str) -> str:
    """A bucket's name in a row of metrics: "16x64x64_64_text_tokens"."""
    return bucket.replace(", ", "_").replace(" ", "_")


Sums: TypeAlias = Mapping[str, Float[Tensor, "2"]]
"""Name -> (weighted sum of token losses, sum of the weights), in fp64."""


def added(first: Sums, second: Sums) -> Sums:
    """The sums over two sets of samples."""
    whole = dict(first)
    for name, value in second.items():
        whole[name] = whole[name] + value if name in whole else value
    return whole


def means_of(sums: Sums) -> dict[str, float]:
    """The mean loss of each name."""
    return {name: float(whole[0] / whole[1]) for name, whole in sums.items()}


def mean_of(means: Mapping[str, float]) -> float:
    """The mean over the evaluations."""
    return sum(means.values()) / len(means)


def by_bucket(chosen: ValidationSet) -> dict[int, list[int]]:
    """Bucket -> places of its rows in the set."""
    bucket, found = bucket_of(chosen.source), dict[int, list[int]]()
    for place, row in enumerate(chosen.rows):
        found.setdefault(bucket(row), []).append(place)
    return found


def sums_of(per_token: Float[Tensor, "b n"], prepared: Prepared) -> Float[Tensor, "b 2"]:
    """Per sample: weighted sum of the token losses and sum of the weights, in fp64."""
    weight = prepared.token_weight.expand_as(per_token).double()
    return torch.stack(((per_token.double() * weight).sum(1), weight.sum(1)), 1)
