"""The 18 layouts of benchmarks/facts/megatron_v100.csv, and their configs at full size and small.

The public table is that of OneFlow's DLPerf report on Megatron-LM: GPTs of five sizes on 1 to 32
V100. A data-parallel rank of the table is a rank of `dp_shard` here: the default of the recipes.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titan_dit.config import catalog, config_file
from titan_dit.config.job import JobConfig
from titan_dit.config.section import UserError
from titan_dit.data.base import DataConfig, Source
from titan_dit.data.token_windows import TokenFacts

FACTS = Path(__file__).resolve().parent / "facts"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A layout of the table, and what others measured."""

    case: str
    """The table's own name: kind of layout, dp x tp x pp, global batch, hidden x layers."""
    dp: int
    tp: int
    pp: int
    microbatch_size: int
    num_microbatches: int
    global_batch_size: int
    hidden: int
    layers: int
    heads: int
    megatron_ms: float
    megatron_mib: int
    oneflow_ms: float
    oneflow_mib: int

    @property
    def ranks(self) -> int:
        """World size."""
        return self.dp * self.tp * self.pp

    @property
    def layout(self) -> str:
        """The axes above 1."""
        sizes = {"dp": self.dp, "tp": self.tp, "pp": self.pp}
        return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "1 GPU"

    @property
    def recipe(self) -> str:
        """Name in train_configs/."""
        return f"gpt_{self.hidden}x{self.layers}"


NUMBERS = {
    "dp": "dp",
    "tp": "tp",
    "pp": "pp",
    "microbatch_size": "micro_batch_samples",
    "num_microbatches": "num_microbatches",
    "global_batch_size": "global_batch_samples",
    "hidden": "hidden",
    "layers": "layers",
    "heads": "heads",
}
"""Field of `Row` -> column of the table."""


def read(folder: Path = FACTS) -> list[Row]:
    """The table, in its order: Megatron-LM's rows, and OneFlow's of the same cases."""
    oneflow = {cells["case"]: cells for cells in cells_of(folder / "oneflow_v100.csv")}
    return [
        Row(
            case=cells["case"],
            megatron_ms=float(cells["step_ms"]),
            megatron_mib=int(cells["memory_mib"]),
            oneflow_ms=float(oneflow[cells["case"]]["step_ms"]),
            oneflow_mib=int(oneflow[cells["case"]]["memory_mib"]),
            **{field: int(cells[column]) for field, column in NUMBERS.items()},
        )
        for cells in cells_of(folder / "megatron_v100.csv")
    ]


def cells_of(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file by column."""
    with path.open(newline="") as lines:
        return list(csv.DictReader(lines))


def chosen(rows: Sequence[Row], only: Sequence[str] | None, most_ranks: int | None) -> list[Row]:
    """The rows whose name begins with one of `only`, on at most `most_ranks` ranks."""
    for name in only or ():
        if not any(row.case.startswith(name) for row in rows):
            known = ", ".join(row.case for row in rows)
            raise UserError(f"--only {name}: no such case. There are {known}.")
    found = [row for row in rows if not only or row.case.startswith(tuple(only))]
    found = [row for row in found if most_ranks is None or row.ranks <= most_ranks]
    if not found:
        raise UserError(f"--ranks {most_ranks}: no chosen case has so few. Give more ranks.")
    return found


def full_config(row: Row) -> JobConfig:
    """The recipe of the row's GPT in the row's layout."""
    keys = {
        "parallel.dp_shard": row.dp,
        "parallel.tp": row.tp,
        "parallel.pp": row.pp,
        "training.global_batch_size": row.global_batch_size,
        "training.microbatch_size": row.microbatch_size,
    }
    flags = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    return config_file.load(["--config", row.recipe, *flags], catalog.variant)


@dataclass(frozen=True, kw_only=True)
class Small:
    """A row reduced to what a CPU can compute: its layout, heads and layers, else smaller."""

    head_dim: int = 8
    """Channels of a head: hidden is a twelfth of the table's 2304 and 3072."""
    tokens: int = 32
    """Tokens of a sample: one for each of 32 tp ranks."""
    vocabulary: int = 500
    """Tables have 512 rows: padding counts."""
    share: int = 8
    """Samples of a microbatch: those of the row, divided by this; at least one."""
    microbatches: int = 8
    """Maximum microbatches of a step: twice the stages of the longest pipelines. The row has up to
    32."""
    layers: int | None = None
    """None: the row's."""
    steps: int = 2
    """The loss of the second depends on every gradient of the first."""


def small_tables(row: Row, small: Small) -> config_file.Tables:
    """The row on a CPU in fp32, in which every layout must give the same loss."""
    tables = config_file.to_tables(full_config(row))
    tables["model"] |= {
        "hidden_size": row.heads * small.head_dim,
        "num_layers": small.layers or row.layers,
        "vocab_size": small.vocabulary,
        "sequence_length": small.tokens,
    }
    keys = {"sequence_length": small.tokens, "vocab_size": small.vocabulary}
    tables["data"] = {"name": "matrix_rows:RandomTokens", **keys}
    size = max(1, row.microbatch_size // small.share)
    batch = row.dp * min(row.num_microbatches, small.microbatches) * size
    tables["training"] |= {
        "steps": small.steps,
        "microbatch_size": size,
        "global_batch_size": batch,
    }
    tables["precision"] = {"dtype": "fp32"}
    # The recipes' warm-up of 5,000 steps would leave the second loss as it was.
    tables["lr_scheduler"] = {"warmup_steps": 0, "decay": "constant"}
    tables["optimizer"] |= {"lr": 1e-3}
    tables["checkpoint"] = {"every": 0}
    tables["metrics"] = {"tensorboard": False}
    return tables


def small_config(row: Row, small: Small) -> JobConfig:
    """`small_tables` as a config."""
    return config_file.build(small_tables(row, small), catalog.variant)


def reference_config(row: Row, small: Small) -> JobConfig:
    """The config of the same steps in one process, without splitting and recomputation."""
    tables = small_tables(row, small)
    tables["parallel"] = {}
    tables["activation_checkpoint"] = {"mode": "none"}
    tables["training"] |= {"microbatch_size": min(64, tables["training"]["global_batch_size"])}
    return config_file.build(tables, catalog.variant)


@dataclass(frozen=True, kw_only=True)
class RandomTokens(DataConfig):
    """1,024 windows of uniform token ids, each a function of its number."""

    name = "matrix_rows:RandomTokens"
    sequence_length: int
    vocab_size: int
    count: int = 1024

    def open(self) -> Windows:
        """Return the source."""
        return Windows(self)


class Windows(Source):
    """The windows of `RandomTokens`."""

    def __init__(self, config: RandomTokens) -> None:
        self.facts: Any = TokenFacts(
            count=config.count,
            sequence_length=config.sequence_length,
            vocabulary=config.vocab_size,
        )
        self.fields = self.facts.fields

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Draw window `index`."""
        shape = (self.facts.sequence_length + 1,)
        generator = torch.Generator().manual_seed(index)
        return {"tokens": torch.randint(self.facts.vocabulary, shape, generator=generator)}
