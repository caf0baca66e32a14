"""Transformer layers and rotary positions. Shapes: b samples, n tokens, d channels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from titan_dit.models.base import Mask

Rotary: TypeAlias = tuple[Tensor, Tensor]
"""Cosines and sines of the angles, each fp32 [n, head_dim / 2]."""

Pairs: TypeAlias = Literal["halves", "neighbours"]
"""The two channels of a head that rotate together: i and i + head_dim / 2 (GPT-NeoX, Llama in
transformers), or 2 i and 2 i + 1 (arXiv:2104.09864, FLUX, Z-Image)."""


def rotary_of(
    positions: Int[Tensor, " n"],
    head_dim: int,
    base: float = 10000.0,
    dtype: torch.dtype = torch.float32,
) -> Rotary:
    """Cosines and sines for tokens at `positions`, fp32: bf16 counts only to 256.

    `dtype`: that of the angles. In fp32 an angle of 500 is off by up to 3e-5.
    Raises ValueError if `head_dim` is odd.
    """
    if head_dim % 2:
        raise ValueError(f"Rotary positions need pairs of channels, but head_dim is {head_dim}.")
    channels = torch.arange(0, head_dim, 2, dtype=dtype, device=positions.device)
    angles = positions.to(dtype)[:, None] / base ** (channels / head_dim)
    return angles.cos().float(), angles.sin().float()


def rotary_on_axes(
    positions: Int[Tensor, "n axes"],
    channels: Sequence[int],
    base: float,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "n 2 p"]:
    """Cosines [:, 0] and sines [:, 1] of tokens with several positions, such as row and column.

    `channels`: how many channels of a head, an even number, rotate by each position. `dtype`: see
    `rotary_of`.
    """
    axes = zip(positions.unbind(1), channels, strict=True)
    cos, sin = zip(*(rotary_of(axis, count, base, dtype) for axis, count in axes), strict=True)
    return torch.stack((torch.cat(cos, -1), torch.cat(sin, -1)), 1)


class JoinedRotary(nn.Module):
    """Angles of `joined` tokens, in the order in which attention gets the tokens."""

    shards: int = 1
    """Sequence-parallel ranks, set by tensor parallelism. Each joins its shards of the parts, so
    that attention gets all parts of the first rank, then all of the second one."""

    def forward(self, *parts: Float[Tensor, "_ 2 p"]) -> Rotary:
        """`rotary_on_axes` of each part's tokens to the angles of all."""
        ranks = zip(*(part.chunk(self.shards) for part in parts), strict=True)
        cos, sin = torch.cat([shard for rank in ranks for shard in rank]).unbind(1)
        return cos, sin


def rotate(
    x: Float[Tensor, "b heads n d"], rotary: Rotary, pairs: Pairs = "halves"
) -> Float[Tensor, "b heads n d"]:
    """Rotate queries or keys (arXiv:2104.09864), in fp32 or fp64 and rounded once.

    In memory the result is [b, n, heads, d].
    """
    exact = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (part.to(exact)[:, None] for part in rotary)
    channels = x.transpose(1, 2).to(exact)
    if pairs == "halves":
        first, second = channels.chunk(2, -1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    else:
        first, second = torch.unflatten(channels, -1, (-1, 2)).unbind(-1)
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), -1)
    return turned.view(channels.shape).to(x.dtype).transpose(1, 2)


def patchify(latents: Float[Tensor, "b c h w"], patch: int) -> Float[Tensor, "b n d"]:
    """Latents to tokens in row-major order; a token is its patch as (p, p, c), channel fastest."""
    b, c, h, w = latents.shape
    # On a CPU two copies with long inner loops are twice as fast as one element-wise copy.
    channel_last = latents.flatten(2).transpose(1, 2).contiguous()
    grid = channel_last.view(b, h // patch, patch, w // patch, patch * c)
    return grid.transpose(2, 3).reshape(b, -1, patch * patch * c)


def unpatchify(tokens: Float[Tensor, "b n d"], patch: int, height: int) -> Float[Tensor, "b c h w"]:
    """The inverse of `patchify` for latents of `height` rows."""
    b, n, d = tokens.shape
    rows = height // patch
    grid = tokens.view(b, rows, n // rows, patch, patch, d // patch**2)
    return grid.permute(0, 5, 1, 3, 2, 4).reshape(b, d // patch**2, height, -1)


def grid_positions(rows: int, columns: int, device: torch.device) -> Float[Tensor, "n 2"]:
    """(row, column) of every token in the order of `patchify`."""
    y = torch.arange(rows, dtype=torch.float32, device=device)
    x = torch.arange(columns, dtype=torch.float32, device=device)
    return torch.cartesian_prod(y, x)


def frequencies(
    count: int, max_period: float, device: torch.device, divisor: int | None = None
) -> Float[Tensor, " count"]:
    """`count` angular frequencies, geometric from 1 down: max_period ** (-i / divisor).

    The divisor is `count` by default; count - 1 makes 1 / max_period the last one.
    """
    steps = torch.arange(count, dtype=torch.float32, device=device)
    return torch.exp(-math.log(max_period) * steps / (divisor or count))


def sincos_positions(positions: Float[Tensor, "n 2"], dim: int) -> Float[Tensor, "n dim"]:
    """Fixed sin-cos embedding of the original DiT (MAE, arXiv:2111.06377).

    Channels: sines, then cosines of the column; sines, then cosines of the row.
    """
    angles = positions[:, :, None] * frequencies(dim // 4, 10000, positions.device)
    row, column = torch.cat((angles.sin(), angles.cos()), -1).unbind(1)
    return torch.cat((column, row), -1)


def modulate(
    x: Float[Tensor, "b n d"], shift: Float[Tensor, "b _ d"], scale: Float[Tensor, "b _ d"]
) -> Float[Tensor, "b n d"]:
    """LayerNorm without weights, then adaLN's shift and scale (arXiv:2212.09748 sec. 3.2)."""
    return scaled_add(shift, 1 + scale, normalized(x))


def normalized(x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
    """LayerNorm without weights, in the memory order of `x`."""
    if is_token_first(x):
        # F.layer_norm would copy such tokens to [b, n, d].
        return F.layer_norm(x.transpose(0, 1), x.shape[-1:], eps=1e-6).transpose(0, 1)
    return F.layer_norm(x, x.shape[-1:], eps=1e-6)


def is_token_first(x: Float[Tensor, "b n d"]) -> bool:
    """True if memory holds [n, b, d]: an order in which tokens are gathered without a copy."""
    return x.stride(0) < x.stride(1)


def as_one_sample(x: Float[Tensor, "b n d"]) -> Float[Tensor, "1 n _"]:
    """Tokens as [1, n, b * d]: a view if their memory is [n, b, d]."""
    return x.transpose(0, 1).flatten(1).unsqueeze(0)


def as_tokens(y: Float[Tensor, "_ _ n head_dim"], samples: int) -> Float[Tensor, "b n _"]:
    """Heads [b, heads, n, head_dim] to tokens; as [1, b * heads, ...] to tokens [n, b, d]."""
    y = y.transpose(1, 2).flatten(2)
    return y if len(y) == samples else y.view(y.shape[1], samples, -1).transpose(0, 1)


def condition_projection(channels: int, patch: int, hidden: int) -> nn.Module:
    """The projection of the tokens of further input channels, added to that of the noisy tokens.

    Together they are one layer over the channels side by side. Without such channels it has no
    weights: the tensor plans name it in both cases.
    """
    if not channels:
        return nn.Identity()
    return nn.Linear(patch * patch * channels, hidden, bias=False)


def joined(*parts: Float[Tensor, "b _ d"]) -> Float[Tensor, "b n d"]:
    """The tokens of several tensors in one, in their memory order; `parted` is the inverse."""
    if is_token_first(parts[0]):
        return torch.cat([part.transpose(0, 1) for part in parts]).transpose(0, 1)
    return torch.cat(parts, 1)


def parted(x: Float[Tensor, "b n d"], sizes: Sequence[int]) -> tuple[Float[Tensor, "b _ d"], ...]:
    """Tensors of `sizes` tokens each, in their memory order and contiguous in it.

    With strides of the whole the first block, which gets tokens of `embed`, would need a graph of
    its own. Compiled, they are written once.
    """
    if is_token_first(x):
        parts = torch.split(x.transpose(0, 1), list(sizes))
        return tuple(part.transpose(0, 1) for part in parts)
    return tuple(part.contiguous() for part in torch.split(x, list(sizes), 1))


class _ScaledAdd(torch.autograd.Function):
    """See `scaled_add`."""

    @staticmethod
    def forward(ctx: FunctionCtx, base: Tensor, scale: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(scale, x)
        ctx.base_is_shared = base.shape[1] != x.shape[1]  # type: ignore[attr-defined]
        return torch.addcmul(base, scale, x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scale, x = ctx.saved_tensors  # type: ignore[attr-defined]
        base = grad.sum(1, keepdim=True) if ctx.base_is_shared else grad  # type: ignore[attr-defined]
        is_shared = scale.shape[1] != x.shape[1]
        # Without a name for the product, which would stay beside the next one.
        by_scale = (grad * x).sum(1, keepdim=True) if is_shared else grad * x
        return base, by_scale, grad * scale


def scaled_add(
    base: Float[Tensor, "b _ d"], scale: Float[Tensor, "b _ d"], x: Float[Tensor, "b n d"]
) -> Float[Tensor, "b n d"]:
    """Compute `base + scale * x`; a `base` and a `scale` of one token broadcast over the tokens.

    The plain expression makes two passes over the tokens in forward. torch.addcmul makes one, but
    its backward makes an extra one. This function avoids both extra passes.
    """
    result: Tensor = _ScaledAdd.apply(base, scale, x)  # type: ignore[no-untyped-call]
    return result


def gelu(x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
    """GELU in its tanh form (arXiv:1606.08415): x (1 + tanh u) / 2 = x sigmoid(2 u)."""
    if not torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    # Compiled, both forms are one kernel, but a tanh costs two to three exponentials.
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    doubled = math.sqrt(8 / math.pi) * (exact + 0.044715 * exact**3)
    return (exact * torch.sigmoid(doubled)).to(x.dtype)


class TimestepEmbedder(nn.Module):
    """Sinusoids of the timestep (max period 10,000), then a two-layer MLP with SiLU."""

    FREQUENCIES = 128

    def __init__(
        self, hidden: int, reaches_period: bool = False, inner: int | None = None, bias: bool = True
    ) -> None:
        """`reaches_period`: the lowest frequency is 1 / 10,000, as in diffusers, not above it.

        `inner`: width between the layers; None: `hidden`.
        """
        super().__init__()
        self.divisor = self.FREQUENCIES - reaches_period
        self.up = nn.Linear(2 * self.FREQUENCIES, inner or hidden, bias)
        self.down = nn.Linear(inner or hidden, hidden, bias)

    def forward(self, timestep: Float[Tensor, "*b"]) -> Float[Tensor, "*b d"]:
        """Embed `timestep`, given in the original DiT's units (0 to 1000) and always in fp32."""
        count, device = self.FREQUENCIES, timestep.device
        angles = timestep[..., None] * frequencies(count, 10000, device, self.divisor)
        # fp32 up to here: bf16 cannot tell timestep 997 from 1000.
        features = torch.cat((angles.cos(), angles.sin()), -1).to(self.up.weight.dtype)
        embedded: Tensor = self.down(F.silu(self.up(features)))
        return embedded


class PaddedEmbedder(nn.Module):
    """Vectors of `width` channels to tokens; padding becomes a learned token."""

    def __init__(self, width: int, hidden: int, norm_eps: float | None = None) -> None:
        """`norm_eps`: epsilon of an RMSNorm before the linear layer; None: no norm."""
        super().__init__()
        self.norm = nn.Identity() if norm_eps is None else nn.RMSNorm(width, eps=norm_eps)
        self.linear = nn.Linear(width, hidden)
        self.padding = nn.Parameter(torch.empty(hidden))

    def forward(
        self, x: Float[Tensor, "b m e"], is_real: Bool[Tensor, "*b m"]
    ) -> Float[Tensor, "b m d"]:
        """`is_real`: False for padding, whose rows of `x` may hold any finite values."""
        tokens = self.linear(self.norm(x.to(self.linear.weight.dtype)))
        return torch.where(is_real[..., None], tokens, self.padding)


CONDITION = "embed.condition.weight"
"""Parameter name of the condition-channel projection. Initialised to zero: a checkpoint without it
predicts as before."""
CLASS_TABLE = "embed.label.table.weight"
"""Name of the label table [num_classes + 1, hidden]: a row per class, then the null row."""


class LabelEmbedder(nn.Module):
    """Class embeddings; the last row is the null class, selected by any negative label."""

    def __init__(self, num_classes: int, hidden: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.table = nn.Embedding(num_classes + 1, hidden)

    def forward(self, labels: Int[Tensor, " b"]) -> Float[Tensor, "b d"]:
        """Labels to embeddings."""
        embedded: Tensor = self.table(labels.where(labels >= 0, self.num_classes))
        return embedded


def attend(
    q: Float[Tensor, "b heads n d"],
    k: Float[Tensor, "b groups m d"],
    v: Float[Tensor, "b groups m d"],
    causal: bool = False,
    lengths: Int[Tensor, " b"] | None = None,
) -> Float[Tensor, "b heads n d"]:
    """softmax(q k^T / sqrt(d)) v over the unmasked keys.

    `causal` masks keys after the query, `lengths` keys beyond the sample's length.
    """
    k, v = for_heads(k, q.shape[1]), for_heads(v, q.shape[1])
    seen = None if lengths is None else within(lengths, k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=causal)


def for_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat each group's keys or values for its heads: [b, groups, n, d] to [b, heads, n, d].

    Grouped queries: arXiv:2305.13245. Not `enable_gqa`: torch's memory-efficient kernel has no
    groups, so that fp32, and GPUs without flash, would get its math backend's n x n scores.
    """
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def within(lengths: Int[Tensor, " b"], tokens: int) -> Bool[Tensor, "b 1 1 n"]:
    """Key padding mask: True for the first lengths[i] keys of sample i."""
    return (torch.arange(tokens, device=lengths.device) < lengths[:, None])[:, None, None]


class TokenLinear(nn.Linear):
    """A linear layer of a block, applied to every token: kernels and float8 may replace it."""

    product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = staticmethod(F.linear)

    def forward(self, input: Float[Tensor, "*b i"]) -> Float[Tensor, "*b o"]:
        """Return x @ weight.T + bias."""
        return self.product(input, self.weight, self.bias)


def unchanged(x: Tensor) -> Tensor:
    """Return x."""
    return x


class NormOverHeads(nn.Module):
    """RMSNorm of queries and of keys, each over the channels of all heads together."""

    total: Callable[[Tensor], Tensor] = staticmethod(unchanged)
    """Sums of squares over a rank's heads to those over all heads; set by tensor parallelism."""
    own: Callable[[Tensor], Tensor] = staticmethod(unchanged)
    """A weight of all heads to that of a rank's heads; set by tensor parallelism."""

    def __init__(self, hidden: int, head_dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.hidden, self.head_dim, self.eps = hidden, head_dim, eps
        self.q = nn.Parameter(torch.ones(hidden))
        self.k = nn.Parameter(torch.ones(hidden))

    def forward(
        self, q: Float[Tensor, "b _heads n d"], k: Float[Tensor, "b _heads m d"]
    ) -> tuple[Tensor, Tensor]:
        """Normalise in fp32 or fp64 and round once; shapes stay.

        Samples may pass as more heads of one.
        """
        weights = [
            torch.unflatten(self.own(x), 0, (-1, 1, self.head_dim)) for x in (self.q, self.k)
        ]
        exact = torch.promote_types(q.dtype, torch.float32)
        # Each [b, samples, heads, n, head_dim].
        parts = [torch.unflatten(x.to(exact), 1, (-1, len(weights[0]))) for x in (q, k)]
        # One tensor, so that ranks exchange both in one message.
        squares = torch.cat([part.square().sum((2, 4)) for part in parts], -1)
        factors = torch.rsqrt(self.total(squares) / self.hidden + self.eps)
        by_kind = torch.split(factors[:, :, None, :, None], [q.shape[2], k.shape[2]], 3)
        normed = [
            (part * factor * weight.to(exact)).flatten(1, 2).to(q.dtype)
            for part, factor, weight in zip(parts, by_kind, weights, strict=True)
        ]
        return normed[0], normed[1]


class Attention(nn.Module):
    """Self-attention; the number of heads is inferred, so that it also runs on a shard of heads.

    The output dim of `qkv` is [groups, heads / groups + 2, head_dim], a group's queries before its
    key and value: a column-parallel shard holds whole groups. By default each head is a group.
    """

    attend: Callable[..., Tensor]
    """q [b, heads, n, head_dim], k and v [b, groups, n, head_dim] to the shape of q; masks as in
    the function `attend`. Context parallelism replaces it."""

    def __init__(
        self,
        hidden: int,
        heads: int,
        qk_norm: bool = False,
        mask: Mask = "none",
        num_key_value_heads: int | None = None,
        bias: bool = True,
        norm_eps: float = 1e-6,
        pairs: Pairs = "halves",
        norm_over_heads: bool = False,
    ) -> None:
        """`num_key_value_heads`: key and value heads, a divisor of `heads`. None: `heads`.

        `qk_norm`: RMSNorm of q and k by head; `norm_over_heads`: over all heads together.
        `norm_eps`: epsilon of these norms. `pairs`: channels that rotate together.
        """
        super().__init__()
        groups = num_key_value_heads or heads
        self.head_dim, self.mask, self.group_size = hidden // heads, mask, heads // groups
        self.pairs: Pairs = pairs
        self.qkv = TokenLinear(hidden, groups * (self.group_size + 2) * self.head_dim, bias)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=norm_eps) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim, eps=norm_eps) if qk_norm else nn.Identity()
        self.norm = NormOverHeads(hidden, self.head_dim, norm_eps) if norm_over_heads else None
        self.out = TokenLinear(hidden, hidden, bias)
        self.attend = attend

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        lengths: Int[Tensor, " b"] | None = None,
        rotary: Rotary | None = None,
    ) -> Float[Tensor, "b n d"]:
        """Attend over the n tokens; mask "lengths" requires `lengths`, passed by keyword.

        `rotary`: angles of the n tokens, see `rotary_of`; after the norms of q and k.
        """
        attended: Tensor = self.out(self.mixed(*self.heads(x, rotary), len(x), lengths))
        return attended

    def heads(
        self, x: Float[Tensor, "b n d"], rotary: Rotary | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [b, heads, n, head_dim], keys and values [b, groups, n, head_dim] of tokens.

        [1, b * heads, n, head_dim] for tokens that are [n, b, d] in memory. `joined` along dim 2
        they are those of several tensors of tokens.
        """
        qkv = self.qkv(x)
        # Kernels copy tokens that are not [b, n, heads, head_dim] in memory. Without lengths the
        # samples of [n, b, heads, head_dim] can pass as more heads of one sample.
        if is_token_first(qkv) and self.mask != "lengths":
            qkv = as_one_sample(qkv)
        q, k, v = (part.transpose(1, 2) for part in self.split(qkv))
        q, k = self.q_norm(q), self.k_norm(k)
        if self.norm is not None:
            q, k = self.norm(q, k)
        if rotary is not None:
            q, k = rotate(q, rotary, self.pairs), rotate(k, rotary, self.pairs)
        return q, k, v

    def mixed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        samples: int,
        lengths: Int[Tensor, " b"] | None = None,
    ) -> Float[Tensor, "b n _"]:
        """Attention output of q, k, v from `heads`, as tokens [b, n, d]; `samples` is b.

        Raises ValueError if mask "lengths" gets no lengths.
        """
        if self.mask == "none":
            y = self.attend(q, k, v)
        elif self.mask == "causal":
            y = self.attend(q, k, v, causal=True)
        elif lengths is None:
            raise ValueError('An attention with mask="lengths" must be given lengths.')
        else:
            y = self.attend(q, k, v, lengths=lengths)
        return as_tokens(y, samples)

    def split(self, qkv: Float[Tensor, "b n d"]) -> tuple[Tensor, ...]:
        """Queries [b, n, heads, head_dim], keys and values [b, n, groups, head_dim].

        Split before transposing: backward then joins the three gradients in one copy.
        """
        parts = torch.unflatten(qkv, -1, (-1, self.group_size + 2, self.head_dim))
        if self.group_size == 1:
            return torch.unbind(parts, 3)
        q, k, v = torch.split(parts, [self.group_size, 1, 1], 3)
        return q.flatten(2, 3), k.squeeze(3), v.squeeze(3)


class CrossAttention(nn.Module):
    """Attention of tokens to a text, whose keys every rank has; q and k normed over all heads.

    No `Attention`: context parallelism leaves it as it is. The number of heads is inferred, as
    there. The output dim of `kv` is [heads, 2, head_dim].
    """

    attend: Callable[..., Tensor]
    """As `Attention.attend`, without a mask."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.q = TokenLinear(hidden, hidden)
        self.kv = TokenLinear(hidden, 2 * hidden)
        self.norm = NormOverHeads(hidden, self.head_dim)
        self.out = TokenLinear(hidden, hidden)
        self.attend = attend

    def forward(
        self, x: Float[Tensor, "b n d"], text: Float[Tensor, "b m d"]
    ) -> Float[Tensor, "b n d"]:
        """Attend from the n tokens to all m tokens of the text."""
        q, kv = self.q(x), self.kv(text)
        if is_token_first(q):
            # As in `Attention.heads`; the text, which has fewer tokens, is copied.
            q, kv = as_one_sample(q), as_one_sample(kv)
        q = torch.unflatten(q, -1, (-1, self.head_dim)).transpose(1, 2)
        k, v = torch.unflatten(kv, -1, (-1, 2, self.head_dim)).transpose(1, 2).unbind(3)
        q, k = self.norm(q, k)
        attended: Tensor = self.out(as_tokens(self.attend(q, k, v), len(x)))
        return attended


class Junction(nn.Module):
    """Tokens as they are, where several layers read them or where the results of several add up.

    By its name tensor parallelism gathers tokens, or adds up partial sums, once for all of them.
    """

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """Return the tokens."""
        return x


class MLP(nn.Module):
    """Two layers with GELU (tanh form)."""

    def __init__(
        self, hidden: int, ffn: int, bias: bool = True, outputs: int | None = None
    ) -> None:
        """`outputs`: width of the result; None: `hidden`."""
        super().__init__()
        self.up = TokenLinear(hidden, ffn, bias)
        self.down = TokenLinear(ffn, outputs or hidden, bias)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n _"]:
        """Apply the MLP to every token."""
        y: Tensor = self.down(gelu(self.up(x)))
        return y


class GatedMLP(nn.Module):
    """SwiGLU: down(silu(gate x) * value x) (arXiv:2002.05202).

    The output dim of `up` is [ffn, 2], gate and value: a column-parallel shard holds both.
    """

    def __init__(self, hidden: int, ffn: int, bias: bool = True) -> None:
        super().__init__()
        self.up = TokenLinear(hidden, 2 * ffn, bias)
        self.down = TokenLinear(ffn, hidden, bias)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """Apply the MLP to every token."""
        up = self.up(x)
        # Backward of unbind stacks both gradients in the order of the dims, not of the memory.
        swaps = is_token_first(up)
        up = up.transpose(0, 1) if swaps else up
        gate, value = torch.unflatten(up, -1, (-1, 2)).unbind(-1)
        gated = F.silu(gate) * value
        y: Tensor = self.down(gated.transpose(0, 1) if swaps else gated)
        return y
