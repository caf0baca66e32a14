"""Flags of `bench attention`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from titan_dit.config.layout import PrecisionConfig
from titan_dit.config.section import (
    BatchSize,
    Dim,
    Few,
    OutputPath,
    PositiveInt,
    Section,
    UserError,
    hints_of,
)
from titan_dit.models.dit_sizes import SIZES

NAMES: tuple[str, ...] = get_args(hints_of(PrecisionConfig)["attention"])
"""Values of [precision] attention."""


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Benchmark attention forward and backward with every kernel that supports the shape.

    Queries, keys and values are views of one projection, as in the model. FLOPs: 4 b heads n^2 d
    forward and twice that backward, as in MFU (flash's recomputation is not counted); half of that
    with a causal mask.
    """

    section = "bench attention"

    size: str | None = None
    """Heads and head dim of a named model: XL/2, 7B, ...; the patch size is ignored."""
    heads: Few | None = None
    """Attention heads per rank."""
    head_dim: Few | None = None
    """Channels per head."""
    tokens: tuple[Dim, ...] = (256, 1024)
    """Tokens per sample; every value is measured."""
    batch: BatchSize = 32
    """Batch size."""
    causal: bool = False
    """Mask the keys after each query."""
    ring: Few = 1
    """Work of one of this many ranks in a ring, without messages; must divide the tokens."""
    compiled: bool = False
    """Join the results of a ring's ranks by compiled kernels, as [compile] enabled does."""
    backends: tuple[str, ...] = NAMES
    """Kernels, as values of [precision] attention."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    laps: PositiveInt = 20
    """Timed calls; their median is printed. A quarter as many warm up."""
    out: OutputPath = ""
    """JSON file for the results."""

    def __post_init__(self) -> None:
        """Check the shape and the kernel names."""
        super().__post_init__()
        if unknown := set(self.backends) - set(NAMES):
            raise UserError(
                f"--backends {', '.join(sorted(unknown))}: unknown. Valid: {', '.join(NAMES)}."
            )
        if self.size is None and None in (self.heads, self.head_dim):
            raise UserError("bench attention: set --size XL/2, or --heads 16 --head-dim 72.")
        chunks = 2 * self.ring if self.causal and self.ring > 1 else self.ring
        if uneven := [n for n in self.tokens if n % chunks]:
            causal = f" --causal makes {chunks} chunks, which do" if chunks > self.ring else " does"
            raise UserError(f"--ring {self.ring}{causal} not divide {uneven[0]} tokens.")
        if self.size is not None and self.size.partition("/")[0] not in SIZES:
            raise UserError(f"--size {self.size}: unknown. Valid: {', '.join(SIZES)}.")

    @property
    def shape(self) -> tuple[int, int]:
        """Heads and head dim, each from its flag if set, else from the named model."""
        hidden, _, heads = SIZES[(self.size or "XL").partition("/")[0]]
        return self.heads or heads, self.head_dim or hidden // heads
