"""A tiny GPT on windows of random tokens."""

from dataclasses import dataclass

import torch
from tiny import built

from titan_dit.data.base import DataConfig, Source
from titan_dit.data.token_windows import TokenFacts

VOCABULARY = 200  # Tables have 256 rows: padding counts in every layout.
TABLES = {
    "model": {
        "name": "gpt",
        "hidden_size": 32,
        "num_layers": 3,
        "num_heads": 4,
        "vocab_size": VOCABULARY,
        "sequence_length": 16,
    },
    "objective": {"name": "next_token"},
    "data": {"name": "tiny_gpt:RandomTokens"},
    "training": {"steps": 4, "global_batch_size": 8},
    "precision": {"dtype": "fp32"},
    "optimizer": {"lr": 1e-3, "weight_decay": 0.01},
    "ema": {"decays": [0.9]},
    "checkpoint": {"every": 0},
    "metrics": {"every": 1, "tensorboard": False},
}


@dataclass(frozen=True, kw_only=True)
class RandomTokens(DataConfig):
    """64 windows of 17 uniform token ids."""

    name = "tiny_gpt:RandomTokens"
    end_of_document: int | None = None
    """Id of every sixth token."""

    def open(self):
        return Windows(self.end_of_document)


class Windows(Source):
    def __init__(self, end):
        sizes = {"count": 64, "sequence_length": 16, "vocabulary": VOCABULARY}
        self.facts = TokenFacts(end_of_document=end, **sizes)
        self.fields = self.facts.fields

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(VOCABULARY, (17,), generator=generator)
        if (end := self.facts.end_of_document) is not None:
            tokens[index % 6 :: 6] = end
        return {"tokens": tokens}


def gpt_config(**sections):
    """TABLES with keys of some sections replaced."""
    return built(TABLES, sections)
