"""Parity of predictions and gradients with the original DiT, reimplemented from its description."""

import math

import pytest
import torch
import torch.nn.functional as F
from test_dit import inputs_for, predict, tiny
from test_layers import original_positions
from torch import nn

from titan_dit.models import dit, layers


class OriginalBlock(nn.Module):
    """DiTBlock of facebookresearch/DiT with timm's attention, written from its description."""

    def __init__(self, hidden, heads, ffn):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.fc1, self.fc2 = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden, 6 * hidden))

    def attention(self, x):
        b, n, d = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        weights = (q * (d // self.heads) ** -0.5 @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, n, d))

    def forward(self, x, c):
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = self.adaLN_modulation(
            c
        ).chunk(6, dim=1)
        x = x + gate_msa.unsqueeze(1) * self.attention(original_modulate(x, shift_msa, scale_msa))
        y = self.fc1(original_modulate(x, shift_mlp, scale_mlp))
        return x + gate_mlp.unsqueeze(1) * self.fc2(F.gelu(y, approximate="tanh"))


def original_modulate(x, shift, scale):
    normed = (x - x.mean(-1, keepdim=True)) / (
        x.var(-1, keepdim=True, unbiased=False) + 1e-6
    ).sqrt()
    return normed * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class OriginalDiT(nn.Module):
    """The network of the paper's code: latents in, latents out."""

    def __init__(self, size, patch, channels, out_channels, hidden, depth, heads, classes):
        super().__init__()
        self.patch, self.out_channels = patch, out_channels
        self.x_embedder = nn.Conv2d(channels, hidden, kernel_size=patch, stride=patch)
        self.t_mlp = nn.Sequential(nn.Linear(256, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.y_embedding = nn.Embedding(classes + 1, hidden)
        self.register_buffer("pos_embed", original_positions(size // patch, hidden).float())
        self.blocks = nn.ModuleList(OriginalBlock(hidden, heads, 4 * hidden) for _ in range(depth))
        self.final_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden, 2 * hidden))
        self.final_linear = nn.Linear(hidden, patch * patch * out_channels)

    def timestep_embedding(self, t):
        freqs = torch.exp(-math.log(10000) * torch.arange(128, dtype=torch.float32) / 128)
        args = t[:, None].float() * freqs[None]
        return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)

    def forward(self, x, t, y):
        x = self.x_embedder(x).flatten(2).transpose(1, 2) + self.pos_embed
        y = torch.where(y < 0, torch.full_like(y, self.y_embedding.num_embeddings - 1), y)
        c = self.t_mlp(self.timestep_embedding(t)) + self.y_embedding(y)
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.final_modulation(c).chunk(2, dim=1)
        x = self.final_linear(original_modulate(x, shift, scale))
        side, p = math.isqrt(x.shape[1]), self.patch
        x = x.reshape(x.shape[0], side, side, p, p, self.out_channels)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(x.shape[0], -1, side * p, side * p)


def as_ours(original, pick):
    """{our name: the original's tensor in our layout}; `pick` takes a weight or its gradient."""
    conv = pick(original.x_embedder.weight)
    ours = {
        # [out, c, p, p] to [out, (p, p, c)]
        "embed.patch.weight": conv.permute(0, 2, 3, 1).flatten(1),
        "embed.patch.bias": pick(original.x_embedder.bias),
        "embed.timestep.up.weight": pick(original.t_mlp[0].weight),
        "embed.timestep.up.bias": pick(original.t_mlp[0].bias),
        "embed.timestep.down.weight": pick(original.t_mlp[2].weight),
        "embed.timestep.down.bias": pick(original.t_mlp[2].bias),
        "embed.label.table.weight": pick(original.y_embedding.weight),
        "head.modulation.weight": pick(original.final_modulation[1].weight),
        "head.modulation.bias": pick(original.final_modulation[1].bias),
        "head.out.weight": pick(original.final_linear.weight),
        "head.out.bias": pick(original.final_linear.bias),
    }
    for i, block in enumerate(original.blocks):
        for kind in ("weight", "bias"):
            # Rows [3, heads, head_dim] to [heads, 3, head_dim].
            rows = pick(getattr(block.qkv, kind)).unflatten(0, (3, block.heads, -1))
            ours[f"blocks.{i}.attn.qkv.{kind}"] = rows.transpose(0, 1).flatten(0, 2)
            ours[f"blocks.{i}.attn.out.{kind}"] = pick(getattr(block.proj, kind))
            ours[f"blocks.{i}.mlp.up.{kind}"] = pick(getattr(block.fc1, kind))
            ours[f"blocks.{i}.mlp.down.{kind}"] = pick(getattr(block.fc2, kind))
            modulation = block.adaLN_modulation[1]
            ours[f"blocks.{i}.modulation.{kind}"] = pick(getattr(modulation, kind))
    return ours


def compare_with_the_original(learned_sigma):
    """The largest difference of the predictions, and of the gradients."""
    config = tiny()
    out_channels = config.in_channels * (2 if learned_sigma else 1)
    torch.manual_seed(0)
    original = OriginalDiT(8, 2, 3, out_channels, hidden=32, depth=2, heads=4, classes=5)
    for parameter in original.parameters():
        nn.init.normal_(parameter, std=0.15)
    model = config.build(out_channels)
    model.load_state_dict(as_ours(original, lambda p: p.detach()))
    latents, timestep, labels = inputs_for(config)
    expected = original(latents, timestep, labels)
    prediction = predict(model, latents, timestep, labels)
    assert prediction.shape == expected.shape == (3, out_channels, 8, 8)
    direction = torch.randn_like(expected) / expected.numel() ** 0.5
    (expected * direction).sum().backward()
    (prediction * direction).sum().backward()
    gradients = as_ours(original, lambda p: p.grad)
    assert all(gradient.abs().max() > 1e-4 for gradient in gradients.values())
    return (
        (prediction - expected).abs().max().item(),
        max((p.grad - gradients[name]).abs().max().item() for name, p in model.named_parameters()),
    )


@pytest.mark.parametrize("learned_sigma", [False, True])
def test_predictions_and_gradients_are_those_of_the_original(learned_sigma):
    forward, backward = compare_with_the_original(learned_sigma)
    assert forward < 1e-5
    assert backward < 1e-5


POSITIONS = layers.sincos_positions


POSITIONS = layers.sincos_positions


def swapped_positions(positions, dim):
    return POSITIONS(positions.flip(1), dim)


def shift_and_scale_exchanged(x, shift, scale):
    return layers.modulate(x, scale, shift)


def scale_without_one(x, shift, scale):
    return layers.modulate(x, shift, scale - 1)


def eps_of_torch(x, shift, scale):
    return torch.addcmul(shift, F.layer_norm(x, x.shape[-1:], eps=1e-2), 1 + scale)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("sincos_positions", swapped_positions),
        ("modulate", shift_and_scale_exchanged),
        ("modulate", scale_without_one),
        ("modulate", eps_of_torch),
    ],
)
def test_the_comparison_with_the_original_sees_a_planted_mistake(monkeypatch, name, wrong):
    monkeypatch.setattr(dit if hasattr(dit, name) else layers, name, wrong)
    assert compare_with_the_original(learned_sigma=False)[0] > 1e-4


def test_the_comparison_with_the_original_sees_another_order_of_qkv(monkeypatch):
    def unflatten_as_timm(self, dim, sizes):
        *_, size = sizes
        return real(self, dim, (3, -1, size)).transpose(-3, -2)

    real = torch.Tensor.unflatten
    monkeypatch.setattr(
        dit.Attention,
        "forward",
        lambda self, x: self.out(attend(unflatten_as_timm(self.qkv(x), -1, (self.head_dim,)))),
    )

    def attend(heads):
        q, k, v = heads.transpose(1, 2).unbind(3)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    assert compare_with_the_original(learned_sigma=False)[0] > 1e-4
