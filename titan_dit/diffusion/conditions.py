"""Conditions: what a network knows of a sample, and what it takes in its place without it.

A `Condition` turns stored fields into named inputs of the network (`Given`), each with a row per
sample. Dropout in training, and guidance, replace whole rows by those of `null`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional

from titan_dit.data.base import Fields, Source

NO_LABEL = -1

Given: TypeAlias = Mapping[str, Tensor]
"""What is known of b samples: the network's inputs by name, each [b, ...]."""
Conditions: TypeAlias = Callable[[Int64[Tensor, " b"]], Given]
"""Numbers of samples -> their conditions, on the device of the numbers."""


class Condition(ABC):
    """Turns fields into the inputs of a network that say what a sample shows."""

    takes: ClassVar[tuple[str, ...]]
    """The fields that `given` needs."""

    @property
    def stored(self) -> tuple[str, ...]:
        """The stored fields that it needs."""
        return self.takes

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


@dataclass(frozen=True)
class Captions(Condition):
    """An embedded caption per sample: `text` [b, m, d] with zeros behind its `text_length` [b]."""

    takes = ("text", "text_length")

    tokens: int
    """Tokens m of the model's input."""
    empty: Float[Tensor, "k d"]
    """The embedding of the empty prompt."""
    is_online: bool = False
    """True if samples have token ids, which `OnlineText` embeds."""

    @property
    def stored(self) -> tuple[str, ...]:
        """The stored fields that it needs."""
        return ("text_ids", "text_length") if self.is_online else self.takes

    def given(self, fields: Fields) -> dict[str, Tensor]:
        """See `Condition.given`; stored captions have at most m tokens."""
        text = fields["text"]
        padded = functional.pad(text, (0, 0, 0, self.tokens - text.shape[1]))
        return {"text": padded, "text_length": fields["text_length"]}

    def null(self, num: int, device: torch.device) -> dict[str, Tensor]:
        """See `Condition.null`: the empty prompt."""
        text = functional.pad(self.empty.to(device), (0, 0, 0, self.tokens - len(self.empty)))
        length = torch.full((num,), len(self.empty), device=device)
        return {"text": text.expand(num, -1, -1), "text_length": length}


@dataclass(frozen=True)
class PreviewPrompts:
    """The prompts of previews, with their embeddings."""

    texts: tuple[str, ...] = ()
    fields: Fields = field(default_factory=dict)
    """The fields of the prompts' conditions, a row per prompt; on the CPU."""
    notes: tuple[str, ...] = ()
    """Console lines about them."""
    key: str = ""
    """A digest of what the embeddings depend on; `Diffusion.remember` writes both. "" if they are
    those of stored captions, which are not written."""
    rows: tuple[int, ...] = ()
    """The rows of the data whose captions they are; empty of other prompts."""


@dataclass
class PreviewData:
    """What previews and scores show; filled by `Objective.open_drawing`."""

    source: Source | None = None
    """The open dataset."""
    prompts: PreviewPrompts = field(default_factory=PreviewPrompts)


def without(given: Given, null: Given, dropped: Bool[Tensor, " b"]) -> dict[str, Tensor]:
    """The condition, with the rows of `null` where it is dropped."""
    return {
        name: torch.where(dropped.view(-1, *[1] * (value.ndim - 1)), null[name].to(value), value)
        for name, value in given.items()
    }


def completed(null: Given, given: Given) -> dict[str, Tensor]:
    """`null` with the inputs of `given` that it lacks: guidance keeps references."""
    return {**given, **null}


def with_first_frame(
    latents: Float[Tensor, "b c f h w"], frame_channels: int
) -> Float[Tensor, "b k f h w"]:
    """Latents of a first frame behind channels that say which frames are given: 1, else 0.

    `frame_channels`: as many as a latent frame has frames; the first latent frame is made
    of the first frame alone, which counts for all of them. As in diffusers'
    `WanImageToVideoPipeline`.
    """
    is_given = torch.zeros_like(latents[:, :1]).repeat(1, frame_channels, 1, 1, 1)
    is_given[:, :, 0] = 1
    return torch.cat((is_given, latents), 1)


def joined(first: Given, second: Given) -> dict[str, Tensor]:
    """The rows of one condition, then those of another."""
    return {name: torch.cat((value, second[name].to(value))) for name, value in first.items()}


def rows_of(given: Given, rows: Tensor | slice) -> dict[str, Tensor]:
    """The condition of some of the samples."""
    return {name: value[rows] for name, value in given.items()}
