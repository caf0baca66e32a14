"""A plain DiT and its training step: the baseline of the benchmarks.

The network of arXiv:2212.09748 as in its paper and public code: a convolution as patch embedding,
a position buffer, timm-style attention and MLP, SiLU inside every modulation. Optimizer: torch's
AdamW with its defaults. No further optimisation.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_dit.config.section import UserError
from titan_dit.models.dit_config import DiTConfig


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Shift and scale by the condition."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class Attention(nn.Module):
    """Self-attention; the qkv projection outputs [3, heads, head_dim]."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """[b, n, d]."""
        b, n, d = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(b, n, d))


class Block(nn.Module):
    """adaLN-Zero block."""

    def __init__(self, dim: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.attn = Attention(dim, heads)
        self.mlp = nn.Sequential(
            nn.Linear(dim, ffn), nn.GELU(approximate="tanh"), nn.Linear(ffn, dim)
        )
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        """[b, n, d] with condition [b, d]."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).chunk(6, dim=1)
        x = x + gate1.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift1, scale1))
        return x + gate2.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift2, scale2))


class PlainDiT(nn.Module):
    """Latents [b, c, h, w], t in [0, 1] and labels to a prediction of the same shape."""

    def __init__(self, config: DiTConfig, output_channels: int) -> None:
        super().__init__()
        dim, layers, heads, patch = config.shape
        self.patch_size, self.null = patch, config.num_classes
        self.patch = nn.Conv2d(config.in_channels, dim, patch, stride=patch)
        tokens = (config.latent_size // patch) ** 2
        self.register_buffer("positions", torch.randn(1, tokens, dim) * 0.02)
        self.time = nn.Sequential(nn.Linear(256, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.label = nn.Embedding(config.num_classes + 1, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, config.ffn) for _ in range(layers))
        self.norm = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim))
        self.out = nn.Linear(dim, patch * patch * output_channels)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """Embed, blocks, unpatchify."""
        frequencies = torch.exp(-math.log(10000) * torch.arange(128, device=x.device) / 128)
        angles = 1000 * t[:, None] * frequencies
        c = self.time(torch.cat((angles.cos(), angles.sin()), -1)) + self.label(y)
        side = x.shape[-1] // self.patch_size
        x = self.patch(x).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.modulation(c).chunk(2, dim=1)
        x = self.out(modulate(self.norm(x), shift, scale))
        p = self.patch_size
        x = x.reshape(x.shape[0], side, side, p, p, -1)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(x.shape[0], -1, side * p, side * p)


class Original(nn.Module):
    """The network of facebookresearch/DiT, called as `PlainDiT` is."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        # In eval mode it drops no labels: the objective does. It has no other dropout.
        self.network = network.eval()
        self.blocks, self.null = network.blocks, network.y_embedder.num_classes

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """Predict, as `PlainDiT` does. Timesteps go to 1000."""
        prediction: Tensor = self.network(x, 1000 * t, y)
        return prediction


def original(config: DiTConfig, learn: Learn, clone: Path | None) -> Original:
    """The original network from models.py of a clone of facebookresearch/DiT, which needs timm."""
    if clone is None or not (clone / "models.py").is_file():
        raise UserError(f"no clone of facebookresearch/DiT in {clone} (--original)")
    spec = importlib.util.spec_from_file_location("original_dit_models", clone / "models.py")
    assert spec is not None
    assert spec.loader is not None
    models = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(models)
    except ImportError as error:
        raise UserError(f"{clone / 'models.py'} cannot be imported: {error}") from error
    hidden, layers, heads, patch = config.shape
    network = models.DiT(
        input_size=config.latent_size,
        patch_size=patch,
        in_channels=config.in_channels,
        hidden_size=hidden,
        depth=layers,
        num_heads=heads,
        mlp_ratio=config.ffn / hidden,
        num_classes=config.num_classes,
        learn_sigma=learn.output_channels(config.in_channels) != config.in_channels,
    )
    return Original(network)


Network: TypeAlias = PlainDiT | Original


class Learn(Protocol):
    """An objective, the counterpart of those of titan_dit."""

    def output_channels(self, channels: int) -> int:
        """Channels that the network predicts."""
        ...

    def loss(self, model: Network, latents: Tensor, labels: Tensor) -> Tensor:
        """Draw the random numbers, run the network and return the loss."""
        ...


class RectifiedFlow:
    """The velocity on the straight path from data to noise, t logit-normal."""

    def output_channels(self, channels: int) -> int:
        """One velocity per channel."""
        return channels

    def loss(self, model: Network, latents: Tensor, labels: Tensor) -> Tensor:
        """Mean squared error of the velocity, with label dropout 0.1."""
        batch, device = len(latents), latents.device
        t = torch.sigmoid(torch.randn(batch, device=device))
        noise = torch.randn_like(latents)
        x = (1 - t.view(-1, 1, 1, 1)) * latents + t.view(-1, 1, 1, 1) * noise
        y = torch.where(torch.rand(batch, device=device) < 0.1, model.null, labels)
        return F.mse_loss(model(x, t, y), noise - latents)


@torch.no_grad()
def update_ema(averages: dict[str, Tensor], model: nn.Module, decay: float = 0.9999) -> None:
    """Update the EMA parameter by parameter."""
    for name, parameter in model.named_parameters():
        averages[name].mul_(decay).add_(parameter, alpha=1 - decay)


def training_step(
    model: Network,
    config: DiTConfig,
    batch: int,
    learn: Learn,
    *,
    autocast: torch.dtype | None = None,
    ema: bool = False,
) -> Callable[[], Tensor]:
    """A training step as in a plain training script, on a fixed batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    named = model.named_parameters() if ema else ()
    averages = {name: parameter.detach().clone() for name, parameter in named}
    device = next(model.parameters()).device
    latents = torch.randn(batch, *config.sample_shape, device=device)
    labels = torch.randint(0, config.num_classes, (batch,), device=device)

    def step() -> Tensor:
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            loss = learn.loss(model, latents, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if ema:
            update_ema(averages, model)
        return loss.detach()

    return step


def make_step(config: DiTConfig, batch: int, device: torch.device) -> Callable[[], Tensor]:
    """A training step of rectified flow in fp32, without EMA."""
    learn = RectifiedFlow()
    model = PlainDiT(config, learn.output_channels(config.in_channels)).to(device)
    return training_step(model, config, batch, learn)
