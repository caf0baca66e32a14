"""The keys of a GPT, and the sizes that follow from them.

Without torch, so that `--help` is quick.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from titan_dit.config.section import Bound, Dim, Few, Layers, PositiveFloat, Section, UserError
from titan_dit.models.named_sizes import fill_in, shape_of

SIZES = {
    #       hidden, layers, heads
    # GPT-2 (Radford 2019, table 2; heads from the released weights)
    "124M": (768, 12, 12),
    "355M": (1024, 24, 16),
    "774M": (1280, 36, 20),
    "1.5B": (1600, 48, 25),
    # GPT-3 (arXiv:2005.14165 table 2.1)
    "1.3B": (2048, 24, 16),
    "2.7B": (2560, 32, 32),
    "6.7B": (4096, 32, 32),
    "13B": (5120, 40, 40),
    "175B": (12288, 96, 96),
    # Megatron (arXiv:2104.04473 table 1)
    "39B": (8192, 48, 64),
    "76B": (10240, 60, 80),
    "145B": (12288, 80, 96),
}
PADDING = 128
"""Rows of the vocabulary's tables are a multiple of this: any tp that divides it fits, and a
checkpoint's tables have the same shape on every tp."""


@dataclass(frozen=True, kw_only=True)
class GPTSizes(Section):
    """A GPT: `size`, or `hidden`, `layers` and `heads` one by one. The defaults are GPT-2's."""

    section = "model"
    name = "gpt"
    replaces = {"size": ("hidden", "layers", "heads")}

    size: str | None = None
    """GPT-2's 124M, 355M, 774M, 1.5B; GPT-3's 1.3B, 2.7B, 6.7B, 13B, 175B; Megatron's 39B, 76B,
    145B."""
    hidden: Dim | None = None
    layers: Layers | None = None
    heads: Few | None = None
    vocabulary: Dim = 50257
    """Number of token ids. Tables are padded to a multiple of 128 rows."""
    sequence_length: Dim = 1024
    """Tokens of a sample."""
    query_groups: Annotated[int, Bound(least=0, most=10**4)] = 0
    """Heads of keys and values (arXiv:2305.13245); 0: `heads`."""
    ffn: Annotated[int, Bound(least=0, most=10**7)] = 0
    """Width of the MLP; 0: 4 x hidden, or 8/3 x hidden rounded up to 64 for swiglu."""
    positions: Literal["learned", "rotary"] = "learned"
    """A table of positions, or rotated queries and keys (arXiv:2104.09864)."""
    rotary_base: PositiveFloat = 10000.0
    """Longest period of the rotary angles, in tokens / (2 pi)."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: PositiveFloat = 1e-5
    mlp: Literal["gelu", "swiglu"] = "gelu"
    """GELU in its tanh form, or SwiGLU (arXiv:2002.05202)."""
    bias: bool = True
    """Biases of the blocks' linear layers."""
    tied: bool = True
    """The output layer shares the weights of the token embedding (arXiv:1608.05859)."""
    dropout: Annotated[float, Bound(least=0, below=1)] = 0.0
    """Dropout of the embedding and of the outputs of attention and MLP; attention probabilities
    have none."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of initial matrices; those that write to the residual stream have
    init_std / sqrt(2 layers)."""

    def __post_init__(self) -> None:
        """Fill in the named size, then check divisibility."""
        super().__post_init__()
        fill_in(self, self.size, shape_of(self.size, SIZES), "124M")
        self._check_divisibility()

    def _check_divisibility(self) -> None:
        hidden, _, heads = self.shape
        if hidden % heads:
            raise UserError(
                f"[model] hidden={hidden} is not divisible by heads={heads}. "
                f"Set hidden = {-(-hidden // heads) * heads}."
            )
        if heads % self.groups:
            raise UserError(
                f"[model] query_groups={self.groups} does not divide heads={heads}. Set a divisor, "
                "or 0."
            )
        if self.positions == "rotary" and hidden // heads % 2:
            raise UserError(
                f'[model] positions="rotary" rotates pairs of channels, but a head has '
                f"{hidden // heads}. Set hidden = {2 * heads * (hidden // heads // 2 + 1)}."
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        """hidden, layers, heads."""
        return self.hidden or 0, self.layers or 0, self.heads or 0

    @property
    def groups(self) -> int:
        """Heads of keys and values."""
        return self.query_groups or self.heads or 0

    @property
    def width(self) -> int:
        """Width of the MLP."""
        hidden = self.hidden or 0
        return self.ffn or (4 * hidden if self.mlp == "gelu" else -(-8 * hidden // 192) * 64)

    @property
    def rows(self) -> int:
        """Rows of the vocabulary's tables."""
        return -(-self.vocabulary // PADDING) * PADDING
