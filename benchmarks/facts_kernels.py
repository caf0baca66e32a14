"""Kernels of trainers that differ from this project's: their bytes and products, from their code.

A rehearsal counts this project's model. Megatron's products, messages and norms are the same, but
its attention writes the scores to memory, its cross entropy is a chain of fp32 kernels, and its
checkpoints repeat the whole forward pass.
"""

from __future__ import annotations

from dataclasses import replace

from titan_dit.planner.work import Attention, Counts, Part, Product, Work

SOFTMAX = (4, 6)
"""Bytes per score of the fused scale, mask and softmax, forward and backward, fp16: reads one
tensor and writes one; reads two and writes one."""
DROPOUT = (5, 5)
"""The same of dropout: with a mask of a byte."""
CROSS_ENTROPY = (38, 14)
"""Bytes per logit of Megatron's vocabulary-parallel cross entropy: to fp32 (2 + 4), maximum (4),
minus it (8), exponential (8), sum (4), softmax (8); backward minus one-hot and scaled (8), to fp16
(4 + 2)."""
NORM = (2, 3)
"""How often a norm reads or writes its tokens, forward and backward."""


def unfused(work: Work) -> Work:
    """The same with attention that writes scores of queries x keys to memory, all of them."""
    extra = Work()
    for attention, count in work.attention.items():
        extra = extra + written_out(attention).times(count)
    return replace(work, attention={}) + extra


def written_out(attention: Attention) -> Work:
    """One call of attention as products, softmax and dropout."""
    batch, queries, keys = attention.batch * attention.heads, attention.queries, attention.keys
    dim, dtype = attention.head_dim, attention.dtype
    shapes = [(queries, keys, dim), (queries, dim, keys)]
    if attention.is_backward:
        # Gradients of values, probabilities, queries and keys.
        shapes = [(keys, dim, queries), (queries, keys, dim)]
        shapes += [(queries, dim, keys), (keys, dim, queries)]
    products: dict[Product, float] = {}
    for m, n, k in shapes:
        product = Product(batch, m, n, k, dtype)
        products[product] = products.get(product, 0) + 1
    which = int(attention.is_backward)
    nbytes = batch * queries * keys * (SOFTMAX[which] + DROPOUT[which])
    kernels = len(shapes) + 2
    return Work(
        products=products, moved=nbytes, fused=nbytes, operators=kernels, kernels=kernels
    )


def repeating(part: Part, work: Work) -> Part:
    """The part whose backward repeats `work` first."""
    return replace(part, backward=work + part.backward)


def as_megatron(counts: Counts, recompute: str, logits: float) -> Counts:
    """Counts without recomputation as those of Megatron's kernels.

    `logits`: elements on a rank. `recompute`: "none", "selective" (attention) or "full".
    """
    block, head = counts.block, counts.head
    forward, backward = unfused(block.forward), unfused(block.backward)
    again = Work()
    if recompute == "full":
        again = forward
    elif recompute == "selective":
        again = unfused(Work(attention=block.forward.attention))
    own = replace(block, forward=forward, backward=again + backward)
    passes = [
        replace(work, fused=norm * counts.stream + nbytes * logits)
        for work, norm, nbytes in zip(
            (head.forward, head.backward), NORM, CROSS_ENTROPY, strict=True
        )
    ]
    return replace(counts, block=own, head=replace(head, forward=passes[0], backward=passes[1]))


def as_checkpointed(counts: Counts, recompute: str) -> Counts:
    """Counts without recomputation as with checkpoints that repeat all of a block's forward.

    torch's since 2.1 stop at the last tensor that backward needs: without the last product.
    """
    if recompute != "full":
        return counts
    return replace(counts, block=repeating(counts.block, counts.block.forward))
