"""Conventions and interfaces of diffusion.

Time: t = 0 is data, t = 1 is noise. The timestep that a network takes has a unit of its own, and
may run the other way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from titan_dit.models.base import ModelSpec

Predict: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(noisy tokens [b, n, d], timestep [b] in the network's unit) -> prediction [b, n, d_out]."""


@dataclass(frozen=True)
class Corrupted:
    """Noisy tokens, their timestep, and the targets of the loss."""

    inputs: Mapping[str, Tensor]
    """`tokens` and `timestep`."""
    targets: Mapping[str, Tensor]


def by_channel(tokens: Float[Tensor, "b n d"], channels: int) -> Float[Tensor, "b n p c"]:
    """Unflatten tokens into pixels and channels; a token holds (p, p, c), channel fastest."""
    return tokens.reshape(*tokens.shape[:-1], -1, channels)


@runtime_checkable
class LatentModel(Protocol):
    """A [model] section that diffusion can train: a model of latents.

    It is also a `LabelledModel` or a `CaptionedModel`.
    """

    @property
    def name(self) -> str:
        """The name in the catalog, or "package.module:Class"."""

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """[c, h, w] of one latent; [c, f, h, w] of a clip of f latent frames."""

    @property
    def token_shape(self) -> tuple[int, int]:
        """[n, d] of one tokenized latent."""

    def spec(self, output_channels: int | None = None) -> ModelSpec:
        """Describe the network: `output_channels` from tokens, timestep and its condition."""

    def tokenize(self, latents: Float[Tensor, "b c *size"]) -> Float[Tensor, "b n d"]:
        """Latents to tokens."""

    def detokenize(self, tokens: Float[Tensor, "b n d"]) -> Float[Tensor, "b c *size"]:
        """The inverse of `tokenize`."""

    def static(self, device: torch.device) -> dict[str, Tensor]:
        """The model's static inputs for samples of `sample_shape`."""


@runtime_checkable
class SizedModel(Protocol):
    """Interface of a model that can take latents of any size."""

    def at_size(self, *size: int) -> Any:
        """The same network for latents of another size: equal parameters, other tokens.

        `size`: height and width, or frames, height and width of clips.
        """


@runtime_checkable
class UnsizedModel(Protocol):
    """Interface of a `SizedModel` whose size may be unset; it is then taken from the data."""

    @property
    def has_size(self) -> bool:
        """False if a size is not set: then `sample_shape` and what follows from it raise."""

    def with_size(self, *size: int) -> Any:
        """The section with the sizes that are not set filled in; `size` as in `at_size`."""


@runtime_checkable
class PaddedModel(Protocol):
    """Interface of a model whose `tokenize` pads; padding tokens have no loss."""

    @property
    def num_real_tokens(self) -> int:
        """Tokens of a latent without padding."""


@runtime_checkable
class TextGroupedModel(Protocol):
    """Interface of a model that pads captions to a multiple of tokens, per bucket."""

    @property
    def text_multiple(self) -> int:
        """Caption lengths are multiples of it, as `text_tokens` is; 0: all have `text_tokens`."""

    def with_text_tokens(self, tokens: int) -> Any:
        """The same network for captions of `tokens` tokens: equal parameters, other positions."""


@runtime_checkable
class TextPaddedModel(Protocol):
    """Interface of a model that accepts only one kind of caption padding."""

    @property
    def text_padding(self) -> Literal["removed", "kept"]:
        """`TextFacts.padding` of its captions; "kept": `text_tokens` of each are attended to."""


@runtime_checkable
class ConditionedModel(Protocol):
    """Interface of a model with extra input channels: the input `condition` [b, n, d_k].

    It holds their tokens, as `tokenize` cuts them; zeros mean that nothing is given.
    """

    @property
    def condition_channels(self) -> int:
        """Number of these channels; 0 for none, and then there is no such input."""


@runtime_checkable
class ReferencedModel(Protocol):
    """Interface of a model that attends to a reference picture: the input `reference` [b, n, d].

    It holds the tokens of a latent of the sample's own size and channels.
    """

    @property
    def reference_tokens(self) -> bool:
        """False for none, and then there is no such input."""


@runtime_checkable
class LabelledModel(Protocol):
    """Interface of a class-conditional model: the input `labels`, int64 [b]."""

    @property
    def num_classes(self) -> int:
        """Number of labels; a negative label means none."""


@runtime_checkable
class CaptionedModel(Protocol):
    """Interface of a caption-conditional model: inputs `text` [b, m, d], `text_length` [b]."""

    @property
    def text_tokens(self) -> int:
        """Tokens m of every caption, with padding."""

    @property
    def text_dim(self) -> int:
        """Width d of the embeddings."""


def has_clips(model: object) -> bool:
    """True if the samples of a model are clips, [c, f, h, w]."""
    return isinstance(model, LatentModel) and len(model.sample_shape) == 4


def condition_channels(model: object) -> int:
    """Channels that a model is given beside a noisy latent."""
    return model.condition_channels if isinstance(model, ConditionedModel) else 0


def has_reference_tokens(model: object) -> bool:
    """True of a model that attends to the tokens of a reference."""
    return isinstance(model, ReferencedModel) and model.reference_tokens


def text_multiple(model: object) -> int:
    """The multiple of tokens to which a model's captions are padded by bucket; 0: to one length."""
    return model.text_multiple if isinstance(model, TextGroupedModel) else 0


def padding_of(model: CaptionedModel) -> Literal["removed", "kept"] | None:
    """The padding that a model's captions must have; None for any."""
    return model.text_padding if isinstance(model, TextPaddedModel) else None


def resized_model(model: Any, size: Sequence[int], text_tokens: int = 0) -> Any:
    """A model for latents of another size and, unless it is 0, captions of another length.

    `size`: [h, w], or [f, h, w] of clips.
    """
    if tuple(size) != model.sample_shape[1:]:
        model = model.at_size(*size)
    return model.with_text_tokens(text_tokens) if text_tokens else model
