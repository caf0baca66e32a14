"""Results of `gpu.py`: JSON after every row, tables at the end."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import torch
from gpu_ceilings import attention_table, gemm_table
from gpu_contenders import Cell, Row
from gpu_queue import Job
from gpu_rounds import summary
from gpu_targets import targets
from gpu_tokens import table as tokens_table
from report import place, table, write

from titan_dit.observe.flops import peak_tflops

HOLDS = """A step: forward, backward, AdamW and one EMA of the weights, on a batch on the device;
fp32 weights, moments and EMA, matrix products in bf16.
plain: autocast, torch's default AdamW, EMA parameter by parameter.
ours: FSDP2 on one rank, random numbers by sample number, gradient clipping, fused AdamW and EMA.
Compiled: block by block. float8: compiled, in the layers that float8_layers = "auto" selects.
FLOPs: our model's flops_per_sample, for all. MFU: of the data sheet's dense bf16 peak. of GEMM: of
the product measured here. Peak: allocated in the timed steps. First step: of the first round, with
compilation (short with a warm compiler cache)."""


ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class Findings:
    """Collects the rows of all parts."""

    def __init__(
        self,
        objective: str,
        cells: Sequence[Cell],
        wanted: Sequence[tuple[Cell, str]],
        out: str | None,
    ) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.objective, self.cells, self.wanted, self.out = objective, cells, wanted, out
        self.ceilings: dict[str, Any] = {"peak_tflops": peak_tflops(device, "bf16")}
        self.ceilings["attention"] = []
        self.measured: list[Row] = []
        """Rows of all training steps that were run."""
        self.max_tokens: list[Row] = []
        self.not_begun: list[str] = []
        self.failed: set[str] = set()

    def add(self, job: Job, row: Row) -> None:
        """Add a row, print it and write the JSON."""
        if row["result"] == "not begun":
            self.not_begun.append(str(job))
            return self.save()
        if row["result"].startswith("failed"):
            self.failed.add(str(job))
        if "contender" in row:
            self.measured.append(row)
        elif "remat" in row:
            self.max_tokens.append(row)
        print(json.dumps(row), flush=True)
        return self.save()

    def has_failed(self, job: Job) -> bool:
        """True if the job raised an unexpected error."""
        return str(job) in self.failed

    def save(self) -> None:
        """Write the JSON, if asked for."""
        if self.out:
            write(
                f"gpu bf16 {self.objective}",
                summary(self.wanted, self.measured, self.ceilings),
                self.out,
                objective=self.objective,
                allocator={name: os.environ[name] for name in ALLOCATOR if name in os.environ},
                step=HOLDS,
                ceilings=self.ceilings,
                measured=self.measured,
                max_tokens=self.max_tokens,
                targets=self.targets,
                not_begun=self.not_begun,
            )

    @property
    def targets(self) -> list[Row]:
        """Rows of the targets."""
        return targets(self.cells, self.measured, self.max_tokens, self.ceilings)

    def show(self) -> None:
        """Print all tables."""
        for name, unit in (("gemm_tflops", "TFLOP/s bf16 product"), ("copy_gb_per_s", "GB/s copy")):
            if name in self.ceilings:
                print(f"{unit}: {self.ceilings[name]:.4g}")
        sections = {
            "Products of the models' layers, TFLOP/s": gemm_table(self.ceilings),
            "Attention, TFLOP/s forward / backward / both": attention_table(self.ceilings),
            f"Training steps, bf16, {self.objective}\n{HOLDS}": (
                summary(self.wanted, self.measured, self.ceilings) if self.measured else []
            ),
            "Tokens of one sample": tokens_table(self.max_tokens),
            "Targets": self.targets,
        }
        for title, rows in sections.items():
            if rows:
                print(f"\n{title}\n\n{table(rows)}")
        if self.not_begun:
            print(f"\nNot begun, over --budget-s: {'; '.join(self.not_begun)}")
        print("\n" + ", ".join(f"{key} {value}" for key, value in place().items()))
        if self.out:
            print(f"wrote {self.out}")
