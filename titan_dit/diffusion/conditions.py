"""Conditions: what a network knows of a sample, and what it takes in its place without it.

A condition is a mapping of named inputs of the network, each with a row per sample. Dropping it in
training, and guidance, exchange whole rows by those of `null`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, TypeAlias

import torch
from jaxtyping import Bool
from torch import Tensor

from titan_dit.data.base import Fields

NO_LABEL = -1

Given: TypeAlias = Mapping[str, Tensor]
"""A condition of b samples: the network's inputs by name, each [b, ...]."""


class Condition(ABC):
    """Turns stored fields into the inputs of a network that say what a sample shows."""

    takes: ClassVar[tuple[str, ...]]
    """The stored fields that it needs."""

    @abstractmethod
    def given(self, fields: Fields) -> dict[str, Tensor]:
        """The condition of stored samples."""

    @abstractmethod
    def null(self, num: int, device: torch.device) -> dict[str, Tensor]:
        """The condition of `num` samples of which nothing is known."""


class ClassLabels(Condition):
    """A class per sample: the input `labels` [b], int64; a negative label means none."""

    takes = ("label",)

    def given(self, fields: Fields) -> dict[str, Tensor]:
        """See `Condition.given`."""
        return {"labels": fields["label"]}

    def null(self, num: int, device: torch.device) -> dict[str, Tensor]:
        """See `Condition.null`."""
        return {"labels": torch.full((num,), NO_LABEL, device=device)}


def without(given: Given, null: Given, dropped: Bool[Tensor, " b"]) -> dict[str, Tensor]:
    """The condition, with the rows of `null` where it is dropped."""
    return {
        name: torch.where(dropped.view(-1, *[1] * (value.ndim - 1)), null[name], value)
        for name, value in given.items()
    }


def joined(first: Given, second: Given) -> dict[str, Tensor]:
    """The rows of one condition, then those of another."""
    return {name: torch.cat((value, second[name])) for name, value in first.items()}


def rows_of(given: Given, rows: Tensor | slice) -> dict[str, Tensor]:
    """The condition of some of the samples."""
    return {name: value[rows] for name, value in given.items()}
