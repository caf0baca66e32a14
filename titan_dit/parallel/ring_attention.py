"""Ring attention: queries stay, keys and values rotate around the ranks (arXiv:2310.01889).

Shapes, for n tokens on a rank: q, out, d_out and dq [b, heads, n, d]; k, v, dk and dv [b, groups,
n, d]; kv and dkv, the stacked keys and values, [2, b, groups, n, d]; lse [b, heads, n].

Also the ring and all-to-all exchanges of one process group. They are functional collectives, which
are asynchronous and can be traced by torch.compile. Only this file calls these private operators
(torch.ops._c10d_functional), which take the group's name in torch 2.11 to 2.15.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers the operators for torch.compile
from torch import Tensor
from torch.autograd.function import FunctionCtx

from titan_dit.kernels.attention_kernels import AttentionKernel, accumulator, named
from titan_dit.models.layers import for_heads


class Peers(Protocol):
    """The communication that context parallelism needs. Messages have the batch in dim 1."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def rank(self) -> int:
        """This rank's position in the ring."""

    def send(self, message: Tensor) -> Tensor:
        """Start sending to the next rank; return the buffer of the previous rank's message.

        The buffer has the message's shape [r, b, ...]; `arrive` waits until it is filled. The
        message must not be modified before `arrive`.
        """

    def arrive(self, incoming: Tensor) -> Tensor:
        """Wait for the message in the buffer that `send` returned; return the message [r, b, ...].

        On a GPU the stream waits, not the host.
        """

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Send parts[i] to rank i; rank j's part becomes [j] of the result. Differentiable."""


@dataclass(frozen=True)
class Exchange:
    """`Peers` of a process group."""

    group: str
    """The group's name, which unlike the group can be copied and compiled."""
    rank: int
    size: int

    @classmethod
    def over(cls, group: dist.ProcessGroup) -> Exchange:
        """The ranks of `group`."""
        return cls(str(group.group_name), dist.get_rank(group), group.size())

    def send(self, message: Tensor) -> Tensor:
        """See `Peers.send`. An all-to-all with data for the next rank only.

        Every backend then posts sends and receives together.
        """
        to, of = [0] * self.size, [0] * self.size
        to[(self.rank + 1) % self.size] = of[(self.rank - 1) % self.size] = message.shape[0]
        return _start(message.contiguous(), of, to, self.group)

    def arrive(self, incoming: Tensor) -> Tensor:
        """See `Peers.arrive`."""
        return _wait(incoming)

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Send parts[i] to rank i; differentiable."""
        result: Tensor = _AllToAll.apply(parts, self.size, self.group)  # type: ignore[no-untyped-call]
        return result


class _AllToAll(torch.autograd.Function):
    """Part j of rank i becomes part i of rank j: its own inverse and its own transpose."""

    @staticmethod
    def forward(ctx: FunctionCtx, parts: Tensor, size: int, group: str) -> Tensor:
        ctx.size, ctx.group = size, group  # type: ignore[attr-defined]
        return _wait(_start(parts.contiguous(), [1] * size, [1] * size, group))

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        size, group = ctx.size, ctx.group  # type: ignore[attr-defined]
        return _wait(_start(grad.contiguous(), [1] * size, [1] * size, group)), None, None


def _start(x: Tensor, receive: list[int], send: list[int], group: str) -> Tensor:
    result: Tensor = torch.ops._c10d_functional.all_to_all_single(x, receive, send, group)
    return result


def _wait(x: Tensor) -> Tensor:
    result: Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return result


ALL = slice(None)


@dataclass(frozen=True)
class Block:
    """Part of a rank's queries and part of another rank's keys, multiplied at one hop of a ring."""

    queries: slice
    keys: slice
    causal: bool = False

    @property
    def at_queries(self) -> tuple[slice, ...]:
        """Index of the queries in [b, heads, n, ...]."""
        return ALL, ALL, self.queries

    @property
    def at_keys(self) -> tuple[slice, ...]:
        """Index of the keys in stacked keys and values, [2, b, groups, n, d]."""
        return ALL, ALL, ALL, self.keys

    def forward(
        self, kernel: AttentionKernel, q: Tensor, kv: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output [b, heads, m, d] and log-sum-exp [b, heads, m] of the block's m queries.

        q [b, heads, n, d] and kv [2, b, groups, n, d] are whole.
        """
        k, v = (for_heads(x, q.shape[1]) for x in take(kv, self.at_keys))
        return kernel.forward(take(q, self.at_queries), k, v, scale, self.causal)

    def backward(
        self,
        kernel: AttentionKernel,
        d_out: Tensor,
        q: Tensor,
        kv: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the block's queries [b, heads, m, d], keys and values [b, groups, k, d]."""
        groups = kv.shape[2]
        k, v = (for_heads(x, q.shape[1]) for x in take(kv, self.at_keys))
        d_out, q, out, lse = (take(x, self.at_queries) for x in (d_out, q, out, lse))
        dq, dk, dv = kernel.backward(d_out, q, k, v, out, lse, scale, self.causal)
        return dq, of_groups(dk, groups), of_groups(dv, groups)


def block_of(rank: int, source: int, tokens: int, causal: bool) -> Block:
    """The block that `rank` computes with the keys of `source`; slices have `tokens` tokens.

    With a causal mask, rank r of c holds chunks r and 2c-1-r of 2c (`context.chunks_of`). Both its
    chunks come after the first chunk of an earlier rank, and before the second one. Its second
    chunk comes after both chunks of a later rank, its first one before both. Each of these blocks
    is half of the product of two slices, as is a rank's own: all ranks have equal work.
    """
    if not causal:
        return Block(ALL, ALL)
    if source == rank:
        return Block(ALL, ALL, causal=True)
    half = tokens // 2
    return Block(ALL, slice(half)) if source < rank else Block(slice(half, None), ALL)


def take(whole: Tensor, at: tuple[slice, ...]) -> Tensor:
    """`whole[at]`; `whole` itself if the index covers all of it."""
    return whole if at[-1] == ALL else whole[at]


def put(whole: Tensor, at: tuple[slice, ...], values: Tensor) -> Tensor:
    """Set `whole[at]` in place and return `whole`; `values` if the index covers all of it."""
    if at[-1] == ALL:
        return values
    whole[at] = values
    return whole


def of_groups(x: Tensor, groups: int) -> Tensor:
    """Sum gradients [b, heads, n, d] of keys or values over each group: [b, groups, n, d].

    The sum is fp32, see `for_heads`.
    """
    if x.shape[1] == groups:
        return x
    return torch.unflatten(x, 1, (groups, -1)).sum(2, dtype=accumulator(x.dtype))


def merge(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over two sets of keys: outputs [b, heads, n, d], log-sum-exps [b, heads, n].

    Each output is weighted by its share of the softmax's sum, exp(lse - merged lse) <= 1: it cannot
    overflow. `out` is fp32, because bf16 rounding would accumulate over c blocks.
    """
    both = torch.logaddexp(lse, new_lse)
    out = out * (lse - both).exp()[..., None] + new_out * (new_lse - both).exp()[..., None]
    return out, both


def add(
    dq: Tensor, more: Tensor, dk: Tensor, dv: Tensor, arrived: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(dq + more, gradients [2, b, groups, n, d] of the block's keys and values so far).

    `more`, `dk` and `dv`: the block's gradients. `arrived`: the gradients of its keys and values
    from other ranks; None for the first block that adds to these keys. The sums are fp32, as `dq`
    and `arrived` are.
    """
    dkv = torch.stack((dk, dv))
    dkv = dkv.to(accumulator(dk.dtype)) if arrived is None else dkv + arrived
    return dq + more, dkv


@dataclass(frozen=True)
class Joining:
    """The two joins of a ring."""

    merge: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    add: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


EAGER = Joining(merge, add)


def joining(compiled: bool) -> Joining:
    """The joins, compiled or eager."""
    return _compiled() if compiled else EAGER


@cache
def _compiled() -> Joining:
    # The ring is opaque to the compiler of its block (see ring_attention.py), so these are graphs
    # of their own. Not `fullgraph`: with more shapes than torch compiles, they run eagerly.
    return Joining(torch.compile(merge), torch.compile(add))


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    peers: Peers,
    kernel: AttentionKernel | str = "auto",
    compiled: bool = False,
    causal: bool = False,
) -> Tensor:
    """Attention of this rank's queries over the keys of all ranks, scaled by 1 / sqrt(d).

    `kernel`: attends to one rank's keys at a time; an `AttentionKernel`, or a value of [precision]
    attention.
    `compiled`: ranks' results are joined by compiled kernels.

    Each rank sends 2 (c-1)/c b n h elements in forward, with h = d x heads of k. Backward sends as
    many, and as many again in fp32 for the gradients of keys and values.
    """
    result: Tensor = _RingAttention.apply(q, k, v, peers, kernel, compiled, causal)  # type: ignore[no-untyped-call]
    return result


class _RingAttention(torch.autograd.Function):
    """Saves for backward only this rank's q, k, v, out and log-sum-exp."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        peers: Peers,
        kernel: AttentionKernel | str,
        compiled: bool,
        causal: bool,
    ) -> Tensor:
        if isinstance(peers, Exchange) and isinstance(kernel, str):
            out, lse = ring_forward(
                q, k, v, kernel, peers.group, peers.rank, peers.size, compiled, causal
            )
        else:
            out, lse = travel_forward(q, k, v, peers, found(kernel, q, causal), compiled, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.peers, ctx.kernel = peers, kernel  # type: ignore[attr-defined]
        ctx.compiled, ctx.causal = compiled, causal  # type: ignore[attr-defined]
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: FunctionCtx, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors  # type: ignore[attr-defined]
        peers, kernel = ctx.peers, ctx.kernel  # type: ignore[attr-defined]
        compiled, causal = ctx.compiled, ctx.causal  # type: ignore[attr-defined]
        if isinstance(peers, Exchange) and isinstance(kernel, str):
            dq, dkv = ring_backward(
                d_out,
                q,
                k,
                v,
                out,
                lse,
                kernel,
                peers.group,
                peers.rank,
                peers.size,
                compiled,
                causal,
            )
        else:
            dq, dkv = travel_backward(
                d_out,
                q,
                k,
                v,
                out,
                lse,
                peers,
                found(kernel, q, causal),
                compiled,
                causal,
            )
        return dq, dkv[0], dkv[1], None, None, None, None


def found(kernel: AttentionKernel | str, q: Tensor, causal: bool) -> AttentionKernel:
    """The kernel, by its name for q [b, heads, n, d]; or `kernel` itself."""
    return named(kernel, q, causal) if isinstance(kernel, str) else kernel


def travel_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    peers: Peers,
    kernel: AttentionKernel,
    compiled: bool = False,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Output [b, heads, n, d] and log-sum-exp [b, heads, n] over the keys of all ranks.

    Keys and values rotate c - 1 times.
    """
    scale, merge = 1 / math.sqrt(q.shape[-1]), joining(compiled).merge
    moving = torch.stack((k, v))
    incoming = peers.send(moving) if peers.size > 1 else moving
    out, lse = block_of(0, 0, q.shape[2], causal).forward(kernel, q, moving, scale)
    out = out.to(accumulator(q.dtype))
    for hop in range(1, peers.size):
        moving = peers.arrive(incoming)
        # The next keys and values are sent while the kernel runs.
        incoming = peers.send(moving) if hop < peers.size - 1 else moving
        block = block_of(peers.rank, (peers.rank - hop) % peers.size, q.shape[2], causal)
        at = block.at_queries
        merged = merge(take(out, at), take(lse, at), *block.forward(kernel, q, moving, scale))
        out, lse = put(out, at, merged[0]), put(lse, at, merged[1])
    return out.to(q.dtype), lse


def travel_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    peers: Peers,
    kernel: AttentionKernel,
    compiled: bool = False,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return dq [b, heads, n, d], and dk and dv stacked, [2, b, groups, n, d].

    `out` and `lse` are over ALL keys. Keys and values rotate c - 1 times again. Their gradients
    follow one rotation behind, and the last rotation returns them to their rank. A rank's own
    contribution is never sent, so that gradients need c - 1 rotations too, not c.
    """
    scale, join = 1 / math.sqrt(q.shape[-1]), joining(compiled)
    moving = torch.stack((k, v))
    incoming = peers.send(moving) if peers.size > 1 else moving
    own = block_of(0, 0, q.shape[2], causal)
    dq, *mine = own.backward(kernel, d_out, q, moving, out, lse, scale)
    dq = dq.to(accumulator(q.dtype))
    pending = None
    for hop in range(1, peers.size):
        moving = peers.arrive(incoming)
        incoming = peers.send(moving) if hop < peers.size - 1 else moving
        block = block_of(peers.rank, (peers.rank - hop) % peers.size, q.shape[2], causal)
        more = block.backward(kernel, d_out, q, moving, out, lse, scale)
        arrived = None if pending is None else peers.arrive(pending)
        if arrived is None and block.keys != ALL:
            arrived = torch.zeros_like(moving, dtype=accumulator(q.dtype))
        here = None if arrived is None else take(arrived, block.at_keys)
        dq_part, dkv = join.add(take(dq, block.at_queries), *more, here)
        dq = put(dq, block.at_queries, dq_part)
        if arrived is not None:
            dkv = put(arrived, block.at_keys, dkv)
        pending = peers.send(dkv)
    home = torch.stack(mine)
    if pending is not None:
        home = home + peers.arrive(pending)  # In fp32.
    return dq.to(q.dtype), home.to(q.dtype)


# Opaque operators for torch.compile. Traced, backward's rotation of keys and values would be merged
# with forward's: all ranks' keys would be saved (c times the memory). The sends would also move
# behind the kernels that they should overlap.


@torch.library.custom_op("titan_dit::ring_forward", mutates_args=())
def ring_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel: str,
    group: str,
    rank: int,
    size: int,
    compiled: bool,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """`travel_forward` over a process group."""
    peers = Exchange(group, rank, size)
    out, lse = travel_forward(q, k, v, peers, named(kernel, q, causal), compiled, causal)
    return _by_token(out), lse.contiguous()


@torch.library.custom_op("titan_dit::ring_backward", mutates_args=())
def ring_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    kernel: str,
    group: str,
    rank: int,
    size: int,
    compiled: bool,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """`travel_backward` over a process group."""
    dq, dkv = travel_backward(
        d_out,
        q,
        k,
        v,
        out,
        lse,
        Exchange(group, rank, size),
        named(kernel, q, causal),
        compiled,
        causal,
    )
    return _by_token(dq), dkv.contiguous()


def _by_token(x: Tensor) -> Tensor:
    """Memory layout [b, n, heads, d], as in the layers around attention."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@ring_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel: str,
    group: str,
    rank: int,
    size: int,
    compiled: bool,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    lse = torch.empty(q.shape[:3], dtype=accumulator(q.dtype), device=q.device)
    return _by_token(torch.empty_like(q)), lse


@ring_backward.register_fake
def _(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    kernel: str,
    group: str,
    rank: int,
    size: int,
    compiled: bool,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    return _by_token(torch.empty_like(q)), k.new_empty(2, *k.shape)
