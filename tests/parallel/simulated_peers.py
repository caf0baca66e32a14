"""Simulates the c ranks of a ring in one process, concatenated along the batch dim.

Attention is independent per sample, so one call runs all ranks at once.
"""

import torch


def to_ranks(x, size):
    """[b, heads, n, d] to token slices [size * b, heads, n / size, d]."""
    return torch.cat(x.chunk(size, 2))


def from_ranks(x, size):
    """The inverse of `to_ranks`."""
    return torch.cat(x.chunk(size), 2)


class SimulatedPeers:
    """Messages have the batch, and so the ranks, in dim 1. Asserts the order of calls."""

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
