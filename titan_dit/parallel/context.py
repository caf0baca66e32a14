"""Context parallelism: every sample's tokens in c contiguous slices, one per cp rank.

Only attention needs the tokens of other ranks; all other layers work token by token.
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


def apply(
    model: nn.Module,
    mesh: DeviceMesh,
    method: Method,
    attention: str = "auto",
    compiled: bool = False,
) -> None:
    """Make every attention layer of the model attend over all ranks of the 1D `mesh`.

    `attention`: the value of [precision] attention, for ring; Ulysses keeps the layer's kernel.
    `compiled`: [compile] enabled, for ring.
    """
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    if not layers:
        raise UserError(
            f"[parallel] cp={mesh.size()}: [model] has no titan_dit.models.layers.Attention, so "
            "tokens could not attend to those of other ranks. Use that layer, or set cp = 1."
        )
    peers = Exchange.over(mesh.get_group())
    for layer in layers:
        if method == "ring":
            ring = partial(ring_attention, peers=peers, kernel=attention, compiled=compiled)
            layer.attend = ring
        else:
            layer.attend = partial(ulysses_attention, peers=peers, attend=layer.attend)


def slice_tokens(
    tensors: Mapping[str, Tensor], token_dims: Mapping[str, int], rank: int, size: int
) -> dict[str, Tensor]:
    """Slice each tensor along its token dim for one rank of `size`.

    Tensors without an entry in `token_dims` (timesteps, labels) stay whole. Slices are copies, so
    that the whole tensors can be freed.
    """
    sliced = dict(tensors)
    for name, dim in token_dims.items():
        tokens = tensors[name].shape[dim]
        assert tokens % size == 0, (name, tokens, size)
        share = tokens // size
        sliced[name] = tensors[name].narrow(dim, rank * share, share).clone()
    return sliced
