"""oneDNN for fp32 linear layers of blocks on a CPU; otherwise `product` is `F.linear`.

F.linear copies the bias over the whole output and lets MKL add the matmul; oneDNN adds the bias as
it writes. `benchmarks/step.py --contenders plain ours ours_without_onednn` measures it. In a
compiled graph it is a custom operator: the compiler would turn F.linear into MKL's product. Only
this file calls the operator, which is private to torch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from titan_dit.models.layers import TokenLinear


def apply(model: nn.Module) -> None:
    """Set `product` in the blocks' linear layers; for models on a CPU."""
    if not has_onednn():
        return
    for layer in model.modules():
        if isinstance(layer, TokenLinear):
            layer.product = product


def product(
    x: Float[Tensor, "*b i"], weight: Float[Tensor, "o i"], bias: Float[Tensor, " o"] | None
) -> Float[Tensor, "*b o"]:
    """Return x @ weight.T + bias."""
    if bias is not None and suits_onednn(x, weight):
        result: Tensor = _OneDNN.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return result
    return F.linear(x, weight, bias)


def suits_onednn(x: Tensor, weight: Tensor) -> bool:
    """True for plain fp32 CPU tensors, x [..., i] and weight [o, i]."""
    return (
        type(x) is Tensor
        and type(weight) in (Tensor, nn.Parameter)
        and (x.device.type, x.dtype, weight.dtype) == ("cpu", torch.float32, torch.float32)
        and not torch.is_autocast_enabled("cpu")
        # The compiler cannot read the flag; `apply` has.
        and (torch.compiler.is_compiling() or has_onednn())
    )


def has_onednn() -> bool:
    """True if this build has the operator and it is not disabled."""
    return bool(torch.backends.mkldnn.enabled) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x @ weight.T + bias: x [..., i], weight [o, i], bias [o] to [..., o]."""
    if torch.compiler.is_compiling():
        result: Tensor = torch.ops.titan_dit.linear(x, weight, bias)
    else:
        result = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


@torch.library.custom_op(
    "titan_dit::linear",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
)
def in_a_graph(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`onednn` as an operator that the compiler does not trace."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


@in_a_graph.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


class _OneDNN(torch.autograd.Function):
    """`onednn` and its gradients."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return onednn(x, weight, bias)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        rows, needed = grad.reshape(-1, grad.shape[-1]), ctx.needs_input_grad  # type: ignore[attr-defined]
        grad_x = onednn(grad, weight.t(), None) if needed[0] else None
        # MKL is faster for this shape: few outputs, summed over all rows.
        grad_weight = rows.t() @ x.reshape(-1, x.shape[-1]) if needed[1] else None
        return grad_x, grad_weight, rows.sum(0) if needed[2] else None
