"""The contenders of benchmarks/gpt_step.py."""

import sys
from pathlib import Path

import pytest
import torch

from titan_dit.interop.tensor_layouts import swap_leading
from titan_dit.models.gpt_config import GPTConfig

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import gpt_step
import plain_gpt

CONFIG = GPTConfig(hidden_size=32, num_layers=2, num_heads=4, vocab_size=128, sequence_length=8)
NAMES = {"attn_norm": "norm1", "mlp_norm": "norm2", "attn.out": "proj", "mlp.up": "up"}
NAMES |= {"mlp.down": "down", "attn.qkv": "qkv"}


def test_the_plain_gpt_is_our_network():
    ours, plain = CONFIG.build(), plain_gpt.PlainGPT(CONFIG)
    weights = {
        "token.weight": ours.embed.token.weight,
        "position.weight": ours.embed.position.weight,
        "norm.weight": ours.head.norm.weight,
        "norm.bias": ours.head.norm.bias,
    }
    for name, parameter in ours.blocks.named_parameters():
        layer, _, inner = name.partition(".")
        part, _, kind = inner.rpartition(".")
        tensor = swap_leading(parameter, 4, 3) if part == "attn.qkv" else parameter
        weights[f"blocks.{layer}.{NAMES[part]}.{kind}"] = tensor
    plain.load_state_dict(weights)
    tokens = torch.randint(0, 128, (2, 8))
    with torch.no_grad():
        found = ours({"tokens": tokens}, CONFIG.static(tokens.device))
        torch.testing.assert_close(plain(tokens), found)


@pytest.mark.parametrize("make", [gpt_step.ours, plain_gpt.make_step])
def test_steps_lower_the_loss(make):
    step = make(CONFIG, torch.randint(0, 128, (2, 9), generator=torch.Generator().manual_seed(0)))
    losses = [step().item() for _ in range(40)]
    assert losses[-1] < losses[0] - 0.1
