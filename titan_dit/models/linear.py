"""A linear layer that is faster than torch's own where that is possible: fp32 on a CPU.

There torch copies the bias over the whole output and sends the product to MKL, to be added to it.
oneDNN, which comes with torch, adds the bias while it writes, and its kernels are made for the
processor at hand; `benchmarks/step.py --contenders plain ours ours_without_onednn` shows what that
saves. This is the only file that calls torch's operator for it, which is not public; without it, or
anywhere else, this is `nn.Linear`.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx


class Linear(nn.Linear):
    """`nn.Linear` for many rows: the projections of a block."""

    def forward(self, input: Float[Tensor, "*b i"]) -> Float[Tensor, "*b o"]:
        """Input times weight, transposed, plus bias."""
        if suits_onednn(input, self.weight) and self.bias is not None:
            result: Tensor = _OneDNN.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]
            return result
        return super().forward(input)


def suits_onednn(x: Tensor, weight: Tensor) -> bool:
    """Plain fp32 tensors on a CPU, outside torch.compile, which has its own way."""
    return (
        not torch.compiler.is_compiling()
        and type(x) is Tensor
        and type(weight) in (Tensor, nn.Parameter)
        and (x.device.type, x.dtype, weight.dtype) == ("cpu", torch.float32, torch.float32)
        and bool(torch.backends.mkldnn.enabled)
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and not torch.is_autocast_enabled("cpu")
    )


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x @ weight.T + bias."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


class _OneDNN(torch.autograd.Function):
    """The layer and its gradients."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        rows, needed = grad.reshape(-1, grad.shape[-1]), ctx.needs_input_grad  # type: ignore[attr-defined]
        grad_x = product(grad, weight.t(), None) if needed[0] else None
        # MKL is the faster one for this shape: few outputs, summed over all rows.
        grad_weight = rows.t() @ x.reshape(-1, x.shape[-1]) if needed[1] else None
        return grad_x, grad_weight, rows.sum(0) if needed[2] else None
