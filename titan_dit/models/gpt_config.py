"""The [model] section of a GPT. Imports torch late, for a quick `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from titan_dit.config.section import Bound, Dim, Few, Layers, PositiveFloat, Section, UserError
from titan_dit.models.named_sizes import fill_in, shape_of

if TYPE_CHECKING:  # Reading a config must not import torch: methods import what they need.
    import torch
    from torch import Tensor

    from titan_dit.models.base import ModelSpec
    from titan_dit.models.gpt import GPT

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
class GPTConfig(Section):
    """A GPT: `size`, or hidden_size, num_layers and num_heads. The defaults are GPT-2's."""

    section = "model"
    name = "gpt"
    replaces = {"size": ("hidden_size", "num_layers", "num_heads")}

    size: str | None = None
    """GPT-2's 124M, 355M, 774M, 1.5B; GPT-3's 1.3B, 2.7B, 6.7B, 13B, 175B; Megatron's 39B, 76B,
    145B."""
    hidden_size: Dim | None = None
    num_layers: Layers | None = None
    num_heads: Few | None = None
    vocab_size: Dim = 50257
    """Number of token ids. Tables are padded to a multiple of 128 rows."""
    sequence_length: Dim = 1024
    """Tokens of a sample."""
    num_key_value_heads: Few | None = None
    """Heads of keys and values (arXiv:2305.13245). Unset: num_heads."""
    intermediate_size: Dim | None = None
    """Width of the MLP. Unset: 4 x hidden_size; for swiglu 8/3 x hidden_size, rounded up to 64."""
    position_embedding_type: Literal["learned", "rotary"] = "learned"
    """A table of positions, or rotated queries and keys (arXiv:2104.09864)."""
    rope_theta: PositiveFloat = 10000.0
    """Longest period of the rotary angles, in tokens / (2 pi)."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: PositiveFloat = 1e-5
    mlp: Literal["gelu", "swiglu"] = "gelu"
    """GELU in its tanh form, or SwiGLU (arXiv:2002.05202)."""
    bias: bool = True
    """Biases of the blocks' linear layers."""
    tie_word_embeddings: bool = True
    """The output layer shares the weights of the token embedding (arXiv:1608.05859)."""
    dropout: Annotated[float, Bound(least=0, below=1)] = 0.0
    """Dropout of the embedding and of the outputs of attention and MLP; attention probabilities
    have none."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of initial matrices; matrices that write to the residual stream have
    init_std / sqrt(2 num_layers)."""

    def __post_init__(self) -> None:
        """Fill in the named size, then check divisibility."""
        super().__post_init__()
        fill_in(self, self.size, shape_of(self.size, SIZES), "124M")
        self._check_divisibility()

    def _check_divisibility(self) -> None:
        hidden, _, heads = self.shape
        if hidden % heads:
            raise UserError(
                f"[model] hidden_size={hidden} is not divisible by num_heads={heads}. "
                f"Set hidden_size = {-(-hidden // heads) * heads}."
            )
        if heads % self.groups:
            raise UserError(
                f"[model] num_key_value_heads={self.groups} does not divide num_heads={heads}. "
                "Set a divisor, or leave it out."
            )
        if self.position_embedding_type == "rotary" and hidden // heads % 2:
            raise UserError(
                '[model] position_embedding_type="rotary" rotates pairs of channels, but a head '
                f"has {hidden // heads}. "
                f"Set hidden_size = {2 * heads * (hidden // heads // 2 + 1)}."
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        """(hidden_size, num_layers, num_heads)."""
        return self.hidden_size or 0, self.num_layers or 0, self.num_heads or 0

    @property
    def groups(self) -> int:
        """Heads of keys and values."""
        return self.num_key_value_heads or self.num_heads or 0

    @property
    def width(self) -> int:
        """Width of the MLP."""
        hidden = self.hidden_size or 0
        return self.intermediate_size or (
            4 * hidden if self.mlp == "gelu" else -(-8 * hidden // 192) * 64
        )

    @property
    def rows(self) -> int:
        """Rows of the vocabulary's tables."""
        return -(-self.vocab_size // PADDING) * PADDING

    def spec(self) -> ModelSpec:
        """Describe the network."""
        import torch

        from titan_dit.models.base import ModelSpec, TensorSpec

        hidden, layers, heads = self.shape
        n, size = self.sequence_length, self.vocab_size
        block = self.block_flops(n)
        tokens = TensorSpec((n,), token_dim=0, dtype=torch.int64)
        angles = TensorSpec((n, hidden // heads // 2), token_dim=0, dtype=torch.float32)
        rotary = {"cos": angles, "sin": angles} if self.position_embedding_type == "rotary" else {}
        keys = {"dropout_keys": TensorSpec((), dtype=torch.int64)} if self.dropout else {}
        return ModelSpec(
            build=self.build,
            inputs={"tokens": tokens},
            stream={"tokens": TensorSpec((n, hidden), token_dim=0)},
            predictions={"logits": TensorSpec((n, size), token_dim=0)},
            scores={"cross_entropy": TensorSpec((n,), token_dim=0, dtype=torch.float32)},
            context={"next_tokens": tokens, **keys},
            static={"positions": tokens, **rotary},
            num_layers=layers,
            num_heads=heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=hidden // heads,
            ffn=self.width,
            num_tokens=n,
            mask="causal",
            head_cost=6 * n * hidden * self.rows / block,
        )

    def build(self) -> GPT:
        """Build the network."""
        from titan_dit.models.gpt import GPT

        return GPT(self)

    def static(self, device: torch.device) -> dict[str, Tensor]:
        """The position of every token, [n], and the cosines and sines of rotary angles."""
        import torch

        from titan_dit.models.layers import rotary_of

        positions = torch.arange(self.sequence_length, device=device)
        if self.position_embedding_type == "learned":
            return {"positions": positions}
        hidden, _, heads = self.shape
        cos, sin = rotary_of(positions, hidden // heads, self.rope_theta)
        return {"positions": positions, "cos": cos, "sin": sin}

    def block_flops(self, tokens: int) -> int:
        """FLOPs of a block, forward and backward, per sample; see `GPT.flops_per_sample`."""
        hidden, _, heads = self.shape
        matrices = 2 if self.mlp == "gelu" else 3
        projections = 2 * hidden + 2 * hidden // heads * self.groups
        linear = hidden * (projections + matrices * self.width)
        return 6 * tokens * linear + 12 * tokens**2 * hidden
