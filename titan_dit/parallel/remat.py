"""Compute activations again in backward instead of keeping them, block by block.

torch's functional checkpoint, applied from outside and inside of what is compiled: blocks keep
their names, all share one graph, and the compiler can join the second forward with backward.
docs/remat.md says what each mode keeps and costs.
"""

from __future__ import annotations

import functools
import logging
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

import titan_dit.parallel.ring_attention  # noqa: F401 (its operator is one of those kept)
from titan_dit.config.layout import RematConfig
from titan_dit.kernels.recomputed import recomputed
from titan_dit.models.base import Model, SideInputs, Stream
from titan_dit.models.layers import Attention

KEPT = (
    # Matrix products. Not bmm: attention without a fused kernel would keep its n x n scores.
    "aten::mm",
    "aten::addmm",
    "aten::_scaled_mm",
    "mkldnn::_linear_pointwise",
    # Attention.
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "titan_dit::ring_forward",
    # What is received and no larger than what a rank holds anyway. Not all_gather: sequence
    # parallelism would keep t times the tokens of a rank, so it gathers them again, as Megatron's.
    "_c10d_functional::reduce_scatter_tensor",
    "_c10d_functional::all_reduce",
    "_c10d_functional::all_to_all_single",
)
"""Operators whose outputs `selective` keeps."""


def apply(model: Model, config: RematConfig) -> None:
    """Let the blocks recompute; before they are compiled and sharded, after attention is chosen."""
    blocks = model.blocks.values()
    if config.mode == "attention":
        for layer in (part for block in blocks for part in block.modules()):
            if isinstance(layer, Attention):
                layer.attend = functools.partial(recomputed, layer.attend)
    elif config.mode != "none":
        # torch warns of in-place operations in what is compiled; the models have none.
        logging.getLogger("torch._higher_order_ops.wrap").addFilter(is_no_warning_of_in_place)
        forward = keep_products if config.mode == "selective" else keep_input
        for block in blocks:
            # One function for all blocks: torch.compile makes one graph of it.
            block.forward = MethodType(forward, block)


def is_no_warning_of_in_place(record: logging.LogRecord) -> bool:
    """Whether to show a line of torch's log."""
    return "context_fn is passed" not in record.getMessage()


def keep_input(block: nn.Module, stream: Stream, side: SideInputs) -> Stream:
    """The block's own forward, of which nothing but its input is kept."""
    result: Stream = recomputed(type(block).forward, block, stream, side)
    return result


def keep_products(block: nn.Module, stream: Stream, side: SideInputs) -> Stream:
    """The block's own forward, of which its input and the outputs of KEPT are kept."""
    result: Stream = recomputed(
        type(block).forward, block, stream, side, context_fn=selective_contexts
    )
    return result


def selective_contexts() -> Any:
    """What runs around the first and around the second forward."""
    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


def policy(
    context: SelectiveCheckpointContext, operator: Any, *_: Any, **__: Any
) -> CheckpointPolicy:
    """Keep what is dear to compute or to send."""
    out = context.op_output
    # The product of a rank's rows is a part of a sum: it has all ranks' tokens. Its reduction,
    # which is kept, has this rank's. The compiler then leaves the product away.
    part_of_sum = isinstance(out, DTensor) and any(p.is_partial() for p in out.placements)
    if operator in kept_operators() and not part_of_sum:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def kept_operators() -> frozenset[Any]:
    """KEPT, as far as this build of torch has it."""
    found = []
    for name in KEPT:
        namespace, _, operator = name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), operator, None)
        if packet is not None:
            found.append(packet.default)
    return frozenset(found)
