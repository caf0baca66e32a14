"""Tokens [b, n, d] whose memory is [n, b, d]: sequence parallelism gathers them without a copy.

A collective joins or splits its tensor along dim 0. With samples first in memory, the tokens of
several samples would have to be cut and joined again around every collective.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle


def token_first(x: Tensor) -> Tensor:
    """[b, n, ...] to a contiguous [n, b, ...]; a view if memory has this order already."""
    return x.transpose(0, 1).contiguous()


def batch_first(x: Tensor) -> Tensor:
    """A contiguous [n, b, ...] as [b, n, ...], a view; its gradient is `token_first`."""
    result: Tensor = _BatchFirst.apply(x)  # type: ignore[no-untyped-call]
    return result


class _BatchFirst(torch.autograd.Function):
    """See `batch_first`. autograd's own gradient would be a view, which no collective takes."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        return x.transpose(0, 1)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> Tensor:
        return token_first(grad)


class TokenFirst(ParallelStyle):
    """A style that gives its module tokens [n, b, d]; outside of it they are [b, n, d].

    Only for modules that treat every token alike, such as linears. Placements of the inner style
    count the dims of [n, b, d].
    """

    def __init__(self, style: ParallelStyle) -> None:
        super().__init__()
        self.style = style

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda _, args: (token_first(args[0]), *args[1:]))
        module = self.style._apply(module, device_mesh)
        module.register_forward_hook(lambda _, __, out: batch_first(out))
        return module


def inner(style: ParallelStyle | None) -> ParallelStyle | None:
    """The style that shards the parameters."""
    return style.style if isinstance(style, TokenFirst) else style
