"""Two transports of one process, joined by a socket pair: lanes of shared memory need no ranks."""

import socket

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from titan_dit.pipeline.schedules.schedule import Action, Kind
from titan_dit.pipeline.transports.base import End, Transport, lanes
from titan_dit.pipeline.transports.meeting import Peer
from titan_dit.pipeline.transports.shared_memory import SharedReceiver, SharedSender

CPU = torch.device("cpu")
STREAM = (
    torch.empty(33, 7, device="meta", dtype=torch.bfloat16),
    torch.empty(5, device="meta", dtype=torch.int64),
    torch.empty(0, 4, device="meta"),
    torch.empty(3, 2, 2, device="meta", dtype=torch.float64),
)


def forward(number, stage=0):
    """A message of a stage's output."""
    return Action(Kind.FORWARD, stage, number)


def gradient(number, stage=1):
    """A message of a stage's input gradient."""
    return Action(Kind.BACKWARD_INPUT, stage, number)


def content(message, stream=STREAM):
    """The tensors of a message: other bytes for each; some not contiguous."""
    kind, stage, number = message
    seed = torch.Generator().manual_seed(1000 * stage + 2 * number + (kind is Kind.FORWARD))
    likes = [t for t in stream if kind is Kind.FORWARD or t.is_floating_point()]
    drawn = [torch.randint(-100, 100, like.shape[::-1], generator=seed) for like in likes]
    pairs = zip(drawn, likes, strict=True)
    return tuple(tensor.to(like.dtype).permute(*range(like.dim())[::-1]) for tensor, like in pairs)


def same(found, wanted):
    """True if tensors have equal dtypes, shapes and values."""
    pairs = list(zip(found, wanted, strict=True))
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


class Operators(TorchDispatchMode):
    """Notes torch's operators in `log`, among what others note there."""

    def __init__(self):
        super().__init__()
        self.log = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.log.append(str(func))
        return func(*args, **(kwargs or {}))


def pair(stage_ranks=(0, 1), stream=STREAM, ends=(SharedSender, SharedReceiver)):
    """The transports of ranks 0 and 1."""
    joined = []
    for rank, connection in enumerate(socket.socketpair()):
        peer, senders, receivers = Peer(1 - rank, connection), {}, {}
        for index, lane in enumerate(lanes(stage_ranks)):
            end = End.of(lane, index, peer, None, stream, CPU)
            if lane.source == rank:
                senders[index] = ends[0](end)
            else:
                receivers[index] = ends[1](end)
        joined.append(Transport({1 - rank: peer}, senders, receivers))
    return joined
