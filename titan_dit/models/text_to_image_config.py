"""Base class of the [model] sections of networks that take captions. Imports torch late.

In most of them caption and picture are two tensors of tokens in the stream, which attention joins:
context and sequence parallelism slice each by itself.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Self

from titan_dit.config.section import Channels, Dim, Few, HeightWidth, Section, UserError, show

if TYPE_CHECKING:  # Reading a config must not import torch: methods import what they need.
    import torch
    from jaxtyping import Float
    from torch import Tensor

    from titan_dit.models.base import Model, ModelSpec, TensorSpec


@dataclass(frozen=True, kw_only=True)
class TextToImageConfig(Section):
    """Base class of the sections; a subclass gives the abstract members."""

    section = "model"
    name: ClassVar[str]

    latent_size: HeightWidth | None = None
    """[height, width] of a latent; one number for a square. Unset: that of the data, of its largest
    bucket."""
    in_channels: Few
    """Channels of a latent."""
    text_tokens: Dim
    """Tokens of a caption, with its padding."""
    text_dim: Dim
    """Width of the text encoder's embeddings."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int, int]:
        """hidden_size, number of blocks, num_heads, patch_size."""

    @property
    @abstractmethod
    def ffn(self) -> int:
        """Width of the MLP."""

    @property
    @abstractmethod
    def kinds(self) -> tuple[str, ...]:
        """The kind of every block, or nothing if all are alike."""

    @property
    @abstractmethod
    def condition(self) -> tuple[str, int]:
        """Name and width of the stream's third tensor: the embedded timestep, or its modulation."""

    @abstractmethod
    def flops(self, output_channels: int, text_tokens: int, tokens: int) -> Mapping[str, int]:
        """FLOPs of forward and backward per sample, of `embed`, a block of each kind and `head`.

        2 per multiply-add of a matmul, without recomputation. Blocks that are all alike are
        "block". `tokens`: of the picture.
        """

    @abstractmethod
    def static(self, device: torch.device) -> dict[str, Tensor]:
        """Side inputs that are equal for all samples, by the names of `static_specs`."""

    @abstractmethod
    def build(self, output_channels: int) -> Model:
        """Build the network; the objective determines `output_channels`."""

    def check_latent_size(self) -> None:
        """Raise UserError unless patches divide a latent."""
        patch = self.shape[3]
        if self.latent_size and any(side % patch for side in self.latent_size):
            fit = [-(-side // patch) * patch for side in self.latent_size]
            raise UserError(
                f"[model] latent_size={show(self.latent_size)} is not divisible by "
                f"patch_size={patch}. Set latent_size = {show(fit)} or another patch_size."
            )

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width of a latent. Raises UserError if they are not set."""
        if self.latent_size is None:
            raise UserError(
                f"[model] name={show(self.name)}: latent_size is not set. Set [height, width] of a "
                "latent."
            )
        height, width = self.latent_size
        return height, width

    @property
    def has_size(self) -> bool:
        """See `diffusion.base.UnsizedModel`."""
        return self.latent_size is not None

    def with_size(self, *size: int) -> Self:
        """See `diffusion.base.UnsizedModel`."""
        return replace(self, latent_size=self.latent_size or size[-2:])

    @property
    def grid(self) -> tuple[int, ...]:
        """(rows, columns) of a picture's tokens; of a clip's (frames, rows, columns)."""
        height, width = self.sides
        return height // self.shape[3], width // self.shape[3]

    def at_size(self, *size: int) -> Self:
        """The same network for latents of another size: height and width, frames before them.

        Raises UserError if the patch misfits.
        """
        height, width = size
        return replace(self, latent_size=(height, width))

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """[c, h, w] of one latent; [c, f, h, w] of a clip."""
        return self.in_channels, *self.sides

    @property
    def token_shape(self) -> tuple[int, int]:
        """[n, d] of one tokenized latent."""
        return math.prod(self.grid), self.shape[3] ** 2 * self.in_channels

    def static_specs(self) -> dict[str, TensorSpec]:
        """The tensors of `static`."""
        import torch

        from titan_dit.models.base import TensorSpec

        hidden, _, heads, _ = self.shape
        m, n, pairs = self.text_tokens, self.token_shape[0], hidden // heads // 2
        return {
            "text_rotary": TensorSpec((m, 2, pairs), token_dim=0, dtype=torch.float32),
            "rotary": TensorSpec((n, 2, pairs), token_dim=0, dtype=torch.float32),
        }

    def spec(self, output_channels: int | None = None) -> ModelSpec:
        """Describe the network; `output_channels` defaults to in_channels."""
        import torch

        from titan_dit.models.base import ModelSpec, TensorSpec

        outputs = output_channels or self.in_channels
        hidden, layers, heads, patch = self.shape
        (n, values), m = self.token_shape, self.text_tokens
        name, width = self.condition
        flops = self.flops(outputs, m, n)
        costs = {
            part: count / flops[(self.kinds or ("block",))[-1]] for part, count in flops.items()
        }
        return ModelSpec(
            build=partial(self.build, outputs),
            inputs={
                "tokens": TensorSpec((n, values), token_dim=0, dtype=torch.float32),
                "timestep": TensorSpec((), dtype=torch.float32),
                "text": TensorSpec((m, self.text_dim), token_dim=0),
                "text_length": TensorSpec((), dtype=torch.int64),
            },
            stream={
                "tokens": TensorSpec((n, hidden), token_dim=0),
                "text": TensorSpec((m, hidden), token_dim=0),
                name: TensorSpec((width,), at_least_fp32=True),
            },
            predictions={"prediction": TensorSpec((n, patch * patch * outputs), token_dim=0)},
            static=self.static_specs(),
            num_layers=layers,
            num_heads=heads,
            head_dim=hidden // heads,
            ffn=self.ffn,
            num_tokens=n,
            num_text_tokens=m,
            layer_kinds=self.kinds,
            kind_costs={kind: costs[kind] for kind in dict.fromkeys(self.kinds)},
            embed_cost=costs["embed"],
            head_cost=costs["head"],
        )

    def flops_per_sample(self, output_channels: int, tokens: int) -> int:
        """FLOPs of the whole network per sample, of `tokens` tokens with those of the caption."""
        flops = self.flops(output_channels, self.text_tokens, tokens - self.text_tokens)
        kinds = self.kinds or ("block",) * self.shape[1]
        return flops["embed"] + sum(flops[kind] for kind in kinds) + flops["head"]

    def tokenize(self, latents: Float[Tensor, "b c h w"]) -> Float[Tensor, "b n d"]:
        """Latents to tokens."""
        from titan_dit.models.layers import patchify

        return patchify(latents, self.shape[3])

    def detokenize(self, tokens: Float[Tensor, "b n d"]) -> Float[Tensor, "b c h w"]:
        """Tokens to latents; a learned sigma adds channels after the first in_channels."""
        from titan_dit.models.layers import unpatchify

        return unpatchify(tokens, self.shape[3], self.sides[0])


@dataclass(frozen=True, kw_only=True)
class ConditionedConfig(TextToImageConfig):
    """Base class of the sections of networks that take further channels beside a noisy latent."""

    condition_channels: Channels = 0
    """Channels of what the network is given of a sample, such as a reference picture or a clip's
    first frame, beside its noisy latent; their weights start at zero."""

    @property
    def all_channels(self) -> int:
        """Channels of a noisy latent and of what is given beside it."""
        return self.in_channels + self.condition_channels

    def spec(self, output_channels: int | None = None) -> ModelSpec:
        """See `TextToImageConfig.spec`."""
        import torch

        from titan_dit.models.base import TensorSpec

        spec = super().spec(output_channels)
        if not self.condition_channels:
            return spec
        shape = self.token_shape[0], self.shape[3] ** 2 * self.condition_channels
        condition = TensorSpec(shape, token_dim=0, dtype=torch.float32)
        return replace(spec, inputs={**spec.inputs, "condition": condition})


@dataclass(frozen=True, kw_only=True)
class ReferencedConfig(ConditionedConfig):
    """Base class of the sections of networks that may attend to the tokens of a reference, too.

    They stand behind those of the picture in the stream, projected as these are (FLUX.1 Kontext,
    arXiv:2506.15742 sec. 3), and have positions of their own. The head leaves them out.
    """

    reference_tokens: bool = False
    """True: the tokens of a reference picture are attended to, and not predicted."""

    @property
    def num_pictures(self) -> int:
        """Pictures in attention: the predicted one and, with `reference_tokens`, the reference."""
        return 2 if self.reference_tokens else 1

    def spec(self, output_channels: int | None = None) -> ModelSpec:
        """See `TextToImageConfig.spec`."""
        spec = super().spec(output_channels)
        if not self.reference_tokens:
            return spec
        n, hidden = spec.num_tokens, self.shape[0]
        tokens = replace(spec.stream["tokens"], shape=(2 * n, hidden))
        return replace(
            spec,
            inputs={**spec.inputs, "reference": spec.inputs["tokens"]},
            stream={**spec.stream, "tokens": tokens},
            num_text_tokens=spec.num_text_tokens + n,
        )

    def static_specs(self) -> dict[str, TensorSpec]:
        """See `TextToImageConfig.static_specs`."""
        found = super().static_specs()
        return found | ({"reference_rotary": found["rotary"]} if self.reference_tokens else {})

    def flops_per_sample(self, output_channels: int, tokens: int) -> int:
        """See `TextToImageConfig.flops_per_sample`."""
        own = (tokens - self.text_tokens) // self.num_pictures
        return super().flops_per_sample(output_channels, self.text_tokens + own)


def default_axes(shape: tuple[int, int, int, int]) -> tuple[int, int, int]:
    """Channels of a head that rotate by each of three axes: about 2, 3 and 3 eighths."""
    pairs = shape[0] // shape[2] // 2
    side = max(1, 3 * pairs // 8)
    return 2 * (pairs - 2 * side), 2 * side, 2 * side


def check_axes(
    axes: Sequence[int], shape: tuple[int, int, int, int], default: Sequence[int]
) -> None:
    """Raise UserError unless axes have even numbers of channels that make up a head.

    `shape`: of the network. `default`: the axes of such a head, of the same number.
    """
    hidden, _, heads, _ = shape
    count = len(default)

    def fits(found: Sequence[int]) -> bool:
        is_even = all(channels % 2 == 0 and channels > 0 for channels in found)
        return len(found) == count and is_even and sum(found) * heads == hidden

    if not fits(axes):
        fit = [max(2, -(-hidden // heads // count // 2) * 2)] * count
        other = f"hidden_size = {sum(fit) * heads} and rope_axes = {show(fit)}"
        raise UserError(
            f"[model] hidden_size={hidden} with num_heads={heads} and rope_axes={show(axes)}: a "
            f"head rotates by {count} even numbers of channels, which add up to its own. Set "
            f"{f'rope_axes = {show(list(default))}' if fits(default) else other}."
        )
