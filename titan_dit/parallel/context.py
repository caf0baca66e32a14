"""Context parallelism: every sample's tokens in c contiguous slices, one per cp rank.

All layers but attention work token by token; only attention needs the others' tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titan_dit.config.section import UserError
from titan_dit.models.layers import Attention
from titan_dit.parallel.exchange import Exchange
from titan_dit.parallel.ring_attention import ring_attention
from titan_dit.parallel.ulysses_attention import ulysses_attention

Method = Literal["ring", "ulysses"]


def apply(model: nn.Module, mesh: DeviceMesh, method: Method, attention: str = "auto") -> None:
    """Let every attention of the model reach the tokens of all ranks of the 1D mesh `cp`.

    `attention`: the kernel, as [precision] attention names it.
    """
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    if not layers:
        raise UserError(
            f"[parallel] cp={mesh.size()}: no block of [model] has a titan_dit.models.layers."
            "Attention, so its tokens would not see those of other ranks. Use it, or set cp = 1."
        )
    peers = Exchange.over(mesh.get_group())
    for layer in layers:
        if method == "ring":
            layer.attend = partial(ring_attention, peers=peers, kernel=attention)
        else:
            layer.attend = partial(ulysses_attention, peers=peers, attend=layer.attend)


def slice_tokens(
    tensors: Mapping[str, Tensor], token_dims: Mapping[str, int], rank: int, size: int
) -> dict[str, Tensor]:
    """Rank's slice of each tensor along the dim that counts its tokens.

    Tensors that `token_dims` does not name have no token dim (timesteps, labels) and stay whole.
    Slices are copies, so that the whole can be freed.
    """
    sliced = dict(tensors)
    for name, dim in token_dims.items():
        tokens = tensors[name].shape[dim]
        assert tokens % size == 0, (name, tokens, size)
        share = tokens // size
        sliced[name] = tensors[name].narrow(dim, rank * share, share).clone()
    return sliced
