"""A plain GPT-2 and its training step: the baseline of gpt_step.py.

The network as in its paper and in common public code, with scaled_dot_product_attention.
Optimizer: torch's AdamW, fused. No further optimisation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_dit.models.gpt_config import GPTConfig


class Block(nn.Module):
    """Pre-norm attention and MLP; the qkv projection outputs [3, heads, head_dim]."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[b, n, d]."""
        b, n, d = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.view(b, n, self.heads, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, n, d))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """Token ids [b, n] to logits [b, n, vocabulary]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        hidden, layers, heads = config.shape
        self.token = nn.Embedding(config.vocab_size, hidden)
        self.position = nn.Embedding(config.sequence_length, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        for parameter in (self.token.weight, self.position.weight):
            nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed, blocks, and the token table as output layer."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.token.weight)


def training_step(
    model: nn.Module, logits: Callable[[Tensor], Tensor], windows: Tensor
) -> Callable[[], Tensor]:
    """A step as in a plain training script, on fixed windows [b, n + 1]."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    inputs, targets = windows[:, :-1].contiguous(), windows[:, 1:].flatten()

    def step() -> Tensor:
        loss = F.cross_entropy(logits(inputs).flatten(0, 1), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def make_step(config: GPTConfig, windows: Tensor) -> Callable[[], Tensor]:
    """A training step in fp32."""
    model = PlainGPT(config).to(windows.device)
    return training_step(model, model, windows)
