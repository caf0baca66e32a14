"""What the trainer, the layouts and the pipeline need to know of a model, and no more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

Stream: TypeAlias = tuple[Tensor, ...]
"""What flows from embed through the blocks to head: tensors that need gradients, batch first.
It alone travels through a pipeline."""

Static: TypeAlias = Mapping[str, Tensor]
"""What every stage is given beside the stream, without gradients: positions, text context."""

InitLaw: TypeAlias = Callable[[torch.Size, torch.Generator], Tensor]
"""(full shape, generator) -> initial values, fp32, on the generator's device."""


class Model(nn.Module):
    """A network cut where the layouts cut it.

    `embed` is None off the first pipeline stage and `head` off the last; `blocks` keeps the global
    layer index as its key after the cut.
    """

    embed: nn.Module | None
    """(inputs, static) -> stream."""
    blocks: nn.ModuleDict
    """Each (stream, static) -> stream."""
    head: nn.Module | None
    """(stream, static) -> prediction."""
    tied: Mapping[str, str] = {}
    """Parameters that are one: {"head.weight": "embed.weight"}."""

    def forward(self, given: Mapping[str, Tensor] | Stream, static: Static) -> Tensor | Stream:
        """Inputs of `embed` to a prediction for every token.

        A pipeline stage is given the stream where it has no `embed`, and gives it on where it has
        no `head`.
        """
        stream: Any = given if self.embed is None else self.embed(given, static)
        for block in self.blocks.values():
            stream = block(stream, static)
        out: Tensor | Stream = stream if self.head is None else self.head(stream, static)
        return out

    def cut(self, layers: range, *, is_first: bool, is_last: bool) -> None:
        """Keep the part of one pipeline stage; names stay those of the whole network."""
        kept = {key: block for key, block in self.blocks.items() if int(key) in layers}
        self.blocks = nn.ModuleDict(kept)
        self.embed = self.embed if is_first else None
        self.head = self.head if is_last else None

    def init_laws(self) -> dict[str, InitLaw]:
        """The law of every parameter and buffer, by name."""
        raise NotImplementedError

    def flops_per_sample(self, tokens: int) -> int:
        """FLOPs of forward and backward, without recomputation."""
        raise NotImplementedError


@runtime_checkable
class ModelConfig(Protocol):
    """The [model] section: builds the network and knows how a sample becomes tokens."""

    @property
    def name(self) -> str:
        """The name in the catalog."""
        ...

    @property
    def num_classes(self) -> int:
        """Number of labels; a negative label stands for none."""
        ...

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        ...

    @property
    def num_heads(self) -> int:
        """Attention heads of a block."""
        ...

    @property
    def ffn(self) -> int:
        """Width of a block's MLP."""
        ...

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        """[c, h, w] of one latent."""
        ...

    @property
    def token_shape(self) -> tuple[int, int]:
        """[n, d] of one tokenized latent."""
        ...

    @property
    def token_dims(self) -> Mapping[str, int]:
        """Which dim counts tokens, for every input and static tensor that has one."""
        ...

    def edge_costs(self, output_channels: int) -> tuple[float, float]:
        """What embed and head cost, in blocks: for balancing pipeline stages."""
        ...

    def stream_shapes(self, batch: int, tokens: int) -> tuple[tuple[int, ...], ...]:
        """The shape of every tensor of the stream, whole, for so many tokens of each sample."""
        ...

    def build(self, output_channels: int) -> Model:
        """The network, on the current default device."""
        ...

    def tokenize(self, latents: Float[Tensor, "b c h w"]) -> Float[Tensor, "b n d"]:
        """Latents to tokens."""
        ...

    def detokenize(self, tokens: Float[Tensor, "b n d"]) -> Float[Tensor, "b c h w"]:
        """The inverse of `tokenize`."""
        ...

    def static(self, device: torch.device) -> dict[str, Tensor]:
        """The model's static inputs for samples of `sample_shape`."""
        ...
