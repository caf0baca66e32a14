"""The [model] section of a BERT. Imports torch late, for a quick `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from titan_dit.config.section import Bound, Dim, Few, Layers, PositiveFloat, Section, UserError
from titan_dit.models.gpt_config import PADDING
from titan_dit.models.named_sizes import fill_in, shape_of

if TYPE_CHECKING:  # Reading a config must not import torch: methods import what they need.
    import torch
    from torch import Tensor

    from titan_dit.models.base import ModelSpec

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
class BERTConfig(Section):
    """A BERT: `size`, or hidden_size, num_layers and num_heads. The defaults are BERT's."""

    section = "model"
    name = "bert"
    replaces = {"size": ("hidden_size", "num_layers", "num_heads")}

    size: str | None = None
    """BERT's base and large; Megatron's 336M, 1.3B and 3.9B."""
    hidden_size: Dim | None = None
    num_layers: Layers | None = None
    num_heads: Few | None = None
    vocab_size: Dim = 30522
    """Number of token ids. Tables are padded to a multiple of 128 rows."""
    sequence_length: Dim = 512
    """Tokens of a sample, including special tokens and padding."""
    intermediate_size: Dim | None = None
    """Width of the MLP. Unset: 4 x hidden_size."""
    norm_place: Literal["post", "pre"] = "post"
    """post: LayerNorms after each residual addition, as in BERT. pre: before attention and MLP, and
    one after the last block, as in Megatron (arXiv:1909.08053 fig. 7)."""
    norm_eps: PositiveFloat = 1e-12
    """Epsilon of the LayerNorms; Megatron's is 1e-5."""
    dropout: Annotated[float, Bound(least=0, below=1)] = 0.0
    """Dropout of the embedding and of the outputs of attention and MLP; attention probabilities
    have none."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of initial matrices; with norm_place = "pre" matrices that write to the
    residual stream have init_std / sqrt(2 num_layers)."""

    def __post_init__(self) -> None:
        """Fill in the named size, then check divisibility."""
        super().__post_init__()
        fill_in(self, self.size, shape_of(self.size, SIZES), "base")
        hidden, _, heads = self.shape
        if hidden % heads:
            raise UserError(
                f"[model] hidden_size={hidden} is not divisible by num_heads={heads}. "
                f"Set hidden_size = {-(-hidden // heads) * heads}."
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        """(hidden_size, num_layers, num_heads)."""
        return self.hidden_size or 0, self.num_layers or 0, self.num_heads or 0

    @property
    def width(self) -> int:
        """Width of the MLP."""
        return self.intermediate_size or 4 * self.shape[0]

    @property
    def rows(self) -> int:
        """Rows of the vocabulary's tables."""
        return -(-self.vocab_size // PADDING) * PADDING

    def spec(self) -> ModelSpec:
        """Describe a network without a second task."""
        return self.masked_spec(self.sequence_length, sentence_order=False)

    def masked_spec(self, num_scored: int, *, sentence_order: bool) -> ModelSpec:
        """Describe the network for a task, see `bert.Task`."""
        import torch

        from titan_dit.models.base import ModelSpec, TensorSpec
        from titan_dit.models.bert import BERT, Task

        hidden, layers, heads = self.shape
        n, task = self.sequence_length, Task(num_scored, sentence_order)
        ids = TensorSpec((n,), token_dim=0, dtype=torch.int64)
        number = TensorSpec((), dtype=torch.int64)
        context = {"labels": ids}
        if sentence_order:
            context |= {"order": ids, "lengths": number}
        if self.dropout:
            context["dropout_keys"] = number
        return ModelSpec(
            build=partial(BERT, self, task),
            inputs={"tokens": ids, "types": ids},
            stream={"tokens": TensorSpec((n, hidden), token_dim=0)},
            predictions={"logits": TensorSpec((n, self.vocab_size), token_dim=0)},
            scores={"losses": TensorSpec((n,), token_dim=0, dtype=torch.float32)},
            context=context,
            static={"positions": ids},
            num_layers=layers,
            num_heads=heads,
            head_dim=hidden // heads,
            ffn=self.width,
            num_tokens=n,
            mask=task.mask,
            head_cost=self.head_flops(num_scored) / self.block_flops(n),
        )

    def static(self, device: torch.device) -> dict[str, Tensor]:
        """The position of every token, [n]."""
        import torch

        return {"positions": torch.arange(self.sequence_length, device=device)}

    def block_flops(self, tokens: int) -> int:
        """FLOPs of a block, forward and backward, per sample; see `BERT.flops_per_sample`."""
        hidden = self.shape[0]
        return 6 * tokens * hidden * (4 * hidden + 2 * self.width) + 12 * tokens**2 * hidden

    def head_flops(self, num_scored: int) -> int:
        """FLOPs of the head, forward and backward, per sample."""
        return 6 * num_scored * self.shape[0] * (self.shape[0] + self.rows)
