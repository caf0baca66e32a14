"""Results of `gpu.py`: JSON after every row, tables at the end."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from gpu_ceilings import attention_table, gemm_table
from gpu_configs import configs
from gpu_contenders import Cell, Row
from gpu_levers import table as levers_table
from gpu_queue import Task
from gpu_rounds import summary
from gpu_targets import targets
from gpu_tokens import table as tokens_table
from gpu_verdicts import Measured, verdicts
from report import table, write

from titan_dit import __version__
from titan_dit.train import SETTINGS

HOLDS = """A step: forward, backward, AdamW and one EMA of the weights, on a batch on the device;
fp32 weights, moments and EMA, matrix products in bf16.
plain: autocast, torch's default AdamW, EMA parameter by parameter.
ours: random numbers by sample number, gradient clipping, fused AdamW and EMA.
Compiled: block by block. float8: compiled, in the layers that float8_layers = "auto" selects.
FLOPs: our model's flops_per_sample, for all. MFU: of the data sheet's dense bf16 peak. of GEMM: of
the product measured here. Peak: allocated in the timed steps. First step: of the first round, with
compilation (short with a warm compiler cache). Host ms: until a step's call returns, at most. Busy
ms: in which a kernel ran, of one traced step; the rest of the step the device waits. Dry run: the
peak that it predicts for the eager step; compiled blocks keep less (docs/dry-run.md)."""


class Findings:
    """Collects the rows of all parts."""

    def __init__(
        self,
        objective: str,
        cells: Sequence[Cell],
        wanted: Sequence[tuple[Cell, str]],
        out: str | None,
        facts: Row,
    ) -> None:
        """`facts`: of the device, from the process that measures."""
        self.objective, self.cells, self.wanted, self.out = objective, cells, wanted, out
        self.place = facts["place"]
        limits = {key: facts[key] for key in ("peak_tflops", "memory_gib")}
        self.ceilings: dict[str, Any] = {**limits, "attention": []}
        self.predicted_gib: dict[Cell, float] = {}
        """Peak memory of our eager step, by the dry run."""
        self.measured: list[Row] = []
        """Rows of all training steps that were run."""
        self.max_tokens: list[Row] = []
        self.levers: list[Row] = []
        self.starts_s: list[float] = []
        """Seconds of each start of the process that measures."""
        self.not_begun: list[str] = []
        self.configs = list(configs(wanted, self.place.get("device", "")))
        self.failed: dict[str, str] = {}
        """Rows of any kind that failed or ran out of memory, and how."""

    def add(self, job: Task, row: Row) -> None:
        """Add a row, print it and write the JSON."""
        if row["result"] == "not begun":
            self.not_begun.append(str(job))
            return self.save()
        if row["result"].startswith(("failed", "out of memory")):
            self.failed[str(job)] = row["result"]
        for name, value in row.get("ceilings", {}).items():
            self.ceilings[name] = (
                self.ceilings.get(name, []) + value if name == "attention" else value
            )
        if "contender" in row:
            self.measured.append(row)
        elif "lever" in row:
            self.levers.append(row)
        elif "remat" in row:
            self.max_tokens.append(row)
        print(json.dumps(row), flush=True)
        return self.save()

    def has_failed(self, job: Task) -> bool:
        """True if the job raised an unexpected error."""
        return self.failed.get(str(job), "").startswith("failed")

    def save(self) -> None:
        """Write the JSON, if asked for."""
        if self.out:
            write(
                f"gpu bf16 {self.objective}",
                self.rows,
                self.out,
                self.place,
                titan_dit=__version__,
                objective=self.objective,
                allocator={name: os.environ[name] for name in SETTINGS if name in os.environ},
                step=HOLDS,
                ceilings=self.ceilings,
                configs=self.configs,
                measured=self.measured,
                max_tokens=self.max_tokens,
                levers=self.levers,
                verdicts=self.verdicts,
                starts_s=self.starts_s,
                targets=self.targets,
                failed=self.failed,
                not_begun=self.not_begun,
            )

    @property
    def rows(self) -> list[Row]:
        """Rows of the training steps."""
        return summary(self.wanted, self.measured, self.ceilings, self.predicted_gib)

    @property
    def targets(self) -> list[Row]:
        """Rows of the targets."""
        return targets(self.cells, self.measured, self.max_tokens, self.ceilings)

    @property
    def verdicts(self) -> list[Row]:
        """Rows of the verdicts."""
        return verdicts(Measured(self.cells[0], self.measured, self.levers, self.ceilings))

    def show(self) -> None:
        """Print all tables."""
        for name, unit in (("gemm_tflops", "TFLOP/s bf16 product"), ("copy_gb_per_s", "GB/s copy")):
            if name in self.ceilings:
                print(f"{unit}: {self.ceilings[name]:.4g}")
        sections = {
            "Products of the models' layers, TFLOP/s": gemm_table(self.ceilings),
            "Attention, TFLOP/s forward / backward / both": attention_table(self.ceilings),
            f"Training steps, bf16, {self.objective}\n{HOLDS}": (
                self.rows if self.measured else []
            ),
            "Parts of a step, in milliseconds": levers_table(self.levers),
            "Tokens of one sample": tokens_table(self.max_tokens),
            "Targets": self.targets,
            "Verdicts": self.verdicts,
        }
        for title, rows in sections.items():
            if rows:
                print(f"\n{title}\n\n{table(rows)}")
        if self.not_begun:
            print(f"\nNot begun, over --budget-s: {'; '.join(self.not_begun)}")
        print("\n" + ", ".join(f"{key} {value}" for key, value in self.place.items()))
        if self.out:
            print(f"wrote {self.out}")
