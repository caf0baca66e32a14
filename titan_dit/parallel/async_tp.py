"""Async tensor parallelism: the compiler splits a matmul and its collective to overlap the parts.

Only this file sets torch's private switches for it. CUDA only: it needs symmetric memory.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from titan_dit.models.base import Model
from titan_dit.models.layers import TokenLinear
from titan_dit.parallel.tensor import TensorPlan, TokenFirst, inner


def apply(model: Model, plan: TensorPlan, mesh: DeviceMesh | None) -> None:
    """Enable async TP for compiled blocks over the 1D tp `mesh`; None disables async TP.

    Call it after `tensor.apply`.
    """
    if mesh is None:
        if "torch._inductor.config" in sys.modules:
            sys.modules["torch._inductor.config"]._micro_pipeline_tp = False  # type: ignore[attr-defined]
        return
    take_biases_out(model, plan)
    import torch._inductor.config as inductor

    inductor._micro_pipeline_tp = True
    if not torch.cuda.is_available():
        return  # A dry run without devices.
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with warnings.catch_warnings():
        # From 2.12 on groups register themselves; 2.11 needs the call.
        warnings.simplefilter("ignore")
        enable_symm_mem_for_group(mesh.get_group().group_name)


def take_biases_out(model: Model, plan: TensorPlan) -> None:
    """Split the blocks' linears over sharded tokens into a product and an addition of the bias.

    torch's compiler finds a collective next to a product (mm), but not next to one with a bias
    (addmm). float8 layers add their biases themselves. A user's own styles, and styles that shard
    another dim or return DTensors, are left alone.
    """
    for block in model.blocks.values():
        styles = plan.styles_of(block)
        for name, layer in block.named_modules():
            if not isinstance(layer, TokenLinear) or layer.bias is None:
                continue
            style = styles.get(name)
            if gathers_tokens(style):
                layer.product = product_then_bias
            elif scatters_tokens(style):
                layer.product = product_alone
                layer.register_forward_hook(add_bias)


def gathers_tokens(style: ParallelStyle | None) -> bool:
    """True for torch's column-parallel style whose input is local tokens, sharded over tp."""
    own = inner(style)
    # A subclass may do anything.
    if type(own) is not ColwiseParallel:
        return False
    return bool(own.use_local_output and own.input_layouts[0] == token_shard(style))


def scatters_tokens(style: ParallelStyle | None) -> bool:
    """True for torch's row-parallel style whose output is local tokens, sharded over tp."""
    own = inner(style)
    if type(own) is not RowwiseParallel:
        return False
    return bool(own.use_local_output and own.output_layouts[0] == token_shard(style))


def token_shard(style: ParallelStyle | None) -> Shard:
    """Placement of sharded tokens: [n, b, d] for a layer in `TokenFirst`, [b, n, d] for others."""
    return Shard(0 if isinstance(style, TokenFirst) else 1)


def product_then_bias(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias, by two operators: x [..., i], weight [o, i] to [..., o]."""
    assert bias is not None
    return F.linear(x, weight) + bias


def product_alone(x: Tensor, weight: Tensor, _: Tensor | None) -> Tensor:
    """Return x @ weight.T, a partial sum over tp: x [..., i], weight [o, i] to [..., o]."""
    return F.linear(x, weight)


def add_bias(layer: Any, _: object, reduced: Tensor) -> Tensor:
    """Forward hook of a row-parallel layer: add the bias [o] to this rank's tokens [..., o]."""
    # A rank's gradient covers its tokens only: a partial sum over tp.
    bias: Tensor = layer.bias.to_local(grad_placements=[Partial()])
    return reduced + bias
