"""Conditions to draw, taken from data: labels in given shares, captions and references of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Int64
from torch import Tensor

from titan_dit.data.base import Source
from titan_dit.diffusion.conditions import Conditions, Given
from titan_dit.diffusion.objective import Diffusion


def spread_labels(num: int, classes: list[int]) -> Int64[Tensor, " num"]:
    """`num` labels, spread evenly over `classes` in their order."""
    index = torch.arange(num) * len(classes) // num
    return torch.tensor(classes)[index]


def labels_like(
    counts: Mapping[str, int], num: int, num_classes: int, names: Sequence[str]
) -> Int64[Tensor, " num"] | None:
    """`num` labels in the proportions of `counts`, by a class's name or number.

    Shares are rounded so that the largest remainders get one more. None if a class is unknown.
    """
    numbers = {name: number for number, name in enumerate(names)}
    numbers |= {str(number): number for number in range(num_classes) if str(number) not in numbers}
    if not counts or not set(counts) <= set(numbers):
        return None
    total, classes = sum(counts.values()), sorted(counts, key=numbers.__getitem__)
    shares = {name: counts[name] * num // total for name in classes}
    by_remainder = sorted(classes, key=lambda name: -(counts[name] * num % total))
    for name in by_remainder[: num - sum(shares.values())]:
        shares[name] += 1
    each = torch.tensor([shares[name] for name in classes])
    return torch.tensor([numbers[name] for name in classes]).repeat_interleave(each)


def rows_to_show(objective: Diffusion, source: Source) -> range:
    """The rows of which samples are drawn: with references those of the model's own size."""
    size = objective.model.sample_shape[1:]
    for bucket, rows in enumerate(source.bucket_rows):
        if objective.data.reference and source.bucket_fields(bucket)["latent"].shape[1:] == size:
            return rows
    return range(len(source))


def captions_of_rows(objective: Diffusion, source: Source, num: int) -> Conditions:
    """The captions of `num` rows, evenly spaced over a dataset, read when they are drawn.

    Where the run embeds captions itself, a call is collective.
    """
    captions, online = objective.captions, objective.frozen.text
    assert captions is not None
    every = rows_to_show(objective, source)

    def read(numbers: Int64[Tensor, " b"]) -> Given:
        rows = (every.start + numbers.cpu() * len(every) // num).tolist()
        stored = source.read_fields(captions.stored, rows)
        found = {name: value.to(numbers.device) for name, value in stored.items()}
        return captions.given(online.embed(found) if online else found)

    return with_references(objective, source, num, read)


def with_references(
    objective: Diffusion, source: Source, num: int, conditions: Conditions
) -> Conditions:
    """Conditions, with the references of `num` rows, evenly spaced over a dataset with some."""
    if objective.data.reference is None:
        return conditions
    every = rows_to_show(objective, source)

    def read(numbers: Int64[Tensor, " b"]) -> Given:
        rows = (every.start + numbers.cpu() * len(every) // num).tolist()
        found = references_of(objective, source, rows)
        given = {name: value.to(numbers.device) for name, value in found.items()}
        return {**conditions(numbers), **given}

    return read


def references_of(objective: Diffusion, source: Source, rows: Sequence[int]) -> Given:
    """The network's inputs by the references of rows of one size; {} if it is given none."""
    if objective.data.reference is None:
        return {}
    return objective.references(source.read_fields(("reference",), rows))
