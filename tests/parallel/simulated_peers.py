"""Simulates the c ranks of a ring in one process.

Concatenated along the batch dim: attention is independent per sample, so one call runs all ranks at
once. As threads: with a causal mask the ranks' work differs.
"""

from concurrent.futures import ThreadPoolExecutor
from queue import Queue

import torch


def to_ranks(x, size):
    """[b, heads, n, d] to token slices [size * b, heads, n / size, d]."""
    return torch.cat(x.chunk(size, 2))


def from_ranks(x, size):
    """The inverse of `to_ranks`."""
    return torch.cat(x.chunk(size), 2)


class SimulatedPeers:
    """Messages have the batch, and so the ranks, in dim 1. Asserts the order of calls."""

    rank = 0  # Of all at once, which compute alike.

    def __init__(self, size):
        self.size = size
        self.sent = 0
        self.under_way = {}

    def send(self, message):
        incoming = torch.full_like(message, torch.nan)
        self.under_way[id(incoming)] = incoming, message, message.clone()
        self.sent += message.numel()
        return incoming

    def arrive(self, incoming):
        incoming, message, as_sent = self.under_way.pop(id(incoming))
        assert torch.equal(message, as_sent), "written to on its way"
        return incoming.copy_(message.unflatten(1, (self.size, -1)).roll(1, 1).flatten(1, 2))

    def all_to_all(self, parts):
        assert parts.shape[0] == self.size
        self._count(parts)
        result = parts.unflatten(1, (self.size, -1)).transpose(0, 1).flatten(1, 2)
        if result.requires_grad:
            result.register_hook(self._count)
        return result

    def _count(self, parts):
        # A rank's part for itself stays.
        self.sent += parts.numel() * (self.size - 1) // self.size


class ThreadPeers:
    """A rank of a ring whose ranks are threads; see `on_threads`."""

    def __init__(self, rank, queues):
        self.rank, self.size, self.queues = rank, len(queues), queues

    def send(self, message):
        self.queues[(self.rank + 1) % self.size].put(message.clone())
        return message

    def arrive(self, incoming):
        return self.queues[self.rank].get(timeout=30)


def on_threads(size, work):
    """The results of work(peers) on every rank."""
    queues = [Queue() for _ in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, [ThreadPeers(rank, queues) for rank in range(size)]))


def rounding(q, k):
    """Relative error of a softmax from rounding its logits: four roundings of the largest one.

    exp(s) has the error of s as its relative error, which differs between the products of CPUs.
    """
    logits = torch.einsum("...qi,...ki->...qk", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1))
    unit = torch.finfo(q.dtype).eps / 2
    return 4 * unit * (logits.abs().max() / q.shape[-1] ** 0.5).item()
