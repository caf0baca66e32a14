"""Kernels of trainers that differ from this project's: their bytes and products, from their code.

A rehearsal counts this project's model. Megatron's products, messages and norms are the same, but
its attention writes the scores to memory, its cross entropy is a chain of fp32 kernels, and its
checkpoints repeat the whole forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from titan_dit.planner.work import AttentionCall, Counts, Part, Product, Work

ONE_KERNEL = (2, 4)
"""Bytes per logit, (forward, backward), of a fused cross entropy on bf16 logits (flash-attention's,
in place)."""
FLOAT8 = 4
"""Bytes per element of an operand that is cast: reads bf16, writes it and its transpose."""
NORM = (2, 3)
"""Times that a norm reads or writes its tokens, (forward, backward)."""


@dataclass(frozen=True, kw_only=True)
class Unfused:
    """Kernels of a trainer that writes attention's scores to memory, in fp16; as in Megatron.

    Bytes are given as (forward, backward).
    """

    scores: tuple[float, float] = (4 + 5, 6 + 5)
    """Bytes per score beside the products. Scale, mask and softmax in one kernel read one tensor
    and write one, backward reads two. Dropout does, too, and has a mask of a byte."""
    logits: tuple[float, float] = (38, 14)
    """Bytes per logit of the vocabulary-parallel cross entropy: to fp32 (2 + 4), maximum (4), minus
    it (8), exponential (8), sum (4), softmax (8); backward minus one-hot and scaled (8), to fp16
    (4 + 2)."""
    add_bytes: float = 6
    """Per gradient and microbatch: added to fp16 gradients (reads two, writes one). 0: the product
    itself adds to its output."""
    hides_tp: bool = False
    """Backward's tp messages hide behind the weight gradients (LinearWithGradAccumulation-
    AndAsyncCommunication)."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes that a trainer with unfused attention holds; pairs are (kept, more in backward)."""

    scores: tuple[float, float] = (2 + 1 + 2, 2 + 2)
    """Per score: probabilities, mask, probabilities after dropout; gradients of both."""
    logits: tuple[float, float] = (2 + 4, 2)
    """Per logit: fp16 and fp32, which becomes its own gradient; that in fp16."""
    buffers: int = 1
    """Stage inputs held for each microbatch in flight."""
    queue: int = 1024
    """Kernels that CUDA lets the host queue; 0: memory is planned before the run."""
    kernels: int = 105
    """Kernels of a layer, forward, recomputed forward and backward."""
    backward_kernels: int = 80
    """The part of `kernels` in recomputed forward and backward."""


def unfused(work: Work, scores: tuple[float, float]) -> Work:
    """Counts with attention that writes all scores of queries x keys to memory."""
    extra = Work()
    for attention, count in work.attention.items():
        extra = extra + written_out(attention, scores[attention.is_backward]).times(count)
    return replace(work, attention={}) + extra


def written_out(attention: AttentionCall, per_score: float) -> Work:
    """One call of attention as products, softmax and dropout, of so many bytes per score."""
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
    nbytes = batch * queries * keys * per_score
    kernels = len(shapes) + 2
    return Work(products=products, moved=nbytes, fused=nbytes, operators=kernels, kernels=kernels)


def as_unfused(counts: Counts, kernels: Unfused, recompute: str, logits: float) -> Counts:
    """Counts without recomputation as those of a trainer like Megatron.

    `logits`: elements on a rank. `recompute`: "none", "selective" (attention) or "full".
    """
    block = counts.block
    forward = unfused(block.forward, kernels.scores)
    backward = unfused(block.backward, kernels.scores)
    if kernels.hides_tp:
        backward = replace(backward, messages={})
    again = Work()
    if recompute == "full":
        again = forward
    elif recompute == "selective":
        again = unfused(Work(attention=block.forward.attention), kernels.scores)
    own = replace(block, forward=forward, backward=again + backward)
    last = scored(counts.head, counts.stream, logits, kernels.logits)
    changed = replace(counts, blocks={"": own}, head=last)
    return changed.each(lambda part: accumulating(part, kernels.add_bytes))


def with_hidden_tp(counts: Counts) -> Counts:
    """Counts whose blocks wait for no message over tp."""

    def hidden(work: Work) -> Work:
        left = {key: count for key, count in work.messages.items() if key.axis != "tp"}
        return replace(work, messages=left)

    block = counts.block
    own = replace(block, forward=hidden(block.forward), backward=hidden(block.backward))
    return replace(counts, blocks={"": own})


def accumulating(part: Part, per_gradient: float) -> Part:
    """The part whose backward adds its gradients to those of other microbatches."""
    nbytes = per_gradient * part.trained
    adding = Work(moved=nbytes, fused=nbytes, operators=part.tensors, kernels=part.tensors)
    return replace(part, backward=part.backward + adding)


def in_float8(work: Work) -> Work:
    """Counts with the linears' products in float8, as Transformer Engine casts for them.

    One kernel casts an operand and its transpose; a transpose serves two products.
    """
    products: dict[Product, float] = {}
    nbytes = kernels = 0.0
    for product, count in work.products.items():
        products[product._replace(dtype="float8")] = count
        nbytes += count * FLOAT8 * (product.m * product.k + product.k * product.n) / 2
        kernels += count
    casts = Work(moved=nbytes, fused=nbytes, operators=kernels, kernels=kernels)
    return replace(work, products=products) + casts


def scored(head: Part, stream: float, logits: float, nbytes: tuple[float, float]) -> Part:
    """The head with a norm and a cross entropy of so many bytes per logit."""
    passes = [
        replace(work, moved=moved, fused=moved)
        for work, moved in (
            (head.forward, NORM[0] * stream + nbytes[0] * logits),
            (head.backward, NORM[1] * stream + nbytes[1] * logits),
        )
    ]
    return replace(head, forward=passes[0], backward=passes[1])


def as_foundry(counts: Counts, recompute: str, logits: float, *, float8: bool) -> Counts:
    """Counts in bf16 without recomputation as those of llm-foundry.

    Its checkpoints repeat all of a block's forward; torch's since 2.1 stop at the last tensor that
    backward needs, without the last product. Its cross entropy is one kernel.
    """
    block = counts.block
    if float8:
        block = replace(block, forward=in_float8(block.forward), backward=in_float8(block.backward))
    if recompute == "full":
        block = replace(block, backward=block.forward + block.backward)
    head = scored(counts.head, counts.stream, logits, ONE_KERNEL)
    return replace(counts, blocks={"": block}, head=head)
