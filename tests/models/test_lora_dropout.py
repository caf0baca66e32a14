"""Dropout of adapters' inputs: a mask of every element, by sample, token, layer and channel."""

import pytest
import torch

from titan_dit.models import lora_dropout
from titan_dit.models.base import ModelSpec, TensorSpec
from titan_dit.models.flux2_config import Flux2Config
from titan_dit.models.wan_config import WanConfig
from titan_dit.rng import SampleRNG

TOKENS, TEXT, CHANNELS = 24, 8, 64
SPEC = ModelSpec(
    build=lambda: None,
    inputs={},
    stream={
        "tokens": TensorSpec((TOKENS, CHANNELS), token_dim=0),
        "text": TensorSpec((TEXT, CHANNELS)),
        "condition": TensorSpec((CHANNELS,)),
    },
    predictions={},
    num_layers=1,
    num_heads=1,
    head_dim=CHANNELS,
    ffn=CHANNELS,
    num_tokens=TOKENS,
)
NUMBERS = torch.arange(100, 116)
WORDS = lora_dropout.drawn(SampleRNG(0, NUMBERS), SPEC)
IMAGE = WORDS["lora_dropout.tokens"]
NUMBER = torch.tensor(lora_dropout.layer_number("blocks.0.attn.qkv"))
RATE = 0.25
FLUX2, WAN = Flux2Config(size="klein-4B"), WanConfig(size="1.3B")


def mask(words=IMAGE, number=NUMBER, first=0, channels=CHANNELS, rate=RATE):
    x = torch.ones(*words.shape, channels)
    return lora_dropout.dropped(x, words, number, rate, first) != 0


def test_words_are_cut_as_the_tokens_are():
    assert {name: tuple(words.shape) for name, words in WORDS.items()} == {
        "lora_dropout": (16,),
        "lora_dropout.tokens": (16, TOKENS),
        "lora_dropout.text": (16, TEXT),
    }
    context = lora_dropout.with_words(SPEC).context
    assert [spec.token_dim for spec in context.values()] == [None, 0, None]
    # A sample's words depend on its number alone.
    some = lora_dropout.drawn(SampleRNG(0, NUMBERS[[5, 3]]), SPEC)
    assert all(torch.equal(some[name], words[[5, 3]]) for name, words in WORDS.items())
    numbers = torch.cat([words.flatten() for words in WORDS.values()])
    assert len(numbers.unique()) == len(numbers)


def test_a_share_of_elements_is_dropped_and_the_mean_stays():
    for rate in (0.1, 0.5, 0.9):
        kept = mask(rate=rate).float()
        deviation = (rate * (1 - rate) / kept.numel()) ** 0.5
        assert abs(kept.mean() - (1 - rate)) < 5 * deviation
        x = lora_dropout.dropped(torch.ones_like(kept), IMAGE, NUMBER, rate)
        assert torch.equal(x, kept / (1 - rate))


def test_elements_are_independent():
    kept, other = mask().float(), mask(number=NUMBER + 1).float()
    pairs = [(kept, other)]  # Two layers.
    pairs += [
        (kept.narrow(dim, 1, n - 1), kept.narrow(dim, 0, n - 1)) for dim, n in enumerate(kept.shape)
    ]
    for one, two in pairs:
        both = (one * two).mean()
        assert abs(both - (1 - RATE) ** 2) < 5 / one.numel() ** 0.5
    # Text and picture at the same place, too.
    text = mask(WORDS["lora_dropout.text"]).float()
    assert abs((text * kept[:, :TEXT]).mean() - (1 - RATE) ** 2) < 5 / text.numel() ** 0.5


def test_any_part_of_a_mask_can_be_drawn():
    whole = mask()
    assert torch.equal(mask(first=16, channels=8), whole[..., 16:24])
    assert torch.equal(mask(IMAGE[3:5, 6:12]), whole[3:5, 6:12])
    assert torch.equal(mask(IMAGE.t()), whole.transpose(0, 1))


def test_joined_words_have_the_order_of_sequence_parallelism():
    parts = WORDS["lora_dropout.text"], IMAGE
    assert torch.equal(lora_dropout.words_of(parts, 1), torch.cat(parts, 1))
    halves = [part.chunk(2, 1) for part in parts]
    wanted = torch.cat([half for rank in zip(*halves, strict=True) for half in rank], 1)
    assert torch.equal(lora_dropout.words_of(parts, 2), wanted)


@pytest.mark.parametrize(
    ("config", "block", "layer", "expected"),
    [
        (FLUX2, 0, "image.attn.qkv", ("tokens",)),
        (FLUX2, 0, "text.mlp.up", ("text",)),
        (FLUX2, -1, "attn.qkv", ("text", "tokens")),
        (WAN, 0, "cross.kv", ("text",)),
        (WAN, 0, "cross.q", ("tokens",)),
    ],
)
def test_a_layer_reads_the_tokens_that_its_part_says(config, block, layer, expected):
    with torch.device("meta"):
        model = config.build(config.in_channels)
    part = list(model.blocks.values())[block]
    assert lora_dropout.streams_read(part, layer, "tokens") == expected
