"""DiT with adaLN-Zero: Scalable Diffusion Models with Transformers (arXiv:2212.09748).

Inputs are tokens [b, n, p*p*c], predictions [b, n, p*p*c_out], see `layers.patchify`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from titan_dit.models import initializers
from titan_dit.models.base import Model, SideInputs, Stream
from titan_dit.models.dit_config import DiTConfig
from titan_dit.models.initializers import Initializer
from titan_dit.models.layers import (
    CONDITION,
    MLP,
    Attention,
    LabelEmbedder,
    TimestepEmbedder,
    condition_projection,
    modulate,
    scaled_add,
)


class Embed(nn.Module):
    """Inputs to the stream: tokens [b, n, d] and the embedding [b, d], after its SiLU.

    The embedding is of timestep and label.
    """

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        hidden, _, _, patch = config.shape
        self.patch = nn.Linear(patch * patch * config.in_channels, hidden)
        self.condition = condition_projection(config.condition_channels, patch, hidden)
        reaches_period = config.timestep_frequencies == "diffusers"
        self.timestep = TimestepEmbedder(hidden, reaches_period)
        self.label = LabelEmbedder(config.num_classes, hidden)

    def forward(self, inputs: Mapping[str, Tensor], side: SideInputs) -> Stream:
        """`tokens` [b, n, p*p*c], `timestep` [b] in 0..1000, `labels` [b].

        With condition channels `condition` [b, n, p*p*k].
        """
        dtype = self.patch.weight.dtype
        tokens = self.patch(inputs["tokens"].to(dtype))
        if "condition" in inputs:
            tokens = tokens + self.condition(inputs["condition"].to(dtype))
        embedding = self.timestep(inputs["timestep"]) + self.label(inputs["labels"])
        # Every block applies SiLU to the embedding first: compute it once.
        return tokens + side["positions"].to(tokens.dtype), F.silu(embedding)


class Block(nn.Module):
    """Attention and MLP, each modulated and gated by the embedding of timestep and label."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        hidden, _, heads, _ = config.shape
        self.modulation = nn.Linear(hidden, 6 * hidden)
        self.attn = Attention(hidden, heads, config.qk_norm)
        self.mlp = MLP(hidden, config.ffn)

    def forward(self, stream: Stream, side: SideInputs) -> Stream:
        """Update the tokens; the embedding passes through."""
        x, embedding = stream
        parts = self.modulation(embedding)[:, None].chunk(6, -1)  # each [b, 1, d]
        shift_attn, scale_attn, gate_attn, shift_mlp, scale_mlp, gate_mlp = parts
        x = scaled_add(x, gate_attn, self.attn(modulate(x, shift_attn, scale_attn)))
        x = scaled_add(x, gate_mlp, self.mlp(modulate(x, shift_mlp, scale_mlp)))
        return x, embedding


class Head(nn.Module):
    """The stream to a prediction [b, n, p*p*c_out]."""

    def __init__(self, config: DiTConfig, output_channels: int) -> None:
        super().__init__()
        hidden, _, _, patch = config.shape
        self.modulation = nn.Linear(hidden, 2 * hidden)
        self.out = nn.Linear(hidden, patch * patch * output_channels)

    def forward(self, stream: Stream, side: SideInputs) -> Float[Tensor, "b n d"]:
        """The last adaLN and the output layer."""
        x, embedding = stream
        shift, scale = self.modulation(embedding)[:, None].chunk(2, -1)
        prediction: Tensor = self.out(modulate(x, shift, scale))
        return prediction


class DiT(Model):
    """The whole network."""

    embed: Embed
    head: Head

    def __init__(self, config: DiTConfig, output_channels: int) -> None:
        super().__init__()
        self.config = config
        self.output_channels = output_channels
        self.embed = Embed(config)
        self.blocks = nn.ModuleDict({str(i): Block(config) for i in range(config.shape[1])})
        self.head = Head(config, output_channels)

    def initializers(self) -> dict[str, Initializer]:
        """As the original: Xavier for linears, N(0, 0.02) for timestep and label, zero gates.

        The modulations and the output layer start at zero, so that every block starts as the
        identity (adaLN-Zero).
        """
        table: dict[str, Initializer] = {}
        for name, _ in self.named_parameters():
            if ".modulation." in name or name.startswith("head.out") or name == CONDITION:
                table[name] = initializers.zeros
            elif name.endswith("_norm.weight"):
                table[name] = initializers.ones
            elif name.endswith(".bias"):
                table[name] = initializers.zeros
            elif name.startswith(("embed.timestep", "embed.label")):
                table[name] = initializers.normal(0.02)
            else:
                table[name] = initializers.xavier_uniform
        return table

    def flops_per_sample(self, tokens: int) -> int:
        """FLOPs of forward and backward per sample: 2 per multiply-add of a matmul, no recompute.

        0.5% below Megatron's formula for DiT: here the last modulation is per sample, the patch
        embedding has no input gradient, and the timestep MLP counts in full.
        """
        embed, block, head = self.config.flops(tokens, self.output_channels)
        return embed + self.config.shape[1] * block + head
