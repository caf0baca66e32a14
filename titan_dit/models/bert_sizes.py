"""The keys of a BERT, and the sizes that follow from them.

Without torch, so that `--help` is quick.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from titan_dit.config.section import Bound, Dim, Few, Layers, PositiveFloat, Section, UserError
from titan_dit.models.gpt_sizes import PADDING
from titan_dit.models.named_sizes import fill_in, shape_of

SIZES = {
    #       hidden, layers, heads
    # BERT (arXiv:1810.04805 sec. 3)
    "base": (768, 12, 12),
    "large": (1024, 24, 16),
    # Megatron (arXiv:1909.08053 table 4)
    "336M": (1024, 24, 16),
    "1.3B": (2048, 24, 32),
    "3.9B": (2560, 48, 40),
}


@dataclass(frozen=True, kw_only=True)
class BERTSizes(Section):
    """A BERT: `size`, or `hidden`, `layers` and `heads` one by one. The defaults are BERT's."""

    section = "model"
    name = "bert"
    replaces = {"size": ("hidden", "layers", "heads")}

    size: str | None = None
    """BERT's base and large; Megatron's 336M, 1.3B and 3.9B."""
    hidden: Dim | None = None
    layers: Layers | None = None
    heads: Few | None = None
    vocabulary: Dim = 30522
    """Number of token ids. Tables are padded to a multiple of 128 rows."""
    sequence_length: Dim = 512
    """Tokens of a sample, including special tokens and padding."""
    ffn: Annotated[int, Bound(least=0, most=10**7)] = 0
    """Width of the MLP; 0: 4 x hidden."""
    norm_place: Literal["post", "pre"] = "post"
    """post: LayerNorms after each residual addition, as in BERT. pre: before attention and MLP, and
    one after the last block, as in Megatron (arXiv:1909.08053 fig. 7)."""
    norm_eps: PositiveFloat = 1e-12
    """Epsilon of the LayerNorms; Megatron's is 1e-5."""
    dropout: Annotated[float, Bound(least=0, below=1)] = 0.0
    """Dropout of the embedding and of the outputs of attention and MLP; attention probabilities
    have none."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of initial matrices; with norm_place = "pre" those that write to the
    residual stream have init_std / sqrt(2 layers)."""

    def __post_init__(self) -> None:
        """Fill in the named size, then check divisibility."""
        super().__post_init__()
        fill_in(self, self.size, shape_of(self.size, SIZES), "base")
        hidden, _, heads = self.shape
        if hidden % heads:
            raise UserError(
                f"[model] hidden={hidden} is not divisible by heads={heads}. "
                f"Set hidden = {-(-hidden // heads) * heads}."
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        """hidden, layers, heads."""
        return self.hidden or 0, self.layers or 0, self.heads or 0

    @property
    def width(self) -> int:
        """Width of the MLP."""
        return self.ffn or 4 * self.shape[0]

    @property
    def rows(self) -> int:
        """Rows of the vocabulary's tables."""
        return -(-self.vocabulary // PADDING) * PADDING
