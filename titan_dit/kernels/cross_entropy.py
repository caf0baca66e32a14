"""Cross entropy over a large vocabulary: the gradient takes the memory of the logits.

Plain operators hold the logits, their fp32 copy and its softmax: in bf16 12 bytes a logit at the
peak. Here fp32 values exist for a few tokens at a time, and backward writes the gradient over the
logits: 2 bytes in bf16, 4 in fp32. With a vocabulary that is sharded over ranks, three numbers per
token are all-reduced, a maximum and two sums (arXiv:1909.08053 sec. 3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from titan_dit.models.vocabulary import Vocabulary

CHUNK = 2**19
"""Logits that are in fp32 at a time on a CPU: they fit its caches."""
CHUNK_ON_DEVICE = 2**26
"""Logits that are in fp32 at a time on a GPU: 256 MiB."""


def unchanged(value: Tensor) -> Tensor:
    """The identity: the maximum or the sum over one rank."""
    return value


@dataclass(frozen=True)
class VocabularyShard:
    """A rank's rows of the vocabulary, from row `first` on; the default is a rank with all rows."""

    first: int = 0
    largest: Callable[[Tensor], Tensor] = unchanged
    """Maximum over the ranks, in place."""
    total: Callable[[Tensor], Tensor] = unchanged
    """Sum over the ranks, in place."""


def apply(model: nn.Module) -> None:
    """Let every `Vocabulary` of a model score with `cross_entropy`."""
    for module in model.modules():
        if isinstance(module, Vocabulary):
            module.score = cross_entropy


def cross_entropy(
    logits: Float[Tensor, "t rows"],
    targets: Int[Tensor, " t"],
    size: int,
    shard: VocabularyShard = VocabularyShard(),
) -> Float[Tensor, " t"]:
    """-log softmax(logits)[target] over rows below `size`, in fp32 or fp64.

    `logits` are overwritten by backward: nothing else may need them.
    """
    result: Tensor = _CrossEntropy.apply(logits, targets, size, shard)  # type: ignore[no-untyped-call]
    return result


def chunks(logits: Tensor) -> range:
    """The first token of each chunk."""
    most = CHUNK if logits.device.type == "cpu" else CHUNK_ON_DEVICE
    return range(0, len(logits), max(1, most // max(1, logits.shape[1])))


class _CrossEntropy(torch.autograd.Function):
    """See `cross_entropy`."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, logits: Tensor, targets: Tensor, size: int, shard: VocabularyShard
    ) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        num_valid = min(max(size - shard.first, 0), logits.shape[1])
        local = targets - shard.first
        is_here = (local >= 0) & (local < num_valid)
        local = local.clamp(0, max(num_valid - 1, 0))
        # The maximum of a rank that holds only padding. Finite: -inf - -inf would be NaN.
        largest = logits.new_full((len(logits),), torch.finfo(dtype).min, dtype=dtype)
        total, own = torch.zeros_like(largest), torch.zeros_like(largest)
        steps = chunks(logits) if num_valid else range(0)
        for start in steps:
            part = slice(start, start + steps.step)
            valid = logits[part, :num_valid].to(dtype)
            torch.amax(valid, 1, out=largest[part])
            total[part] = (valid - largest[part, None]).exp_().sum(1)
            own[part] = valid.gather(1, local[part, None])[:, 0]
        mine, largest = largest, shard.largest(largest.clone())
        total = shard.total(total * (mine - largest).exp_())
        own = shard.total(own.masked_fill_(~is_here, 0))
        log_sum = largest + total.log()
        ctx.save_for_backward(logits, local, is_here, log_sum)
        ctx.num_valid = num_valid  # type: ignore[attr-defined]
        return log_sum - own

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, local, is_here, log_sum = ctx.saved_tensors  # type: ignore[attr-defined]
        num_valid = ctx.num_valid  # type: ignore[attr-defined]
        if num_valid:
            ones = is_here.to(log_sum.dtype)[:, None]
            steps = chunks(logits)
            for start in steps:
                part = slice(start, start + steps.step)
                valid = logits[part, :num_valid]
                softmax = (valid.to(log_sum.dtype) - log_sum[part, None]).exp_()
                softmax.scatter_add_(1, local[part, None], -ones[part])
                valid.copy_(softmax.mul_(grad[part, None]))
        logits[:, num_valid:] = 0
        return logits, None, None, None
