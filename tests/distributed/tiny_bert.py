"""A tiny BERT on random tokens: windows, or sentences of random lengths to be cut into pairs."""

from dataclasses import dataclass

import torch

from titan_dit.config import catalog, config_file
from titan_dit.data.base import DataConfig, Source
from titan_dit.data.sentence_pairs import PairFacts
from titan_dit.data.token_windows import TokenFacts

VOCABULARY = 200  # Tables have 256 rows: padding counts in every layout.
LENGTH = 16
TABLES = {
    "model": {
        "name": "bert",
        "hidden_size": 32,
        "num_layers": 3,
        "num_heads": 4,
        "vocab_size": VOCABULARY,
        "sequence_length": LENGTH,
        "norm_eps": 1e-5,
    },
    "objective": {"name": "masked_token", "mask_share": 0.3},
    "training": {"steps": 4, "global_batch_size": 8},
    "precision": {"dtype": "fp32"},
    "optimizer": {"lr": 1e-3, "weight_decay": 0.01},
    "ema": {"decays": [0.9]},
    "checkpoint": {"every": 0},
    "metrics": {"every": 1, "tensorboard": False},
}


@dataclass(frozen=True, kw_only=True)
class RandomWindows(DataConfig):
    """64 windows of 17 uniform token ids."""

    name = "tiny_bert:RandomWindows"

    def open(self):
        return Windows()


@dataclass(frozen=True, kw_only=True)
class RandomSentences(DataConfig):
    """64 samples of two to five sentences of one to four tokens."""

    name = "tiny_bert:RandomSentences"

    def open(self):
        return Sentences()


class Windows(Source):
    def __init__(self):
        self.facts = TokenFacts(count=64, sequence_length=LENGTH, vocabulary=VOCABULARY - 1)
        self.fields = self.facts.fields

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {"tokens": torch.randint(VOCABULARY - 1, (LENGTH + 1,), generator=generator)}


class Sentences(Source):
    def __init__(self):
        self.facts = PairFacts(
            count=64, sequence_length=LENGTH, vocabulary=VOCABULARY, cls=1, sep=2, mask=3
        )
        self.fields = self.facts.fields

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        lengths = torch.randint(1, 5, (2 + index % 4,), generator=generator)
        size = LENGTH - 3
        numbers = torch.arange(len(lengths)).repeat_interleave(lengths)[:size]
        sentences = torch.full((size,), -1)
        sentences[: len(numbers)] = numbers
        tokens = torch.randint(4, VOCABULARY, (size,), generator=generator)
        return {"tokens": tokens.where(sentences >= 0, 0), "sentences": sentences}


def bert_config(*, sentence_order=False, **sections):
    """TABLES with keys of some sections replaced."""
    tables = {name: dict(table) for name, table in TABLES.items()}
    tables["objective"]["sentence_order"] = sentence_order
    kind = "Sentences" if sentence_order else "Windows"
    tables["data"] = {"name": f"tiny_bert:Random{kind}"}
    for name, table in sections.items():
        tables.setdefault(name, {}).update(table)
    return config_file.build(tables, catalog.variant)
