"""[activation_checkpoint]: activations are recomputed in backward, block by block.

docs/remat.md lists what each mode saves and costs.

torch's functional checkpoint runs inside the compiled region: module names do not change, all
blocks share one graph, and the compiler can fuse the recomputation with backward.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

import titan_dit.kernels.linear  # noqa: F401 (registers an operator of KEPT)
from titan_dit.config.layout import ActivationCheckpointConfig
from titan_dit.kernels.recomputed import recomputed
from titan_dit.models.base import Model, SideInputs, Stream
from titan_dit.models.layers import Attention, CrossAttention

KEPT = (
    # Matmuls. Not bmm: attention without a fused kernel would save its n x n scores.
    "aten::mm",
    "aten::addmm",
    "aten::_scaled_mm",
    "mkldnn::_linear_pointwise",
    "titan_dit::linear",
    # Attention.
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "titan_dit::ring_forward",
    # Collectives whose outputs are no larger than a rank's tokens. Not all_gather: sequence
    # parallelism would save t times a rank's tokens, so it gathers again, as Megatron does.
    "_c10d_functional::reduce_scatter_tensor",
    "_c10d_functional::all_reduce",
    "_c10d_functional::all_to_all_single",
)
"""Operators whose outputs `selective` saves."""
SAVES_PARTS_OF_ADDCMUL = torch.__version__ < "2.12"
"""torch 2.11's compiler splits addcmul, does not mark its parts to be recomputed, and saves them:
3 x hidden elements per token instead of 1 x. With contexts each operator gets its own mark."""


def apply(model: Model, config: ActivationCheckpointConfig) -> None:
    """Set up recomputation: after attention is chosen, before blocks are compiled and sharded."""
    blocks = model.blocks.values()
    if config.mode == "attention":
        for layer in (part for block in blocks for part in block.modules()):
            if isinstance(layer, Attention | CrossAttention):
                layer.attend = functools.partial(recomputed, layer.attend)
    elif config.mode != "none":
        # torch warns about in-place operations in compiled graphs; the models have none.
        logging.getLogger("torch._higher_order_ops.wrap").addFilter(is_not_about_in_place)
        forward = keep_input
        if config.mode == "selective":
            import titan_dit.parallel.ring_attention  # noqa: F401 (registers another one)

            forward = keep_products
        for block in blocks:
            # One function for all blocks, so that torch.compile makes one graph.
            block.forward = MethodType(forward, block)


def is_not_about_in_place(record: logging.LogRecord) -> bool:
    """Log filter: False for torch's warning about in-place operations."""
    return "context_fn is passed" not in record.getMessage()


def keep_input(block: nn.Module, stream: Stream, side: SideInputs) -> Stream:
    """The block's forward, saving only its input."""
    result: Stream
    if SAVES_PARTS_OF_ADDCMUL and torch.compiler.is_compiling():
        result = recomputed(apart, block, side, *stream, context_fn=empty_contexts)
    else:
        result = recomputed(apart, block, side, *stream)
    return result


def apart(block: nn.Module, side: SideInputs, *stream: Tensor) -> Stream:
    """The block's forward on tensors: only of these does torch's checkpoint tell hooks."""
    result: Stream = type(block).forward(block, stream, side)
    return result


def keep_products(block: nn.Module, stream: Stream, side: SideInputs) -> Stream:
    """The block's forward, saving its input and the outputs of KEPT."""
    result: Stream = recomputed(
        type(block).forward, block, stream, side, context_fn=selective_contexts
    )
    return result


def selective_contexts() -> Any:
    """The contexts of the forward and of its recomputation."""
    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


def empty_contexts() -> Any:
    """Contexts of selective recomputation that save the output of no operator."""
    return create_selective_checkpoint_contexts([])  # type: ignore[no-untyped-call]


def policy(
    context: SelectiveCheckpointContext, operator: Any, *inputs: Any, **_: Any
) -> CheckpointPolicy:
    """Save the outputs of KEPT, except partial sums over tp; recompute the rest.

    torch 2.11 calls this before it runs the operator, and again in the recomputation: the result
    depends on the inputs only.
    """
    # A row-parallel matmul is a partial sum over all ranks' tokens. Its reduction is saved instead,
    # with this rank's tokens only; the compiler then does not recompute the matmul.
    if operator in kept_operators() and not is_part_of_sum(operator, inputs):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def is_part_of_sum(operator: Any, inputs: Sequence[Any]) -> bool:
    """True if a matmul's output is a partial sum: the dim that it contracts is sharded."""
    rows = inputs[1 if operator is torch.ops.aten.addmm.default else 0]
    return isinstance(rows, DTensor) and any(
        p.is_partial() or p.is_shard(rows.ndim - 1) for p in rows.placements
    )


@functools.cache
def kept_operators() -> frozenset[Any]:
    """The operators of KEPT that this build of torch has."""
    found = []
    for name in KEPT:
        namespace, _, operator = name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), operator, None)
        if packet is not None:
            found.append(packet.default)
    return frozenset(found)
