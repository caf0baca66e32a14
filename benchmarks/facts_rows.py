"""Rows of benchmarks/facts, or of any file with their columns, as cases of the planner."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from facts_kernels import as_foundry, as_unfused, with_hidden_tp
from facts_software import SOFTWARE, Software

from titan_dit.config import catalog, config_file
from titan_dit.config.job import JobConfig
from titan_dit.config.layout import ActivationCheckpointConfig
from titan_dit.config.section import UserError
from titan_dit.plan import RunPlan, resolve
from titan_dit.planner.calibrate import Case
from titan_dit.planner.counts import Rehearsals
from titan_dit.planner.hardware import Device
from titan_dit.planner.search import tp_crosses_nodes
from titan_dit.planner.work import Counts

FACTS = Path(__file__).resolve().parent / "facts"
COLUMNS = tuple((FACTS / "megatron_v100.csv").read_text().splitlines()[0].split(","))
SHAPE = ("hidden", "heads", "kv_heads", "layers", "ffn", "seq_tokens", "vocab_padded")
LAYOUT = ("variant", "gpus", "dp", "tp", "pp", "cp", "schedule", "virtual_stages", "recompute")
BATCH = ("micro_batch_samples", "global_batch_samples", "sequence_parallel", "precision")
GROUP = ("software", "device", "gpus", "global_batch_samples", *SHAPE[:-1])
"""Layouts that a user would choose from; padding of the vocabulary follows tp."""


@dataclass(frozen=True)
class Fact:
    """A row."""

    row: Mapping[str, str]

    def __getitem__(self, column: str) -> int:
        """A column of whole numbers."""
        return int(self.row[column])

    @property
    def name(self) -> str:
        """Its case."""
        return self.row["case"]

    @property
    def same(self) -> str:
        """Equal in rows of the same case: everything but what was measured."""
        return " ".join(self.row[key] for key in ("software", "device", *LAYOUT, *BATCH, *SHAPE))

    @property
    def group(self) -> tuple[str, ...]:
        """Equal in rows that a user would choose from."""
        return tuple(self.row[key] for key in GROUP)

    @property
    def software(self) -> Software:
        """Settings of its trainer."""
        return SOFTWARE[self.row["software"]][self.row["variant"]]

    @property
    def equal_stages(self) -> list[int]:
        """Layers of each stage: equal in all trainers; [] if they do not divide."""
        stages = self["pp"] * self["virtual_stages"]
        each, rest = divmod(self["layers"], stages)
        return [] if rest or self["pp"] == 1 else [each] * stages

    @property
    def tables(self) -> dict[str, dict[str, Any]]:
        """The config that describes the row."""
        software, recompute = self.software, self.row["recompute"]
        is_llama = self["kv_heads"] < self["heads"]
        float8 = self.row["precision"] == "float8"
        training = {"steps": 1, "global_batch_size": self["global_batch_samples"]}
        data = {"name": "tokens", "paths": ["unread"], "sequence_length": self["seq_tokens"]}
        return {
            "job": {"name": "facts"},
            "model": model_table(self, is_llama=is_llama),
            "objective": {"name": "next_token"},
            "data": {**data, "vocab_size": self["vocab_padded"]},
            "parallel": {
                "dp_shard": self["dp"],
                "tp": self["tp"],
                "pp": self["pp"],
                "cp": self["cp"],
                "sequence_parallel": bool(self["sequence_parallel"]),
                "reshard_after_forward": software.reshard,
            },
            "pipeline": {
                "schedule": self.row["schedule"],
                "virtual_stages": self["virtual_stages"],
                "split": self.equal_stages,
            },
            "training": {**training, "microbatch_size": self["micro_batch_samples"]},
            "activation_checkpoint": {"mode": software.remat.get(recompute, recompute)},
            "precision": {
                "dtype": "bf16" if float8 else self.row["precision"],
                "float8": "tensorwise" if float8 else "off",
                "float8_layers": "all" if float8 else "auto",
            },
            "compile": {"enabled": software.is_compiled},
            "optimizer": {"name": "adamw", "lr": 1e-4},
            "ema": {"decays": []},
        }


def model_table(fact: Fact, *, is_llama: bool) -> dict[str, Any]:
    """[model]: GPT-2 as Megatron trains it, or Llama."""
    llama = {
        "num_key_value_heads": fact["kv_heads"],
        "position_embedding_type": "rotary",
        "norm": "rmsnorm",
        "mlp": "swiglu",
        "bias": False,
        "tie_word_embeddings": False,
    }
    return {
        "name": "gpt",
        "hidden_size": fact["hidden"],
        "num_heads": fact["heads"],
        "num_layers": fact["layers"],
        "intermediate_size": fact["ffn"],
        "sequence_length": fact["seq_tokens"],
        "vocab_size": fact["vocab_padded"],
        **(llama if is_llama else {}),
    }


def read(path: Path) -> list[Fact]:
    """The rows of a file. Raises UserError about columns and software that are unknown."""
    if not path.is_file():
        raise UserError(f"--facts {path}: no such file.")
    with path.open(newline="") as lines:
        rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    if missing := [column for column in COLUMNS if column not in (rows or [{}])[0]]:
        raise UserError(
            f"--facts {path}: columns {', '.join(missing)} are missing. benchmarks/facts/README.md "
            "explains them."
        )
    for row in rows:
        if row["variant"] not in SOFTWARE.get(row["software"], {}):
            raise UserError(
                f"--facts {path}: software={row['software']!r} with variant={row['variant']!r} is "
                f"not in benchmarks/facts_software.py: {', '.join(SOFTWARE)}. Add it there."
            )
    return [Fact(row) for row in rows]


def config_of(tables: Mapping[str, Any]) -> JobConfig:
    """The config of tables."""
    return config_file.build(tables, catalog.variant)


def plan_of(fact: Fact) -> RunPlan:
    """The plan that describes a row."""
    return resolve(config_of(fact.tables), fact["gpus"])


def inside_nodes(facts: Sequence[Fact], device: Device) -> list[Fact]:
    """The rows whose tp groups stay inside a node; others are neither fitted nor counted."""
    return [fact for fact in facts if not tp_crosses_nodes(plan_of(fact).sizes, device)]


REHEARSALS: dict[str, Rehearsals] = {}
"""By model; rehearsals are slow, and many rows share one."""


def rehearsed(fact: Fact, plan: RunPlan) -> Counts:
    """Counts of this project's own run of a plan."""
    # A layer's counts do not depend on how many there are.
    model = json.dumps({**fact.tables["model"], "num_layers": 0})
    if model not in REHEARSALS:
        REHEARSALS[model] = Rehearsals(config_of(fact.tables))
    return REHEARSALS[model].counts(plan)


def counts_of(fact: Fact, plan: RunPlan) -> Counts:
    """Counts of a row's trainer."""
    kernels, recompute = fact.software.kernels, fact.row["recompute"]
    if kernels == "ours":
        own = rehearsed(fact, plan)
        return with_hidden_tp(own) if fact.software.is_async else own
    precision = replace(plan.precision, float8="off")
    plain = replace(
        plan, activation_checkpoint=ActivationCheckpointConfig(mode="none"), precision=precision
    )
    counts = rehearsed(fact, plain)
    tokens = fact["micro_batch_samples"] * fact["seq_tokens"]
    logits = tokens * fact["vocab_padded"] / fact["tp"]
    if kernels == "foundry":
        float8 = fact.row["precision"] == "float8"
        return as_foundry(counts, recompute, logits, float8=float8)
    return as_unfused(counts, kernels, recompute, logits)


def case_of(fact: Fact) -> Case:
    """A row as a case for a fit."""
    plan = plan_of(fact)
    return Case(
        name=fact.name,
        plan=plan,
        counts=counts_of(fact, plan),
        seconds=float(fact.row["step_ms"]) / 1e3,
        runtime=fact.software.runtime,
        same=fact.same,
    )


def thirds(facts: Sequence[Fact]) -> list[list[Fact]]:
    """The rows to calibrate on, for each of three offsets: every third case, with its twins."""
    cases = list(dict.fromkeys(fact.same for fact in facts))
    return [[fact for fact in facts if fact.same in cases[offset::3]] for offset in range(3)]
